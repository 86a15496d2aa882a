package fleet

import (
	"testing"

	"kvindex/index"
)

// TestCacheIsItsEvents holds the caches of a fleet to what their events say:
// applied one by one to plain sets they give the caches' contents, the sets
// never exceed the capacity, and a block is only there under its parent.
func TestCacheIsItsEvents(t *testing.T) {
	const workers, capacity = 4, 300
	f := New(workers, capacity)
	blocks := mustBlocks(t, 64)
	router := NewRouter(workers, 1)

	held := make([]map[index.SeqHash]bool, workers)
	for w := range held {
		held[w] = map[index.SeqHash]bool{}
	}
	parent := map[index.SeqHash]index.SeqHash{} // of every block ever stored; roots are absent
	children := make([]map[index.SeqHash]int, workers)
	for w := range children {
		children[w] = map[index.SeqHash]int{}
	}
	removed := 0
	for n, r := range all(t, NewSynthetic(2000, 7)) {
		p := blocks.Of(r)
		w := router.Pick(len(p.Seqs), f.Depths(nil, p))
		depth := f.caches[w].depth(p.Seqs)
		s := f.Serve(w, p)
		if s.Hit != min(depth, capacity) {
			t.Fatalf("request %d: hit %d blocks, cache held %d", n, s.Hit, depth)
		}
		for _, h := range s.Removed {
			removed++
			if !held[w][h] {
				t.Fatalf("request %d: removed a block that was not held", n)
			}
			if children[w][h] > 0 {
				t.Fatalf("request %d: removed a block before the %d after it", n, children[w][h])
			}
			delete(held[w], h)
			children[w][parent[h]]--
		}
		prev, has := s.Parent, s.Hit > 0
		if has && prev != p.Seqs[s.Hit-1] {
			t.Fatalf("request %d: parent is not the last block hit", n)
		}
		for _, l := range s.Stored {
			h := index.SeqHash(l)
			if has {
				if !held[w][prev] {
					t.Fatalf("request %d: stored a block whose parent is not held", n)
				}
				h = index.Next(prev, l)
				parent[h] = prev
				children[w][prev]++
			}
			if held[w][h] {
				t.Fatalf("request %d: stored a block that is held", n)
			}
			held[w][h] = true
			prev, has = h, true
		}
		if len(held[w]) > capacity {
			t.Fatalf("request %d: %d blocks held, capacity is %d", n, len(held[w]), capacity)
		}
		if got := len(f.caches[w].at); got != len(held[w]) {
			t.Fatalf("request %d: cache holds %d blocks, its events say %d", n, got, len(held[w]))
		}
		for h := range held[w] {
			if _, ok := f.caches[w].at[h]; n%100 == 0 && !ok {
				t.Fatalf("request %d: the cache lacks a block its events stored", n)
			}
		}
	}
	if removed == 0 {
		t.Fatal("nothing was ever evicted: the test shows nothing")
	}
}

func TestCacheEvictsLeastRecentlyUsedLeaf(t *testing.T) {
	c := newCache(4)
	use := func(want []index.SeqHash, prompt ...index.SeqHash) {
		t.Helper()
		_, _, removed := c.use(prompt, nil)
		if len(removed) != len(want) {
			t.Fatalf("use(%v) removed %v, want %v", prompt, removed, want)
		}
		for i := range want {
			if removed[i] != want[i] {
				t.Fatalf("use(%v) removed %v, want %v", prompt, removed, want)
			}
		}
	}
	seqs := func(s ...index.SeqHash) []index.SeqHash { return s }
	use(nil, 1, 2, 3)
	use(nil, 1, 4)
	use(seqs(3, 2), 1, 5, 6)                // 2 and 3 were used before 4
	use(seqs(4), 1, 5, 7)                   // not 6, which is more recent
	use(seqs(6, 7, 5, 1), 8, 9, 10, 11, 12) // larger than the cache: 12 is not kept
	if got := c.depth(seqs(8, 9, 10, 11, 12)); got != 4 {
		t.Fatalf("depth %d of a prompt larger than the cache, want 4", got)
	}
}
