// This file has the sets of slots that hold a block, read without locks.

package index

import (
	"math/bits"
	"slices"
	"sync/atomic"
)

// holders is a set of slots: a list while they are few, else a bitmap. Readers
// need no lock: a list is only ever appended to, and a bitmap changes in single
// atomic words; all else is a new object.
type holders struct {
	n    atomic.Uint32   // how many; of a bitmap readers may see it late
	list []Slot          // as long as it can get; the first n count. nil for a bitmap
	bits []atomic.Uint64 // nil for a list
}

// listLimit is how many slots a list may have: a bitmap of all slots is then
// about twice as large and as fast to go through.
func (f *forests) listLimit() int {
	return max(8, len(*f.slots.Load())/64)
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
// be h itself. The caller keeps
// other writers of the set away.
func (f *forests) without(h *holders, slot Slot) *holders {
	n := int(h.n.Load()) - 1
	if h.bits != nil {
		h.bits[slot/64].And(^(uint64(1) << (slot % 64)))
		h.n.Store(uint32(n))
		if n >= f.listLimit()/2 {
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
		return &f.slot(list[0]).self
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

// has reports whether a slot is in the set.
func (h *holders) has(slot Slot) bool {
	if h.bits != nil {
		w := int(slot / 64)
		return w < len(h.bits) && h.bits[w].Load()&(1<<(slot%64)) != 0
	}
	return slices.Contains(h.slots(), slot)
}

// count returns how many slots of the set are in only too, which nil means all are.
// While writers change a bitmap, the number may be of a moment ago.
func (h *holders) count(only *SlotSet) (n int) {
	switch {
	case h == nil:
	case only == nil:
		n = int(h.n.Load())
	case h.bits == nil:
		for _, s := range h.slots() {
			if only.Has(s) {
				n++
			}
		}
	default:
		for i := range min(len(h.bits), len(only.words)) {
			n += bits.OnesCount64(h.bits[i].Load() & only.words[i])
		}
	}
	return n
}
