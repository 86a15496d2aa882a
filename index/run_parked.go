// This file is what a RunIndex does out of the ordinary: blocks whose parent is
// not held, and positions that were claimed for blocks out of reach.

package index

// claim is the position that an event claimed for a block that is out of reach
// and in a run, of which the position is known.
type claim struct {
	pos   int32   // not the true one
	waits SeqHash // an ancestor that is not in a run
}

// isParked reports whether the slot holds a block out of the runs.
func (k *slotRuns) isParked(h SeqHash) bool {
	if k.parked == nil {
		return false
	}
	at := k.parked.find(h)
	return at != none && k.parked.nodes[at].state != ghost
}

// awaits reports whether blocks out of reach wait for one of these, or are among
// them.
func (k *slotRuns) awaits(seqs []SeqHash) bool {
	if k.parked == nil && k.claims == nil {
		return false
	}
	for _, seq := range seqs {
		if k.parked != nil && k.parked.find(seq) != none || k.waits[seq] > 0 {
			return true
		}
	}
	return false
}

// missing returns an ancestor of a block in a run that the slot has in no run, or
// 0: then the block is in reach.
func (k *slotRuns) missing(at spot) SeqHash {
	for {
		r := at.ref.run.Load()
		if c := r.cutoff(k.slot); at.p >= c {
			return r.seq(c)
		}
		if !r.hasParent {
			return 0
		}
		if at = r.up; !k.is(at, r.parent) {
			var ok bool
			if at, ok = k.locate(r.parent, int32(r.base)-1); !ok || at.ref.run.Load().base+at.p+1 != r.base {
				return r.parent
			}
		}
	}
}

// storeEach stores block by block, looking at all that place does not.
func (x *RunIndex) storeEach(k *slotRuns, s *Stored, seqs []SeqHash, at spot, pos uint32, placed bool, e *Effect) {
	parent, hasParent := s.Parent, s.HasParent
	for i, seq := range seqs {
		local, claimed := s.Locals[i], NoPosition
		if s.Position >= 0 {
			claimed = s.Position + int32(i)
		}
		switch {
		case placed:
			var fresh int
			reach := !hasParent || k.missing(at) == 0
			fresh, at = x.place(k, at, hasParent, parent, pos, s.Locals[i:i+1], seqs[i:i+1])
			if fresh == 0 {
				e.Duplicate++
				break
			}
			e.Stored++
			if !reach && claimed != int32(pos) {
				k.addClaim(seq, claimed, at)
			}
			x.arrived(k, seq, e)
		case k.isParked(seq):
			e.Duplicate++
		default:
			var held bool
			if at, held = k.locate(seq, claimed); held {
				e.Duplicate++
				placed, pos = true, at.ref.run.Load().base+at.p
				break
			}
			if !k.isParked(parent) {
				e.Orphan++
			}
			k.park(parent, seq, local, claimed)
			e.Stored++
		}
		parent, hasParent = seq, true
		pos++
	}
}

// park keeps a block whose parent is in no run.
func (k *slotRuns) park(parent, seq SeqHash, local LocalHash, claimed int32) {
	if k.parked == nil {
		k.parked = newSlotBlocks(k.slot, k.x.salt)
		k.parked.open()
	}
	b := k.parked
	above := b.find(parent)
	if above == none {
		above = b.add(parent)
	}
	at := b.find(seq)
	if at == none {
		at = b.add(seq)
	}
	b.nodes[at].local, b.nodes[at].pos = local, claimed
	b.hold(at, above)
}

// unpark takes a block out of the parked ones, and reports whether it was there.
func (k *slotRuns) unpark(h SeqHash) bool {
	if !k.isParked(h) {
		return false
	}
	k.parked.drop(k.parked.find(h))
	return true
}

// tidyParked frees the memory of parked blocks that are gone.
func (k *slotRuns) tidyParked() {
	if k.parked != nil {
		if k.parked.shrink(); k.parked.held == 0 {
			k.parked = nil
		}
	}
}

// arrived does what follows from a block's being in a run now: blocks that were
// parked below it go into runs too, parents first, and claims are tested.
func (x *RunIndex) arrived(k *slotRuns, seq SeqHash, e *Effect) {
	k.testClaims(seq, e)
	if k.parked == nil {
		return
	}
	todo := []SeqHash{seq}
	for len(todo) > 0 {
		parent := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for {
			b := k.parked
			above := b.find(parent)
			if above == none {
				break
			}
			child := b.nodes[above].child
			n := b.nodes[child]
			b.drop(child)
			at, ok := k.locate(parent, NoPosition)
			if !ok {
				panic("BUG: a block that arrived is not there")
			}
			pos := at.ref.run.Load().base + at.p + 1
			reach := k.missing(at) == 0
			_, at = x.place(k, at, true, parent, pos, []LocalHash{n.local}, []SeqHash{n.seq})
			switch {
			case n.pos == int32(pos):
			case !reach:
				k.addClaim(n.seq, n.pos, at)
			case n.pos >= 0:
				e.Contradiction++
			}
			k.testClaims(n.seq, e)
			todo = append(todo, n.seq)
		}
	}
	k.tidyParked()
}

// addClaim notes the position claimed for a block out of reach.
func (k *slotRuns) addClaim(seq SeqHash, pos int32, at spot) {
	if k.claims == nil {
		k.claims, k.waits = make(map[SeqHash]claim), make(map[SeqHash]int)
	}
	c := claim{pos, k.missing(at)}
	k.claims[seq] = c
	k.waits[c.waits]++
}

// dropClaim forgets what was claimed for a block.
func (k *slotRuns) dropClaim(seq SeqHash) {
	c, ok := k.claims[seq]
	if !ok {
		return
	}
	delete(k.claims, seq)
	if k.waits[c.waits]--; k.waits[c.waits] == 0 {
		delete(k.waits, c.waits)
	}
	if len(k.claims) == 0 {
		k.claims, k.waits = nil, nil
	}
}

// testClaims looks again at the claims that waited for a block that is in a run
// now, and counts those that are found wrong.
func (k *slotRuns) testClaims(arrived SeqHash, e *Effect) {
	if k.waits[arrived] == 0 {
		return
	}
	var waited []SeqHash
	for seq, c := range k.claims {
		if c.waits == arrived {
			waited = append(waited, seq)
		}
	}
	for _, seq := range waited {
		c := k.claims[seq]
		at, ok := k.locate(seq, NoPosition)
		if !ok {
			panic("BUG: claim about a block that is not there")
		}
		k.dropClaim(seq)
		switch {
		case k.missing(at) != 0:
			k.addClaim(seq, c.pos, at)
		case c.pos >= 0:
			e.Contradiction++
		}
	}
}
