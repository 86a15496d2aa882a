// This file checks structures that take opaque hashes: point 9 of the contract.

package indextest

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
)

// RunOpaque puts a kind of structure through what opaque hashes add to the
// conformance suite: cases, random histories, memory, and concurrent writers unless
// alone says that the structure is for one goroutine.
func RunOpaque(t *testing.T, alone bool, empty func() index.Structure) {
	t.Run("Contract", func(t *testing.T) { RunOpaqueContract(t, empty) })
	t.Run("Random", func(t *testing.T) { runOpaqueRandom(t, empty) })
	t.Run("RandomIndex", func(t *testing.T) { runRandomIndex(t, empty, NewOpaqueFleet, 1<<50) })
	t.Run("Churn", func(t *testing.T) { runOpaqueChurn(t, empty()) })
	if !alone {
		t.Run("Concurrent", func(t *testing.T) { runOpaqueConcurrent(t, empty) })
	}
}

// opaque stores a chain of blocks that have these hashes, below parent or, if that
// is 0, from the root.
func (f *fixture) opaque(slot index.Slot, parent index.SeqHash, locals []index.LocalHash, hashes ...index.SeqHash) index.Effect {
	f.t.Helper()
	return f.store(slot, index.Stored{
		Parent: parent, HasParent: parent != 0, Position: index.NoPosition, Locals: locals[:len(hashes)], Hashes: hashes,
	})
}

// replayed is a structure into which a slot's dump was stored.
func (f *fixture) replayed(empty func() index.Structure, slot index.Slot) *fixture {
	f.t.Helper()
	g := &fixture{t: f.t, s: empty()}
	f.s.Dump(slot, func(s index.Stored) bool {
		if len(s.Hashes) != len(s.Locals) {
			f.t.Fatalf("dumped %+v: without the hashes", s)
		}
		if e := g.store(slot, s); e.Stored != len(s.Locals) {
			f.t.Fatalf("replay of %+v: %+v", s, e)
		}
		return true
	})
	g.holds(slot, f.s.Len(slot))
	return g
}

