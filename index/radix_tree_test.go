package index_test

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvindex/index"
	"kvindex/index/indextest"
)

func TestConcurrentRadixTree(t *testing.T) {
	empty := func() index.Structure { return index.NewConcurrentRadixTree() }
	indextest.Run(t, empty)
	t.Run("Opaque", func(t *testing.T) { indextest.RunOpaque(t, false, empty) })
}

func TestRadixTree(t *testing.T) {
	empty := func() index.Structure { return index.NewRadixTree(time.Minute) }
	indextest.RunAlone(t, empty)
	t.Run("Opaque", func(t *testing.T) { indextest.RunOpaque(t, true, empty) })
}

// An opaque event that changes nothing allocates nothing, though the slot holds two
// hashes of each block.
func TestOpaqueEventsAllocateNothing(t *testing.T) {
	tree := index.NewConcurrentRadixTree()
	a := chainOf("a", 64)
	var hashes [2][]index.SeqHash
	for i := range hashes {
		for j := range a {
			hashes[i] = append(hashes[i], index.SeqHash(1000*i+j+1))
		}
		if e, err := tree.Store(0, index.Stored{Locals: a, Hashes: hashes[i]}); err != nil || e.Stored != len(a) {
			t.Fatalf("%+v, %v", e, err)
		}
	}
	unknown := []index.SeqHash{5000, 5001}
	var m index.SlotMatches
	if n := testing.AllocsPerRun(100, func() {
		for i := range hashes {
			_, _ = tree.Store(0, index.Stored{Locals: a, Hashes: hashes[i]})
		}
		tree.Remove(0, unknown)
		tree.Find(a, index.FindOptions{}, &m)
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
	if len(m.Matches) != 1 || m.Matches[0].Depth != len(a) {
		t.Errorf("found %v", m.Matches)
	}
}

// What each step gives, in seconds and with a window of ten.
func TestRadixTreeCountsUses(t *testing.T) {
	tree := index.NewRadixTree(10 * time.Second)
	a, b := chainOf("a", 5), chainOf("b", 5)
	ab := slices.Concat(a[:2], b)
	put := func(slot index.Slot, locals []index.LocalHash) {
		if _, err := tree.Store(slot, index.Stored{Locals: locals}); err != nil {
			t.Fatal(err)
		}
	}
	use := func(second int, query []index.LocalHash, want ...int) {
		t.Helper()
		if got := tree.Use(query, time.Unix(int64(second), 0), nil); !slices.Equal(got, want) {
			t.Fatalf("uses at %d s: %v, want %v", second, got, want)
		}
	}
	use(100, a)
	put(0, a[:3])
	put(1, ab)
	use(101, a, 0, 0, 0)
	use(102, a, 1, 1, 1)
	use(103, a[:1], 2)
	use(104, ab, 3, 2, 0, 0, 0, 0, 0)
	use(105, b)
	put(1, a) // more of it is held now
	use(110, a, 4, 3, 2, 0, 0)
	use(111, a, 4, 3, 2, 1, 1) // without that at 101
	use(112, ab, 4, 3, 1, 1, 1, 1, 1)
	use(90, a, 5, 4, 2, 2, 2) // time does not go back
	// Blocks that nobody holds are forgotten, with their uses.
	tree.Remove(1, index.Chain(nil, a)[3:])
	use(113, a, 5, 5, 3)
	put(1, a)
	use(113, a, 6, 6, 4, 0, 0)
	// So it is if the block was in the middle.
	tree.Clear(0)
	tree.Remove(1, index.Chain(nil, a)[1:2])
	use(114, a, 6)
	put(1, a)
	use(114, a, 7, 0, 0, 0, 0)
	use(1000, a, 0, 0, 0, 0, 0)
	use(1009, ab, 1, 1, 0, 0, 0, 0, 0)
	use(1010, ab, 1, 1, 1, 1, 1, 1, 1)
	if got := tree.Use(a, time.Unix(1010, 0), []int{7}); !slices.Equal(got, []int{7, 2, 2, 0, 0, 0}) {
		t.Fatalf("appended: %v", got)
	}
}

// The window against a plain list of queries with each block they reached.
func TestRadixTreeUsesAtRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		window := time.Duration(rapid.IntRange(0, 20).Draw(t, "window"))
		tree := index.NewRadixTree(window)
		oracle := indextest.NewOracle()
		now := time.Unix(1, 0)
		times := make(map[index.SeqHash][]time.Time) // when a block was reached
		prompt := func() []index.LocalHash {
			return rapid.SliceOfN(rapid.Map(rapid.IntRange(1, 2), func(n int) index.LocalHash { return index.LocalHash(n) }), 1, 6).Draw(t, "prompt")
		}
		// lost forgets the uses of what nobody holds, or not from its root on.
		var all [][]index.LocalHash
		lost := func() {
			for _, p := range all {
				reach := 0
				for _, depth := range oracle.Depths(p) {
					reach = max(reach, depth)
				}
				for _, seq := range index.Chain(nil, p)[reach:] {
					delete(times, seq)
				}
			}
		}
		slot := func() index.Slot { return index.Slot(rapid.IntRange(0, 2).Draw(t, "slot")) }
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				slot, s := slot(), index.Stored{Position: index.NoPosition, Locals: prompt()}
				_, _ = tree.Store(slot, s)
				_, _ = oracle.Store(slot, s)
			},
			"remove": func(t *rapid.T) {
				slot, seqs := slot(), index.Chain(nil, prompt())
				seqs = seqs[len(seqs)-1:]
				tree.Remove(slot, seqs)
				oracle.Remove(slot, seqs)
				lost()
			},
			"clear": func(t *rapid.T) {
				slot := slot()
				tree.Clear(slot)
				oracle.Clear(slot)
				lost()
			},
			"use": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 8).Draw(t, "later")))
				query := prompt()
				all = append(all, query)
				reach := 0
				for _, depth := range oracle.Depths(query) {
					reach = max(reach, depth)
				}
				want := []int{}
				for _, seq := range index.Chain(nil, query)[:reach] {
					times[seq] = slices.DeleteFunc(times[seq], func(at time.Time) bool { return !at.After(now.Add(-window)) })
					want = append(want, len(times[seq]))
					times[seq] = append(times[seq], now)
				}
				if got := tree.Use(query, now, []int{}); !slices.Equal(got, want) {
					t.Fatalf("query %v at %d: %v uses, want %v", query, now.UnixNano(), got, want)
				}
			},
		})
	})
}

