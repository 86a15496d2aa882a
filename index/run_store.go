// This file stores blocks in a RunIndex: an event's chain on its way into runs.

package index

// chain appends the sequence hashes of the event's blocks to dst. It refuses
// what check does, and opaque hashes.
func (s *Stored) chain(dst []SeqHash) ([]SeqHash, error) {
	if len(s.Hashes) > 0 {
		if err := s.check(); err != nil {
			return dst, err
		}
		return dst, ErrOpaqueHash
	}
	if len(s.Locals) == 0 {
		return dst, ErrEmptyStore
	}
	if s.Position < NoPosition || int64(s.Position)+int64(len(s.Locals))-1 > 1<<31-1 {
		return dst, ErrBadPosition
	}
	prev, rest, self := s.Parent, s.Locals, false
	if !s.HasParent {
		prev, rest = SeqHash(s.Locals[0]), s.Locals[1:]
		dst = append(dst, prev)
	}
	if prev == 0 {
		return dst, ErrNullHash
	}
	for _, l := range rest {
		seq := Next(prev, l)
		if seq == 0 {
			return dst, ErrNullHash
		}
		self = self || seq == prev
		dst = append(dst, seq)
		prev = seq
	}
	if self {
		return dst, ErrSelfParent
	}
	return dst, nil
}

// scratchBlocks is the longest event whose memory is kept.
const scratchBlocks = 4096

// Store implements Structure.
func (x *RunIndex) Store(slot Slot, s Stored) (Effect, error) {
	kept := &x.lane(slot).scratch
	seqs := kept.Swap(nil)
	if seqs == nil {
		seqs = new([]SeqHash)
	}
	e, err := x.store(slot, &s, seqs)
	if cap(*seqs) <= scratchBlocks {
		kept.Store(seqs)
	}
	return e, err
}

func (x *RunIndex) store(slot Slot, s *Stored, scratch *[]SeqHash) (e Effect, err error) {
	seqs, err := s.chain((*scratch)[:0])
	*scratch = seqs
	if err != nil {
		return e, err
	}
	k := x.slot(slot)
	if k == nil {
		k = x.addSlot(slot)
	}
	at, pos, placed, reach := spot{}, uint32(0), true, true
	if s.HasParent {
		if at, placed = k.locate(s.Parent, max(s.Position, 0)-1); placed {
			pos = at.ref.run.Load().base + at.p + 1
			// Whether the parent is in reach matters only to a claim that differs.
			if s.Position != int32(pos) {
				reach = k.missing(at) == 0
			}
		}
	}
	if placed && reach && s.Position >= 0 && s.Position != int32(pos) {
		e.Contradiction += len(seqs)
	}
	if placed && reach && !k.awaits(seqs) {
		e.Stored, _ = x.place(k, at, s.HasParent, s.Parent, pos, s.Locals, seqs)
		e.Duplicate = len(seqs) - e.Stored
	} else {
		x.storeEach(k, s, seqs, at, pos, placed, &e)
	}
	if e.Stored > 0 {
		x.lane(slot).blocks.Add(int64(e.Stored))
		k.tidy()
	}
	return e, nil
}

// place gives a slot a chain of blocks, of which the first is at position pos
// and its parent, if it has one, at a spot that the slot holds. It returns how many
// are new to the slot and where the last one is.
func (x *RunIndex) place(k *slotRuns, at spot, hasParent bool, parent SeqHash, pos uint32, locals []LocalHash, seqs []SeqHash) (fresh int, last spot) {
	i := 0
	last = at
	if hasParent {
		// A run that goes on otherwise never goes on like this, so it needs no lock.
		if r, p := at.ref.run.Load(), at.p+1; p >= r.n.Load() || r.buf[p] == locals[0] {
			n, f, ref := x.goOn(k, at.ref.lock(), p, locals, seqs)
			if i, fresh = n, f; n > 0 {
				last = spot{ref: ref, p: at.p + uint32(n)}
			}
		}
	}
	for i < len(locals) {
		if i > 0 {
			hasParent, parent = true, seqs[i-1]
		}
		r := x.lockHead(seqs[i], pos+uint32(i), locals[i])
		if r == nil {
			r = x.newRun(last, hasParent, parent, pos+uint32(i), locals[i:], seqs[i])
			if !x.insert(r) {
				continue // another writer was first
			}
			x.lane(k.slot).entries.Add(1)
			r.n.Store(1)
		}
		n, f, ref := x.goOn(k, r, 0, locals[i:], seqs[i:])
		i += n
		fresh += f
		last = spot{ref: ref, p: uint32(n - 1)}
	}
	k.held += fresh
	return fresh, last
}

