// This file is what a RunIndex knows of one slot alone: where its blocks are.

package index

import (
	"cmp"
	"math/bits"
	"slices"
	"sort"
)

// slotRuns is a slot's own memory, of which only its goroutine knows.
//
// The journal gives each block that the slot got an address, counted from 1; the
// table has, by hash, words of some bits of the hash and an address. Both may speak
// of blocks that the slot has no more, or name one twice, until they are written
// anew.
type slotRuns struct {
	x    *RunIndex
	slot Slot

	held  int // blocks in runs
	holes int // runs of which it holds blocks past a hole

	cursor spot    // where the last event ended; ref is nil if nowhere
	seq    SeqHash // of the cursor's block
	at     uint32  // its address, 0 if it has none or is in the table
	near   spot    // where the last removal was

	journal []stretch
	next    uint32 // address of the next block
	limit   int    // stretches at which to write the journal anew

	words   []uint32 // open-addressed; 0 if empty
	used    int      // words that are not 0
	width   uint     // bits of an address in a word
	indexed uint32   // addresses below are all in words

	parked *slotBlocks       // blocks whose parent is not held, and what is below them; nil if there are none
	claims map[SeqHash]claim // of blocks in runs, out of reach, for which another position was claimed
	waits  map[SeqHash]int   // how many claims wait for a block
}

// spot is a block's place in a run.
type spot struct {
	ref *runRef
	p   uint32
}

// stretch is consecutive blocks of a run that have consecutive addresses, up to
// the next stretch's.
type stretch struct {
	ref *runRef
	at  uint32 // address of the first
	p   uint32 // its place in the run
}

// reset forgets where blocks are.
func (k *slotRuns) reset() {
	k.cursor, k.near, k.at = spot{}, spot{}, 0
	k.journal, k.next, k.limit = nil, 1, 0
	k.words, k.used, k.indexed = nil, 0, 0
}

// covers reports whether the slot holds block p of a run that is not locked.
func (k *slotRuns) covers(r *run, p uint32) bool {
	if p < r.cutoff(k.slot) {
		return true
	}
	if k.holes == 0 {
		return false
	}
	if r = r.ref.lock(); r == nil {
		return false
	}
	h := r.hole(k.slot)
	has := h != nil && h.has(p)
	r.mu.Unlock()
	return has
}

// is reports whether the slot holds that hash at a spot.
func (k *slotRuns) is(at spot, h SeqHash) bool {
	r := at.ref.run.Load()
	return r != nil && at.p < r.n.Load() && r.seq(at.p) == h && k.covers(r, at.p)
}

// locate returns where the slot has a block in a run.
func (k *slotRuns) locate(h SeqHash) (spot, bool) {
	if k.held == 0 {
		return spot{}, false
	}
	if k.cursor.ref != nil && k.seq == h && k.is(k.cursor, h) {
		return k.cursor, true
	}
	if at := k.near; at.ref != nil {
		for _, p := range [2]uint32{at.p - 1, at.p + 1} {
			if s := (spot{at.ref, p}); k.is(s, h) {
				return s, true
			}
		}
	}
	if at, ok := k.probe(h); ok {
		return at, true
	}
	if k.indexed == k.next {
		return spot{}, false
	}
	k.index()
	return k.probe(h)
}

// find returns the spot of an address.
func (k *slotRuns) find(address uint32) spot {
	i := sort.Search(len(k.journal), func(i int) bool { return k.journal[i].at > address }) - 1
	s := &k.journal[i]
	return spot{s.ref, s.p + address - s.at}
}

// probe looks a hash up in the table.
func (k *slotRuns) probe(h SeqHash) (spot, bool) {
	n := len(k.words)
	if n == 0 {
		return spot{}, false
	}
	m := k.x.mix(h)
	for i := int(m >> 32 * uint64(n) >> 32); k.words[i] != 0; {
		if w := k.words[i]; w>>k.width == uint32(m)>>k.width {
			if at := k.find(w & (1<<k.width - 1)); k.is(at, h) {
				return at, true
			}
		}
		if i++; i == n {
			i = 0
		}
	}
	return spot{}, false
}

// put adds an address to the table, which has room.
func (k *slotRuns) put(h SeqHash, address uint32) {
	n := len(k.words)
	m := k.x.mix(h)
	i := int(m >> 32 * uint64(n) >> 32)
	for k.words[i] != 0 {
		if i++; i == n {
			i = 0
		}
	}
	k.words[i] = uint32(m)>>k.width<<k.width | address
	k.used++
}

// room reports whether the table takes n more words, with addresses up to next.
func (k *slotRuns) room(n int) bool {
	return (k.used+n)*5 <= len(k.words)*4 && uint64(k.next) <= 1<<k.width
}

