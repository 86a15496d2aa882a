// This file is a run of a RunIndex: its blocks, and which of them each slot
// holds.

package index

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// run is an array of consecutive blocks. Searches need the first 64 bytes.
type run struct {
	first SeqHash                  // of block 0
	n     atomic.Uint32            // blocks published
	base  uint32                   // position of block 0 in its sequence
	buf   []LocalHash              // local hashes, then as many sequence hashes; below n they never change
	few   [2]atomic.Uint64         // coverage words: slot+1, cutoff; free if the cutoff is 0
	many  atomic.Pointer[coverSet] // more of them; nil if there are none

	mu        sync.Mutex // held to change anything
	ref       *runRef
	parent    SeqHash // of block 0, if hasParent
	holes     *[]hole // what slots hold past their cutoffs; nil if nothing
	tail      uint32  // slots that hold block n-1
	covering  uint32  // slots with a cutoff above 0
	up        spot    // where the parent was when the run was made; like parent, it never changes
	hasParent bool
	sealed    bool // takes no more blocks, ever
	dead      bool // replaced by another object, or gone
}

// runRef names a run, of which the object may change.
type runRef struct {
	run atomic.Pointer[run] // nil once the run is gone
}

// lock returns the run's object, locked, or nil if it is gone.
func (f *runRef) lock() *run {
	for {
		r := f.run.Load()
		if r == nil {
			return nil
		}
		r.mu.Lock()
		if !r.dead {
			return r
		}
		r.mu.Unlock()
	}
}

func (r *run) capacity() uint32     { return uint32(len(r.buf) / 2) }
func (r *run) seq(p uint32) SeqHash { return SeqHash(r.buf[r.capacity()+p]) }
func (r *run) seqs() []LocalHash    { return r.buf[len(r.buf)/2:] }

// coverSet is a set of coverage words: open-addressed, or cutoffs by slot.
type coverSet struct {
	live  int // cutoffs above 0; under the run's lock, as is used
	used  int // words that are not 0
	words []atomic.Uint64
	dense []atomic.Uint32 // not nil: instead of words
}

func coverWord(s Slot, c uint32) uint64 { return (uint64(s)+1)<<32 | uint64(c) }

// coverHome is where the search for a slot begins in n words.
func coverHome(s Slot, n int) int {
	return int(uint64(uint32(s)*0x9e3779b1) * uint64(n) >> 32)
}

// find returns the word of a slot in an open-addressed set, or nil.
func (c *coverSet) find(s Slot) *atomic.Uint64 {
	n := len(c.words)
	if n == 0 {
		return nil
	}
	for i := coverHome(s, n); ; {
		w := c.words[i].Load()
		if w == 0 {
			return nil
		}
		if w>>32 == uint64(s)+1 {
			return &c.words[i]
		}
		if i++; i == n {
			i = 0
		}
	}
}

// add puts a slot that is not there into a set that has room.
func (c *coverSet) add(s Slot, cutoff uint32) {
	c.live++
	if c.dense != nil {
		c.dense[s].Store(cutoff)
		return
	}
	for i := coverHome(s, len(c.words)); ; {
		w := c.words[i].Load()
		if uint32(w) == 0 {
			if w == 0 {
				c.used++
			}
			c.words[i].Store(coverWord(s, cutoff))
			return
		}
		if i++; i == len(c.words) {
			i = 0
		}
	}
}

// each calls f for each slot with a cutoff above 0.
func (c *coverSet) each(f func(s Slot, cutoff uint32)) {
	for i := range c.words {
		if w := c.words[i].Load(); uint32(w) != 0 {
			f(Slot(w>>32-1), uint32(w))
		}
	}
	for s := range c.dense {
		if v := c.dense[s].Load(); v != 0 {
			f(Slot(s), v)
		}
	}
}

// resized returns a copy with room for another slot, in the form that is right
// for as many as it has, of as many slots as there are. Slots are never fewer
// than before.
func (c *coverSet) resized(s Slot, slots int) *coverSet {
	to := &coverSet{}
	if c.live >= 16 && c.live*3 >= slots {
		to.dense = make([]atomic.Uint32, max(slots, int(s)+1)*9/8)
	} else {
		to.words = make([]atomic.Uint64, max(4, c.live*2-c.live/5))
	}
	c.each(to.add)
	return to
}

