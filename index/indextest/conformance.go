// This file is the deterministic part of the conformance suite: the contract of
// the index, point by point.

package indextest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"kvindex/index"
)

// Run puts a kind of structure through the whole conformance suite. Each call of
// empty returns a new one.
func Run(t *testing.T, empty func() index.Structure) {
	RunAlone(t, empty)
	t.Run("Concurrent", func(t *testing.T) { RunConcurrent(t, empty) })
	t.Run("TiersConcurrent", func(t *testing.T) { RunTiersConcurrent(t, empty) })
	t.Run("Turnover", func(t *testing.T) { RunTurnover(t, empty) })
	t.Run("Growth", func(t *testing.T) { RunGrowth(t, empty) })
	t.Run("Restore", func(t *testing.T) { RunRestore(t, empty) })
}

// RunAlone does Run's checks of structures that are for one goroutine.
func RunAlone(t *testing.T, empty func() index.Structure) {
	t.Run("Contract", func(t *testing.T) { RunContract(t, empty) })
	t.Run("Random", func(t *testing.T) { RunRandom(t, empty) })
	t.Run("RandomIndex", func(t *testing.T) { RunRandomIndex(t, empty) })
	t.Run("Tiers", func(t *testing.T) { RunTiers(t, empty) })
	t.Run("Churn", func(t *testing.T) { RunChurn(t, empty) })
}

// fixture is a structure under test and words to speak about it.
type fixture struct {
	t *testing.T
	s index.Structure
	m index.SlotMatches
}

// blocks returns n local hashes that stand for the same content wherever name
// is the same.
func blocks(name string, n int) []index.LocalHash {
	h := index.BlockHasher{BlockSize: 1, Scheme: index.Flash}
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return h.Append(nil, tokens, index.Extra{Salt: name})
}

// root stores a chain from its root.
func (f *fixture) root(slot index.Slot, locals ...index.LocalHash) index.Effect {
	f.t.Helper()
	return f.store(slot, index.Stored{Position: index.NoPosition, Locals: locals})
}

// below stores the blocks from position from on of the chain locals.
func (f *fixture) below(slot index.Slot, locals []index.LocalHash, from, to int) index.Effect {
	f.t.Helper()
	return f.store(slot, part(locals, from, to))
}

// part is the event that stores the blocks [from, to) of the chain locals.
func part(locals []index.LocalHash, from, to int) index.Stored {
	s := index.Stored{Position: int32(from), Locals: locals[from:to]}
	if from > 0 {
		s.HasParent = true
		s.Parent = index.Chain(nil, locals[:from])[from-1]
	}
	return s
}

func (f *fixture) store(slot index.Slot, s index.Stored) index.Effect {
	f.t.Helper()
	e, err := f.s.Store(slot, s)
	if err != nil {
		f.t.Fatalf("store: %v", err)
	}
	return e
}

// byDepth returns an answer by slot, and whether it is no answer at all: a slot
// twice, or without depth.
func byDepth(m *index.SlotMatches) (depths map[index.Slot]int, bad bool) {
	depths = make(map[index.Slot]int, len(m.Matches))
	for _, match := range m.Matches {
		if _, twice := depths[match.Slot]; twice || match.Depth < 1 {
			bad = true
		}
		depths[match.Slot] = match.Depth
	}
	return depths, bad
}

// depths asks for the query and returns the answer by slot.
func (f *fixture) depths(query []index.LocalHash, opt index.FindOptions) map[index.Slot]int {
	f.t.Helper()
	f.s.Find(query, opt, &f.m)
	out, bad := byDepth(&f.m)
	if bad {
		f.t.Fatalf("a slot twice, or without depth, in %v", f.m.Matches)
	}
	return out
}

// finds checks the answer to a query.
func (f *fixture) finds(query []index.LocalHash, want map[index.Slot]int) {
	f.t.Helper()
	if got := f.depths(query, index.FindOptions{}); !maps.Equal(got, want) {
		f.t.Fatalf("depths by slot: got %v, want %v", got, want)
	}
}

