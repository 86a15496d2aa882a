package snapshot

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// fill stores chains with shared prefixes, branches, holes, orphans and tiers.
func fill(t testing.TB, w *index.Worker) {
	t.Helper()
	store := func(tier index.Tier, s index.Stored) {
		if _, err := w.Store(tier, s); err != nil {
			t.Fatal(err)
		}
	}
	for tier := range index.Tier(2) {
		for c := range 20 {
			trunk := locals(int(tier)*100+c, 300)
			store(tier, index.Stored{Position: 0, Locals: trunk})
			seq := index.Chain(nil, trunk)
			for b := range 5 {
				at := 30 * (b + 1)
				store(tier, index.Stored{HasParent: true, Parent: seq[at-1], Position: int32(at), Locals: locals(5000+c*10+b, 40)})
			}
			w.Remove(tier, []index.SeqHash{seq[200], seq[201]})
		}
		store(tier, index.Stored{HasParent: true, Parent: 99, Position: 4, Locals: locals(9, 7)})
		store(tier, index.Stored{HasParent: true, Parent: 98, Position: index.NoPosition, Locals: locals(8, 7)})
	}
}

// dumped returns the worker's blocks as text, in an order of its own: where an
// index may choose, two need not dump in the same order.
func dumped(w *index.Worker) []string {
	var out []string
	w.Dump(func(t index.Tier, s index.Stored) bool {
		for b := range s.Singles() {
			out = append(out, fmt.Sprint(t, b))
		}
		return true
	})
	slices.Sort(out)
	return out
}

// block is a Stored of one block.
type block struct {
	tier      index.Tier
	hasParent bool
	parent    index.SeqHash
	position  int32
	local     index.LocalHash
	hash      index.SeqHash
}

func (b block) stored() index.Stored {
	s := index.Stored{Parent: b.parent, HasParent: b.hasParent, Position: b.position, Locals: []index.LocalHash{b.local}}
	if b.hash != 0 {
		s.Hashes = []index.SeqHash{b.hash}
	}
	return s
}

// encode encodes every chunk, checks its size, and returns what decoding gives, block by block.
func encode(t testing.TB, p *Packed, limit int) []block {
	t.Helper()
	var out []block
	var c, got schemas.Chunk
	c.Worker = "worker"
	for n := range p.Chunks() {
		p.fill(&c, n)
		value, err := schemas.AppendChunk(nil, &c)
		if err != nil {
			t.Fatal(err)
		}
		if len(value) > p.chunks[n].bytes+64 || p.chunks[n].bytes > limit {
			t.Errorf("chunk %d is %d bytes, estimated %d, limit %d", n, len(value), p.chunks[n].bytes, limit)
		}
		if err := schemas.DecodeChunk(&got, value); err != nil {
			t.Fatal(err)
		}
		for _, chain := range got.Chains {
			parent, hasParent, position := chain.Parent, chain.HasParent, chain.Position
			for i, local := range chain.Locals {
				b := block{chain.Tier, hasParent, parent, position, local, 0}
				switch {
				case len(chain.Hashes) > 0:
					b.hash = chain.Hashes[i]
					parent = b.hash
				case hasParent:
					parent = index.Next(parent, local)
				default:
					parent = index.SeqHash(local)
				}
				hasParent, position = true, next(position)
				out = append(out, b)
			}
		}
	}
	return out
}