// cutoff returns how many leading blocks of the run a slot holds.
func (r *run) cutoff(s Slot) uint32 {
	for i := range r.few {
		if w := r.few[i].Load(); w>>32 == uint64(s)+1 {
			if uint32(w) != 0 {
				return uint32(w)
			}
		}
	}
	c := r.many.Load()
	if c == nil {
		return 0
	}
	if c.dense != nil {
		if int(s) < len(c.dense) {
			return c.dense[s].Load()
		}
		return 0
	}
	if w := c.find(s); w != nil {
		return uint32(w.Load())
	}
	return 0
}

// setCutoff changes it. The run is locked.
func (x *RunIndex) setCutoff(r *run, s Slot, cutoff uint32) {
	old := r.cutoff(s)
	switch {
	case old == cutoff:
		return
	case old == 0:
		if r.covering++; r.covering == 1 && r.base == 0 {
			x.roots.Add(1)
		}
		r.addCutoff(s, cutoff, len(*x.slots.Load()))
		return
	case cutoff == 0:
		if r.covering--; r.covering == 0 && r.base == 0 {
			x.roots.Add(-1)
		}
	}
	for i := range r.few {
		if w := r.few[i].Load(); uint32(w) != 0 && w>>32 == uint64(s)+1 {
			r.few[i].Store(coverWord(s, cutoff))
			return
		}
	}
	c := r.many.Load()
	if c.dense != nil {
		c.dense[s].Store(cutoff)
	} else {
		c.find(s).Store(coverWord(s, cutoff))
	}
	if cutoff > 0 {
		return
	}
	c.live--
	switch {
	case c.live == 0:
		r.many.Store(nil)
	case c.live*8 < len(c.words), c.live*8 < len(c.dense):
		r.many.Store(c.resized(0, len(*x.slots.Load())))
	}
}

// addCutoff adds a word for a slot that has none, or one of cutoff 0.
func (r *run) addCutoff(s Slot, cutoff uint32, slots int) {
	c := r.many.Load()
	if c != nil && c.dense == nil {
		if w := c.find(s); w != nil { // else it would be there twice
			w.Store(coverWord(s, cutoff))
			c.live++
			return
		}
	}
	for i := range r.few {
		if uint32(r.few[i].Load()) == 0 {
			r.few[i].Store(coverWord(s, cutoff))
			return
		}
	}
	switch {
	case c == nil:
		c = (&coverSet{}).resized(s, slots)
		c.add(s, cutoff)
		r.many.Store(c)
	case c.dense != nil && int(s) >= len(c.dense), c.dense == nil && c.used*4 >= len(c.words)*3:
		c = c.resized(s, slots)
		c.add(s, cutoff)
		r.many.Store(c)
	default:
		c.add(s, cutoff)
	}
}

// hole is what a slot holds of a run past its cutoff, a bit a block.
type hole struct {
	slot  Slot
	count int
	bits  []uint64
}

func (h *hole) has(p uint32) bool {
	return int(p/64) < len(h.bits) && h.bits[p/64]>>(p%64)&1 != 0
}

// set adds the blocks [a, b) and returns how many are new.
func (h *hole) set(a, b uint32) (fresh int) {
	for len(h.bits)*64 < int(b) {
		h.bits = append(h.bits, 0)
	}
	for a < b {
		end := min(b, a|63+1)
		mask := ^uint64(0) >> (64 - (end - a)) << (a % 64)
		fresh += bits.OnesCount64(mask &^ h.bits[a/64])
		h.bits[a/64] |= mask
		a = end
	}
	h.count += fresh
	return fresh
}

// end returns the block after the last one.
func (h *hole) end() uint32 {
	for i := len(h.bits) - 1; i >= 0; i-- {
		if h.bits[i] != 0 {
			return uint32(i*64 + bits.Len64(h.bits[i]))
		}
	}
	return 0
}

// hole returns what a slot holds past its cutoff, nil if nothing.
func (r *run) hole(s Slot) *hole {
	if r.holes == nil {
		return nil
	}
	for i := range *r.holes {
		if h := &(*r.holes)[i]; h.slot == s {
			return h
		}
	}
	return nil
}

func (r *run) addHole(k *slotRuns) *hole {
	if h := r.hole(k.slot); h != nil {
		return h
	}
	if r.holes == nil {
		r.holes = new([]hole)
	}
	*r.holes = append(*r.holes, hole{slot: k.slot})
	k.holes++
	return &(*r.holes)[len(*r.holes)-1]
}

func (r *run) dropHole(k *slotRuns) {
	all := *r.holes
	last := len(all) - 1
	for i := range all {
		if all[i].slot == k.slot {
			all[i], all[last] = all[last], hole{}
			break
		}
	}
	*r.holes = all[:last]
	if last == 0 {
		r.holes = nil
	}
	k.holes--
}

