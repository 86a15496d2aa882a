// This file keeps a worker's unions true: what its tiers hold together.
//
// A structure knows slots alone, and a search gives each slot the blocks that it
// holds from the first on. So that an answer can say how deep the device and the host
// tier match together, whichever of both each block is in, the two have a slot for
// their union, and so on for further tiers. A lower tier in use has a slot of its own,
// which no search looks at, and one for the union of it with all before it; with a tier
// that is not in use the union is that of the tiers before. So a worker that has a
// device tier alone has one slot.
//
// A block enters unions before its tier and leaves them after it, the largest union
// first in and last out: at no moment is a block in a tier and not in a union of it.

package index

import "slices"

// open takes a lower tier into use.
func (w *Worker) open(t Tier) {
	x := w.x
	x.mu.Lock()
	slot, union := x.takeSlot(), x.takeSlot()
	if x.lower++; x.lower == 1 {
		// A Find that searches all slots must not take a union for a device tier.
		x.publish()
		x.reuses.Add(1)
	}
	x.mu.Unlock()

	before := w.slots[Device] - 1
	for u := Host; u < t; u++ {
		if s := w.unions[u].Load(); s != 0 {
			before = Slot(s - 1)
		}
	}
	x.s.Dump(before, func(s Stored) bool {
		e, err := x.s.Store(union, s)
		if err != nil {
			panic("BUG: a dump cannot be stored: " + err.Error())
		}
		x.inUnion.Add(int64(e.Stored))
		return true
	})

	w.slots[t] = slot + 1
	w.lower++
	x.mu.Lock()
	w.unions[t].Store(uint32(union) + 1)
	x.own(union, w)
	x.mu.Unlock()
}

// close takes a lower tier that holds nothing out of use. Its union is what the
// tiers before it hold.
func (w *Worker) close(t Tier) {
	x := w.x
	union := Slot(w.unions[t].Load() - 1)
	x.inUnion.Add(-int64(x.s.Clear(union)))
	x.mu.Lock()
	w.unions[t].Store(0)
	x.giveSlot(union)
	x.giveSlot(w.slots[t] - 1)
	x.lower--
	x.publish()
	x.mu.Unlock()
	w.slots[t] = 0
	w.lower--
}

// join adds a chain that a tier is about to hold to the unions that the tier is in.
func (w *Worker) join(t Tier, s Stored) error {
	for u := External; u >= max(t, Host); u-- {
		if union := w.unions[u].Load(); union != 0 {
			e, err := w.x.s.Store(Slot(union-1), s)
			if err != nil {
				return err // the first one's: no other slot would have taken it either
			}
			w.x.inUnion.Add(int64(e.Stored))
		}
	}
	return nil
}

// leave takes blocks that a tier holds no more out of the unions that the tier is
// in, but for those that another tier of the union holds.
func (w *Worker) leave(t Tier, hashes []SeqHash) {
	const keep = 1024 // hashes' room
	rest := append(w.rest[:0], hashes...)
	for u := Device; u < Tiers && len(rest) > 0; u++ {
		if u != t && w.slots[u] != 0 {
			rest = slices.DeleteFunc(rest, func(h SeqHash) bool { return w.x.s.Holds(w.slots[u]-1, h) })
		}
		if union := w.unions[u].Load(); union != 0 && u >= t {
			e := w.x.s.Remove(Slot(union-1), rest)
			w.x.inUnion.Add(-int64(e.Removed))
		}
	}
	if w.rest = rest[:0]; cap(rest) > keep {
		w.rest = nil
	}
}

// heldIn returns the blocks of a tier that unions with tiers behind it have to be
// told of when the tier is cleared.
func (w *Worker) heldIn(t Tier) (out []SeqHash) {
	told := false
	for u := t + 1; u < Tiers; u++ {
		told = told || w.slots[u] != 0
	}
	if !told {
		return nil
	}
	out = make([]SeqHash, 0, w.Len(t))
	w.x.s.Dump(w.slot(t), func(s Stored) bool {
		if len(s.Hashes) > 0 {
			out = append(out, s.Hashes...)
			return true
		}
		prev := s.Parent
		for i, l := range s.Locals {
			if i == 0 && !s.HasParent {
				prev = SeqHash(l)
			} else {
				prev = Next(prev, l)
			}
			out = append(out, prev)
		}
		return true
	})
	return out
}

// level returns which of the worker's answers a slot of its gives: Device, or the
// last tier of a union. ok is false if it is none of its any more.
func (w *Worker) level(slot Slot) (t Tier, ok bool) {
	if slot == w.slots[Device]-1 {
		return Device, true
	}
	for t := Host; t < Tiers; t++ {
		if w.unions[t].Load() == uint32(slot)+1 {
			return t, true
		}
	}
	return 0, false
}