// RunOpaqueContract checks opaque hashes on small cases.
func RunOpaqueContract(t *testing.T, empty func() index.Structure) {
	a, b := blocks("a", 10), blocks("b", 10)
	for _, c := range []struct {
		name string
		test func(f *fixture)
	}{
		{"found by local hashes, removed by opaque ones", func(f *fixture) {
			f.did(f.opaque(0, 0, a, 1, 2, 3), index.Effect{Stored: 3})
			f.did(f.opaque(0, 3, a[3:], 4, 5), index.Effect{Stored: 2})
			f.finds(a, as(0, 5))
			f.finds(a[1:], nil)
			f.did(f.s.Remove(0, []index.SeqHash{index.Chain(nil, a)[1], 5}), index.Effect{Removed: 1, Unknown: 1})
			f.finds(a, as(0, 4))
			if !f.s.Holds(0, 4) || f.s.Holds(0, 5) {
				f.t.Fatal("Holds does not say what was stored")
			}
			f.s.Clear(0)
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats after all was cleared: %+v", st)
			}
		}},
		{"each slot's hashes are its own", func(f *fixture) {
			f.opaque(0, 0, a, 1, 2, 3)
			f.opaque(1, 0, a, 3, 1, 2) // the same path
			f.opaque(2, 0, b, 1, 2, 3) // the same hashes
			f.root(3, a...)            // hashes that are computed
			f.finds(a, map[index.Slot]int{0: 3, 1: 3, 3: 10})
			f.finds(b, as(2, 3))
			for slot := range index.Slot(3) {
				f.s.Remove(slot, []index.SeqHash{3})
			}
			f.finds(a, map[index.Slot]int{0: 2, 3: 10})
			f.finds(b, as(2, 2))
		}},
		{"a hole, an orphan, and back", func(f *fixture) {
			f.did(f.opaque(0, 3, a[3:], 4, 5), index.Effect{Stored: 2, Orphan: 1})
			f.opaque(0, 0, a, 1, 2)
			f.finds(a, as(0, 2))
			f.opaque(0, 2, a[2:], 3)
			f.finds(a, as(0, 5))
			f.s.Remove(0, []index.SeqHash{2})
			f.finds(a, as(0, 1))
			f.holds(0, 4)
			f.opaque(0, 1, b, 2) // the same hash, other content now
			f.finds(a, as(0, 1))
			f.finds(slices.Concat(a[:1], b[:1], a[2:]), as(0, 5))
		}},
		{"a hash is placed once", func(f *fixture) {
			f.opaque(0, 0, a, 1, 2, 3)
			f.did(f.opaque(0, 0, a, 1, 2), index.Effect{Duplicate: 2})
			f.did(f.opaque(0, 0, b, 1), index.Effect{Duplicate: 1, Contradiction: 1})
			f.did(f.opaque(0, 1, a[2:], 3), index.Effect{Duplicate: 1, Contradiction: 1})
			f.did(f.opaque(0, 0, a[2:], 3), index.Effect{Duplicate: 1, Contradiction: 1})
			f.did(f.opaque(0, 9, a[2:], 3), index.Effect{Duplicate: 1, Contradiction: 1})
			f.did(f.store(0, index.Stored{Position: 5, Locals: b[:2], Hashes: []index.SeqHash{1, 8}}), index.Effect{Stored: 1, Duplicate: 1, Contradiction: 2})
			f.finds(a, as(0, 3))
			f.finds(b, nil)
			f.finds([]index.LocalHash{a[0], b[1]}, as(0, 2)) // 8 is below 1, wherever that is
			f.holds(0, 4)
		}},
		{"two hashes for one path", func(f *fixture) {
			f.opaque(0, 0, a, 1, 2, 3)
			f.did(f.opaque(0, 0, a, 11, 12, 13, 14), index.Effect{Stored: 4})
			f.opaque(1, 0, a, 1, 2, 3)
			f.holds(0, 7)
			f.finds(a, map[index.Slot]int{0: 4, 1: 3})
			f.s.Remove(0, []index.SeqHash{1})
			f.finds(a, map[index.Slot]int{0: 4, 1: 3})
			g := f.replayed(empty, 0)
			g.finds(a, as(0, 4))
			f.s.Remove(0, []index.SeqHash{13})
			f.finds(a, map[index.Slot]int{0: 2, 1: 3}) // 3 is held, but not what precedes it
			f.s.Remove(0, []index.SeqHash{12})
			f.finds(a, map[index.Slot]int{0: 1, 1: 3})
			f.opaque(0, 0, a, 1)
			f.finds(a, as2(0, 3, 1, 3))
			f.s.Remove(0, []index.SeqHash{11})
			f.finds(a, as2(0, 3, 1, 3))
			f.s.Remove(0, []index.SeqHash{3, 2, 1})
			f.finds(a, as(1, 3))
			f.s.Clear(1)
			f.holds(0, 1)
			f.s.Clear(0)
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats after all was cleared: %+v", st)
			}
		}},
		{"blocks that are each other's ancestors", func(f *fixture) {
			f.opaque(0, 0, a, 1, 2)
			f.did(f.opaque(0, 23, a, 21, 22, 23, 24), index.Effect{Stored: 4, Orphan: 1})
			f.did(f.opaque(0, 31, a, 32), index.Effect{Stored: 1, Orphan: 1})
			f.did(f.opaque(0, 32, a, 31), index.Effect{Stored: 1})
			f.did(f.opaque(0, 22, b, 25, 26), index.Effect{Stored: 2})
			f.finds(a, as(0, 2))
			g := f.replayed(empty, 0)
			for _, f := range []*fixture{f, g} {
				f.holds(0, 10)
				f.finds(a, as(0, 2))
				n := 0
				f.s.Dump(0, func(index.Stored) bool { n++; return n < 4 })
				if n != 4 {
					f.t.Fatalf("a dump went on to %d chains after it was stopped at 4", n)
				}
				// Opened, 24 hangs below 23 below 22 below a root.
				f.s.Remove(0, []index.SeqHash{21})
				f.finds(a, as(0, 2))
				f.opaque(0, 0, b, 21)
				f.finds(slices.Concat(b[:1], a[1:]), as(0, 4))
				f.finds([]index.LocalHash{b[0], a[1], b[0], b[1]}, as(0, 4))
				f.did(f.s.Remove(0, []index.SeqHash{31, 32, 31}), index.Effect{Removed: 2, Unknown: 1})
				f.holds(0, 8)
				if n := f.s.Clear(0); n != 8 {
					f.t.Fatalf("cleared %d blocks, want 8", n)
				}
				if st := f.s.Stats(); st != (index.Stats{}) {
					f.t.Fatalf("stats after all was cleared: %+v", st)
				}
			}
		}},
		{"a chain that comes back to itself", func(f *fixture) {
			f.did(f.opaque(0, 0, a, 1, 2, 1, 3), index.Effect{Stored: 3, Duplicate: 1, Contradiction: 1})
			f.finds(a, as(0, 2))
			f.finds([]index.LocalHash{a[0], a[3]}, as(0, 2))
			f.did(f.opaque(0, 5, a, 4, 5, 4), index.Effect{Stored: 2, Orphan: 1, Duplicate: 1, Contradiction: 1})
			f.finds(a, as(0, 2))
		}},
		{"mixed with hashes that are computed", func(f *fixture) {
			seqs := index.Chain(nil, a)
			f.root(0, a[:3]...)
			f.opaque(0, seqs[2], a[3:], 1, 2)
			f.below(0, a, 3, 4)
			f.finds(a, as(0, 5))
			g := f.replayed(empty, 0)
			for _, f := range []*fixture{f, g} {
				f.s.Remove(0, []index.SeqHash{1})
				f.finds(a, as(0, 4))
				f.s.Remove(0, seqs[2:3])
				f.finds(a, as(0, 2))
				f.holds(0, 4)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&fixture{t: t, s: empty()})
		})
	}
}

