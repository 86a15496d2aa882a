// This file is a PositionalIndex's search.

package index

import (
	"math/bits"
	"slices"
)

// Find implements Structure. It looks at one block in jump, and where slots were
// lost on the way it bisects for the last block of each. The query's sequence
// hashes are computed only as far as it gets. It allocates nothing if m has
// served as large a search before.
func (p *PositionalIndex) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	m.Reset()
	if len(query) == 0 {
		return
	}
	m.seqs = append(m.seqs[:0], SeqHash(query[0]))
	h := p.find(place{query[0], 0}, m.seqs[0])
	if h == nil {
		return
	}
	s := positionalSearch{p: p, query: query, m: m, words: h.words()}
	m.sets = slices.Grow(m.sets[:0], (2+bits.Len(uint(p.jump)))*s.words)
	active, lost := s.set(0), s.set(1)
	n := h.copyTo(active)
	if opt.Only != nil {
		n = intersect(active, opt.Only)
	}
	at, last := 0, len(query)-1 // each of the n active slots holds the block at at
	for n > 0 && at < last {
		if opt.EarlyExit && n == 1 {
			m.LowerBounds = true
			break
		}
		to := min(at+p.jump, last)
		for i := len(m.seqs); i <= to; i++ {
			m.seqs = append(m.seqs, Next(m.seqs[i-1], query[i]))
		}
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

// FindBest implements Structure, at the cost of a Find: leaps give no depth before
// the last slot is bisected.
func (p *PositionalIndex) FindBest(query []LocalHash, k int, opt FindOptions, m *SlotMatches) {
	opt.EarlyExit = false
	p.Find(query, opt, m)
	m.cut(k)
}

// positionalSearch is one Find under way.
type positionalSearch struct {
	p     *PositionalIndex
	query []LocalHash
	m     *SlotMatches
	words int // of a bitmap of slots
}

// set returns one of the bitmaps that m has room for.
func (s *positionalSearch) set(i int) []uint64 {
	return s.m.sets[:cap(s.m.sets)][i*s.words : (i+1)*s.words]
}

// look returns the holders of the query's block at pos.
func (s *positionalSearch) look(pos int) *holders {
	return s.p.find(place{s.query[pos], int32(pos)}, s.m.seqs[pos])
}

// bisect answers for the n slots of the bitmap at level, which all hold the
// block at lo and not the one at hi. Each level halves the distance, so there
// are no more than jump has bits.
func (s *positionalSearch) bisect(lo, hi, level, n int) {
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
func (s *positionalSearch) answer(set []uint64, depth int) {
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