// covers reports whether a slot holds block p.
func (r *run) covers(s Slot, p uint32) bool {
	if p < r.cutoff(s) {
		return true
	}
	h := r.hole(s)
	return h != nil && h.has(p)
}

// cover gives a slot the blocks [a, b) and returns how many are new to it.
func (x *RunIndex) cover(k *slotRuns, r *run, a, b uint32) (fresh int) {
	c := r.cutoff(k.slot)
	if b <= c {
		return 0
	}
	h := r.hole(k.slot)
	if a > c {
		if h == nil {
			h = r.addHole(k)
		}
		return h.set(a, b)
	}
	fresh = int(b - c)
	if h != nil {
		stored := b
		for h.has(b) {
			b++
		}
		for p := c; p < b; p++ {
			if h.has(p) {
				h.bits[p/64] &^= 1 << (p % 64)
				h.count--
				if p < stored {
					fresh--
				}
			}
		}
	}
	x.setCutoff(r, k.slot, b)
	if h != nil && h.count == 0 {
		r.dropHole(k)
	}
	return fresh
}

// uncover takes block p, which it holds, from a slot.
func (x *RunIndex) uncover(k *slotRuns, r *run, p uint32) {
	if c := r.cutoff(k.slot); p < c {
		x.setCutoff(r, k.slot, p)
		if p+1 < c {
			r.addHole(k).set(p+1, c)
		}
		return
	}
	h := r.hole(k.slot)
	h.bits[p/64] &^= 1 << (p % 64)
	if h.count--; h.count == 0 {
		r.dropHole(k)
	}
}

// islands appends the blocks to out as stretches [a, b).
func (h *hole) islands(out [][2]uint32) [][2]uint32 {
	for p, end := uint32(0), h.end(); p < end; p++ {
		if !h.has(p) {
			continue
		}
		a := p
		for h.has(p) {
			p++
		}
		out = append(out, [2]uint32{a, p})
	}
	return out
}

// settle ends what was done to a locked run, and returns its object: it counts
// who holds the last block, and forgets blocks that nobody holds. hadTail says
// whether the slot held the last block before, of those that were there.
func (x *RunIndex) settle(r *run, s Slot, hadTail bool) *run {
	n := r.n.Load()
	if has := r.covers(s, n-1); has != hadTail {
		if has {
			r.tail++
		} else {
			r.tail--
		}
	}
	if r.tail > 0 {
		return r
	}
	return x.trim(r, s)
}

// trim takes the blocks that nobody holds any more, the slot being the last, off
// the end of a locked run. It returns the object that is locked then.
func (x *RunIndex) trim(r *run, s Slot) *run {
	n, end, tail := r.n.Load(), uint32(0), uint32(0)
	see := func(e uint32) {
		switch {
		case e > end:
			end, tail = e, 1
		case e == end:
			tail++
		}
	}
	for i := range r.few {
		see(uint32(r.few[i].Load()))
	}
	if c := r.many.Load(); c != nil {
		c.each(func(_ Slot, cutoff uint32) { see(cutoff) })
	}
	if r.holes != nil {
		for i := range *r.holes {
			see((*r.holes)[i].end())
		}
	}
	x.lane(s).entries.Add(int64(end) - int64(n))
	if end == 0 {
		x.remove(r)
		r.n.Store(0)
		r.dead = true
		r.ref.run.Store(nil)
		return r
	}
	r.tail = tail
	r.sealed = true
	r.n.Store(end)
	if r.capacity() > 2*end+8 {
		return x.resize(r, end)
	}
	return r
}

// resize replaces a locked run's object by one with room for that many blocks,
// and returns it, locked.
func (x *RunIndex) resize(r *run, capacity uint32) *run {
	n := r.n.Load()
	to := &run{
		first: r.first, base: r.base, buf: make([]LocalHash, 2*capacity),
		ref: r.ref, parent: r.parent, up: r.up, hasParent: r.hasParent, holes: r.holes,
		tail: r.tail, covering: r.covering, sealed: r.sealed,
	}
	copy(to.buf, r.buf[:n])
	copy(to.seqs(), r.seqs()[:n])
	for i := range r.few {
		to.few[i].Store(r.few[i].Load())
	}
	to.many.Store(r.many.Load())
	to.n.Store(n)
	to.mu.Lock()
	r.ref.run.Store(to)
	x.replace(r, to)
	r.dead, r.holes = true, nil
	r.mu.Unlock()
	return to
}