// as2 is a map from two slots to their depths.
func as2(s1 index.Slot, d1 int, s2 index.Slot, d2 int) map[index.Slot]int {
	return map[index.Slot]int{s1: d1, s2: d2}
}

// Random opaque histories are over few hashes and fewer contents, so that hashes
// come again elsewhere, paths have several hashes, and parents go round.
const (
	opaqueHashes = 14
	opaqueLocals = 2
	opaqueLong   = 70 // blocks of the chains that make searches leap
)

// opaqueHistory is a history with opaque hashes.
type opaqueHistory struct {
	history
}

func drawOpaque(t *rapid.T, name string) index.SeqHash {
	return index.SeqHash(rapid.IntRange(1, opaqueHashes).Draw(t, name))
}

func drawOpaqueLocals(t *rapid.T, n int) []index.LocalHash {
	return rapid.SliceOfN(rapid.Map(rapid.IntRange(1, opaqueLocals), func(n int) index.LocalHash { return index.LocalHash(n) }), n, n).Draw(t, "locals")
}

// longOpaque returns one of two long chains of the same content.
func longOpaque(which int) (locals []index.LocalHash, hashes []index.SeqHash) {
	for i := range opaqueLong {
		locals = append(locals, index.LocalHash(1+i%opaqueLocals))
		hashes = append(hashes, index.SeqHash(1000*which+i))
	}
	return locals, hashes
}

func (h *opaqueHistory) apply(t *rapid.T, slot index.Slot, s index.Stored) {
	got, err := h.s.Store(slot, s)
	want, wantErr := h.oracle.Store(slot, s)
	if got != want || err != wantErr {
		t.Fatalf("slot %d, store %+v: got %+v, %v, want %+v, %v", slot, s, got, err, want, wantErr)
	}
}

func (h *opaqueHistory) store(t *rapid.T) {
	n := rapid.IntRange(1, 6).Draw(t, "n")
	s := index.Stored{
		Position: int32(rapid.IntRange(-1, 3).Draw(t, "position")),
		Locals:   drawOpaqueLocals(t, n),
	}
	for range n {
		s.Hashes = append(s.Hashes, drawOpaque(t, "hash"))
	}
	if rapid.Bool().Draw(t, "below") {
		s.HasParent, s.Parent = true, drawOpaque(t, "parent")
	}
	if rapid.IntRange(0, 9).Draw(t, "computed") == 0 {
		s.Hashes = nil
	}
	h.apply(t, h.slot(t), s)
}

func (h *opaqueHistory) storeLong(t *rapid.T) {
	locals, hashes := longOpaque(rapid.IntRange(1, 2).Draw(t, "which"))
	from := rapid.SampledFrom([]int{0, 0, 20, 40}).Draw(t, "from")
	s := index.Stored{Position: index.NoPosition, Locals: locals[from:], Hashes: hashes[from:]}
	if from > 0 {
		s.HasParent, s.Parent = true, hashes[from-1]
	}
	h.apply(t, h.slot(t), s)
}

func (h *opaqueHistory) remove(t *rapid.T) {
	slot := h.slot(t)
	var hashes []index.SeqHash
	for range rapid.IntRange(1, 4).Draw(t, "n") {
		hashes = append(hashes, drawOpaque(t, "hash"))
	}
	if rapid.IntRange(0, 3).Draw(t, "long") == 0 {
		_, hashes = longOpaque(rapid.IntRange(1, 2).Draw(t, "which"))
		from := rapid.IntRange(0, opaqueLong-1).Draw(t, "from")
		hashes = hashes[from:rapid.SampledFrom([]int{from + 1, opaqueLong}).Draw(t, "to")]
	}
	if got, want := h.s.Remove(slot, hashes), h.oracle.Remove(slot, hashes); got != want {
		t.Fatalf("slot %d, remove %d: got %+v, want %+v", slot, hashes, got, want)
	}
}

