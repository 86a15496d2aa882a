// This file is PositionalIndex: events on its way into the shared map.

package index

import (
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/puzpuzpuz/xsync/v3"
)

// DefaultJump is the usual jump size of a PositionalIndex, in blocks.
const DefaultJump = 32

// PositionalIndex is a Structure that finds a block by its position and local
// hash in one shared map, and so can leap over many blocks of a query at a time.
// It refuses opaque hashes: it must be able to compute a query's. Blocks of one
// sequence hash are one block to a slot, where it was stored first; a producer that
// makes hashes collide on purpose hides blocks of its own worker, nobody else's.
//
// A slot is in the shared map with exactly those of its blocks that are in
// reach; the others live in the slot's own memory until their ancestors arrive.
// Blocks enter the map parent first and leave it deepest first. So whoever
// finds a slot at a block, at any moment, knows that it holds all ancestors of
// the block, and what a leap skips needs no look.
//
// Costs: Store and Remove of a block is one write to the map; taking a block out
// of the middle of a chain, or putting it back, is one for each block behind it.
type PositionalIndex struct {
	jump int
	salt uint64 // keeps chosen hashes from colliding in the slots' tables

	heads *xsync.MapOf[place, *entry]  // of each place, the first block that came there
	more  *xsync.MapOf[branch, *entry] // the other blocks of a place, by its head

	growing sync.Mutex
	slots   atomic.Pointer[[]*slotBlocks] // by slot; grows under growing and never shrinks

	blocks  atomic.Int64
	entries atomic.Int64
}

// place is where a block may be: blocks with the same content at the same
// distance from the root, whatever precedes them.
type place struct {
	local LocalHash
	pos   int32
}

// branch names a block at a place that has another one as its head.
type branch struct {
	head *entry
	seq  SeqHash
}

// NewPositionalIndex returns an empty PositionalIndex. jump is how many blocks
// a search leaps at a time; below 1 it is DefaultJump.
func NewPositionalIndex(jump int) *PositionalIndex {
	if jump < 1 {
		jump = DefaultJump
	}
	mix := func(x uint64) uint64 {
		hi, lo := bits.Mul64(x, 0x9e3779b97f4a7c15)
		return hi ^ lo
	}
	p := &PositionalIndex{
		jump: jump,
		salt: rand.Uint64() | 1,
		heads: xsync.NewMapOfWithHasher[place, *entry](func(k place, seed uint64) uint64 {
			return mix((uint64(k.local)^seed)*0xbf58476d1ce4e5b9 + uint64(k.pos))
		}),
		more: xsync.NewMapOfWithHasher[branch, *entry](func(k branch, seed uint64) uint64 {
			return mix(uint64(k.seq) ^ seed)
		}),
	}
	p.slots.Store(new([]*slotBlocks))
	return p
}

// slot returns a slot's own memory, nil if it never stored anything.
func (p *PositionalIndex) slot(slot Slot) *slotBlocks {
	if all := *p.slots.Load(); int(slot) < len(all) {
		return all[slot]
	}
	return nil
}

// addSlot makes the slots up to this one known and returns its memory.
func (p *PositionalIndex) addSlot(slot Slot) *slotBlocks {
	p.growing.Lock()
	defer p.growing.Unlock()
	all := *p.slots.Load()
	for n := len(all); n <= int(slot); n++ {
		// Readers index below the length that they loaded, so that appending
		// in place is safe.
		all = append(all, newSlotBlocks(Slot(n), p.salt))
	}
	p.slots.Store(&all)
	return all[slot]
}