// best checks the best k of an answer: those of want that are at least that deep.
func (f *fixture) best(query []index.LocalHash, k int, opt index.FindOptions, want map[index.Slot]int, least int) {
	f.t.Helper()
	want = maps.Clone(want)
	maps.DeleteFunc(want, func(_ index.Slot, d int) bool { return d < least })
	f.s.FindBest(query, k, opt, &f.m)
	if got, bad := byDepth(&f.m); bad || f.m.LowerBounds || !maps.Equal(got, want) {
		f.t.Fatalf("best %d: got %v, want %v", k, f.m.Matches, want)
	}
}

// did checks what an event did.
func (f *fixture) did(got, want index.Effect) {
	f.t.Helper()
	if got != want {
		f.t.Fatalf("effect: got %+v, want %+v", got, want)
	}
}

func (f *fixture) holds(slot index.Slot, want int) {
	f.t.Helper()
	if got := f.s.Len(slot); got != want {
		f.t.Fatalf("slot %d holds %d blocks, want %d", slot, got, want)
	}
}

// as is a map from one slot to a depth.
func as(slot index.Slot, depth int) map[index.Slot]int {
	return map[index.Slot]int{slot: depth}
}

// RunContract checks each point of the contract on small cases.
func RunContract(t *testing.T, empty func() index.Structure) {
	a, b := blocks("a", 100), blocks("b", 100)
	as100, bs100 := index.Chain(nil, a), index.Chain(nil, b)
	for _, c := range []struct {
		name string
		test func(f *fixture)
	}{
		{"1/empty", func(f *fixture) {
			f.finds(a, nil)
			f.finds(nil, nil)
			f.holds(0, 0)
			if f.s.Holds(3, as100[0]) {
				f.t.Fatal("an empty slot holds a block")
			}
			f.did(f.s.Remove(3, as100[:2]), index.Effect{Unknown: 2})
			if n := f.s.Clear(3); n != 0 {
				f.t.Fatalf("clearing nothing removed %d blocks", n)
			}
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats of nothing: %+v", st)
			}
		}},
		{"1/depth is the leading blocks held", func(f *fixture) {
			f.root(0, a...)
			f.root(1, a[:50]...)
			f.root(2, a[0])
			f.root(3, b...)
			f.finds(a, map[index.Slot]int{0: 100, 1: 50, 2: 1})
			f.finds(a[:70], map[index.Slot]int{0: 70, 1: 50, 2: 1})
			f.finds(a[:1], map[index.Slot]int{0: 1, 1: 1, 2: 1})
			f.finds(b[:33], as(3, 33))
			f.finds(a[1:], nil)
		}},
		{"1/every depth around every other", func(f *fixture) {
			want := make(map[index.Slot]int)
			for d := 1; d <= 100; d++ {
				f.root(index.Slot(d), a[:d]...)
				want[index.Slot(d)] = d
			}
			f.finds(a, want)
			for n := 1; n <= 100; n++ {
				for s := range want {
					want[s] = min(int(s), n)
				}
				f.finds(a[:n], want)
			}
		}},
		{"1/a query that leaves the chain", func(f *fixture) {
			f.root(0, a...)
			for at := range 100 {
				query := slices.Concat(a[:at], b[at:at+1], a[at:])
				want := map[index.Slot]int{}
				if at > 0 {
					want[0] = at
				}
				f.finds(query, want)
			}
		}},
		{"1/queries longer than what is held", func(f *fixture) {
			f.root(0, a[:40]...)
			f.finds(slices.Concat(a, b, a), as(0, 40))
		}},
		{"2/stored again changes nothing", func(f *fixture) {
			f.did(f.root(0, a[:10]...), index.Effect{Stored: 10})
			f.did(f.root(0, a[:10]...), index.Effect{Duplicate: 10})
			f.did(f.root(0, a[:12]...), index.Effect{Stored: 2, Duplicate: 10})
			f.did(f.below(0, a, 5, 15), index.Effect{Stored: 3, Duplicate: 7})
			f.holds(0, 15)
			f.finds(a, as(0, 15))
			f.did(f.s.Remove(0, as100[14:15]), index.Effect{Removed: 1})
			f.finds(a, as(0, 14))
		}},
		{"2/continued below a parent", func(f *fixture) {
			f.root(0, a[:10]...)
			f.did(f.below(0, a, 10, 60), index.Effect{Stored: 50})
			f.did(f.store(0, index.Stored{Parent: as100[59], HasParent: true, Position: index.NoPosition, Locals: a[60:61]}), index.Effect{Stored: 1})
			f.finds(a, as(0, 61))
		}},
		{"2/parent and position only place blocks", func(f *fixture) {
			f.root(0, a[:10]...)
			wrong := part(a, 10, 13)
			wrong.Position = 50
			f.did(f.store(0, wrong), index.Effect{Stored: 3, Contradiction: 3})
			f.finds(a, as(0, 13))
			f.did(f.store(0, index.Stored{Position: 7, Locals: b[:2]}), index.Effect{Stored: 2, Contradiction: 2})
			f.finds(b, as(0, 2))
		}},
		{"2/an orphan waits for its ancestors", func(f *fixture) {
			f.did(f.below(0, a, 10, 20), index.Effect{Stored: 10, Orphan: 1})
			f.did(f.below(0, a, 30, 40), index.Effect{Stored: 10, Orphan: 1})
			f.holds(0, 20)
			f.finds(a, nil)
			if !f.s.Holds(0, as100[15]) || f.s.Holds(0, as100[25]) {
				f.t.Fatal("Holds does not say what was stored")
			}
			f.did(f.below(0, a, 0, 10), index.Effect{Stored: 10})
			f.finds(a, as(0, 20))
			f.did(f.below(0, a, 20, 30), index.Effect{Stored: 10})
			f.finds(a, as(0, 40))
		}},
		{"2/an orphan joins in the middle of an event", func(f *fixture) {
			f.below(0, a, 10, 20)
			f.did(f.below(0, a, 0, 30), index.Effect{Stored: 20, Duplicate: 10})
			f.finds(a, as(0, 30))
		}},
		{"2/an orphan's position is only a claim", func(f *fixture) {
			claim := part(a, 10, 20)
			claim.Position = 3
			f.did(f.store(0, claim), index.Effect{Stored: 10, Orphan: 1})
			claim = part(a, 20, 25)
			claim.Position = index.NoPosition
			f.did(f.store(0, claim), index.Effect{Stored: 5})
			f.finds(a, nil)
			f.finds(slices.Concat(a[:3], a[10:]), nil)
			f.did(f.below(0, a, 0, 10), index.Effect{Stored: 10, Contradiction: 10})
			f.finds(a, as(0, 25))
		}},
		{"2/an orphan without a position contradicts nothing", func(f *fixture) {
			claim := part(a, 10, 20)
			claim.Position = index.NoPosition
			f.did(f.store(0, claim), index.Effect{Stored: 10, Orphan: 1})
			f.did(f.below(0, a, 0, 10), index.Effect{Stored: 10})
			f.finds(a, as(0, 20))
		}},
		{"2/an orphan leaves other slots alone", func(f *fixture) {
			f.root(0, a[:30]...)
			f.below(1, a, 10, 20)
			f.finds(a, as(0, 30))
			f.root(1, a[:5]...)
			f.finds(a, map[index.Slot]int{0: 30, 1: 5})
			f.s.Remove(0, as100[12:13])
			f.finds(a, map[index.Slot]int{0: 12, 1: 5})
			f.below(1, a, 5, 10)
			f.finds(a, map[index.Slot]int{0: 12, 1: 20})
		}},
		{"2/an orphan's wrong position changes nothing for others", func(f *fixture) {
			f.root(0, a[:30]...)
			f.root(1, b[:12]...)
			others := func() {
				f.t.Helper()
				for n := 1; n <= 40; n++ {
					for _, query := range [][]index.LocalHash{a[:n], slices.Concat(a[:n], a[10:]), slices.Concat(b[:n], a[10:])} {
						depths := f.depths(query, index.FindOptions{})
						want := map[index.Slot]int{0: 0, 1: 0}
						for s, own := range map[index.Slot][]index.LocalHash{0: a[:30], 1: b[:12]} {
							for d := range min(len(own), len(query)) {
								if query[d] != own[d] {
									break
								}
								want[s]++
							}
							if depths[s] != want[s] {
								f.t.Fatalf("slot %d has depth %d, want %d", s, depths[s], want[s])
							}
						}
					}
				}
			}
			for i, claimed := range []int32{0, 1, 9, 11, 12, 30, 1 << 30} {
				claim := part(a, 10, 20)
				claim.Position = claimed
				slot := index.Slot(2 + i)
				f.did(f.store(slot, claim), index.Effect{Stored: 10, Orphan: 1})
				others()
				f.finds(slices.Concat(a[:1], a[10:20]), map[index.Slot]int{0: 1})
			}
			for slot := index.Slot(2); slot < 9; slot++ {
				f.did(f.below(slot, a, 0, 10), index.Effect{Stored: 10, Contradiction: 10})
				others()
			}
			f.finds(a, map[index.Slot]int{0: 30, 2: 20, 3: 20, 4: 20, 5: 20, 6: 20, 7: 20, 8: 20})
		}},
		{"2/orphans of one missing parent", func(f *fixture) {
			f.store(0, index.Stored{Parent: as100[0], HasParent: true, Position: 1, Locals: a[1:5]})
			f.store(0, index.Stored{Parent: as100[0], HasParent: true, Position: 1, Locals: b[1:5]})
			f.finds(a, nil)
			f.root(0, a[0])
			f.finds(a, as(0, 5))
			f.finds(slices.Concat(a[:1], b[1:]), as(0, 5))
		}},
		{"2/refused events change nothing", func(f *fixture) {
			f.root(0, a[:5]...)
			for _, c := range []struct {
				name string
				s    index.Stored
				want error
			}{
				{"no blocks", index.Stored{Position: 0}, index.ErrEmptyStore},
				{"position below -1", index.Stored{Position: -2, Locals: a[:1]}, index.ErrBadPosition},
				{"position of the last block beyond an int32", index.Stored{Position: 1<<31 - 2, Locals: a[:3]}, index.ErrBadPosition},
				{"null root", index.Stored{Position: 0, Locals: []index.LocalHash{0, 1}}, index.ErrNullHash},
				{"null parent", index.Stored{Position: 1, HasParent: true, Locals: a[:1]}, index.ErrNullHash},
				{"null opaque hash", index.Stored{Position: 0, Locals: a[:2], Hashes: []index.SeqHash{1, 0}}, index.ErrNullHash},
				{"opaque block that is its own parent", index.Stored{Position: 1, HasParent: true, Parent: 9, Locals: a[:2], Hashes: []index.SeqHash{9, 10}}, index.ErrSelfParent},
				{"opaque block that follows itself", index.Stored{Position: 0, Locals: a[:2], Hashes: []index.SeqHash{9, 9}}, index.ErrSelfParent},
				{"fewer opaque hashes than blocks", index.Stored{Position: 0, Locals: a[:2], Hashes: []index.SeqHash{9}}, index.ErrHashCount},
			} {
				e, err := f.s.Store(0, c.s)
				if !errors.Is(err, c.want) || e != (index.Effect{}) {
					f.t.Errorf("%s: got %+v, %v, want nothing and %v", c.name, e, err, c.want)
				}
			}
			f.holds(0, 5)
			f.finds(a, as(0, 5))
		}},
		{"3/a removed middle block hides the deeper ones", func(f *fixture) {
			f.root(0, a[:4]...)
			f.did(f.s.Remove(0, as100[1:2]), index.Effect{Removed: 1})
			f.holds(0, 3)
			f.finds(a, as(0, 1))
			f.did(f.below(0, a, 1, 2), index.Effect{Stored: 1})
			f.finds(a, as(0, 4))
		}},
		{"3/a removed root hides all", func(f *fixture) {
			f.root(0, a...)
			f.root(1, a[:3]...)
			f.s.Remove(0, as100[:1])
			f.finds(a, as(1, 3))
			f.root(0, a[0])
			f.finds(a, map[index.Slot]int{0: 100, 1: 3})
		}},
		{"3/an unknown hash does not keep the rest", func(f *fixture) {
			f.root(0, a[:10]...)
			f.did(f.s.Remove(0, []index.SeqHash{as100[9], bs100[3], as100[8], as100[9], 0}), index.Effect{Removed: 2, Unknown: 3})
			f.finds(a, as(0, 8))
		}},
		{"3/removals in any order", func(f *fixture) {
			for _, order := range []string{"leaves first", "root first", "odd, then even"} {
				hashes := slices.Clone(as100[:60])
				switch order {
				case "leaves first":
					slices.Reverse(hashes)
				case "odd, then even":
					slices.SortStableFunc(hashes, func(x, y index.SeqHash) int {
						return slices.Index(as100, y)%2 - slices.Index(as100, x)%2
					})
				}
				f.root(0, a[:60]...)
				f.root(1, a...)
				oracle := NewOracle()
				if _, err := oracle.Store(0, part(a, 0, 60)); err != nil {
					f.t.Fatal(err)
				}
				for _, h := range hashes {
					f.did(f.s.Remove(0, []index.SeqHash{h}), index.Effect{Removed: 1})
					oracle.Remove(0, []index.SeqHash{h})
					want := oracle.Depths(a)
					want[1] = 100
					f.finds(a, want)
				}
				f.holds(0, 0)
			}
		}},
		{"3/a branch point removed and back", func(f *fixture) {
			ab := slices.Concat(a[:40], b[40:])
			f.root(0, a...)
			f.below(0, ab, 40, 100)
			f.s.Remove(0, as100[39:40])
			f.finds(a, as(0, 39))
			f.finds(ab, as(0, 39))
			f.s.Remove(0, as100[60:61])
			f.below(0, a, 39, 40)
			f.finds(a, as(0, 60))
			f.finds(ab, as(0, 100))
		}},
		{"3/holes in holes", func(f *fixture) {
			f.root(0, a...)
			f.s.Remove(0, []index.SeqHash{as100[80], as100[20], as100[50]})
			f.finds(a, as(0, 20))
			f.below(0, a, 50, 51)
			f.finds(a, as(0, 20))
			f.below(0, a, 20, 21)
			f.finds(a, as(0, 80))
			f.below(0, a, 80, 81)
			f.finds(a, as(0, 100))
		}},
		{"4/clear empties one slot", func(f *fixture) {
			f.root(0, a...)
			f.below(0, b, 10, 20)
			f.root(1, a[:50]...)
			if n := f.s.Clear(0); n != 110 {
				f.t.Fatalf("cleared %d blocks, want 110", n)
			}
			f.holds(0, 0)
			f.holds(1, 50)
			f.finds(a, as(1, 50))
			f.root(0, b[:10]...)
			f.finds(b, as(0, 10))
			f.s.Clear(1)
			f.s.Clear(0)
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats after all was cleared: %+v", st)
			}
		}},
		{"5/no cap on slots, on holders of a block, or on blocks of a slot", func(f *fixture) {
			want := make(map[index.Slot]int)
			const many = 3000
			for s := range index.Slot(many) {
				f.root(s, a[:1+s%7]...)
				want[s] = 1 + int(s%7)
			}
			f.root(100_000, a[:3]...)
			want[100_000] = 3
			f.finds(a, want)
			for s := range index.Slot(many) {
				if s%10 != 0 {
					f.s.Remove(s, as100[:1])
					delete(want, s)
				}
			}
			f.finds(a, want)
			for s := range index.Slot(many) {
				f.s.Clear(s)
				delete(want, s)
			}
			f.finds(a, want)
			f.s.Clear(100_000)
			f.finds(a, nil)
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats after all was cleared: %+v", st)
			}
			long := blocks("long", 100_000)
			seqs := index.Chain(nil, long)
			f.root(0, long...)
			f.finds(long, as(0, len(long)))
			f.s.Remove(0, seqs[1:2])
			f.finds(long, as(0, 1))
			f.below(0, long, 1, 2)
			f.finds(long, as(0, len(long)))
			f.s.Remove(0, seqs)
			f.holds(0, 0)
		}},
		{"7/a dump replays into an equal", func(f *fixture) {
			ab := slices.Concat(a[:40], b[40:])
			f.root(0, a...)
			f.below(0, ab, 40, 100)
			f.below(0, b, 5, 9)
			f.s.Remove(0, []index.SeqHash{as100[20], as100[70]})
			copied := &fixture{t: f.t, s: empty()}
			f.s.Dump(0, func(s index.Stored) bool {
				if len(s.Hashes) != 0 {
					f.t.Fatalf("dumped %+v: with hashes that can be computed", s)
				}
				copied.did(copied.store(0, s), index.Effect{Stored: len(s.Locals), Orphan: orphan(copied.s, s)})
				return true
			})
			for _, g := range []*fixture{f, copied} {
				g.holds(0, 100+60+4-2)
				g.finds(a, as(0, 20))
				g.below(0, a, 20, 21)
				g.finds(a, as(0, 70))
				g.finds(ab, as(0, 100))
				g.did(g.below(0, a, 70, 71), index.Effect{Stored: 1})
				g.finds(a, as(0, 100))
				g.did(g.root(0, b[:5]...), index.Effect{Stored: 5})
				g.finds(b, as(0, 9))
			}
		}},
		{"7/a dump gives parents first, with position and parent", func(f *fixture) {
			f.root(0, a[:30]...)
			f.below(0, a, 50, 60)
			seen := make(map[index.SeqHash]bool)
			n := 0
			dumped(f.s, 0, func(seq index.SeqHash, s index.Stored) {
				at := slices.Index(as100, seq)
				if at < 0 || seen[seq] {
					f.t.Fatalf("dumped %+v: not a block of the chain, or twice", s)
				}
				if at != 0 && at != 50 && !seen[as100[at-1]] {
					f.t.Fatalf("block %d was dumped before its parent", at)
				}
				if s.HasParent != (at > 0) || int(s.Position) != at {
					f.t.Fatalf("block %d was dumped as %+v", at, s)
				}
				seen[seq] = true
				n++
			})
			if n != 40 {
				f.t.Fatalf("dumped %d blocks, want 40", n)
			}
			n = 0
			f.s.Dump(0, func(index.Stored) bool { n++; return n < 2 })
			if n != 2 {
				f.t.Fatalf("a dump went on to %d chains after it was stopped at 2", n)
			}
		}},
		{"8/a right local hash after a wrong prefix", func(f *fixture) {
			for at := range 60 {
				// Equal to a everywhere but in one block.
				other := slices.Clone(a)
				other[at] = b[at]
				slot := index.Slot(at + 1)
				f.root(slot, other...)
			}
			want := make(map[index.Slot]int)
			for at := 1; at < 60; at++ {
				want[index.Slot(at+1)] = at
			}
			f.finds(a, want)
			f.root(0, a...)
			want[0] = 100
			f.finds(a, want)
			f.s.Clear(0)
			delete(want, 0)
			f.finds(a, want)
			for at := 60; at >= 0; at-- {
				f.s.Clear(index.Slot(at))
				delete(want, index.Slot(at))
				f.finds(a, want)
			}
			if st := f.s.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats after all was cleared: %+v", st)
			}
		}},
		{"8/as many workers, but others", func(f *fixture) {
			f.root(0, a[:10]...)
			f.root(1, a...)
			// At the end of a there are as many slots as at its start, but not
			// the same.
			f.below(2, a, 40, 100)
			f.below(3, a, 60, 100)
			f.finds(a, map[index.Slot]int{0: 10, 1: 100})
		}},
		{"8/the same content deeper down", func(f *fixture) {
			f.root(0, slices.Concat(b[:1], a)...)
			f.finds(a, nil)
			f.finds(slices.Concat(b[:1], a), as(0, 101))
			f.root(1, slices.Concat(a[:1], a[:1], a[:1])...)
			f.finds(slices.Concat(a[:1], a[:1]), as(1, 2))
		}},
		{"9/opaque hashes are refused or right", func(f *fixture) {
			e, err := f.s.Store(0, index.Stored{Position: 0, Locals: a[:2], Hashes: []index.SeqHash{901, 902}})
			if errors.Is(err, index.ErrOpaqueHash) {
				f.did(e, index.Effect{})
				f.holds(0, 0)
				f.finds(a, nil)
				return
			}
			if err != nil {
				f.t.Fatal(err)
			}
			f.finds(a, as(0, 2))
			f.did(f.s.Remove(0, []index.SeqHash{902}), index.Effect{Removed: 1})
			f.finds(a, as(0, 1))
		}},
		{"10/early exit gives lower bounds", func(f *fixture) {
			long := blocks("long", 5000) // longer than any leap
			f.root(0, long[:10]...)
			f.root(1, long[:20]...)
			f.root(2, long...)
			truth := map[index.Slot]int{0: 10, 1: 20, 2: 5000}
			got := f.depths(long, index.FindOptions{EarlyExit: true})
			if why := earlyExit(got, truth, f.m.LowerBounds); why != "" {
				f.t.Fatal(why)
			}
			if !f.m.LowerBounds {
				f.t.Fatal("one slot matched 4,980 blocks alone and the search did not stop")
			}
			got = f.depths(long[:15], index.FindOptions{EarlyExit: true})
			if why := earlyExit(got, map[index.Slot]int{0: 10, 1: 15, 2: 15}, f.m.LowerBounds); why != "" {
				f.t.Fatal(why)
			}
			f.finds(long, truth)
			if f.m.LowerBounds {
				f.t.Fatal("lower bounds without early exit")
			}
		}},
		{"the best k, with all ties at the last depth", func(f *fixture) {
			// Slots 0 to 9 have depths 10, 10, 20, 20 and so on; 10 and 11 are as deep
			// as 8 and 9 but for a hole in the middle, 12 has other blocks first.
			for s := range index.Slot(12) {
				f.root(s, a[:10*(1+min(s, 9)/2)]...)
			}
			f.s.Remove(10, as100[25:26])
			f.s.Remove(11, as100[:1])
			f.below(12, a, 1, 100)
			depth := map[index.Slot]int{10: 25}
			for s := range index.Slot(10) {
				depth[s] = 10 * (1 + int(s)/2)
			}
			for k, least := range []int{1: 50, 2: 50, 3: 40, 4: 40, 5: 30, 6: 30, 7: 25, 8: 20, 9: 20, 10: 10, 11: 10, 12: 1, 13: 1} {
				if k > 0 {
					f.best(a, k, index.FindOptions{}, depth, least)
				}
			}
			// Queries that end before the deepest, and that leave the chain.
			f.best(a[:45], 1, index.FindOptions{}, map[index.Slot]int{8: 45, 9: 45}, 1)
			f.best(slices.Concat(a[:15], b), 2, index.FindOptions{}, map[index.Slot]int{2: 15, 3: 15, 4: 15, 5: 15, 6: 15, 7: 15, 8: 15, 9: 15, 10: 15}, 1)
			f.best(b, 2, index.FindOptions{}, nil, 1)
			f.best(nil, 2, index.FindOptions{}, nil, 1)
			// Of some slots only, and whole depths whatever else is asked for.
			var only index.SlotSet
			only.Add(3)
			only.Add(7)
			only.Add(10)
			only.Add(100_000)
			some := map[index.Slot]int{3: 20, 7: 40, 10: 25}
			f.best(a, 1, index.FindOptions{Only: &only, EarlyExit: true}, some, 40)
			f.best(a, 2, index.FindOptions{Only: &only}, some, 25)
			f.best(a, 9, index.FindOptions{Only: &only}, some, 1)
		}},
		{"the best of many", func(f *fixture) {
			depth := make(map[index.Slot]int)
			for s := range index.Slot(1000) {
				d := 1 + int(s*7)%100
				f.root(s, a[:d]...)
				depth[s] = d
			}
			for _, k := range []int{1, 9, 10, 11, 500, 999, 1000, 1001} {
				f.best(a, k, index.FindOptions{}, depth, max(1, 101-(k+9)/10))
			}
			// Branches that most do not follow.
			for s := range index.Slot(20) {
				f.below(1+100*(s%10), slices.Concat(a[:8], b), 8, 8+1+int(s))
				depth[1+100*(s%10)] = 8 + 1 + int(s)
			}
			query := slices.Concat(a[:8], b)
			for s, d := range depth {
				if s%100 != 1 || s > 901 {
					depth[s] = min(d, 8)
				}
			}
			for k := 1; k <= 10; k++ {
				f.best(query, k, index.FindOptions{}, depth, 29-k)
			}
			f.best(query, 11, index.FindOptions{}, depth, 8)
		}},
		{"only some slots are searched", func(f *fixture) {
			for s := range index.Slot(200) {
				f.root(s, a[:1+s%50]...)
			}
			var only index.SlotSet
			f.s.Find(a, index.FindOptions{Only: &only}, &f.m)
			if len(f.m.Matches) != 0 {
				f.t.Fatalf("no slot allowed, but found %v", f.m.Matches)
			}
			only.Add(7)
			only.Add(130)
			only.Add(100_000)
			want := map[index.Slot]int{7: 8, 130: 31}
			if got := f.depths(a, index.FindOptions{Only: &only}); !maps.Equal(got, want) {
				f.t.Fatalf("got %v, want %v", got, want)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&fixture{t: t, s: empty()})
		})
	}
}

