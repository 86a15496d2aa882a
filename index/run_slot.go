// This file is what a RunIndex knows of one slot alone: where its blocks are.

package index

import (
	"bytes"
	"math/bits"
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
	noted  bool    // the cursor's block is in words, or not worth it
	near   spot    // where the last removal was

	journal   []stretch
	low, high []byte // the last two bytes of the hash of each address, from 1, as far as they were needed; nil if full
	next      uint32 // address of the next block

	// When to write the journal anew:
	most  uint64 // next is above this, and far above what is held
	limit int    // or there are more stretches
	least int    // or fewer blocks are held

	words   []uint32 // open-addressed; 0 if empty
	used    int      // words that are not 0
	width   uint     // bits of an address in a word
	full    bool     // all addresses go into words, because scanning took too long
	indexed uint32   // if full, addresses below are all in words
	scanned uint64   // bytes of low scanned since the journal was written anew

	parked *slotBlocks       // blocks whose parent is not held, and what is below them; nil if there are none
	claims map[SeqHash]claim // of blocks in runs, out of reach, for which another position was claimed
	waits  map[SeqHash]int   // how many claims wait for a block
}

// spot is a block's place in a run.
type spot struct {
	ref *runRef
	p   uint32
	at  uint32 // its address in the journal, if that is known; a guess sometimes
}

// stretch is consecutive blocks of a run that have consecutive addresses, up to
// the next stretch's.
type stretch struct {
	ref *runRef
	at  uint32 // address of the first
	pos uint32 // its position in the sequence
}

// len returns how many blocks the slot holds, those parked included.
func (k *slotRuns) len() int {
	n := k.held
	if k.parked != nil {
		n += k.parked.held
	}
	return n
}

// reset forgets where blocks are.
func (k *slotRuns) reset() {
	k.cursor, k.near = spot{}, spot{}
	k.journal, k.next = nil, 1
	k.most, k.limit, k.least = 2*uint64(k.x.slack), k.x.slack/8, 0
	k.low, k.high = nil, nil
	k.words, k.used, k.indexed, k.full, k.scanned = nil, 0, 0, false, 0
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
	if at.ref == nil {
		return false
	}
	r := at.ref.run.Load()
	return r != nil && at.p < r.n.Load() && r.seq(at.p) == h && k.covers(r, at.p)
}

// locate returns where the slot has a block in a run. pos is its position, if
// something was said of it, else below 0.
func (k *slotRuns) locate(h SeqHash, pos int32) (spot, bool) {
	if k.held == 0 {
		return spot{}, false
	}
	if k.cursor.ref != nil && k.seq == h && k.is(k.cursor, h) {
		return k.cursor, true
	}
	if at, ok := k.probe(h); ok {
		return at, true
	}
	if !k.full {
		if k.scanned < k.x.scanEach*uint64(k.next)+k.x.scanFree {
			at, ok := k.scan(h, pos)
			if ok && k.room(1) {
				k.put(h, at.at) // it may be a place where many go apart
			}
			return at, ok
		}
		k.full, k.indexed, k.low, k.high = true, 1, nil, nil
	}
	if k.indexed == k.next {
		return spot{}, false
	}
	k.index()
	return k.probe(h)
}

// locateNear is locate for blocks to remove: many are next to the last one.
func (k *slotRuns) locateNear(h SeqHash) (spot, bool) {
	if at := k.near; at.ref != nil {
		for _, d := range [2]uint32{1, ^uint32(0)} {
			if s := (spot{at.ref, at.p + d, at.at + d}); k.is(s, h) {
				return s, true
			}
		}
	}
	return k.locate(h, NoPosition)
}

// find returns the spot of an address; ref is nil if the run is gone.
func (k *slotRuns) find(address uint32) spot {
	return k.journal[k.stretchOf(address)].spot(address)
}

// stretchOf returns which stretch of the journal an address is in.
func (k *slotRuns) stretchOf(address uint32) int {
	return sort.Search(len(k.journal), func(i int) bool { return k.journal[i].at > address }) - 1
}

// spot returns where the block of an address of the stretch is.
func (s *stretch) spot(address uint32) spot {
	if r := s.ref.run.Load(); r != nil {
		return spot{s.ref, s.pos + address - s.at - r.base, address}
	}
	return spot{}
}

