package index_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

// chainOf returns n blocks that are the same wherever name is the same.
func chainOf(name string, n int) []index.LocalHash {
	h := index.BlockHasher{BlockSize: 1}
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return h.Append(nil, tokens, index.Extra{Salt: name})
}

func store(t testing.TB, w *index.Worker, tier index.Tier, locals ...index.LocalHash) {
	t.Helper()
	if _, err := w.Store(tier, index.Stored{Position: 0, Locals: locals}); err != nil {
		t.Fatal(err)
	}
}

// find returns the depths of an answer by worker.
func find(x *index.Index, q index.Query) map[*index.Worker]int {
	var r index.Result
	x.Find(&q, &r)
	out := make(map[*index.Worker]int)
	for _, m := range r.Matches {
		out[m.Worker] += m.Depth // a worker given twice shows as too deep
	}
	return out
}

func wantDepths(t *testing.T, got, want map[*index.Worker]int) {
	t.Helper()
	if !maps.Equal(got, want) {
		name := func(m map[*index.Worker]int) (s string) {
			for w, d := range m {
				s += fmt.Sprintf(" %s/%d(%p):%d", w.Name, w.Rank, w, d)
			}
			return s
		}
		t.Fatalf("got%s, want%s", name(got), name(want))
	}
}

func TestIndexOfNothing(t *testing.T) {
	x := index.New(index.NewPositionalIndex(0))
	wantDepths(t, find(x, index.Query{Locals: chainOf("a", 3)}), nil)
	w := x.AddWorker("w", 0, "mine")
	wantDepths(t, find(x, index.Query{}), nil)
	if w.Tag != "mine" || w.Len(index.Device) != 0 || w.Clear() != 0 || w.Holds(index.Host, 1) {
		t.Fatalf("a new worker is not empty: %+v", w)
	}
	if st := x.Stats(); st != (index.Stats{Workers: 1}) {
		t.Fatalf("stats: %+v", st)
	}
}

// During a move from one partition to another a worker-rank exists twice. Each
// has its own blocks, and a filter by name takes both.
func TestSameNameAndRankTwice(t *testing.T) {
	x := index.New(index.NewPositionalIndex(0))
	a := chainOf("a", 10)
	old, fresh, other := x.AddWorker("w", 0, nil), x.AddWorker("w", 0, nil), x.AddWorker("v", 0, nil)
	store(t, old, index.Device, a...)
	store(t, fresh, index.Device, a[:4]...)
	store(t, other, index.Device, a[:2]...)
	wantDepths(t, find(x, index.Query{Locals: a}), map[*index.Worker]int{old: 10, fresh: 4, other: 2})
	wantDepths(t, find(x, index.Query{Locals: a, Workers: []string{"w"}}), map[*index.Worker]int{old: 10, fresh: 4})
	if n := old.Retire(); n != 10 {
		t.Fatalf("retired %d blocks, want 10", n)
	}
	wantDepths(t, find(x, index.Query{Locals: a, Workers: []string{"w", "nobody"}}), map[*index.Worker]int{fresh: 4})
	fresh.Retire()
	wantDepths(t, find(x, index.Query{Locals: a, Workers: []string{"w"}}), nil)
	wantDepths(t, find(x, index.Query{Locals: a}), map[*index.Worker]int{other: 2})
}

// A union holds nothing of its own, and counts for early exit like a worker.
func TestUnionsAreNotCounted(t *testing.T) {
	x := index.New(index.NewPositionalIndex(0))
	a := chainOf("a", 100)
	v, w := x.AddWorker("v", 0, nil), x.AddWorker("w", 0, nil)
	store(t, v, index.Host, a...)
	store(t, v, index.Disk, a[:50]...)
	wantDepths(t, find(x, index.Query{Locals: a}), map[*index.Worker]int{v: 0})
	store(t, w, index.Device, a...)
	store(t, v, index.Device, a[:7]...)
	wantDepths(t, find(x, index.Query{Locals: a}), map[*index.Worker]int{v: 7, w: 100})
	early := func() bool {
		var r index.Result
		x.Find(&index.Query{Locals: a, EarlyExit: true}, &r)
		return r.LowerBounds
	}
	if early() {
		t.Error("a search stopped though the host tier matches as well")
	}
	if st := x.Stats(); st.Blocks != 257 || st.Workers != 2 {
		t.Errorf("stats: %+v", st)
	}
	if n := v.ClearTier(index.Host); n != 100 || v.Len(index.Disk) != 50 || v.Len(index.Device) != 7 {
		t.Errorf("clearing the host tier took %d blocks and left %d, %d", n, v.Len(index.Disk), v.Len(index.Device))
	}
	if !early() {
		t.Error("a search went on for one worker")
	}
	if n := v.Retire(); n != 57 {
		t.Errorf("retired %d blocks, want 57", n)
	}
	wantDepths(t, find(x, index.Query{Locals: a}), map[*index.Worker]int{w: 100})
	// Its slots serve others now.
	for i := range 5 {
		n := x.AddWorker("n", int32(i), nil)
		store(t, n, index.Device, a[:i+1]...)
	}
	if got := find(x, index.Query{Locals: a}); len(got) != 6 {
		t.Errorf("%d workers match, want 6", len(got))
	}
}

