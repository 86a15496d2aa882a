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
	mask    index.SeqHash // 0, or what makes hashes opaque
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
	return rapid.SampledFrom([]index.Tier{index.Device, index.Device, index.Device, index.Host, index.Host, index.Disk, index.External}).Draw(t, "tier")
}

func (h *fleetHistory) store(t *rapid.T) {
	wr, w := h.worker(t)
	tier, prompt := drawTier(t), randomPrompt(t)
	s := part(prompt, rapid.SampledFrom([]int{0, 0, 0, len(prompt) / 2}).Draw(t, "from"), len(prompt))
	if h.mask != 0 {
		s.Parent ^= h.mask
		s.Hashes = h.seqs(prompt)[len(prompt)-len(s.Locals):]
	}
	got, err := w.Store(tier, s)
	want, wantErr := h.fleet.Store(wr, tier, s)
	if got != want || err != wantErr {
		t.Fatalf("%v %v, store %+v: got %+v, %v, want %+v, %v", wr, tier, s, got, err, want, wantErr)
	}
}

// seqs returns the hashes by which events name a prompt's blocks.
func (h *fleetHistory) seqs(prompt []index.LocalHash) []index.SeqHash {
	seqs := index.Chain(nil, prompt)
	for i := range seqs {
		seqs[i] ^= h.mask
	}
	return seqs
}

func (h *fleetHistory) remove(t *rapid.T) {
	wr, w := h.worker(t)
	tier, seqs := drawTier(t), h.seqs(randomPrompt(t))
	from := rapid.IntRange(0, len(seqs)-1).Draw(t, "from")
	seqs = seqs[from:rapid.SampledFrom([]int{from + 1, len(seqs), len(seqs)}).Draw(t, "to")]
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
	seq := rapid.SampledFrom(h.seqs(randomPrompt(t))).Draw(t, "seq")
	for wr, w := range h.workers {
		for tier := range index.Tier(index.Tiers) {
			if got, want := w.Len(tier), h.fleet.Len(wr, tier); got != want {
				t.Fatalf("%v %v holds %d blocks, want %d", wr, tier, got, want)
			}
			if got, want := w.Holds(tier, seq), h.fleet.Holds(wr, tier, seq); got != want {
				t.Fatalf("%v %v, block %x: held is %v, want %v", wr, tier, uint64(seq), got, want)
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
		maps.DeleteFunc(truth, func(wr WorkerRank, _ index.Depths) bool { return !slices.Contains(q.Workers, wr.Worker) })
	}
	searched := maps.Clone(truth)
	if rapid.Bool().Draw(t, "keep") {
		q.Keep = func(w *index.Worker) bool { return w.Rank == 1 }
		maps.DeleteFunc(truth, func(wr WorkerRank, _ index.Depths) bool { return wr.Rank != 1 })
	}
	if got := h.find(t, &q); !maps.Equal(got, truth) || h.r.LowerBounds {
		t.Fatalf("query %v: got %v, want %v", q.Locals, got, truth)
	}

	q.TopK = rapid.IntRange(1, 4).Draw(t, "k")
	h.find(t, &q)
	checkTopK(t, &h.r, truth, q.TopK)

	q.TopK, q.Keep, q.EarlyExit = 0, nil, true
	checkEarlyExit(t, h.find(t, &q), searched, h.r.LowerBounds)
}

// find returns the answer to a query, after checking that it is well made.
func (h *fleetHistory) find(t *rapid.T, q *index.Query) map[WorkerRank]index.Depths {
	h.x.Find(q, &h.r)
	got := make(map[WorkerRank]index.Depths)
	for i, m := range h.r.Matches {
		wr := WorkerRank{m.Worker.Name, m.Worker.Rank}
		if h.workers[wr] != m.Worker || m.Worker.Tag != any(wr) {
			t.Fatalf("an answer has a worker %v that is not the one of that name", wr)
		}
		got[wr] = h.r.Depths(i)
		if m.Depth != got[wr][index.Device] {
			t.Fatalf("%v has depth %d, by tier %v", wr, m.Depth, got[wr])
		}
	}
	if len(got) != len(h.r.Matches) {
		t.Fatalf("an answer has a worker twice: %v", h.r.Matches)
	}
	return got
}

// checkTopK fails unless r is the k deepest of truth, deepest first.
func checkTopK(t *rapid.T, r *index.Result, truth map[WorkerRank]index.Depths, k int) {
	order := func(a, b index.Depths) int { return slices.Compare(b[:], a[:]) }
	want := slices.SortedFunc(maps.Values(truth), order)
	want = want[:min(k, len(want))]
	var got []index.Depths
	for i, m := range r.Matches {
		got = append(got, r.Depths(i))
		if got[i] != truth[WorkerRank{m.Worker.Name, m.Worker.Rank}] {
			t.Fatalf("top %d: %v has depths %v, want %v", k, m.Worker.Name, got[i], truth)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("top %d: got depths %v, want %v", k, got, want)
	}
}

// checkEarlyExit fails unless got is truth but, if lower is set, for a lower bound of
// one of the deepest.
func checkEarlyExit(t *rapid.T, got, truth map[WorkerRank]index.Depths, lower bool) {
	short := 0
	for wr, want := range truth {
		g, ok := got[wr]
		for tier := range want {
			if !ok || g[tier] > want[tier] {
				t.Fatalf("early exit: %v has depths %v, want %v", wr, g, want)
			}
		}
		if g == want {
			continue
		}
		short++
		for other, o := range got {
			if o[index.External] > g[index.External] {
				t.Fatalf("early exit: %v was left at depths %v of %v though %v has %v", wr, g, want, other, o)
			}
		}
	}
	if len(got) != len(truth) || short > 1 || short > 0 && !lower {
		t.Fatalf("early exit: got %v of %v, lower bounds: %v", got, truth, lower)
	}
}

// RunRandomIndex checks random histories of an index over the structure: worker
// ranks that come and go so that slots are reused, tiers, dumps replayed in the
// middle, filters, top k and early exit.
func RunRandomIndex(t *testing.T, empty func() index.Structure) {
	runRandomIndex(t, empty, NewFleet, 0)
}

func runRandomIndex(t *testing.T, empty func() index.Structure, fleet func() *Fleet, mask index.SeqHash) {
	rapid.Check(t, func(t *rapid.T) {
		h := &fleetHistory{empty: empty, x: index.New(empty()), fleet: fleet(), workers: make(map[WorkerRank]*index.Worker), mask: mask}
		t.Repeat(map[string]func(*rapid.T){
			"store":      h.store,
			"storeMore":  h.store,
			"remove":     h.remove,
			"removeMore": h.remove,
			"clear":      h.clear,
			"clearTier":  h.clearTier,
			"retire":     h.retire,
			"replay":     h.replay,
			"":           h.check,
		})
		for wr, w := range h.workers {
			w.Retire()
			h.fleet.Clear(wr)
		}
		if st := h.x.Stats(); st != (index.Stats{}) {
			t.Fatalf("stats after all retired: %+v", st)
		}
	})
}