func (h *opaqueHistory) check(t *rapid.T) {
	for slot := range index.Slot(randomSlots) {
		if got, want := h.s.Len(slot), h.oracle.Len(slot); got != want {
			t.Fatalf("slot %d holds %d blocks, want %d", slot, got, want)
		}
	}
	got, want := h.s.Stats(), h.oracle.Stats()
	if got.Blocks != want.Blocks || (got.Entries == 0) != (want.Entries == 0) {
		t.Fatalf("stats: got %+v, want %+v", got, want)
	}
	slot, seq := h.slot(t), drawOpaque(t, "seq")
	if got, want := h.s.Holds(slot, seq), h.oracle.Holds(slot, seq); got != want {
		t.Fatalf("slot %d, block %d: held is %v, want %v", slot, seq, got, want)
	}
	h.find(t, drawOpaqueLocals(t, rapid.IntRange(1, 7).Draw(t, "n")))
	long, _ := longOpaque(1)
	h.find(t, long)
}

// runOpaqueRandom checks random histories with opaque hashes against the Oracle.
func runOpaqueRandom(t *testing.T, empty func() index.Structure) {
	rapid.Check(t, func(t *rapid.T) {
		h := &opaqueHistory{history{empty: empty, s: empty(), oracle: NewOpaqueOracle()}}
		t.Repeat(map[string]func(*rapid.T){
			"store":     h.store,
			"storeMore": h.store,
			"storeLong": h.storeLong,
			"remove":    h.remove,
			"clear":     h.clear,
			"replay":    h.replay,
			"":          h.check,
		})
		h.end(t)
	})
}

// runOpaqueConcurrent does RunConcurrent's check with hashes of each writer's own,
// and with writers that have two for each block.
func runOpaqueConcurrent(t *testing.T, empty func() index.Structure) {
	// The last of the actors is the one that never changes.
	all := slices.Insert(slices.Clone(actors), len(actors)-1, actor{
		name: "has one hash or another for each block", trunk: [2]int{trunkLen, trunkLen}, twin: [2]int{fork, fork},
		start: func(w *slotWriter) { w.store(w.trunk, 0, trunkLen) },
		act: func(w *slotWriter) {
			had := w.seqs(w.trunk)
			w.mask ^= 1 << 20
			w.store(w.trunk, 0, trunkLen)
			w.remove(w.shuffled(had))
		},
	})
	runConcurrent(t, empty(), NewOpaqueOracle(), all, func(slot index.Slot) index.SeqHash { return index.SeqHash(slot + 1) })
}

// runOpaqueChurn stores and removes, in random order, chains that have two hashes for
// each block, or hang together in a circle, and checks that nothing is left of them.
func runOpaqueChurn(t *testing.T, s index.Structure) {
	const chains, length, turns = 30, 40, 40
	w, rng := NewWorkload(9, 0, 0), rand.New(rand.NewPCG(9, 9))
	next := index.SeqHash(1)
	turn := func() {
		var all []index.SeqHash
		for i := range chains {
			locals := w.Fresh(length)
			for range 2 {
				hashes := make([]index.SeqHash, length)
				for j := range hashes {
					hashes[j] = next
					next++
				}
				ev := index.Stored{Position: index.NoPosition, Locals: locals, Hashes: hashes}
				if i%3 == 0 {
					ev.HasParent, ev.Parent = true, hashes[length-1]
				}
				if e, err := s.Store(0, ev); err != nil || e.Stored != length {
					t.Fatalf("store: %+v, %v", e, err)
				}
				all = append(all, hashes...)
			}
		}
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		if e := s.Remove(0, all); e.Removed != len(all) {
			t.Fatalf("removed %d blocks of %d", e.Removed, len(all))
		}
	}
	// One block stays, so that what is empty is not simply dropped.
	if _, err := s.Store(0, index.Stored{Locals: w.Fresh(1), Hashes: []index.SeqHash{1 << 60}}); err != nil {
		t.Fatal(err)
	}
	before := heap()
	turn()
	turn()
	after := heap()
	for range turns {
		turn()
	}
	if end := heap(); end > after+16<<10 || end > before+64<<10 {
		t.Errorf("one block took %d bytes more after two turns, and %d more after %d others", after-before, end-after, turns)
	}
	if got := s.Stats(); got != (index.Stats{Blocks: 1, Entries: 1}) {
		t.Errorf("stats: %+v", got)
	}
	runtime.KeepAlive(s)
}
