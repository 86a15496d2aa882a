package index_test

import (
	"slices"
	"testing"

	"kvindex/index"
)

// A chain taken apart and stored block by block is the chain.
func TestSingles(t *testing.T) {
	locals := chainOf("a", 4)
	seqs := index.Chain(nil, locals)
	parent := index.SeqHash(99)
	below := []index.SeqHash{index.Next(parent, locals[0])}
	for _, l := range locals[1:] {
		below = append(below, index.Next(below[len(below)-1], l))
	}
	opaque := []index.SeqHash{5, 6, 7, 8}
	for _, c := range []struct {
		name    string
		chain   index.Stored
		parents []index.SeqHash // of the blocks after the first
		pos     []int32
	}{
		{"root", index.Stored{Locals: locals}, seqs, []int32{0, 1, 2, 3}},
		{"below a parent", index.Stored{Parent: parent, HasParent: true, Position: 7, Locals: locals}, below, []int32{7, 8, 9, 10}},
		{"without a position", index.Stored{Parent: parent, HasParent: true, Position: index.NoPosition, Locals: locals}, below, []int32{-1, -1, -1, -1}},
		{"opaque", index.Stored{Locals: locals, Hashes: opaque}, opaque, []int32{0, 1, 2, 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := 0
			for b := range c.chain.Singles() {
				want := c.chain
				want.Position, want.Locals = c.pos[i], locals[i:i+1]
				if i > 0 {
					want.Parent, want.HasParent = c.parents[i-1], true
				}
				if len(c.chain.Hashes) > 0 {
					want.Hashes = opaque[i : i+1]
				}
				if b.Parent != want.Parent || b.HasParent != want.HasParent || b.Position != want.Position ||
					!slices.Equal(b.Locals, want.Locals) || !slices.Equal(b.Hashes, want.Hashes) {
					t.Fatalf("block %d: got %+v, want %+v", i, b, want)
				}
				i++
			}
			if i != len(locals) {
				t.Fatalf("%d blocks, want %d", i, len(locals))
			}
			for range c.chain.Singles() {
				break
			}
		})
	}
}
