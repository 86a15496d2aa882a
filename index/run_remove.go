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
		x.lane(slot).blocks.Add(-int64(e.Removed))
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
	end := 1 // hashes that go on upwards from the first
	for end < len(hashes) && p+uint32(end) < c && r.seq(p+uint32(end)) == hashes[end] {
		end++
	}
	whole := p+uint32(end) == c && r.hole(k.slot) == nil // all that the slot holds from p on
	switch {
	case whole && end == 1:
		// Leaves first, as caches evict: one store.
		for taken = 1; taken < len(hashes) && uint32(taken) <= p && r.seq(p-uint32(taken)) == hashes[taken]; {
			taken++
		}
		p -= uint32(taken) - 1
		x.setCutoff(r, k.slot, p)
	case whole:
		taken = end
		x.setCutoff(r, k.slot, p)
	default:
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
	n := k.len()
	for _, ref := range k.refs() {
		r := ref.lock()
		if r == nil {
			continue // the slot held nothing of it
		}
		hadTail := r.covers(slot, r.n.Load()-1)
		x.setCutoff(r, slot, 0)
		if r.hole(slot) != nil {
			r.dropHole(k)
		}
		x.settle(r, slot, hadTail).mu.Unlock()
	}
	k.reset()
	k.held, k.parked, k.claims, k.waits = 0, nil, nil, nil
	x.lane(slot).blocks.Add(-int64(n))
	return n
}
