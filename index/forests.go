// This file is what PositionalIndex and the trees have in common: they know each
// slot's blocks apart, and show to searches those in reach.

package index

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// forests is most of a Structure: each slot's own blocks, and which of them are in
// reach. Those, and no others, searches see in what all slots share. A block enters
// it after its parent and leaves it before, so that whoever sees a slot at a block,
// at any moment, knows that the slot holds all the block's ancestors.
type forests struct {
	reach reach
	salt  uint64 // keeps chosen hashes from colliding in the slots' tables

	growing sync.Mutex
	slots   atomic.Pointer[[]*slotBlocks] // by slot; grows under growing and never shrinks

	blocks  atomic.Int64
	entries atomic.Int64
}

// reach is what all slots share, and searches see. Calls for a slot are made by its
// goroutine.
type reach interface {
	// enter adds the slot to a block's holders. The parent's has it. It returns
	// whether the block had no holder.
	enter(b *slotBlocks, at uint32) (fresh bool)
	// leave takes the slot out of a block's holders, and returns whether it was
	// the last.
	leave(b *slotBlocks, at uint32) (gone bool)
}

func (f *forests) init(r reach) {
	f.reach, f.salt = r, rand.Uint64()|1
	f.slots.Store(new([]*slotBlocks))
}

// slot returns a slot's own memory, nil if it never stored anything.
func (f *forests) slot(slot Slot) *slotBlocks {
	if all := *f.slots.Load(); int(slot) < len(all) {
		return all[slot]
	}
	return nil
}

// addSlot makes the slots up to this one known and returns its memory.
func (f *forests) addSlot(slot Slot) *slotBlocks {
	f.growing.Lock()
	defer f.growing.Unlock()
	all := *f.slots.Load()
	for n := len(all); n <= int(slot); n++ {
		// Readers index below the length that they loaded, so that appending
		// in place is safe.
		all = append(all, newSlotBlocks(Slot(n), f.salt))
	}
	f.slots.Store(&all)
	return all[slot]
}

// store adds a chain of blocks, which check let pass, to the slot.
func (f *forests) store(slot Slot, s *Stored) (e Effect) {
	b := f.slot(slot)
	if b == nil {
		b = f.addSlot(slot)
	}
	b.open()

	opaque := len(s.Hashes) > 0
	b.opaque = b.opaque || opaque
	parent, unknown, wrong := origin, false, false
	if s.HasParent {
		parent = b.find(s.Parent)
		unknown = parent == none
	}
	if s.Position >= 0 && !unknown && b.nodes[parent].state == inReach && s.Position != b.nodes[parent].pos+1 {
		wrong = true
		e.Contradiction += len(s.Locals)
	}
	prev, fresh := s.Parent, 0
	for i, l := range s.Locals {
		seq := SeqHash(l)
		switch {
		case opaque:
			seq = s.Hashes[i]
		case i > 0 || s.HasParent:
			seq = Next(prev, l)
		}
		at := b.find(seq)
		if at != none && b.nodes[at].state != ghost {
			e.Duplicate++
			if b.opaque && !wrong && b.differs(at, l, prev, i > 0 || s.HasParent) {
				e.Contradiction++
			}
			parent, unknown, prev = at, false, seq
			continue
		}
		if unknown {
			parent, unknown = b.add(s.Parent), false
		}
		if at == none {
			at = b.add(seq)
		}
		n := &b.nodes[at]
		n.local = l
		if s.Position >= 0 {
			n.pos = s.Position + int32(i)
		}
		b.hold(at, parent)
		e.Stored++
		switch b.nodes[parent].state {
		case ghost:
			e.Orphan++
		case inReach:
			contradictions, entries := f.enterReach(b, at)
			e.Contradiction += contradictions
			fresh += entries
		}
		parent, prev = at, seq
	}
	if e.Stored > 0 {
		f.blocks.Add(int64(e.Stored))
	}
	if fresh > 0 {
		f.entries.Add(int64(fresh))
	}
	return e
}

