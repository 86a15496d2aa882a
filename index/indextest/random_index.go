// This file runs random histories of a whole index over a structure against the
// Fleet.

package indextest

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
)

var (
	fleetNames = []string{"ant", "bee", "cat"}
	fleetRanks = []int32{0, 1}
)

// fleetHistory is an index and the Fleet that lived through the same events.
type fleetHistory struct {
	empty   func() index.Structure
	x       *index.Index
	fleet   *Fleet
	workers map[WorkerRank]*index.Worker
	r       index.Result
}

// worker draws a worker-rank that is there, adding one if there is none.
func (h *fleetHistory) worker(t *rapid.T) (WorkerRank, *index.Worker) {
	wr := WorkerRank{rapid.SampledFrom(fleetNames).Draw(t, "name"), rapid.SampledFrom(fleetRanks).Draw(t, "rank")}
	w := h.workers[wr]
	if w == nil {
		w = h.x.AddWorker(wr.Worker, wr.Rank, wr)
		h.workers[wr] = w
	}
	return wr, w
}

func drawTier(t *rapid.T) index.Tier {
	// Most events are of the device tier.
	return rapid.SampledFrom([]index.Tier{index.Device, index.Device, index.Device, index.Host, index.External}).Draw(t, "tier")
}

func (h *fleetHistory) store(t *rapid.T) {
	wr, w := h.worker(t)
	tier, prompt := drawTier(t), randomPrompt(t)
	s := part(prompt, rapid.SampledFrom([]int{0, 0, 0, len(prompt) / 2}).Draw(t, "from"), len(prompt))
	got, err := w.Store(tier, s)
	want, wantErr := h.fleet.Store(wr, tier, s)
	if got != want || err != wantErr {
		t.Fatalf("%v %v, store %+v: got %+v, %v, want %+v, %v", wr, tier, s, got, err, want, wantErr)
	}
}

func (h *fleetHistory) remove(t *rapid.T) {
	wr, w := h.worker(t)
	tier, seqs := drawTier(t), index.Chain(nil, randomPrompt(t))
	seqs = seqs[rapid.IntRange(0, len(seqs)-1).Draw(t, "from"):]
	if got, want := w.Remove(tier, seqs), h.fleet.Remove(wr, tier, seqs); got != want {
		t.Fatalf("%v %v, remove: got %+v, want %+v", wr, tier, got, want)
	}
}

func (h *fleetHistory) clear(t *rapid.T) {
	wr, w := h.worker(t)
	if got, want := w.Clear(), h.fleet.Clear(wr); got != want {
		t.Fatalf("%v: cleared %d blocks, want %d", wr, got, want)
	}
}

func (h *fleetHistory) clearTier(t *rapid.T) {
	wr, w := h.worker(t)
	tier := drawTier(t)
	if got, want := w.ClearTier(tier), h.fleet.ClearTier(wr, tier); got != want {
		t.Fatalf("%v %v: cleared %d blocks, want %d", wr, tier, got, want)
	}
}

func (h *fleetHistory) retire(t *rapid.T) {
	wr, w := h.worker(t)
	if got, want := w.Retire(), h.fleet.Clear(wr); got != want {
		t.Fatalf("%v: retired %d blocks, want %d", wr, got, want)
	}
	if w.Len(index.Device) != 0 || w.Len(index.Host) != 0 {
		t.Fatalf("%v holds blocks after it retired", wr)
	}
	delete(h.workers, wr)
}

// replay goes on with a new index into which every worker was dumped.
func (h *fleetHistory) replay(t *rapid.T) {
	x := index.New(h.empty())
	for wr, w := range h.workers {
		fresh := x.AddWorker(wr.Worker, wr.Rank, wr)
		w.Dump(func(tier index.Tier, s index.Stored) bool {
			if e, err := fresh.Store(tier, s); err != nil || e.Stored != len(s.Locals) {
				t.Fatalf("%v %v, replay of %+v: %+v, %v", wr, tier, s, e, err)
			}
			return true
		})
		h.workers[wr] = fresh
	}
	h.x = x
}