// note puts the cursor's block into the table.
func (k *slotRuns) note() {
	if k.at == 0 || k.at < k.indexed {
		return
	}
	if !k.room(1) {
		k.rewriteTable(k.indexed > 1)
		return
	}
	k.put(k.seq, k.at)
	k.at = 0
}

// index puts all addresses into the table.
func (k *slotRuns) index() {
	if !k.room(int(k.next - max(k.indexed, 1))) {
		k.rewriteTable(true)
		return
	}
	k.fill(max(k.indexed, 1))
}

// rewriteTable makes the table anew: of all blocks, or of the last ones of each
// stretch.
func (k *slotRuns) rewriteTable(all bool) {
	n := len(k.journal)
	if all {
		n = int(k.next)
	}
	k.words = make([]uint32, n*2+32)
	k.used, k.indexed, k.at = 0, 1, 0
	k.width = uint(min(32, max(10, bits.Len64(2*uint64(k.next)))))
	if all {
		k.fill(1)
		return
	}
	for i := range k.journal {
		s := &k.journal[i]
		last := k.end(i) - 1
		if r := s.ref.run.Load(); r != nil && s.p+last-s.at < r.n.Load() {
			k.put(r.seq(s.p+last-s.at), last)
		}
	}
}

// end returns the address after a stretch's last.
func (k *slotRuns) end(i int) uint32 {
	if i+1 < len(k.journal) {
		return k.journal[i+1].at
	}
	return k.next
}

// fill puts the addresses from one on into the table.
func (k *slotRuns) fill(from uint32) {
	i := sort.Search(len(k.journal), func(i int) bool { return k.journal[i].at > from }) - 1
	for ; i >= 0 && i < len(k.journal); i++ {
		s := &k.journal[i]
		r := s.ref.run.Load()
		if r == nil {
			continue
		}
		a, b := max(s.at, from), k.end(i)
		b = min(b, s.at+max(s.p, r.n.Load())-s.p)
		for ; a < b; a++ {
			k.put(r.seq(s.p+a-s.at), a)
		}
	}
	k.indexed = k.next
}

// gained notes in the journal that the slot has the blocks [a, b) of a run.
func (k *slotRuns) gained(r *run, a, b uint32) {
	if last := len(k.journal) - 1; last < 0 || k.journal[last].ref != r.ref || k.journal[last].p+k.next-k.journal[last].at != a {
		k.journal = append(k.journal, stretch{r.ref, k.next, a})
	}
	if k.next+(b-a) < k.next {
		panic("BUG: more addresses of blocks than 32 bits can name")
	}
	k.next += b - a
}

// moveCursor notes where an event ended; at is its address, or 0.
func (k *slotRuns) moveCursor(to spot, h SeqHash, at uint32) {
	if k.cursor.ref != to.ref {
		k.note()
	}
	k.cursor, k.seq, k.at = to, h, at
}

// tidy writes the journal anew if it has grown too long.
func (k *slotRuns) tidy() {
	if k.held == 0 {
		k.reset()
		return
	}
	if uint64(k.next) < 2*uint64(k.held)+512 && len(k.journal) < k.limit {
		return
	}
	if len(k.journal) < 64 && k.next < 1024 {
		return
	}
	refs := k.refs()
	all := k.indexed > 1
	k.journal, k.next = make([]stretch, 0, len(refs)+len(refs)/4), 1
	for _, ref := range refs {
		r := ref.run.Load()
		if c := r.cutoff(k.slot); c > 0 {
			k.gained(r, 0, c)
		}
		if k.holes > 0 {
			for _, s := range ref.islands(k.slot) {
				k.gained(r, s[0], s[1])
			}
		}
	}
	k.limit = 2*len(k.journal) + 64
	k.rewriteTable(all)
}

// refs returns the runs of which the slot holds blocks, each once.
func (k *slotRuns) refs() []*runRef {
	seen := make(map[*runRef]bool, len(k.journal))
	refs := make([]*runRef, 0, len(k.journal))
	for i := range k.journal {
		ref := k.journal[i].ref
		if seen[ref] {
			continue
		}
		seen[ref] = true
		r := ref.run.Load()
		if r != nil && (r.cutoff(k.slot) > 0 || k.holes > 0 && len(ref.islands(k.slot)) > 0) {
			refs = append(refs, ref)
		}
	}
	return refs
}

// sortByPosition sorts runs so that parents come before children.
func sortByPosition(refs []*runRef) {
	slices.SortFunc(refs, func(a, b *runRef) int {
		return cmp.Compare(a.run.Load().base, b.run.Load().base)
	})
}
