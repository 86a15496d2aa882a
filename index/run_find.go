// This file is a RunIndex's search.

package index

import "slices"

// Find implements Structure. It goes from run to run along the query; each step
// gives a depth to all slots that hold something of the run and held all before.
// It allocates nothing if m has served as large a search before.
func (x *RunIndex) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	m.Reset()
	s := x.search(opt, m)
	for w := x.walk(query); ; {
		at := w.at
		r, match := w.next()
		if r == nil {
			break
		}
		var whole int // slots that hold all of the match
		if at == 0 {
			whole = s.first(r, match)
		} else {
			whole = s.next(r, uint32(at), match)
		}
		if whole == 0 || w.at == len(query) {
			break
		}
		if opt.EarlyExit && whole == 1 {
			m.LowerBounds = true
			break
		}
	}
	s.answer(m, 0)
}

// FindBest implements Structure. It goes along the query first, without a look at
// who holds what, and then back from the deepest run until it has k slots. It
// allocates nothing if m has served as large a search before.
func (x *RunIndex) FindBest(query []LocalHash, k int, opt FindOptions, m *SlotMatches) {
	m.Reset()
	s := x.search(opt, m)
	steps := m.steps[:0]
	for w := x.walk(query); ; {
		at := w.at
		r, match := w.next()
		if r == nil {
			break
		}
		steps = append(steps, runStep{r, uint32(at), match})
	}
	// Slots that are found later are less deep than all found before.
	least := uint32(0)
	for n := len(steps); n > 0 && s.found < k; n-- {
		end := steps[n-1]
		if found := s.found; found+s.last(steps[:n]) >= k {
			least = end.at + end.match
		}
	}
	clear(steps) // so that it keeps no runs alive
	m.steps = steps
	s.answer(m, least)
	m.cut(k)
}

// runWalk goes from run to run along a query.
type runWalk struct {
	x     *RunIndex
	query []LocalHash
	at    int     // blocks matched
	seq   SeqHash // of the query's next block
}

func (x *RunIndex) walk(query []LocalHash) runWalk {
	w := runWalk{x: x, query: query}
	if len(query) > 0 {
		w.seq = SeqHash(query[0])
	}
	return w
}

// next returns the run that begins with the query's next block, and how many of
// its blocks match; nil if there is none.
func (w *runWalk) next() (r *run, match uint32) {
	rest := w.query[w.at:]
	if len(rest) == 0 {
		return nil, 0
	}
	if r = w.x.lookup(w.seq, uint32(w.at), rest[0]); r == nil {
		return nil, 0
	}
	n := int(r.n.Load())
	if n == 0 {
		return nil, 0 // just made, or gone
	}
	// Most runs match to their end: the place of the next one is on its way into
	// the cache while this one is compared.
	ahead := n < len(rest)
	if ahead {
		w.seq = Next(r.seq(uint32(n-1)), rest[n])
		w.x.table.Load().touch(w.x.mix(w.seq))
	}
	c := common(rest, r.buf[:n])
	w.at += c
	if c < n && c < len(rest) {
		w.seq = Next(r.seq(uint32(c-1)), rest[c])
	}
	return r, uint32(c)
}

// runStep is a run that a query goes along.
type runStep struct {
	run   *run
	at    uint32 // blocks before it
	match uint32 // blocks of it that match, from its first
}

// runSearch is one Find under way.
type runSearch struct {
	depths []uint32 // by slot, 0 between searches
	found  int      // slots with a depth
	slots  []Slot   // those, unless most have one
	most   bool
	only   *SlotSet
}

// search begins a Find in m's memory.
func (x *RunIndex) search(opt FindOptions, m *SlotMatches) runSearch {
	// Slots that are added from now on held nothing when the call began.
	n := len(*x.slots.Load())
	if len(m.depths) < n {
		m.depths = make([]uint32, n+n/8)
	}
	return runSearch{depths: m.depths[:n], slots: m.slots[:0], only: opt.Only}
}

// answer ends it, with the slots that are at least that deep.
func (s *runSearch) answer(m *SlotMatches, least uint32) {
	n := 0
	if s.most {
		least = max(least, 1)
		out := slices.Grow(m.Matches, len(s.depths))[:len(s.depths)]
		for slot, d := range s.depths {
			out[n] = SlotMatch{Slot(slot), int(d)}
			if d >= least {
				n++
			}
		}
		clear(s.depths)
		m.Matches, m.slots = out[:n], s.slots
		return
	}
	out := slices.Grow(m.Matches, len(s.slots))[:len(s.slots)]
	for _, slot := range s.slots {
		d := s.depths[slot]
		s.depths[slot] = 0
		out[n] = SlotMatch{slot, int(d)}
		if d >= least {
			n++
		}
	}
	m.Matches, m.slots = out[:n], s.slots
}

// last gives depths to the slots that hold something of the last run and all that
// matches of the others, unless they have one. It returns how many hold all that
// matches.
func (s *runSearch) last(steps []runStep) (whole int) {
	before := steps[:len(steps)-1]
	end := steps[len(before)]
	if len(before) == 0 {
		return s.first(end.run, end.match)
	}
	try := func(slot Slot, cutoff uint32) {
		if int(slot) >= len(s.depths) || s.depths[slot] != 0 || s.only != nil && !s.only.Has(slot) {
			return
		}
		for i := len(before) - 1; i >= 0; i-- {
			if before[i].run.cutoff(slot) < before[i].match {
				return
			}
		}
		s.slots = append(s.slots, slot)
		s.found++
		d := min(cutoff, end.match)
		s.depths[slot] = end.at + d
		if d == end.match {
			whole++
		}
	}
	for i := range end.run.few {
		if w := end.run.few[i].Load(); uint32(w) != 0 {
			try(Slot(w>>32-1), uint32(w))
		}
	}
	if c := end.run.many.Load(); c != nil {
		c.each(try)
	}
	return whole
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
	// Of most slots, so without a list; those of the two words in the run have 0
	// here.
	s.most = true
	dense := c.dense[:min(len(c.dense), len(s.depths))]
	depths := s.depths[:len(dense)]
	for i := range dense {
		v := min(dense[i].Load(), match)
		if v > depths[i] {
			// Unless it moved here from a word of the run, while the search was on.
			if depths[i] == 0 {
				s.found++
			}
			depths[i] = v
			if v == match {
				whole++
			}
		}
	}
	return whole
}

// begin gives a slot its first depth, and returns 1 if it is all of match.
func (s *runSearch) begin(slot Slot, cutoff, match uint32) int {
	if int(slot) >= len(s.depths) || s.depths[slot] != 0 || s.only != nil && !s.only.Has(slot) {
		return 0
	}
	s.slots = append(s.slots, slot)
	s.found++
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