func (h *fleetHistory) check(t *rapid.T) {
	for wr, w := range h.workers {
		for tier := range index.Tier(index.Tiers) {
			if got, want := w.Len(tier), h.fleet.Len(wr, tier); got != want {
				t.Fatalf("%v %v holds %d blocks, want %d", wr, tier, got, want)
			}
		}
	}
	if st := h.x.Stats(); st.Workers != len(h.workers) || st.Blocks != h.fleet.Blocks() {
		t.Fatalf("stats: got %+v, want %d workers and %d blocks", st, len(h.workers), h.fleet.Blocks())
	}

	q := index.Query{Locals: randomPrompt(t)}
	truth := h.fleet.Find(q.Locals)
	if rapid.Bool().Draw(t, "filter") {
		q.Workers = rapid.SliceOfN(rapid.SampledFrom(append(fleetNames, "nobody")), 1, 3).Draw(t, "names")
		maps.DeleteFunc(truth, func(wr WorkerRank, _ int) bool { return !slices.Contains(q.Workers, wr.Worker) })
	}
	searched := maps.Clone(truth)
	if rapid.Bool().Draw(t, "keep") {
		q.Keep = func(w *index.Worker) bool { return w.Rank == 1 }
		maps.DeleteFunc(truth, func(wr WorkerRank, _ int) bool { return wr.Rank != 1 })
	}
	h.find(t, &q, truth)

	q.TopK = rapid.IntRange(1, 4).Draw(t, "k")
	h.x.Find(&q, &h.r)
	checkTopK(t, h.r.Matches, truth, q.TopK)

	q.TopK, q.Keep, q.EarlyExit = 0, nil, true
	h.x.Find(&q, &h.r)
	got, want := make(map[index.Slot]int), make(map[index.Slot]int)
	for i, wr := range slices.Collect(maps.Keys(searched)) {
		want[index.Slot(i)] = searched[wr]
		for _, m := range h.r.Matches {
			if m.Worker == h.workers[wr] {
				got[index.Slot(i)] = m.Depth
			}
		}
	}
	if why := earlyExit(got, want, h.r.LowerBounds); why != "" || len(h.r.Matches) != len(searched) {
		t.Fatalf("query %v: %d workers of %d; %s", q.Locals, len(h.r.Matches), len(searched), why)
	}
}

// find compares the whole answer to a query.
func (h *fleetHistory) find(t *rapid.T, q *index.Query, want map[WorkerRank]int) {
	h.x.Find(q, &h.r)
	got := make(map[WorkerRank]int)
	for _, m := range h.r.Matches {
		wr := WorkerRank{m.Worker.Name, m.Worker.Rank}
		if h.workers[wr] != m.Worker || m.Worker.Tag != any(wr) {
			t.Fatalf("an answer has a worker %v that is not the one of that name", wr)
		}
		got[wr] = m.Depth
	}
	if !maps.Equal(got, want) || len(got) != len(h.r.Matches) || h.r.LowerBounds {
		t.Fatalf("query %v: got %v, want %v", q.Locals, h.r.Matches, want)
	}
}

// checkTopK fails unless got is the k deepest of truth, deepest first.
func checkTopK(t *rapid.T, got []index.Match, truth map[WorkerRank]int, k int) {
	depths := slices.Sorted(maps.Values(truth))
	slices.Reverse(depths)
	depths = depths[:min(k, len(depths))]
	seen := make(map[*index.Worker]bool)
	for i, m := range got {
		if i >= len(depths) || m.Depth != depths[i] || m.Depth != truth[WorkerRank{m.Worker.Name, m.Worker.Rank}] || seen[m.Worker] {
			t.Fatalf("top %d: got %v, want depths %v of %v", k, got, depths, truth)
		}
		seen[m.Worker] = true
	}
	if len(got) != len(depths) {
		t.Fatalf("top %d: got %v, want depths %v", k, got, depths)
	}
}

// RunRandomIndex checks random histories of an index over the structure: worker
// ranks that come and go so that slots are reused, tiers, dumps replayed in the
// middle, filters, top k and early exit.
func RunRandomIndex(t *testing.T, empty func() index.Structure) {
	rapid.Check(t, func(t *rapid.T) {
		h := &fleetHistory{empty: empty, x: index.New(empty()), fleet: NewFleet(), workers: make(map[WorkerRank]*index.Worker)}
		t.Repeat(map[string]func(*rapid.T){
			"store":     h.store,
			"storeMore": h.store,
			"remove":    h.remove,
			"clear":     h.clear,
			"clearTier": h.clearTier,
			"retire":    h.retire,
			"replay":    h.replay,
			"":          h.check,
		})
	})
}