// newRun returns a locked run of one block, not published, with room for all.
func (x *RunIndex) newRun(up spot, hasParent bool, parent SeqHash, pos uint32, locals []LocalHash, seq SeqHash) *run {
	c := min(max(len(locals), 4), int(x.maxRun))
	r := &run{first: seq, base: pos, buf: make([]LocalHash, 2*c), ref: new(runRef), parent: parent, up: up, hasParent: hasParent}
	r.buf[0], r.buf[c] = locals[0], LocalHash(seq)
	r.ref.run.Store(r)
	r.mu.Lock()
	return r
}

// goOn gives the slot the blocks that a locked run has from p on, as far as they
// are those, and makes new ones at its end if it can. It unlocks the run. It
// returns how many of the blocks are in the run, and how many new to the slot.
func (x *RunIndex) goOn(k *slotRuns, r *run, p uint32, locals []LocalHash, seqs []SeqHash) (taken, fresh int, ref *runRef) {
	n := r.n.Load()
	hadTail := r.tail > 0 && r.covers(k.slot, n-1)
	taken = common(locals, r.buf[p:n])
	if p+uint32(taken) == n && taken < len(locals) && !r.sealed {
		var made int
		if r, made = x.extend(k, r, locals[taken:], seqs[taken:]); made > 0 {
			taken += made
			r.tail, hadTail = 0, false
		}
	}
	if taken == 0 {
		r.mu.Unlock()
		return 0, 0, nil
	}
	a, b := p, p+uint32(taken)
	if c := r.cutoff(k.slot); c < b {
		if r.holes == nil {
			a = max(p, c)
		}
		if fresh = x.cover(k, r, p, b); fresh > 0 {
			k.gained(r, a, b)
		}
	}
	address := uint32(0)
	if fresh > 0 {
		address = k.next - 1
	}
	k.moveCursor(spot{r.ref, b - 1, address}, seqs[taken-1])
	r = x.settle(r, k.slot, hadTail)
	ref = r.ref
	r.mu.Unlock()
	return taken, fresh, ref
}

// extend makes blocks at the end of a locked run that is not sealed, and returns
// its object and how many.
func (x *RunIndex) extend(k *slotRuns, r *run, locals []LocalHash, seqs []SeqHash) (*run, int) {
	n := r.n.Load()
	if n == x.maxRun {
		return r, 0
	}
	want := min(uint32(len(locals)), x.maxRun-n)
	made := uint32(0)
	t := x.table.Load() // has all runs that may begin with one of these: who makes one holds its parent
	for ; made < want; made++ {
		word, mask := t.bit(x.mix(seqs[made]))
		if word.Load()&mask != 0 && x.lookup(seqs[made], r.base+n+made, locals[made]) != nil {
			break
		}
	}
	if made < want {
		r.sealed = true
	}
	if made == 0 {
		return r, 0
	}
	if n+made > r.capacity() {
		r = x.resize(r, min(max(n+made, n+n/4+4), x.maxRun))
	}
	copy(r.buf[n:], locals[:made])
	to := r.seqs()[n : n+made]
	for i, s := range seqs[:made] {
		to[i] = LocalHash(s)
	}
	x.lane(k.slot).entries.Add(int64(made))
	r.n.Store(n + made)
	return r, int(made)
}

// common returns how many leading hashes are equal. It compares in large steps:
// most blocks that are compared are equal.
func common(a, b []LocalHash) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	i := 0
	for i+64 <= n && *(*[64]LocalHash)(a[i:]) == *(*[64]LocalHash)(b[i:]) {
		i += 64
	}
	for i+8 <= n {
		p, q := (*[8]LocalHash)(a[i:]), (*[8]LocalHash)(b[i:])
		if (p[0]^q[0])|(p[1]^q[1])|(p[2]^q[2])|(p[3]^q[3])|(p[4]^q[4])|(p[5]^q[5])|(p[6]^q[6])|(p[7]^q[7]) != 0 {
			break
		}
		i += 8
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}
