// This file is a RunIndex's reading of blocks by their sequence hashes.

package index

// Locals implements SeqReader. It takes no lock and compares the hashes that
// runs keep, so that a block costs no hashing; a lookup comes with each run.
func (x *RunIndex) Locals(dst []LocalHash, seqs []SeqHash) []LocalHash {
	var prev SeqHash
	for at := 0; at < len(seqs); {
		r := x.lookupSeq(seqs[at], uint32(at), prev)
		if r == nil {
			break
		}
		n := min(r.n.Load(), uint32(len(seqs)-at))
		c := uint32(0)
		for c < n && r.seq(c) == seqs[at+int(c)] {
			c++
		}
		if c == 0 {
			break // just made, or gone
		}
		dst = append(dst, r.buf[:c]...)
		at += int(c)
		prev = seqs[at-1]
	}
	return dst
}

// lookupSeq returns the run that begins with the block of this sequence hash, or
// nil. prev is the sequence hash of the block before it, which a root has not.
func (x *RunIndex) lookupSeq(seq SeqHash, pos uint32, prev SeqHash) *run {
	t := x.table.Load()
	base, i := t.home(x.mix(seq))
	for {
		p := &t.places[base+i]
		r := p.run.Load()
		if r == nil {
			return nil
		}
		if p.seq.Load() == uint64(seq) && r.first == seq && r.base == pos && r != removed {
			if local := r.buf[0]; pos == 0 && SeqHash(local) == seq || pos > 0 && Next(prev, local) == seq {
				return r
			}
		}
		i = (i + 1) & (t.size - 1)
	}
}
