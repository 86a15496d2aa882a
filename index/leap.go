// This file is the search that leaps over many blocks of a query at a time, a
// PositionalIndex's and a tree's.

package index

import (
	"math/bits"
	"slices"
)

// leapSearch is one Find under way. It looks at the holders of one block in jump,
// and where slots were lost on the way it bisects for the last block of each. It
// allocates nothing if m has served as large a search before.
type leapSearch struct {
	p     *PositionalIndex // nil: m.path is the tree's
	jump  int
	query []LocalHash
	m     *SlotMatches
	words int // of a bitmap of slots
}

// run searches onward from the block at at, which h holds.
func (s *leapSearch) run(h *holders, at int, opt FindOptions) {
	s.words = h.words()
	s.m.sets = slices.Grow(s.m.sets[:0], (2+bits.Len(uint(s.jump)))*s.words)
	active, lost := s.set(0), s.set(1)
	n := h.copyTo(active)
	if opt.Only != nil {
		n = intersect(active, opt.Only)
	}
	last := len(s.query) - 1
	for n > 0 && at < last { // each of the n active slots holds the block at at
		if opt.EarlyExit && n == 1 {
			s.m.LowerBounds = true
			break
		}
		to := min(at+s.jump, last)
		s.reach(to)
		switch l := s.look(to).missing(active, lost, n); {
		case l == n:
			s.bisect(at, to, 0, n)
			n = 0
		case l > 0:
			subtract(active, lost)
			n -= l
			s.bisect(at, to, 1, l)
		}
		at = to
	}
	if n > 0 {
		s.answer(active, at+1)
	}
}

// set returns one of the bitmaps that m has room for.
func (s *leapSearch) set(i int) []uint64 {
	return s.m.sets[:cap(s.m.sets)][i*s.words : (i+1)*s.words]
}

// reach makes ready for looks at blocks up to to.
func (s *leapSearch) reach(to int) {
	if s.p == nil {
		s.m.walk(s.query[:to+1])
		return
	}
	for i := len(s.m.seqs); i <= to; i++ {
		s.m.seqs = append(s.m.seqs, Next(s.m.seqs[i-1], s.query[i]))
	}
}

// look returns the holders of the query's block at pos, nil if there are none.
func (s *leapSearch) look(pos int) *holders {
	if s.p != nil {
		return s.p.find(place{s.query[pos], int32(pos)}, s.m.seqs[pos])
	}
	if pos >= len(s.m.path) {
		return nil
	}
	return s.m.path[pos].holders.Load()
}

// bisect answers for the n slots of the bitmap at level, which all hold the
// block at lo and not the one at hi. Each level halves the distance, so there
// are no more than jump has bits.
func (s *leapSearch) bisect(lo, hi, level, n int) {
	set := s.set(level)
	for hi-lo > 1 {
		mid := lo + (hi-lo)/2
		lost := s.set(level + 1)
		switch l := s.look(mid).missing(set, lost, n); {
		case l == n:
			hi = mid
		case l > 0:
			subtract(set, lost)
			n -= l
			s.bisect(lo, mid, level+1, l)
			lo = mid
		default:
			lo = mid
		}
	}
	s.answer(set, lo+1)
}

// answer gives the slots of a bitmap that depth.
func (s *leapSearch) answer(set []uint64, depth int) {
	for i, w := range set {
		for ; w != 0; w &= w - 1 {
			s.m.Matches = append(s.m.Matches, SlotMatch{Slot(i*64 + bits.TrailingZeros64(w)), depth})
		}
	}
}

// subtract takes what is in out out of set.
func subtract(set, out []uint64) {
	for i, w := range out[:len(set)] {
		set[i] &^= w
	}
}

// intersect takes what is not in only out of set, and returns how much is left.
func intersect(set []uint64, only *SlotSet) (n int) {
	for i := range set {
		if i < len(only.words) {
			set[i] &= only.words[i]
		} else {
			set[i] = 0
		}
		n += bits.OnesCount64(set[i])
	}
	return n
}