// earlyExit returns why got is not what an early exit may answer if truth is the
// whole answer: all slots are there, and at most one, a deepest one, is below its
// depth.
func earlyExit(got, truth map[index.Slot]int, lower bool) string {
	short := 0
	for slot, depth := range truth {
		g, ok := got[slot]
		switch {
		case !ok || g > depth:
			return fmt.Sprintf("early exit: slot %d has depth %d of %d", slot, g, depth)
		case g < depth:
			short++
			for other, o := range got {
				if o > g {
					return fmt.Sprintf("early exit: slot %d was left at depth %d of %d though slot %d has %d", slot, g, depth, other, o)
				}
			}
		}
	}
	if len(got) != len(truth) || short > 1 || short > 0 && !lower {
		return fmt.Sprintf("early exit: got %v of %v, lower bounds: %v", got, truth, lower)
	}
	return ""
}

// describe is for messages about a structure's content.
func describe(s index.Structure, slots ...index.Slot) string {
	out := ""
	for _, slot := range slots {
		out += fmt.Sprintf("slot %d:", slot)
		dumped(s, slot, func(_ index.SeqHash, b index.Stored) {
			out += fmt.Sprintf(" %d@%d<-%x", b.Locals[0], b.Position, uint64(b.Parent))
		})
		out += "\n"
	}
	return out
}

// dumped calls f for each block of a slot, in the order of its dump.
func dumped(s index.Structure, slot index.Slot, f func(seq index.SeqHash, b index.Stored)) {
	s.Dump(slot, func(chain index.Stored) bool {
		for b := range chain.Singles() {
			seq := index.SeqHash(b.Locals[0])
			switch {
			case len(b.Hashes) > 0:
				seq = b.Hashes[0]
			case b.HasParent:
				seq = index.Next(b.Parent, b.Locals[0])
			}
			f(seq, b)
		}
		return true
	})
}

// orphan returns how many orphans a chain that slot 0 does not hold will be
// there: 1 if its parent is not held.
func orphan(s index.Structure, chain index.Stored) int {
	if chain.HasParent && !s.Holds(0, chain.Parent) {
		return 1
	}
	return 0
}
