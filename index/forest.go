// This file is what a PositionalIndex or a tree knows of one slot alone: every block
// it holds, in reach or not, as a forest in a hash table.

package index

import (
	"maps"
	"math/bits"
	"slices"
)

// Indexes of nodes. The origin is the parent of all roots, in reach at position
// -1; as nothing has it as a child or sibling, its index also stands for none.
const (
	origin uint32 = 0
	none   uint32 = 0
)

// nodeState is what a node stands for.
type nodeState uint8

const (
	ghost      nodeState = iota // a block that is not held, but has children that are; or no block at all
	outOfReach                  // held, some ancestor is not
	inReach                     // held, like all its ancestors, and seen by searches
)

// node is a block. Children of a node are always held; they are linked both
// ways, so that one of many thousand can leave at once.
type node struct {
	seq    SeqHash
	local  LocalHash
	parent uint32
	child  uint32 // the first one
	next   uint32 // sibling; of an unused node the next unused one
	prev   uint32 // sibling
	pos    int32  // in reach the position, else the claimed one or NoPosition
	state  nodeState
}

// slotBlocks is a slot's own memory, of which only its goroutine knows. For a
// PositionalIndex it holds no pointers but for its two arrays, so that the collector
// has nothing to look at, and takes some 70 bytes a block. The arrays go when it is
// empty and shrink when it has.
type slotBlocks struct {
	slot Slot
	salt uint64
	self holders // the set of this slot alone, shared by all entries that only it holds

	nodes []node       // nil while nothing was stored
	table []tableEntry // nodes by sequence hash, linear probing, a power of two long
	shift int          // from a tag to an index of table
	used  int          // nodes in the table, ghosts included
	held  int          // blocks
	free  uint32       // first unused node

	opaque bool // some hashes may not be those that are computed

	// In trees only:
	places []*treeNode         // by node, where a block in reach is
	twins  map[*treeNode]int32 // where the slot has several blocks, how many besides the first
}

func newSlotBlocks(slot Slot, salt uint64) *slotBlocks {
	b := &slotBlocks{slot: slot, salt: salt}
	b.self.list = []Slot{slot}
	b.self.n.Store(1)
	return b
}

// open makes room for the first blocks.
func (b *slotBlocks) open() {
	if b.nodes == nil {
		b.nodes = append(b.nodes, node{pos: -1, state: inReach})
		b.resizeTable(16)
	}
}

// reset forgets everything.
func (b *slotBlocks) reset() {
	b.nodes, b.table, b.free = nil, nil, none
	b.used, b.held = 0, 0
	b.opaque, b.places, b.twins = false, nil, nil
}

// tableEntry is a node's index, with so much of its hash that most searches look at
// one node only, and moves within the table at none. at is none in an empty place.
type tableEntry struct {
	tag uint32
	at  uint32
}

// tag mixes a hash. Sequence hashes of roots are whatever a producer says, so they
// are mixed with a number it does not know.
func (b *slotBlocks) tag(h SeqHash) uint32 {
	hi, lo := bits.Mul64(uint64(h)^b.salt, 0x9e3779b97f4a7c15)
	return uint32((hi ^ lo) >> 32)
}

// bucket is where the search for a tag begins.
func (b *slotBlocks) bucket(tag uint32) int { return int(tag >> b.shift) }

// find returns the node with that hash, or none.
func (b *slotBlocks) find(h SeqHash) uint32 {
	if len(b.table) == 0 {
		return none
	}
	tag := b.tag(h)
	for i := b.bucket(tag); ; i = (i + 1) & (len(b.table) - 1) {
		e := b.table[i]
		if e.at == none || e.tag == tag && b.nodes[e.at].seq == h {
			return e.at
		}
	}
}

// add makes a ghost of a hash that is not there.
func (b *slotBlocks) add(h SeqHash) uint32 {
	if (b.used+1)*4 > len(b.table)*3 {
		b.resizeTable(2 * len(b.table))
	}
	at := b.free
	if at != none {
		b.free = b.nodes[at].next
		b.nodes[at] = node{seq: h, pos: NoPosition}
	} else {
		at = uint32(len(b.nodes))
		if len(b.nodes) == cap(b.nodes) {
			// append's own growth by a quarter copies twice as much in all.
			b.nodes = slices.Grow(b.nodes, len(b.nodes)/2+8)
		}
		b.nodes = append(b.nodes, node{seq: h, pos: NoPosition})
	}
	b.used++
	b.place(tableEntry{b.tag(h), at})
	return at
}

// place puts a node into the table.
func (b *slotBlocks) place(e tableEntry) {
	i := b.bucket(e.tag)
	for b.table[i].at != none {
		i = (i + 1) & (len(b.table) - 1)
	}
	b.table[i] = e
}

