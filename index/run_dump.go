// This file dumps a slot of a RunIndex.

package index

import (
	"cmp"
	"slices"
)

// Dump implements Structure: a chain for each stretch that the slot holds of a
// run, of the run's own memory. Blocks out of the runs come first, one by one: what
// is below them may be in runs.
func (x *RunIndex) Dump(slot Slot, yield func(Stored) bool) {
	k := x.slot(slot)
	if k == nil || !k.dumpParked(yield) {
		return
	}
	type part struct {
		run  *run
		a, b uint32
	}
	var parts []part
	var held [][2]uint32
	for _, ref := range k.refs() {
		var r *run
		r, held = k.parts(ref, held[:0])
		for _, h := range held {
			parts = append(parts, part{r, h[0], h[1]})
		}
	}
	// A block's parent has a lower position.
	slices.SortFunc(parts, func(p, q part) int { return cmp.Compare(p.run.base+p.a, q.run.base+q.a) })
	for _, p := range parts {
		if !k.dumpPart(p.run, p.a, p.b, yield) {
			return
		}
	}
}

// dumpPart yields the blocks [a, b) of a run, in parts where claimed positions
// are not consecutive. It returns false if yield did.
func (k *slotRuns) dumpPart(r *run, a, b uint32, yield func(Stored) bool) bool {
	for a < b {
		s := Stored{Parent: r.parent, HasParent: r.hasParent, Position: k.claimed(r, a)}
		if a > 0 {
			s.Parent, s.HasParent = r.seq(a-1), true
		}
		end := b
		if k.claims != nil {
			at := s.Position
			for end = a + 1; end < b; end++ {
				if at != NoPosition {
					at++
				}
				if k.claimed(r, end) != at {
					break
				}
			}
		}
		s.Locals = r.buf[a:end:end]
		if !yield(s) {
			return false
		}
		a = end
	}
	return true
}

// claimed returns the position of a block of a run: its own, unless the slot knows
// another that was claimed for it.
func (k *slotRuns) claimed(r *run, p uint32) int32 {
	if k.claims != nil {
		if c, ok := k.claims[r.seq(p)]; ok {
			return c.pos
		}
	}
	return int32(r.base + p)
}

// dumpParked yields the blocks that are in no run. It returns false if yield did.
func (k *slotRuns) dumpParked(yield func(Stored) bool) bool {
	b := k.parked
	if b == nil {
		return true
	}
	var local [1]LocalHash
	for top := range b.nodes {
		top := uint32(top)
		if b.nodes[top].state != ghost || b.nodes[top].child == none {
			continue
		}
		for at := b.after(top, top); at != none; at = b.after(at, top) {
			n := &b.nodes[at]
			local[0] = n.local
			if !yield(Stored{Parent: b.nodes[n.parent].seq, HasParent: true, Position: n.pos, Locals: local[:]}) {
				return false
			}
		}
	}
	return true
}
