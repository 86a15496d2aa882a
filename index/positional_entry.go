// This file is a PositionalIndex's shared map: blocks and the sets of slots that
// hold them, read without locks.

package index

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// entry is a block in the shared map. The first one that comes to a place is
// its head; it stays until the place has no holders at all, so that the others
// can be found through it.
type entry struct {
	seq     SeqHash
	holders atomic.Pointer[holders] // nil if there are none

	// Of a head only:
	branches atomic.Int32 // other blocks of this place, in PositionalIndex.more
	dead     bool         // it has neither holders nor branches and leaves the map; guarded by mu
	mu       sync.Mutex   // held by whoever changes holders of a block of this place
}

// holders is a set of slots: a list while they are few, else a bitmap. Readers
// need no lock: a list is only ever appended to, and a bitmap changes in single
// atomic words; all else is a new object.
type holders struct {
	n    atomic.Uint32   // how many; readers use it for lists only
	list []Slot          // as long as it can get; the first n count. nil for a bitmap
	bits []atomic.Uint64 // nil for a list
}

// find returns the slots that hold a block, nil if there are none.
func (p *PositionalIndex) find(at place, seq SeqHash) *holders {
	e, ok := p.heads.Load(at)
	if !ok {
		return nil
	}
	if e.seq == seq {
		return e.holders.Load()
	}
	if e.branches.Load() == 0 {
		return nil
	}
	if e, ok = p.more.Load(branch{e, seq}); !ok {
		return nil
	}
	return e.holders.Load()
}

// publish adds b's slot to the holders of a block. It returns whether the block
// had none.
func (p *PositionalIndex) publish(at place, seq SeqHash, b *slotBlocks) (fresh bool) {
	for {
		if e, ok := p.heads.Load(at); ok {
			e.mu.Lock()
			if !e.dead {
				fresh = p.publishBelow(e, seq, b)
				e.mu.Unlock()
				return fresh
			}
			e.mu.Unlock()
		}
		p.heads.Compute(at, func(old *entry, loaded bool) (*entry, bool) {
			if loaded {
				old.mu.Lock()
				dead := old.dead
				old.mu.Unlock()
				if !dead {
					return old, false
				}
			}
			fresh = true
			e := &entry{seq: seq}
			e.holders.Store(&b.self)
			return e, false
		})
		if fresh {
			return true
		}
	}
}

// publishBelow does publish's work with the head of the place locked.
func (p *PositionalIndex) publishBelow(head *entry, seq SeqHash, b *slotBlocks) (fresh bool) {
	e := head
	if head.seq != seq {
		other, ok := p.more.Load(branch{head, seq})
		if !ok {
			other = &entry{seq: seq}
			other.holders.Store(&b.self)
			p.more.Store(branch{head, seq}, other)
			head.branches.Add(1)
			return true
		}
		e = other
	}
	h := e.holders.Load()
	if h == nil {
		e.holders.Store(&b.self)
		return true
	}
	if grown := h.add(b.slot, p.listLimit()); grown != h {
		e.holders.Store(grown)
	}
	return false
}

// withdraw takes a slot out of the holders of a block. It returns whether it
// was the last.
func (p *PositionalIndex) withdraw(at place, seq SeqHash, slot Slot) (gone bool) {
	head, ok := p.heads.Load(at)
	if !ok {
		panic("BUG: block in reach is not in the map")
	}
	head.mu.Lock()
	e := head
	if head.seq != seq {
		if e, ok = p.more.Load(branch{head, seq}); !ok {
			panic("BUG: block in reach is not in the map")
		}
	}
	if h := e.holders.Load(); h.n.Load() > 1 {
		if shrunk := p.without(h, slot); shrunk != h {
			e.holders.Store(shrunk)
		}
		head.mu.Unlock()
		return false
	}
	e.holders.Store(nil)
	if e != head {
		p.more.Delete(branch{head, seq})
		head.branches.Add(-1)
	}
	dead := head.holders.Load() == nil && head.branches.Load() == 0
	head.dead = dead
	head.mu.Unlock()
	if dead {
		// Whoever wants the place from now on puts a new head there, maybe
		// before this one is gone.
		p.heads.Compute(at, func(old *entry, loaded bool) (*entry, bool) {
			return old, !loaded || old == head
		})
	}
	return true
}