// Of workers that match as deep, each comes first as often as any other.
func TestTopKTiesRotate(t *testing.T) {
	x := index.New(index.NewPositionalIndex(0))
	a := chainOf("a", 10)
	deep := x.AddWorker("deep", 0, nil)
	store(t, deep, index.Device, a...)
	const tied, k, queries = 10, 4, 4000
	for i := range tied {
		store(t, x.AddWorker("tied", int32(i), nil), index.Device, a[:5]...)
	}
	store(t, x.AddWorker("shallow", 0, nil), index.Device, a[:4]...)
	second, any := make(map[*index.Worker]int), make(map[*index.Worker]int)
	var r index.Result
	for range queries {
		x.Find(&index.Query{Locals: a, TopK: k}, &r)
		if len(r.Matches) != k || r.Matches[0].Worker != deep {
			t.Fatalf("got %v", r.Matches)
		}
		second[r.Matches[1].Worker]++
		for _, m := range r.Matches[1:] {
			if m.Depth != 5 {
				t.Fatalf("got depth %d among the top %d", m.Depth, k)
			}
			any[m.Worker]++
		}
	}
	check := func(what string, counts map[*index.Worker]int, fair int) {
		if len(counts) != tied {
			t.Errorf("%s: %d of %d workers", what, len(counts), tied)
		}
		for w, n := range counts {
			if n < fair*3/4 || n > fair*5/4 {
				t.Errorf("%s: rank %d %d times, fair were %d", what, w.Rank, n, fair)
			}
		}
	}
	check("first of the tied", second, queries/tied)
	check("among the top", any, queries*(k-1)/tied)
}

// hooked is a structure that lets something happen after each search.
type hooked struct {
	index.Structure
	after func()
}

func (h *hooked) Find(q []index.LocalHash, opt index.FindOptions, m *index.SlotMatches) {
	h.Structure.Find(q, opt, m)
	h.after()
}

// A slot that changes hands between the search and the answer credits nobody
// with what its last owner held.
func TestSlotReusedDuringFind(t *testing.T) {
	a := chainOf("a", 10)
	for _, times := range []int{0, 1, 2, 3, 10} {
		t.Run(fmt.Sprintf("%d times", times), func(t *testing.T) {
			h := &hooked{Structure: index.NewPositionalIndex(0), after: func() {}}
			x := index.New(h)
			current := x.AddWorker("w", 0, nil)
			store(t, current, index.Device, a...)
			stays := x.AddWorker("stays", 0, nil)
			store(t, stays, index.Device, a[:3]...)

			left, searches := times, 0
			h.after = func() {
				searches++
				// From the last try on, handing out slots has to wait for the
				// Find, so it is not tried here.
				if left > 0 && searches <= 3 {
					left--
					current.Retire()
					current = x.AddWorker("w", 0, nil)
				}
			}
			got := find(x, index.Query{Locals: a})
			want := map[*index.Worker]int{stays: 3}
			if times == 0 {
				want[current] = 10
			}
			wantDepths(t, got, want)
			if wantSearches := min(times, 3) + 1; searches != wantSearches {
				t.Errorf("%d searches, want %d", searches, wantSearches)
			}
		})
	}
}