// Whatever order blocks are added in, the same blocks come out, and consecutive
// ones share a chain.
func TestPackRoundTrip(t *testing.T) {
	for _, tc := range []struct {
		name   string
		add    func(add func(index.Tier, index.Stored) bool)
		chains int
	}{
		{"nothing", func(func(index.Tier, index.Stored) bool) {}, 0},
		{"a root chain", chainOf(0, false, 0, 5, false), 1},
		{"an orphan chain", chainOf(index.Host, true, 77, 5, false), 1},
		{"unknown positions", chainOf(index.Disk, true, index.NoPosition, 5, false), 1},
		{"opaque", chainOf(0, false, 0, 5, true), 1},
		{"two roots", func(add func(index.Tier, index.Stored) bool) {
			chainOf(0, false, 0, 5, false)(add)
			chainOf(0, false, 0, 3, false)(add)
		}, 2},
		{"the same in two tiers", func(add func(index.Tier, index.Stored) bool) {
			chainOf(0, false, 0, 5, false)(add)
			chainOf(1, false, 0, 5, false)(add)
		}, 2},
		{"several chunks", chainOf(0, false, 0, 500, false), 9},
		{"several opaque chunks", chainOf(0, false, 0, 500, true), 17},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := &Packed{ChunkBytes: smallChunk}
			for range 2 { // the second time in the first one's storage
				p.Reset()
				var want []block
				tc.add(func(tier index.Tier, s index.Stored) bool {
					b := block{tier, s.HasParent, s.Parent, s.Position, s.Locals[0], 0}
					if len(s.Hashes) > 0 {
						b.hash = s.Hashes[0]
					}
					want = append(want, b)
					return p.Add(tier, s)
				})
				if got := encode(t, p, smallChunk); !slices.Equal(got, want) {
					t.Errorf("blocks\n%v\nwant\n%v", got, want)
				}
				var chains int
				for n := range p.n {
					chains += len(p.chunks[n].runs)
				}
				if chains != tc.chains || p.Blocks() != int64(len(want)) {
					t.Errorf("%d chains of %d blocks, want %d of %d", chains, p.Blocks(), tc.chains, len(want))
				}
			}
		})
	}
}

// chainOf adds a chain of n blocks, one by one.
func chainOf(tier index.Tier, orphan bool, position int32, n int, opaque bool) func(func(index.Tier, index.Stored) bool) {
	return func(add func(index.Tier, index.Stored) bool) {
		b := block{tier: tier, hasParent: orphan, position: position}
		if orphan {
			b.parent = 4242
		}
		for i := range n {
			b.local = index.LocalHash(i + 1)
			seq := index.SeqHash(b.local)
			if b.hasParent {
				seq = index.Next(b.parent, b.local)
			}
			if opaque {
				seq = index.SeqHash(1<<40 + i)
				b.hash = seq
			}
			add(tier, b.stored())
			b.hasParent, b.parent, b.position = true, seq, next(b.position)
		}
	}
}

// Blocks in any order, joined or not, come out as they went in; also those of
// events of several blocks.
func TestPackRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		p := &Packed{ChunkBytes: smallChunk}
		var want []block
		var b block
		for range rng.IntN(400) {
			n := 1
			if rng.IntN(4) > 0 && len(want) > 0 { // continue
				b.hasParent = true
				if b.parent = index.SeqHash(b.local); len(want) > 0 && want[len(want)-1].hasParent {
					b.parent = index.Next(want[len(want)-1].parent, b.local)
				}
				b.position = next(b.position)
			} else {
				b = block{tier: index.Tier(rng.IntN(4)), hasParent: rng.IntN(2) == 0, position: int32(rng.IntN(3)) - 1}
				if b.hasParent {
					b.parent = index.SeqHash(rng.Uint64())
				}
				n += rng.IntN(100)
			}
			s := index.Stored{Parent: b.parent, HasParent: b.hasParent, Position: b.position}
			for i := range n {
				if i > 0 {
					if b.hasParent {
						b.parent = index.Next(b.parent, b.local)
					} else {
						b.parent = index.SeqHash(b.local)
					}
					b.hasParent, b.position = true, next(b.position)
				}
				b.local = index.LocalHash(rng.Uint64())
				s.Locals = append(s.Locals, b.local)
				want = append(want, b)
			}
			p.Add(b.tier, s)
		}
		if got := encode(t, p, smallChunk); !slices.Equal(got, want) {
			t.Fatalf("blocks\n%v\nwant\n%v", got, want)
		}
	}
}

// Chunks of their real size stay within it.
func TestPackChunkSize(t *testing.T) {
	var p Packed
	for i := range 3 {
		p.Add(index.Device, index.Stored{Position: 0, Locals: locals(i, 150_000)})
	}
	if got := len(encode(t, &p, defaultChunkBytes)); got != 450_000 || p.Chunks() != 7 {
		t.Errorf("%d blocks in %d chunks, want 450000 in 7", got, p.Chunks())
	}
}

// A Packed that has held as much before allocates nothing.
func TestPackAllocates(t *testing.T) {
	var p Packed
	chain := locals(1, 20_000)
	n := testcontainers.LeastAllocs(1, func() {
		p.Reset()
		p.Add(index.Device, index.Stored{Position: 0, Locals: chain})
	})
	if n > 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