// Queries that have left the window, and blocks that nobody holds, take no memory.
func TestRadixTreeForgetsUses(t *testing.T) {
	tree := index.NewRadixTree(time.Second)
	load := indextest.NewWorkload(1, 0, 0)
	a := load.Fresh(50)
	now := time.Unix(1, 0)
	var dst []int
	turn := func() {
		for range 20_000 {
			now = now.Add(time.Millisecond)
			dst = tree.Use(a, now, dst[:0])
		}
	}
	if _, err := tree.Store(0, index.Stored{Locals: a}); err != nil {
		t.Fatal(err)
	}
	turn()
	before := heapBytes()
	turn()
	// A burst within the window, of blocks that then go.
	for range 200 {
		b := load.Fresh(100)
		_, _ = tree.Store(1, index.Stored{Locals: b})
		for range 100 {
			tree.Use(b, now, nil)
		}
	}
	tree.Clear(1)
	if got := heapBytes() - before; got > 2<<20 {
		t.Errorf("%d KiB for 20,000 queries of 200 prompts that are gone", got>>10)
	}
	tree.Expire(now.Add(time.Second))
	if got := heapBytes() - before; got > 32<<10 {
		t.Errorf("%d KiB are left of queries that have left the window", got>>10)
	}
	if n := testing.AllocsPerRun(100, func() { dst = tree.Use(a[:1], now, dst[:0]) }); n > 1 {
		t.Errorf("%v allocations a query", n)
	}
	runtime.KeepAlive(tree)
}