// After losing to reuse often enough a Find holds it back, and lets go of it.
func TestFindHoldsBackSlotReuse(t *testing.T) {
	a := chainOf("a", 10)
	h := &hooked{Structure: index.NewPositionalIndex(0), after: func() {}}
	x := index.New(h)
	current := x.AddWorker("w", 0, nil)
	store(t, current, index.Device, a...)
	turn := func() {
		current.Retire()
		current = x.AddWorker("w", 0, nil)
		store(t, current, index.Device, a...)
	}
	searches := 0
	ended := make(chan struct{})
	h.after = func() {
		if searches++; searches <= 3 {
			turn()
			return
		}
		go func() {
			defer close(ended)
			turn()
		}()
	}
	before := current
	var r index.Result
	x.Find(&index.Query{Locals: a}, &r)
	if searches != 4 {
		t.Fatalf("%d searches, want 4", searches)
	}
	<-ended
	if len(r.Matches) > 1 || len(r.Matches) == 1 && (r.Matches[0].Worker == before || r.Matches[0].Depth != 10) {
		t.Errorf("got %v", r.Matches)
	}
}

// Workers come and go on many goroutines, each life with a chain of its own. A
// chain is only ever found at the life that stored it.
func TestWorkersComeAndGoDuringFinds(t *testing.T) {
	const (
		goroutines = 4
		lives      = 300
		length     = 40
	)
	x := index.New(index.NewPositionalIndex(0))
	name := func(g, life int) string { return fmt.Sprintf("%d-%d", g, life) }
	var latest [goroutines]atomic.Int64
	var writing, reading sync.WaitGroup
	var done atomic.Bool
	for g := range goroutines {
		writing.Go(func() {
			for life := range lives {
				latest[g].Store(int64(life))
				w := x.AddWorker(name(g, life), int32(g), nil)
				store(t, w, index.Device, chainOf(name(g, life), length)...)
				if life%3 == 0 {
					store(t, w, index.Host, chainOf(name(g, life), length)...)
				}
				if n := w.Retire(); n < length {
					t.Errorf("retired %d blocks, want %d", n, length)
				}
			}
		})
	}
	for i := range 2 {
		reading.Go(func() {
			rng := rand.New(rand.NewPCG(3, uint64(i)))
			var r index.Result
			for !done.Load() {
				g := rng.IntN(goroutines)
				life := int(latest[g].Load()) - rng.IntN(2)
				q := index.Query{Locals: chainOf(name(g, life), length)}
				if rng.IntN(2) == 0 {
					q.Workers = []string{name(g, life)}
				}
				x.Find(&q, &r)
				for _, m := range r.Matches {
					if m.Worker.Name != name(g, life) {
						t.Errorf("worker %s was credited with %d blocks of %s", m.Worker.Name, m.Depth, name(g, life))
					}
				}
				x.Stats()
			}
		})
	}
	writing.Wait()
	done.Store(true)
	reading.Wait()
	if st := x.Stats(); st != (index.Stats{}) {
		t.Errorf("stats after all retired: %+v", st)
	}
}

func TestRetiredWorkerMustNotBeUsed(t *testing.T) {
	w := index.New(index.NewPositionalIndex(0)).AddWorker("w", 0, nil)
	store(t, w, index.Device, chainOf("a", 3)...)
	w.Retire()
	if w.Len(index.Device) != 0 {
		t.Error("a retired worker has blocks")
	}
	defer func() {
		if recover() == nil {
			t.Error("a retired worker took an event")
		}
	}()
	w.Remove(index.Device, []index.SeqHash{1})
}

// A warm Find allocates nothing, whatever is asked and however many match.
func TestFindAllocatesNothing(t *testing.T) {
	for _, s := range structures {
		t.Run(s.name, func(t *testing.T) {
			for _, workers := range []int{1, 64, 7000} {
				x := index.New(s.empty())
				a := chainOf("a", 192)
				for i := range workers {
					w := x.AddWorker(fmt.Sprint(i), 0, nil)
					store(t, w, index.Device, a[:1+i%192]...)
					if i%100 == 3 {
						store(t, w, index.Host, a[:1+i%192]...)
					}
				}
				for name, q := range map[string]index.Query{
					"all":        {},
					"top 3":      {TopK: 3},
					"keep":       {Keep: func(w *index.Worker) bool { return w.Rank == 0 }},
					"by name":    {Workers: []string{"0", "5", "nobody"}},
					"early exit": {EarlyExit: true},
				} {
					t.Run(fmt.Sprintf("%s of %d", name, workers), func(t *testing.T) {
						q.Locals = a
						var r index.Result
						if n := testing.AllocsPerRun(20, func() { x.Find(&q, &r) }); n != 0 {
							t.Errorf("%v allocations, want 0", n)
						}
						if len(r.Matches) == 0 {
							t.Error("nothing found")
						}
					})
				}
			}
		})
	}
}

