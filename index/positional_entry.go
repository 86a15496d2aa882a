// This file is a PositionalIndex's shared map: blocks and who holds them, read
// without locks.

package index

import (
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
