// This file is the tree that RadixTree and ConcurrentRadixTree are: its nodes, and
// how slots enter and leave them.

package index

import (
	"sync"
	"sync/atomic"
)

// tree is all of a ConcurrentRadixTree and most of a RadixTree. A path from its root
// is a prompt, by local hashes, and a node on it says which slots hold the prompt's
// blocks up to there:
//
//	root ── A {0,1,2} ── B {0,1} ── C {0}
//	                └─── D {2}
//
// Here slot 0 holds A B C, slot 1 A B, slot 2 A D. What a slot holds out of reach is
// not in the tree, but parked in the slot's own forest, under its parent's hash, and
// enters the tree when the parent does; when a block leaves, all below it are parked
// again. So a node's slots are some of its parent's, and whoever sees a slot at a
// node knows that it holds the whole path.
//
// Sequence hashes matter only within a slot: its forest finds a block by hash, and
// knows the node of each that is in reach. That is why they may be opaque. Two hashes
// of a slot may have the same path; the slot then leaves the node with the last.
//
// A writer goes from node to node. It holds a node's lock while it adds or removes its
// slot there, and the parent's before the child's where a child is new. Searches take
// the lock of a node's further children, for reading, and none where there is only a
// first one. Nobody holds a lock for more than a step.
type tree struct {
	forests
	root treeNode // above all first blocks; nobody holds it
}

// Store implements Structure. It takes opaque hashes, and computed ones beside them.
func (t *tree) Store(slot Slot, s Stored) (Effect, error) {
	if err := s.check(); err != nil {
		return Effect{}, err
	}
	return t.store(slot, &s), nil
}

// treeNode stands for a path of local hashes from a first block on, whoever holds
// it. It is linked below its parent while some slot holds it. Slots that hold it hold
// the parent too, as forests sees to, so only a node without holders and children is
// ever unlinked.
//
// A node that has lost its last holder is dead, for good: a slot that wants the path
// puts a new node in its place, maybe before the dead one is unlinked.
type treeNode struct {
	local   LocalHash
	holders atomic.Pointer[holders]  // nil: dead, or the root; changes under mu
	first   atomic.Pointer[treeNode] // one of the children; changes under mu
	more    atomic.Pointer[children] // the others, nil if there are none; changes under mu
	uses    *uses                    // RadixTree's, nil until there are some
	mu      sync.Mutex               // held by writers, for one block's sake; a parent's before its child's
}

// children are those that are not a node's first. A child never moves from here to
// there, so that a search that looks at the first and then here misses none that was
// there all the time.
type children struct {
	mu      sync.RWMutex // under the node's mu for writers, alone for searches
	byLocal map[LocalHash]*treeNode
	most    int // that were in the map since it was made
}

// child returns the child with that local hash, nil if there is none. It may be
// dead.
func (n *treeNode) child(l LocalHash) *treeNode {
	if c := n.first.Load(); c != nil && c.local == l {
		return c
	}
	more := n.more.Load()
	if more == nil {
		return nil
	}
	more.mu.RLock()
	defer more.mu.RUnlock()
	return more.byLocal[l]
}

// link puts a child in, in the place of a dead one if there is one. n.mu is held.
func (n *treeNode) link(c *treeNode) {
	first, more := n.first.Load(), n.more.Load()
	inMore := more != nil && more.byLocal[c.local] != nil
	if !inMore && (first == nil || first.local == c.local) {
		n.first.Store(c)
		return
	}
	if more == nil {
		more = &children{byLocal: make(map[LocalHash]*treeNode)}
		defer n.more.Store(more)
	}
	more.mu.Lock()
	more.byLocal[c.local] = c
	more.most = max(more.most, len(more.byLocal))
	more.mu.Unlock()
}

// unlink takes a dead child out, unless another one has its place.
func (n *treeNode) unlink(c *treeNode) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.first.CompareAndSwap(c, nil) {
		return
	}
	more := n.more.Load()
	if more == nil || more.byLocal[c.local] != c {
		return
	}
	more.mu.Lock()
	defer more.mu.Unlock()
	delete(more.byLocal, c.local)
	switch left := len(more.byLocal); {
	case left == 0:
		n.more.Store(nil)
	case more.most >= 64 && left < more.most/4:
		// Go's maps do not shrink.
		byLocal := make(map[LocalHash]*treeNode, left)
		for l, c := range more.byLocal {
			byLocal[l] = c
		}
		more.byLocal, more.most = byLocal, left
	}
}

// parent returns the node above a block of a slot.
func (t *tree) parent(b *slotBlocks, at uint32) *treeNode {
	if parent := b.nodes[at].parent; parent != origin {
		return b.places[parent]
	}
	return &t.root
}

// enter implements reach.
func (t *tree) enter(b *slotBlocks, at uint32) (fresh bool) {
	l, parent := b.nodes[at].local, t.parent(b, at)
	place := parent.child(l)
	joined, twin := false, false
	if place != nil {
		joined, twin = t.join(place, b)
	}
	if !joined {
		parent.mu.Lock()
		// Somebody else may have put it there.
		if place = parent.child(l); place != nil {
			joined, twin = t.join(place, b)
		}
		if !joined {
			fresh = true
			place = &treeNode{local: l}
			place.holders.Store(&b.self)
			parent.link(place)
		}
		parent.mu.Unlock()
	}
	if twin {
		if b.twins == nil {
			b.twins = make(map[*treeNode]int32)
		}
		b.twins[place]++
	}
	b.setPlace(at, place)
	return fresh
}

// join adds the slot to a node's holders, if the node is alive. twin says that it
// was there already, with another block.
func (t *tree) join(n *treeNode, b *slotBlocks) (joined, twin bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.holders.Load()
	switch {
	case h == nil:
		return false, false
	case h.has(b.slot):
		return true, true
	}
	if grown := h.add(b.slot, t.listLimit()); grown != h {
		n.holders.Store(grown)
	}
	return true, false
}

// leave implements reach.
func (t *tree) leave(b *slotBlocks, at uint32) (gone bool) {
	n := b.places[at]
	b.places[at] = nil
	if more := b.twins[n]; more > 0 {
		if b.twins[n] = more - 1; more == 1 {
			delete(b.twins, n)
			if len(b.twins) == 0 {
				b.twins = nil
			}
		}
		return false
	}
	n.mu.Lock()
	h := n.holders.Load()
	if h.n.Load() > 1 {
		if shrunk := t.without(h, b.slot); shrunk != h {
			n.holders.Store(shrunk)
		}
		n.mu.Unlock()
		return false
	}
	n.holders.Store(nil)
	n.mu.Unlock()
	if n.uses != nil {
		n.uses.node = nil // so that they do not keep it
		n.uses = nil
	}
	t.parent(b, at).unlink(n)
	return true
}

// setPlace notes where a block in reach is.
func (b *slotBlocks) setPlace(at uint32, n *treeNode) {
	if int(at) >= len(b.places) {
		grown := make([]*treeNode, cap(b.nodes))
		copy(grown, b.places)
		b.places = grown
	}
	b.places[at] = n
}

// movePlaces is places for nodes that have new indexes, of which there are n.
func movePlaces(places []*treeNode, moved []uint32, n int) []*treeNode {
	out := make([]*treeNode, n)
	for old, p := range places[:min(len(places), len(moved))] {
		if p != nil {
			out[moved[old]] = p
		}
	}
	return out
}