// What changes nothing allocates nothing, nor does in a RunIndex what comes and
// goes in runs that are there. A block that is new to a PositionalIndex costs its
// entry and its place in the map, one that is new to a tree a node, and another holder
// of a block a share of a list.
// Blocks new to a RunIndex cost a run.
func TestEventAllocations(t *testing.T) {
	sharedBlocks := map[string]float64{"positional": 2 * 32 * 2, "runs": 0, "concurrent-radix": 2 * 32 * 2}
	newBlocks := map[string]float64{
		"positional": 2*32 + 4, // an entry and a node of the map each, now and then an array
		"runs":       8,        // a run, its name, its buffer, now and then arrays

		"concurrent-radix": 32 + 4, // a node each, now and then an array
	}
	for _, s := range structures {
		t.Run(s.name, func(t *testing.T) {
			x := index.New(s.empty())
			w := x.AddWorker("w", 0, nil)
			a := chainOf("a", 64)
			seqs := index.Chain(nil, a)
			unknown := []index.SeqHash{1, 2, 3}
			store(t, w, index.Device, a...)
			b := chainOf("b", 64)
			bs := index.Chain(nil, b)

			store(t, x.AddWorker("other", 0, nil), index.Device, b...)
			store(t, x.AddWorker("third", 0, nil), index.Device, b...)
			next := index.Stored{Parent: bs[31], HasParent: true, Position: 32, Locals: b[32:33]}
			for _, c := range []struct {
				name string
				f    func()
				want float64
			}{
				{"store duplicates", func() { _, _ = w.Store(index.Device, index.Stored{Position: 0, Locals: a}) }, 0},
				{"remove unknown blocks", func() { w.Remove(index.Device, unknown) }, 0},
				{"refused", func() { _, _ = w.Store(index.Device, index.Stored{Position: 0}) }, 0},
				{"store and remove 32 blocks", func() {
					_, _ = w.Store(index.Device, index.Stored{Position: 0, Locals: a})
					w.Remove(index.Device, seqs[32:])
				}, newBlocks[s.name]},
				{"store and remove 32 blocks that others hold", func() {
					_, _ = w.Store(index.Device, index.Stored{Position: 0, Locals: b})
					w.Remove(index.Device, bs[32:])
				}, sharedBlocks[s.name]},
				{"store and remove one block that others hold", func() {
					_, _ = w.Store(index.Device, next)
					w.Remove(index.Device, bs[32:33])
				}, sharedBlocks[s.name]},
			} {
				t.Run(c.name, func(t *testing.T) {
					if n := testing.AllocsPerRun(100, c.f); n > c.want {
						t.Errorf("%v allocations, want at most %v", n, c.want)
					}
				})
			}
		})
	}
}

// A (worker, block) pair that is shared with nobody takes no more than this.
func TestBytesPerBlock(t *testing.T) {
	most := map[string]float64{"positional": 280, "runs": 30, "concurrent-radix": 180}
	for _, s := range structures {
		t.Run(s.name, func(t *testing.T) {
			const workers, chains, length = 8, 100, 128
			load := indextest.NewWorkload(1, 0, 0)
			before := heapBytes()
			x := index.New(s.empty())
			for i := range workers {
				w := x.AddWorker("w", int32(i), nil)
				for range chains {
					store(t, w, index.Device, load.Fresh(length)...)
				}
			}
			got := float64(heapBytes()-before) / (workers * chains * length)
			t.Logf("%.0f bytes a block", got)
			if want := most[s.name]; got > want {
				t.Errorf("%.0f bytes a block, want at most %.0f", got, want)
			}
			if st := x.Stats(); st.Blocks != workers*chains*length || st.Entries != st.Blocks {
				t.Errorf("stats: %+v", st)
			}
		})
	}
}

// heapBytes returns the bytes of live objects.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
