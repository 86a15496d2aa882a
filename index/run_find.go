// This file is a RunIndex's search.

package index

import "slices"

// Find implements Structure. It goes from run to run along the query; each step
// gives a depth to all slots that hold something of the run and held all before.
// It allocates nothing if m has served as large a search before.
func (x *RunIndex) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	m.Reset()
	if len(query) == 0 {
		return
	}
	// Slots that are added from now on held nothing when the call began.
	if n := len(*x.slots.Load()); len(m.depths) < n {
		m.depths = make([]uint32, n+n/8)
	}
	s := runSearch{depths: m.depths, slots: m.slots[:0], only: opt.Only}
	seq := SeqHash(query[0])
	for i := 0; ; {
		r := x.lookup(seq, uint32(i), query[i])
		if r == nil {
			break
		}
		n := int(r.n.Load())
		if n == 0 {
			break // just made, or gone
		}
		// Most runs match to their end: the place of the next one is on its way
		// into the cache while this one is compared.
		ahead := i+n < len(query)
		if ahead {
			seq = Next(r.seq(uint32(n-1)), query[i+n])
			x.table.Load().touch(x.mix(seq))
		}
		match := common(query[i:], r.buf[:n])
		var whole int // slots that hold all of the match
		if i == 0 {
			whole = s.first(r, uint32(match))
		} else {
			whole = s.next(r, uint32(i), uint32(match))
		}
		if i += match; whole == 0 || i == len(query) {
			break
		}
		if opt.EarlyExit && whole == 1 {
			m.LowerBounds = true
			break
		}
		if !ahead || match < n {
			seq = Next(r.seq(uint32(match-1)), query[i])
		}
	}
	m.Matches = slices.Grow(m.Matches, len(s.slots))[:len(s.slots)]
	for i, slot := range s.slots {
		m.Matches[i] = SlotMatch{slot, int(s.depths[slot])}
		s.depths[slot] = 0
	}
	m.slots = s.slots
}

// runSearch is one Find under way.
type runSearch struct {
	depths []uint32 // by slot, 0 between searches
	slots  []Slot   // with a depth
	only   *SlotSet
}

// first gives depths to the slots that hold something of the run that the query
// begins with, and returns how many hold as many blocks as match.
func (s *runSearch) first(r *run, match uint32) (whole int) {
	for i := range r.few {
		if w := r.few[i].Load(); uint32(w) != 0 {
			whole += s.begin(Slot(w>>32-1), uint32(w), match)
		}
	}
	c := r.many.Load()
	if c == nil {
		return whole
	}
	if s.only != nil || c.dense == nil {
		for i := range c.words {
			if w := c.words[i].Load(); uint32(w) != 0 {
				whole += s.begin(Slot(w>>32-1), uint32(w), match)
			}
		}
		for i := range c.dense {
			if v := c.dense[i].Load(); v != 0 {
				whole += s.begin(Slot(i), v, match)
			}
		}
		return whole
	}
	// Of most slots, so without a branch for each; those of the two words in the
	// run have 0 here.
	dense := c.dense[:min(len(c.dense), len(s.depths))]
	depths := s.depths[:len(dense)]
	n := len(s.slots)
	slots := slices.Grow(s.slots, len(dense))[:n+len(dense)]
	for i := range dense {
		v := min(dense[i].Load(), match)
		slots[n] = Slot(i)
		if v > depths[i] {
			// Unless it moved here from a word of the run, while the search was on.
			if depths[i] == 0 {
				n++
			}
			depths[i] = v
			if v == match {
				whole++
			}
		}
	}
	s.slots = slots[:n]
	return whole
}

// begin gives a slot its first depth, and returns 1 if it is all of match.
func (s *runSearch) begin(slot Slot, cutoff, match uint32) int {
	if int(slot) >= len(s.depths) || s.depths[slot] != 0 || s.only != nil && !s.only.Has(slot) {
		return 0
	}
	s.slots = append(s.slots, slot)
	if cutoff < match {
		s.depths[slot] = cutoff
		return 0
	}
	s.depths[slot] = match
	return 1
}

// next raises the depths of slots that hold all of the at blocks before the run,
// and returns how many hold as many of it as match.
func (s *runSearch) next(r *run, at, match uint32) (whole int) {
	depths := s.depths
	for i := range r.few {
		if w := r.few[i].Load(); uint32(w) != 0 {
			if slot := w>>32 - 1; slot < uint64(len(depths)) && depths[slot] == at {
				d := min(uint32(w), match)
				depths[slot] = at + d
				if d == match {
					whole++
				}
			}
		}
	}
	c := r.many.Load()
	if c == nil {
		return whole
	}
	for i := range c.words {
		w := c.words[i].Load()
		if slot := w>>32 - 1; uint32(w) != 0 && slot < uint64(len(depths)) && depths[slot] == at {
			d := min(uint32(w), match)
			depths[slot] = at + d
			if d == match {
				whole++
			}
		}
	}
	if c.dense != nil {
		dense := c.dense[:min(len(c.dense), len(depths))]
		depths = depths[:len(dense)]
		for i := range dense {
			if depths[i] == at {
				d := min(dense[i].Load(), match)
				depths[i] = at + d
				if d == match {
					whole++
				}
			}
		}
	}
	return whole
}
