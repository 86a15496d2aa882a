// This file is a RunIndex's search.

package index

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
		seq = Next(r.seq(uint32(match-1)), query[i])
	}
	for _, slot := range s.slots {
		m.Matches = append(m.Matches, SlotMatch{slot, int(s.depths[slot])})
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
	see := func(slot Slot, cutoff uint32) {
		if int(slot) >= len(s.depths) || s.depths[slot] != 0 || s.only != nil && !s.only.Has(slot) {
			return
		}
		if cutoff >= match {
			cutoff = match
			whole++
		}
		s.depths[slot] = cutoff
		s.slots = append(s.slots, slot)
	}
	for i := range r.few {
		if w := r.few[i].Load(); uint32(w) != 0 {
			see(Slot(w>>32-1), uint32(w))
		}
	}
	if c := r.many.Load(); c != nil {
		c.each(see)
	}
	return whole
}

// next raises the depths of slots that hold all of the at blocks before the run,
// and returns how many hold as many of it as match.
func (s *runSearch) next(r *run, at, match uint32) (whole int) {
	see := func(slot Slot, cutoff uint32) {
		if int(slot) >= len(s.depths) || s.depths[slot] != at {
			return
		}
		if cutoff >= match {
			cutoff = match
			whole++
		}
		s.depths[slot] = at + cutoff
	}
	for i := range r.few {
		if w := r.few[i].Load(); uint32(w) != 0 {
			see(Slot(w>>32-1), uint32(w))
		}
	}
	if c := r.many.Load(); c != nil {
		c.each(see)
	}
	return whole
}