// enterReach lets others see a block whose parent is in reach, and all that it
// brings into reach, parents first. It returns how many of the latter had claimed a
// wrong position, and how many blocks nobody else has.
func (f *forests) enterReach(b *slotBlocks, top uint32) (contradictions, fresh int) {
	at := top
	for {
		n := &b.nodes[at]
		pos := b.nodes[n.parent].pos + 1
		if at != top && n.pos >= 0 && n.pos != pos {
			contradictions++
		}
		n.pos = pos
		n.state = inReach
		if f.reach.enter(b, at) {
			fresh++
		}
		if at = b.after(at, top); at == none {
			return contradictions, fresh
		}
	}
}

// leaveReach takes a block and all its descendants out of others' sight, deepest
// first, and returns how many blocks nobody has any more.
func (f *forests) leaveReach(b *slotBlocks, top uint32) (gone int) {
	at := b.deepest(top)
	for {
		n := &b.nodes[at]
		if f.reach.leave(b, at) {
			gone++
		}
		n.state = outOfReach
		switch {
		case at == top:
			return gone
		case n.next != none:
			at = b.deepest(n.next)
		default:
			at = n.parent
		}
	}
}

// Remove implements Structure.
func (f *forests) Remove(slot Slot, hashes []SeqHash) Effect {
	b := f.slot(slot)
	if b == nil {
		return Effect{Unknown: len(hashes)}
	}
	var e Effect
	gone := 0
	for _, h := range hashes {
		at := b.find(h)
		if at == none || b.nodes[at].state == ghost {
			e.Unknown++
			continue
		}
		if b.nodes[at].state == inReach {
			gone += f.leaveReach(b, at)
		}
		b.drop(at)
		e.Removed++
	}
	b.shrink()
	if e.Removed > 0 {
		f.blocks.Add(-int64(e.Removed))
	}
	if gone > 0 {
		f.entries.Add(-int64(gone))
	}
	return e
}

// Clear implements Structure.
func (f *forests) Clear(slot Slot) int {
	b := f.slot(slot)
	if b == nil || b.nodes == nil {
		return 0
	}
	gone := 0
	for root := b.nodes[origin].child; root != none; root = b.nodes[root].next {
		gone += f.leaveReach(b, root)
	}
	n := b.held
	b.reset()
	f.blocks.Add(-int64(n))
	f.entries.Add(-int64(gone))
	return n
}

// Holds implements Structure.
func (f *forests) Holds(slot Slot, h SeqHash) bool {
	b := f.slot(slot)
	if b == nil {
		return false
	}
	at := b.find(h)
	return at != none && b.nodes[at].state != ghost
}

// Len implements Structure.
func (f *forests) Len(slot Slot) int {
	b := f.slot(slot)
	if b == nil {
		return 0
	}
	return b.held
}

// Dump implements Structure. Chains come whole: a block's first child follows
// it. Opaque blocks that are each other's ancestors come last, in no order.
func (f *forests) Dump(slot Slot, yield func(Stored) bool) {
	b := f.slot(slot)
	if b == nil {
		return
	}
	left := b.held
	var local [1]LocalHash
	var hash [1]SeqHash
	one := func(at uint32) bool {
		left--
		n := &b.nodes[at]
		local[0] = n.local
		s := Stored{Parent: b.nodes[n.parent].seq, HasParent: n.parent != origin, Position: n.pos, Locals: local[:]}
		if b.opaque {
			hash[0] = n.seq
			s.Hashes = hash[:]
		}
		return yield(s)
	}
	if !b.walk(one) || left == 0 {
		return
	}
	walked := make([]bool, len(b.nodes))
	b.walk(func(at uint32) bool { walked[at] = true; return true })
	for at := range b.nodes {
		if b.nodes[at].state != ghost && at != int(origin) && !walked[at] && !one(uint32(at)) {
			return
		}
	}
}

// Stats implements Structure.
func (f *forests) Stats() Stats {
	return Stats{Blocks: f.blocks.Load(), Entries: f.entries.Load()}
}
