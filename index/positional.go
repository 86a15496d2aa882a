// This file is PositionalIndex: its layout, and what events do to the shared map.

package index

import (
	"math/bits"

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
// reach, and forests says in which order they enter and leave. So whoever
// finds a slot at a block, at any moment, knows that it holds all ancestors of
// the block, and what a leap skips needs no look.
//
// Costs: Store and Remove of a block is one write to the map; taking a block out
// of the middle of a chain, or putting it back, is one for each block behind it.
type PositionalIndex struct {
	forests
	jump int

	heads *xsync.MapOf[place, *entry]  // of each place, the first block that came there
	more  *xsync.MapOf[branch, *entry] // the other blocks of a place, by its head
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
		heads: xsync.NewMapOfWithHasher[place, *entry](func(k place, seed uint64) uint64 {
			return mix((uint64(k.local)^seed)*0xbf58476d1ce4e5b9 + uint64(k.pos))
		}),
		more: xsync.NewMapOfWithHasher[branch, *entry](func(k branch, seed uint64) uint64 {
			return mix(uint64(k.seq) ^ seed)
		}),
	}
	p.init(p)
	return p
}

// Store implements Structure.
func (p *PositionalIndex) Store(slot Slot, s Stored) (Effect, error) {
	if err := s.check(); err != nil {
		return Effect{}, err
	}
	if len(s.Hashes) > 0 {
		return Effect{}, ErrOpaqueHash
	}
	return p.store(slot, &s), nil
}

// enter implements reach.
func (p *PositionalIndex) enter(b *slotBlocks, at uint32) (fresh bool) {
	n := &b.nodes[at]
	return p.publish(place{n.local, n.pos}, n.seq, b)
}

// leave implements reach.
func (p *PositionalIndex) leave(b *slotBlocks, at uint32) (gone bool) {
	n := &b.nodes[at]
	return p.withdraw(place{n.local, n.pos}, n.seq, b.slot)
}