// scan looks a hash up by two of its bytes, in what came last first: at its
// position, then everywhere.
func (k *slotRuns) scan(h SeqHash, pos int32) (spot, bool) {
	k.fillScan()
	low, high := byte(h), byte(h>>8)
	if pos >= 0 {
		end := k.next
		for i := len(k.journal) - 1; i >= 0; i-- {
			s := &k.journal[i]
			if d := uint32(pos) - s.pos; d < end-s.at && k.low[s.at-1+d] == low && k.high[s.at-1+d] == high {
				if at := s.spot(s.at + d); k.is(at, h) {
					k.scanned += 8 * uint64(len(k.journal)-i)
					return at, true
				}
			}
			end = s.at
		}
	}
	k.scanned += 8 * uint64(len(k.journal))
	const step = 2048
	for end := len(k.low); end > 0; end -= step {
		start := max(0, end-step)
		for i := start; ; i++ {
			d := bytes.IndexByte(k.low[i:end], low)
			if d < 0 {
				break
			}
			if i += d; k.high[i] == high {
				if at := k.find(uint32(i + 1)); k.is(at, h) {
					k.scanned += uint64(len(k.low) - start)
					return at, true
				}
			}
		}
	}
	k.scanned += uint64(len(k.low))
	return spot{}, false
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
	if k.noted || k.full && k.cursor.at < k.indexed {
		return
	}
	k.noted = true
	if !k.room(1) {
		k.rewriteTable()
		return
	}
	k.put(k.seq, k.cursor.at)
}

// address returns the address of a block that the slot holds, which is at if
// that is true and else a new one.
func (k *slotRuns) address(r *run, p, at uint32) uint32 {
	if at > 0 && at < k.next {
		if s := k.find(at); s.ref == r.ref && s.p == p {
			return at
		}
	}
	k.gained(r, p, p+1)
	return k.next - 1
}

// index puts all addresses into the table.
func (k *slotRuns) index() {
	if !k.room(int(k.next - k.indexed)) {
		k.rewriteTable()
		return
	}
	k.fill(k.indexed)
}