// Store implements Structure.
func (p *PositionalIndex) Store(slot Slot, s Stored) (Effect, error) {
	var e Effect
	if err := s.check(); err != nil {
		return e, err
	}
	if len(s.Hashes) > 0 {
		return e, ErrOpaqueHash
	}
	b := p.slot(slot)
	if b == nil {
		b = p.addSlot(slot)
	}
	b.open()

	parent, unknown := origin, false
	if s.HasParent {
		parent = b.find(s.Parent)
		unknown = parent == none
	}
	if s.Position >= 0 && !unknown && b.nodes[parent].state == inReach && s.Position != b.nodes[parent].pos+1 {
		e.Contradiction += len(s.Locals)
	}
	prev, fresh := s.Parent, 0
	for i, l := range s.Locals {
		seq := SeqHash(l)
		if i > 0 || s.HasParent {
			seq = Next(prev, l)
		}
		prev = seq
		at := b.find(seq)
		if at != none && b.nodes[at].state != ghost {
			e.Duplicate++
			parent, unknown = at, false
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
			contradictions, entries := p.enterReach(b, at)
			e.Contradiction += contradictions
			fresh += entries
		}
		parent = at
	}
	if e.Stored > 0 {
		p.blocks.Add(int64(e.Stored))
	}
	if fresh > 0 {
		p.entries.Add(int64(fresh))
	}
	return e, nil
}

// enterReach publishes a block whose parent is in reach, and all that it brings
// into reach, parents first. It returns how many of the latter had claimed a
// wrong position, and how many blocks are new to the map.
func (p *PositionalIndex) enterReach(b *slotBlocks, top uint32) (contradictions, fresh int) {
	at := top
	for {
		n := &b.nodes[at]
		pos := b.nodes[n.parent].pos + 1
		if at != top && n.pos >= 0 && n.pos != pos {
			contradictions++
		}
		n.pos = pos
		n.state = inReach
		if p.publish(place{n.local, n.pos}, n.seq, b) {
			fresh++
		}
		if at = b.after(at, top); at == none {
			return contradictions, fresh
		}
	}
}

// leaveReach takes a block and all its descendants out of the map, deepest
// first, and returns how many blocks nobody has any more.
func (p *PositionalIndex) leaveReach(b *slotBlocks, top uint32) (gone int) {
	at := b.deepest(top)
	for {
		n := &b.nodes[at]
		if p.withdraw(place{n.local, n.pos}, n.seq, b.slot) {
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
func (p *PositionalIndex) Remove(slot Slot, hashes []SeqHash) Effect {
	b := p.slot(slot)
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
			gone += p.leaveReach(b, at)
		}
		b.drop(at)
		e.Removed++
	}
	b.shrink()
	if e.Removed > 0 {
		p.blocks.Add(-int64(e.Removed))
	}
	if gone > 0 {
		p.entries.Add(-int64(gone))
	}
	return e
}

// Clear implements Structure.
func (p *PositionalIndex) Clear(slot Slot) int {
	b := p.slot(slot)
	if b == nil || b.nodes == nil {
		return 0
	}
	gone := 0
	for root := b.nodes[origin].child; root != none; root = b.nodes[root].next {
		gone += p.leaveReach(b, root)
	}
	n := b.held
	b.reset()
	p.blocks.Add(-int64(n))
	p.entries.Add(-int64(gone))
	return n
}

// Holds implements Structure.
func (p *PositionalIndex) Holds(slot Slot, h SeqHash) bool {
	b := p.slot(slot)
	if b == nil {
		return false
	}
	at := b.find(h)
	return at != none && b.nodes[at].state != ghost
}

// Len implements Structure.
func (p *PositionalIndex) Len(slot Slot) int {
	b := p.slot(slot)
	if b == nil {
		return 0
	}
	return b.held
}

// Dump implements Structure. Chains come whole: a block's first child follows
// it.
func (p *PositionalIndex) Dump(slot Slot, yield func(Stored) bool) {
	b := p.slot(slot)
	if b == nil {
		return
	}
	var local [1]LocalHash
	for top := range b.nodes {
		if top := uint32(top); top == origin || b.nodes[top].state == ghost && b.nodes[top].child != none {
			for at := b.after(top, top); at != none; at = b.after(at, top) {
				n := &b.nodes[at]
				local[0] = n.local
				if !yield(Stored{
					Parent:    b.nodes[n.parent].seq,
					HasParent: n.parent != origin,
					Position:  n.pos,
					Locals:    local[:],
				}) {
					return
				}
			}
		}
	}
}

// Stats implements Structure.
func (p *PositionalIndex) Stats() Stats {
	return Stats{Blocks: p.blocks.Load(), Entries: p.entries.Load()}
}