// listLimit is how many slots a list may have: a bitmap of all slots is then
// about twice as large and as fast to go through.
func (p *PositionalIndex) listLimit() int {
	return max(8, len(*p.slots.Load())/64)
}

// add returns the set with a slot that is not in it, which may be h itself. The
// place is locked.
func (h *holders) add(slot Slot, limit int) *holders {
	n := int(h.n.Load())
	if h.bits != nil {
		w := int(slot / 64)
		if w >= len(h.bits) {
			h = newBitmap(h, w+1)
		}
		h.bits[w].Or(1 << (slot % 64))
		h.n.Store(uint32(n + 1))
		return h
	}
	if n == len(h.list) {
		if n >= limit {
			return newBitmap(h, int(slot/64)+1).add(slot, limit)
		}
		list := make([]Slot, 2*n)
		copy(list, h.list)
		h = &holders{list: list}
	}
	h.list[n] = slot
	h.n.Store(uint32(n + 1))
	return h
}

// newBitmap returns a copy of h as a bitmap of at least that many words.
func newBitmap(h *holders, words int) *holders {
	c := &holders{bits: make([]atomic.Uint64, max(words, h.words()))}
	c.n.Store(h.n.Load())
	for i := range h.bits {
		c.bits[i].Store(h.bits[i].Load())
	}
	for _, s := range h.slots() {
		c.bits[s/64].Or(1 << (s % 64))
	}
	return c
}

// without returns the set of at least two slots without one of them, which may
// be h itself. The place is locked.
func (p *PositionalIndex) without(h *holders, slot Slot) *holders {
	n := int(h.n.Load()) - 1
	if h.bits != nil {
		h.bits[slot/64].And(^(uint64(1) << (slot % 64)))
		h.n.Store(uint32(n))
		if n >= p.listLimit()/2 {
			return h
		}
	}
	list := make([]Slot, 0, 1<<bits.Len(uint(n-1)))
	for _, s := range h.slots() {
		if s != slot {
			list = append(list, s)
		}
	}
	for i := range h.bits {
		for w := h.bits[i].Load(); w != 0; w &= w - 1 {
			list = append(list, Slot(i*64+bits.TrailingZeros64(w)))
		}
	}
	if n == 1 {
		return &p.slot(list[0]).self
	}
	c := &holders{list: list[:cap(list)]}
	c.n.Store(uint32(n))
	return c
}

// slots returns the members of a list, nothing of a bitmap.
func (h *holders) slots() []Slot {
	if h.bits != nil {
		return nil
	}
	return h.list[:h.n.Load()]
}

// words returns how many words a bitmap needs for the set.
func (h *holders) words() int {
	if h.bits != nil {
		return len(h.bits)
	}
	words := 0
	for _, s := range h.slots() {
		words = max(words, int(s/64)+1)
	}
	return words
}

// copyTo makes the bitmap set equal to as much of h as it has room for, and
// returns how many slots that is.
func (h *holders) copyTo(set []uint64) (n int) {
	if h.bits == nil {
		clear(set)
		for _, s := range h.slots() {
			if w := int(s / 64); w < len(set) {
				set[w] |= 1 << (s % 64)
				n++
			}
		}
		return n
	}
	for i := range set {
		set[i] = 0
		if i < len(h.bits) {
			set[i] = h.bits[i].Load()
			n += bits.OnesCount64(set[i])
		}
	}
	return n
}

// missing returns how many of the n slots in set are not in h. If that is some
// but not all, it makes out the set of them.
func (h *holders) missing(set, out []uint64, n int) int {
	if h == nil {
		return n
	}
	if h.bits == nil {
		left := n
		list := h.slots()
		for _, s := range list {
			if w := int(s / 64); w < len(set) && set[w]&(1<<(s%64)) != 0 {
				left--
			}
		}
		if left == 0 || left == n {
			return left
		}
		copy(out, set)
		for _, s := range list {
			if w := int(s / 64); w < len(out) {
				out[w] &^= 1 << (s % 64)
			}
		}
		return left
	}
	left := 0
	for i, w := range set {
		if i < len(h.bits) {
			w &^= h.bits[i].Load()
		}
		out[i] = w
		left += bits.OnesCount64(w)
	}
	return left
}
