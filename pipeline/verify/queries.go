package verify

// This file makes queries that are worth asking: about what is held.

import (
	"math/rand/v2"
	"slices"

	"kvindex/index"
)

// Query is a prompt to ask about.
type Query struct {
	Model     string
	BlockSize int32
	Locals    []index.LocalHash
}

// leaf is the last block of a chain that a worker-rank holds in one tier or several.
type leaf struct {
	*rank
	seq index.SeqHash
}

func (o *Oracle) leaves() []leaf {
	res := o.resolve()
	if res.leaves == nil {
		for _, r := range res.ranks {
			parents := make(map[index.SeqHash]struct{})
			for _, held := range r.tiers {
				for seq := range held {
					b, _ := o.block(r.rank, seq)
					parents[b.parent] = struct{}{}
				}
			}
			var own []index.SeqHash
			for _, held := range r.tiers {
				for seq := range held {
					if _, inner := parents[seq]; !inner {
						own = append(own, seq)
					}
				}
			}
			slices.Sort(own) // so that a seed gives the same queries again
			for _, seq := range slices.Compact(own) {
				res.leaves = append(res.leaves, leaf{r.rank, seq})
			}
		}
	}
	return res.leaves
}

// block returns how a block that the rank holds, or an ancestor of one, came about. Of
// opaque hashes it knows those that are held.
func (o *Oracle) block(r *rank, seq index.SeqHash) (b block, known bool) {
	for _, own := range r.own {
		if b, known = own[seq]; known {
			return b, true
		}
	}
	if r.hasher != index.Opaque.String() {
		b, known = o.blocks[seq]
	}
	return b, known
}

// chain returns the locals from the root to the leaf, across blocks that are held no
// more; nil if an ancestor was never stored, or an opaque one is not held.
func (o *Oracle) chain(l leaf) []index.LocalHash {
	held := 0
	for _, tier := range l.tiers {
		held += len(tier)
	}
	var locals []index.LocalHash
	for seq, seen := l.seq, 0; ; seen++ {
		b, known := o.block(l.rank, seq)
		if !known || seen > held && l.hasher == index.Opaque.String() {
			return nil // the latter are each other's ancestors
		}
		locals = append(locals, b.local)
		if !b.hasParent {
			slices.Reverse(locals)
			return locals
		}
		seq = b.parent
	}
}

// Queries returns n random queries: chains that are held, whole or cut, going
// on into blocks that nobody has, or with a strange block in their middle. It
// returns fewer, possibly none, if hardly any chain is held from its root.
func (o *Oracle) Queries(rng *rand.Rand, n int) []Query {
	leaves := o.leaves()
	var queries []Query
	for tries := 2 * n; tries > 0 && len(queries) < n && len(leaves) > 0; tries-- {
		l := leaves[rng.IntN(len(leaves))]
		locals := o.chain(l)
		if locals == nil {
			continue
		}
		switch rng.IntN(4) {
		case 0: // whole
		case 1:
			locals = locals[:1+rng.IntN(len(locals))]
		case 2:
			locals = locals[:1+rng.IntN(len(locals))]
			for range 1 + rng.IntN(8) {
				locals = append(locals, index.LocalHash(rng.Uint64()))
			}
		case 3:
			locals[rng.IntN(len(locals))] = index.LocalHash(rng.Uint64())
		}
		queries = append(queries, Query{l.model, l.blockSize, locals})
	}
	return queries
}
