// This file takes blocks out of a RunIndex.

package index

// Remove implements Structure.
func (x *RunIndex) Remove(slot Slot, hashes []SeqHash) Effect {
	k := x.slot(slot)
	if k == nil {
		return Effect{Unknown: len(hashes)}
	}
	var e Effect
	for i := 0; i < len(hashes); {
		at, ok := k.locateNear(hashes[i])
		if !ok {
			if k.unpark(hashes[i]) {
				e.Removed++
			} else {
				e.Unknown++
			}
			i++
			continue
		}
		n := x.take(k, at, hashes[i:])
		if k.claims != nil {
			for _, h := range hashes[i : i+n] {
				k.dropClaim(h)
			}
		}
		e.Removed += n
		i += n
	}
	k.tidyParked()
	if e.Removed > 0 {
		x.blocks.Add(-int64(e.Removed))
		k.tidy()
	}
	return e
}

// take takes the block at a spot from the slot, and as many of the following as
// go on in the run, up or down. hashes begins with the spot's. It returns how many.
func (x *RunIndex) take(k *slotRuns, at spot, hashes []SeqHash) (taken int) {
	r, p := at.ref.lock(), at.p
	n := r.n.Load()
	hadTail := r.covers(k.slot, n-1)
	c := r.cutoff(k.slot)
	if p+1 == c && r.hole(k.slot) == nil {
		// Leaves first, as caches evict: one store.
		for taken = 1; taken < len(hashes) && uint32(taken) <= p && r.seq(p-uint32(taken)) == hashes[taken]; {
			taken++
		}
		x.setCutoff(r, k.slot, c-uint32(taken))
		p -= uint32(taken) - 1
	} else {
		for {
			x.uncover(k, r, p)
			if taken++; taken == len(hashes) {
				break
			}
			if h := hashes[taken]; p > 0 && r.seq(p-1) == h && r.covers(k.slot, p-1) {
				p--
			} else if p+1 < n && r.seq(p+1) == h && r.covers(k.slot, p+1) {
				p++
			} else {
				break
			}
		}
	}
	k.held -= taken
	k.near = spot{r.ref, p, at.at + p - at.p}
	switch now := r.cutoff(k.slot); {
	case now == c: // removed behind a hole
	case now > 0:
		// What is removed next, or stored, may follow here.
		k.moveCursor(spot{r.ref, now - 1, k.address(r, now-1, at.at+now-1-at.p)}, r.seq(now-1))
	case k.cursor.ref == r.ref:
		k.cursor, k.noted = spot{}, true
	}
	x.settle(r, k.slot, hadTail).mu.Unlock()
	return taken
}

// Clear implements Structure.
func (x *RunIndex) Clear(slot Slot) int {
	k := x.slot(slot)
	if k == nil {
		return 0
	}
	n := k.held
	if k.parked != nil {
		n += k.parked.held
	}
	for _, ref := range k.refs() {
		r := ref.lock()
		hadTail := r.covers(slot, r.n.Load()-1)
		x.setCutoff(r, slot, 0)
		if r.hole(slot) != nil {
			r.dropHole(k)
		}
		x.settle(r, slot, hadTail).mu.Unlock()
	}
	k.reset()
	k.held, k.parked, k.claims, k.waits = 0, nil, nil, nil
	x.blocks.Add(-int64(n))
	return n
}

// Dump implements Structure. Blocks out of the runs come first: what is below
// them may be in runs.
func (x *RunIndex) Dump(slot Slot, yield func(Stored) bool) {
	k := x.slot(slot)
	if k == nil {
		return
	}
	var local [1]LocalHash
	if b := k.parked; b != nil {
		for top := range b.nodes {
			if top := uint32(top); b.nodes[top].state == ghost && b.nodes[top].child != none {
				for at := b.after(top, top); at != none; at = b.after(at, top) {
					n := &b.nodes[at]
					local[0] = n.local
					if !yield(Stored{Parent: b.nodes[n.parent].seq, HasParent: true, Position: n.pos, Locals: local[:]}) {
						return
					}
				}
			}
		}
	}
	refs := k.refs()
	sortByPosition(refs)
	for _, ref := range refs {
		r := ref.run.Load()
		parts := [][2]uint32{{0, r.cutoff(slot)}}
		if k.holes > 0 {
			parts = append(parts, ref.islands(slot)...)
		}
		for _, part := range parts {
			for p := part[0]; p < part[1]; p++ {
				s := Stored{Parent: r.parent, HasParent: r.hasParent, Position: int32(r.base + p)}
				if p > 0 {
					s.Parent, s.HasParent = r.seq(p-1), true
				}
				if k.claims != nil {
					if c, ok := k.claims[r.seq(p)]; ok {
						s.Position = c.pos
					}
				}
				local[0] = r.buf[p]
				s.Locals = local[:]
				if !yield(s) {
					return
				}
			}
		}
	}
}