// resizeTable makes the table that long and fills it again.
func (b *slotBlocks) resizeTable(size int) {
	old := b.table
	b.table = make([]tableEntry, size)
	b.shift = 32 - bits.TrailingZeros(uint(size))
	for _, e := range old {
		if e.at != none {
			b.place(e)
		}
	}
}

// forget takes a ghost without children out.
func (b *slotBlocks) forget(at uint32) {
	mask := len(b.table) - 1
	i := b.bucket(b.tag(b.nodes[at].seq))
	for b.table[i].at != at {
		i = (i + 1) & mask
	}
	// Move up what would not be found past the gap.
	for j := (i + 1) & mask; b.table[j].at != none; j = (j + 1) & mask {
		if home := b.bucket(b.table[j].tag); (j-home)&mask >= (j-i)&mask {
			b.table[i] = b.table[j]
			i = j
		}
	}
	b.table[i] = tableEntry{}
	b.nodes[at] = node{next: b.free}
	b.free = at
	b.used--
}

// hold turns a ghost into a held block, out of reach, below parent.
func (b *slotBlocks) hold(at, parent uint32) {
	n, p := &b.nodes[at], &b.nodes[parent]
	n.state = outOfReach
	n.parent = parent
	n.prev, n.next = none, p.child
	if p.child != none {
		b.nodes[p.child].prev = at
	}
	p.child = at
	b.held++
}

// drop gives up a held block that is out of reach. While it has children its
// ghost stays.
func (b *slotBlocks) drop(at uint32) {
	n := &b.nodes[at]
	p := &b.nodes[n.parent]
	if n.prev != none {
		b.nodes[n.prev].next = n.next
	} else {
		p.child = n.next
	}
	if n.next != none {
		b.nodes[n.next].prev = n.prev
	}
	parent := n.parent
	n.state, n.pos = ghost, NoPosition
	n.parent, n.prev, n.next = none, none, none
	b.held--
	if n.child == none {
		b.forget(at)
	}
	if p.state == ghost && p.child == none {
		b.forget(parent)
	}
}

// after returns the block that follows at in the order parents first, first
// child next, within what is below top; none at the end.
func (b *slotBlocks) after(at, top uint32) uint32 {
	if c := b.nodes[at].child; c != none {
		return c
	}
	for at != top {
		n := &b.nodes[at]
		if n.next != none {
			return n.next
		}
		at = n.parent
	}
	return none
}

// walk visits every block that is not its own ancestor or below one that is,
// parents first, until f returns false. It reports whether it came to the end.
func (b *slotBlocks) walk(f func(at uint32) bool) bool {
	for top := range b.nodes {
		if top := uint32(top); top == origin || b.nodes[top].state == ghost && b.nodes[top].child != none {
			for at := b.after(top, top); at != none; at = b.after(at, top) {
				if !f(at) {
					return false
				}
			}
		}
	}
	return true
}

// differs reports whether a held block has another local hash or parent than these.
func (b *slotBlocks) differs(at uint32, local LocalHash, parent SeqHash, hasParent bool) bool {
	n := &b.nodes[at]
	return n.local != local || hasParent != (n.parent != origin) || hasParent && b.nodes[n.parent].seq != parent
}

// deepest follows first children from at to the last.
func (b *slotBlocks) deepest(at uint32) uint32 {
	for b.nodes[at].child != none {
		at = b.nodes[at].child
	}
	return at
}

// shrink moves what is left into smaller arrays once they are three quarters
// empty.
func (b *slotBlocks) shrink() {
	if b.used == 0 {
		b.reset()
		return
	}
	if len(b.nodes) < 64 || b.used >= len(b.nodes)/4 {
		return
	}
	old := b.nodes
	moved := make([]uint32, len(old)) // from old index to new
	b.nodes = append(make([]node, 0, b.used+b.used/4+1), old[origin])
	b.table, b.free = nil, none
	for at := range old {
		// Unused nodes are ghosts without children; no ghost in use is.
		if n := &old[at]; at != int(origin) && (n.state != ghost || n.child != none) {
			moved[at] = uint32(len(b.nodes))
			b.nodes = append(b.nodes, *n)
		}
	}
	size := 16
	for size*3 < (len(b.nodes)+1)*4 {
		size *= 2
	}
	b.resizeTable(size)
	for at := range b.nodes {
		n := &b.nodes[at]
		n.parent, n.child, n.next, n.prev = moved[n.parent], moved[n.child], moved[n.next], moved[n.prev]
		if at != int(origin) {
			b.place(tableEntry{b.tag(n.seq), uint32(at)})
		}
	}
	if b.places != nil {
		b.places = movePlaces(b.places, moved, len(b.nodes))
	}
	if b.twins != nil {
		left := make(map[*treeNode]int32, len(b.twins))
		maps.Copy(left, b.twins) // Go's maps do not shrink
		b.twins = left
	}
}