// rewriteTable makes the table anew: of all blocks, if full, or of the last ones
// of each stretch.
func (k *slotRuns) rewriteTable() {
	n := len(k.journal)
	if k.full {
		n = int(k.next)
	}
	k.words = make([]uint32, n*2+32)
	k.used, k.indexed = 0, 1
	k.width = uint(min(32, max(10, bits.Len64(2*uint64(k.next)))))
	if k.full {
		k.fill(1)
		return
	}
	for i := range k.journal {
		s := &k.journal[i]
		// Others may end a run that the slot has nothing of any more, at any moment.
		r := s.ref.run.Load()
		if r == nil {
			continue
		}
		last := k.end(i) - 1
		p := s.pos + last - s.at - r.base
		if c := r.cutoff(k.slot); k.holes == 0 && c <= p {
			// The stretch's last ones were removed.
			removed := p - c + 1
			if removed > last-s.at {
				continue
			}
			p, last = p-removed, last-removed
		}
		if p < r.n.Load() {
			k.put(r.seq(p), last)
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
	for i := k.stretchOf(from); i >= 0 && i < len(k.journal); i++ {
		s := &k.journal[i]
		r := s.ref.run.Load()
		if r == nil {
			continue
		}
		n := r.n.Load()
		for a, p := max(s.at, from), s.spot(max(s.at, from)).p; a < k.end(i) && p < n; a, p = a+1, p+1 {
			k.put(r.seq(p), a)
		}
	}
	k.indexed = k.next
}

// gained notes in the journal that the slot has the blocks [a, b) of a run.
func (k *slotRuns) gained(r *run, a, b uint32) {
	pos := r.base + a
	if i := len(k.journal) - 1; i < 0 || k.journal[i].ref != r.ref || k.journal[i].pos+k.next-k.journal[i].at != pos {
		k.journal = append(k.journal, stretch{r.ref, k.next, pos})
	}
	if k.next+(b-a) < k.next {
		panic("BUG: more addresses of blocks than 32 bits can name")
	}
	k.next += b - a
	if k.low != nil {
		k.fillScan() // while they are in the cache: who scans once, scans again
	}
}

// fillScan brings low and high up to the last address.
func (k *slotRuns) fillScan() {
	from, n := len(k.low), int(k.next)-1
	if from == n {
		return
	}
	if n > cap(k.low) {
		room := n + n/4 + 64
		both := make([]byte, 2*room)
		copy(both, k.low)
		copy(both[room:], k.high)
		k.low, k.high = both[:room:room], both[room:]
	}
	k.low, k.high = k.low[:n], k.high[:n]
	i := len(k.journal) - 1
	for int(k.journal[i].at)-1 > from {
		i--
	}
	for ; i < len(k.journal); i++ {
		s := &k.journal[i]
		a, end := max(int(s.at)-1, from), int(k.end(i))-1
		low, high := k.low[a:end], k.high[a:end]
		var seqs []LocalHash
		if r := s.ref.run.Load(); r != nil {
			p, n := s.pos+uint32(a+1)-s.at-r.base, r.n.Load()
			seqs = r.seqs()[min(p, n):n]
		}
		seqs = seqs[:min(len(seqs), len(low))]
		for j, h := range seqs {
			low[j], high[j] = byte(h), byte(h>>8)
		}
		// The slot has the others no more.
		clear(low[len(seqs):])
		clear(high[len(seqs):])
	}
}

// moveCursor notes where an event ended. Without an address it is not worth to be
// in the table.
func (k *slotRuns) moveCursor(to spot, h SeqHash) {
	if k.cursor.ref != to.ref && k.cursor.ref != nil {
		k.note()
	}
	k.cursor, k.seq, k.noted = to, h, to.at == 0
}

// tidy writes the journal anew if it speaks of much more than the slot holds.
func (k *slotRuns) tidy() {
	switch {
	case k.held == 0:
		k.reset()
	case uint64(k.next) > max(k.most, 3*uint64(k.held)+uint64(k.x.slack)), len(k.journal) > k.limit, k.held < k.least:
		k.rewrite()
	}
}

// rewrite writes the journal anew, and so gives all blocks other addresses.
func (k *slotRuns) rewrite() {
	refs := k.refs()
	k.full = k.full && k.scanned >= k.x.scanEach*uint64(k.next)/2
	k.journal, k.next, k.scanned = make([]stretch, 0, len(refs)+len(refs)/4), 1, 0
	k.low, k.high = nil, nil
	var parts [][2]uint32
	for _, ref := range refs {
		var r *run
		if r, parts = k.parts(ref, parts[:0]); r == nil {
			continue
		}
		for i := 0; i < len(parts); {
			a, b := parts[i][0], parts[i][1]
			// A stretch more costs more than addresses for a few blocks that the slot
			// does not hold.
			for i++; i < len(parts) && parts[i][0] <= b+4; i++ {
				b = parts[i][1]
			}
			k.gained(r, a, b)
		}
	}
	slack := k.x.slack
	k.most = 3*uint64(k.next) + uint64(slack)
	k.limit = 2*len(k.journal) + k.held/16 + slack/8
	k.least = 0
	if k.next > uint32(slack) {
		k.least = k.held / 3
	}
	k.cursor.at, k.near.at, k.noted = 0, 0, true // addresses are others now
	k.rewriteTable()
}

// parts returns a run and appends what the slot holds of it to parts, as stretches
// [a, b). The run is nil if it is gone.
func (k *slotRuns) parts(ref *runRef, parts [][2]uint32) (*run, [][2]uint32) {
	r := ref.run.Load()
	if k.holes > 0 {
		if r = ref.lock(); r != nil {
			defer r.mu.Unlock()
		}
	}
	if r == nil {
		return nil, parts
	}
	if c := r.cutoff(k.slot); c > 0 {
		parts = append(parts, [2]uint32{0, c})
	}
	if k.holes > 0 {
		if h := r.hole(k.slot); h != nil {
			parts = h.islands(parts)
		}
	}
	return r, parts
}

// refs returns the runs of which the slot holds blocks, each once, and maybe some
// more if it has holes.
func (k *slotRuns) refs() []*runRef {
	seen := make(map[*runRef]bool, len(k.journal))
	refs := make([]*runRef, 0, len(k.journal))
	for i := range k.journal {
		ref := k.journal[i].ref
		if seen[ref] {
			continue
		}
		seen[ref] = true
		if r := ref.run.Load(); r != nil && (k.holes > 0 || r.cutoff(k.slot) > 0) {
			refs = append(refs, ref)
		}
	}
	return refs
}
