// This file has the sets of slots that searches take and the answers they give.

package index

import "math/bits"

// SlotSet is a set of slots, a bitmap. The zero value is empty. It may be read
// by many goroutines while none writes it.
type SlotSet struct {
	words []uint64
}

// Add puts a slot into the set.
func (s *SlotSet) Add(slot Slot) {
	w := int(slot / 64)
	for w >= len(s.words) {
		s.words = append(s.words, 0)
	}
	s.words[w] |= 1 << (slot % 64)
}

// Remove takes a slot out of the set.
func (s *SlotSet) Remove(slot Slot) {
	if w := int(slot / 64); w < len(s.words) {
		s.words[w] &^= 1 << (slot % 64)
	}
}

// Has reports whether a slot is in the set.
func (s *SlotSet) Has(slot Slot) bool {
	w := int(slot / 64)
	return w < len(s.words) && s.words[w]&(1<<(slot%64)) != 0
}

// Reset empties the set and keeps its memory.
func (s *SlotSet) Reset() {
	clear(s.words)
	s.words = s.words[:0]
}

// first returns the least slot of the set; ok is false if it is empty.
func (s *SlotSet) first() (slot Slot, ok bool) {
	for i, w := range s.words {
		if w != 0 {
			return Slot(i*64 + bits.TrailingZeros64(w)), true
		}
	}
	return 0, false
}

// SlotMatch is how deep one slot matches a query.
type SlotMatch struct {
	Slot  Slot
	Depth int // leading blocks held, > 0
}

// SlotMatches is a caller-owned answer of Structure.Find with the memory that a
// search needs; reused, it makes searches free of allocation. The zero value is
// ready. It serves one search at a time.
type SlotMatches struct {
	Matches     []SlotMatch // each slot at most once, in no order
	LowerBounds bool        // the search stopped early: at most one of the depths, a deepest one, is below the truth

	seqs []SeqHash   // of the query's first blocks, as far as the search went
	path []*treeNode // the same of a tree, but for blocks that it does not have
	sets []uint64    // bitmaps, one after the other

	depths []uint32 // by slot, all 0 between searches
	slots  []Slot   // with a depth
	steps  []runStep
}

// cut leaves of the answer what FindBest gives of it.
func (m *SlotMatches) cut(k int) {
	ms := m.Matches
	if k >= len(ms) {
		return
	}
	for lo, hi := 0, len(ms); ; {
		// Deeper than the pivot, then as deep, then the others.
		pivot := ms[lo+(hi-lo)/2].Depth
		same, below := lo, hi
		for i := lo; i < below; {
			switch d := ms[i].Depth; {
			case d > pivot:
				ms[i], ms[same] = ms[same], ms[i]
				same++
				i++
			case d < pivot:
				below--
				ms[i], ms[below] = ms[below], ms[i]
			default:
				i++
			}
		}
		switch {
		case k <= same:
			hi = same
		case k > below:
			lo = below
		default:
			m.Matches = ms[:below]
			return
		}
	}
}

// Reset empties the answer and keeps its memory.
func (m *SlotMatches) Reset() {
	m.Matches = m.Matches[:0]
	m.LowerBounds = false
}
