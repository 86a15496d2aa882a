package snapshot

// This file packs a dump's blocks into the chains of chunks.

import (
	"kvindex/index"
	"kvindex/schemas"
)

const (
	// defaultChunkBytes leaves the rest of 512 KiB to the worker's name and the
	// chunk's other fields.
	defaultChunkBytes = 511 << 10
	// chainOverhead is the most that a chain takes besides its hashes: tier 1,
	// parent 9, position 6, two counts and their ends 10.
	chainOverhead = 26
)

// Packed is one worker-rank's blocks, joined into chains and cut into chunks.
// The zero Packed is empty. Packing only copies hashes and follows their chain
// (some 10 ns a block), so that the goroutine that owns the index is soon free
// again; encoding is left to the Writer. A Packed can be reset and used again,
// and then allocates only for what it has not held before.
type Packed struct {
	// ChunkBytes is the most that the chains of a chunk take when encoded, 511 KiB
	// if it is 0. It is set before the first Add.
	ChunkBytes int

	chunks []packedChunk // the first n are in use
	n      int
	blocks int64

	// The last block added, which the next one may continue.
	tier   index.Tier
	opaque bool
	pos    int32
	seq    index.SeqHash
}

type packedChunk struct {
	runs   []run
	locals []index.LocalHash
	hashes []index.SeqHash
	bytes  int // encoded, estimated from above
}

// run is a chain whose hashes are a part of its chunk's.
type run struct {
	tier      index.Tier
	hasParent bool
	parent    index.SeqHash
	position  int32
	locals    int32 // how many
	hashes    int32 // as many, or none
}

// Reset empties p and keeps its storage.
func (p *Packed) Reset() { p.n, p.blocks = 0, 0 }

// Blocks returns how many blocks p holds.
func (p *Packed) Blocks() int64 { return p.blocks }

// Chunks returns how many chunks the blocks make.
func (p *Packed) Chunks() int { return p.n }

// Bytes returns what the chunks take when encoded, estimated from above.
func (p *Packed) Bytes() int64 {
	var n int64
	for i := range p.n {
		n += int64(p.chunks[i].bytes)
	}
	return n
}

// Add adds blocks, parents before their children, and copies what it keeps. It
// always returns true: it is what index.Worker.Dump yields to. A block that
// continues the one before it (same tier, its sequence hash as parent, next
// position) joins its chain.
func (p *Packed) Add(t index.Tier, s index.Stored) bool {
	for i, local := range s.Locals {
		opaque := len(s.Hashes) > 0
		if i > 0 || p.continues(t, opaque, &s) {
			p.pos = next(p.pos)
		} else {
			p.begin(t, opaque, &s)
		}
		size := 8
		if opaque {
			size = 16
		}
		if c := p.last(); c.bytes+size > p.most() {
			p.split()
		}
		c := p.last()
		r := &c.runs[len(c.runs)-1]
		c.locals = append(c.locals, local)
		r.locals++
		switch {
		case opaque:
			c.hashes = append(c.hashes, s.Hashes[i])
			r.hashes++
			p.seq = s.Hashes[i]
		case !r.hasParent && r.locals == 1:
			p.seq = index.SeqHash(local)
		default:
			p.seq = index.Next(p.seq, local)
		}
		c.bytes += size
		p.blocks++
	}
	return true
}

func (p *Packed) continues(t index.Tier, opaque bool, s *index.Stored) bool {
	return p.n > 0 && t == p.tier && opaque == p.opaque && s.HasParent && s.Parent == p.seq && s.Position == next(p.pos)
}

// begin starts a chain, in a new chunk if the last one is full.
func (p *Packed) begin(t index.Tier, opaque bool, s *index.Stored) {
	p.tier, p.opaque, p.pos, p.seq = t, opaque, s.Position, s.Parent
	if p.n == 0 || p.last().bytes+chainOverhead+16 > p.most() {
		p.grow()
	}
	p.push(s.HasParent, s.Parent)
}

// split goes on with the chain in a new chunk; p.seq is its parent there.
func (p *Packed) split() {
	c := p.last()
	if c.runs[len(c.runs)-1].locals == 0 {
		panic("BUG: a chain was begun in a chunk without room for a block")
	}
	p.grow()
	p.push(true, p.seq)
}

func (p *Packed) push(hasParent bool, parent index.SeqHash) {
	c := p.last()
	c.runs = append(c.runs, run{tier: p.tier, hasParent: hasParent, parent: parent, position: p.pos})
	c.bytes += chainOverhead
}

func (p *Packed) most() int {
	if p.ChunkBytes > 0 {
		return p.ChunkBytes
	}
	return defaultChunkBytes
}

func (p *Packed) last() *packedChunk { return &p.chunks[p.n-1] }

func (p *Packed) grow() {
	if p.n == len(p.chunks) {
		p.chunks = append(p.chunks, packedChunk{})
	}
	p.n++
	c := p.last()
	c.runs, c.locals, c.hashes, c.bytes = c.runs[:0], c.locals[:0], c.hashes[:0], 0
}

// fill sets c's chains to those of chunk n; they alias p.
func (p *Packed) fill(c *schemas.Chunk, n int) {
	from := &p.chunks[n]
	locals, hashes := from.locals, from.hashes
	c.Chains = c.Chains[:0]
	for _, r := range from.runs {
		c.Chains = append(c.Chains, schemas.Chain{Tier: r.tier, Stored: index.Stored{
			Parent:    r.parent,
			HasParent: r.hasParent,
			Position:  r.position,
			Locals:    locals[:r.locals],
			Hashes:    hashes[:r.hashes],
		}})
		locals, hashes = locals[r.locals:], hashes[r.hashes:]
	}
}

// next returns the position after pos.
func next(pos int32) int32 {
	if pos == index.NoPosition {
		return index.NoPosition
	}
	return pos + 1
}
