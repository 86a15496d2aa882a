// This file turns a request of a trace into the blocks that engines cache.

package fleet

import (
	"fmt"

	"kvindex/index"
)

// Prompt is a request's full blocks, from the first.
type Prompt struct {
	Locals []index.LocalHash
	Seqs   []index.SeqHash
}

// Blocks turns requests into blocks. A trace only says which spans of 512
// tokens are equal, so each hash id stands for tokens drawn from it; they are
// hashed as any producer hashes its prompts.
type Blocks struct {
	hasher index.BlockHasher
	tokens []uint32
	prompt Prompt
}

// NewBlocks returns a Blocks for blocks of that many tokens, which must divide
// TraceBlock.
func NewBlocks(blockSize int, scheme index.Hasher) (*Blocks, error) {
	if blockSize <= 0 || TraceBlock%blockSize != 0 {
		return nil, fmt.Errorf("block size %d does not divide the %d tokens of a trace's block", blockSize, TraceBlock)
	}
	return &Blocks{hasher: index.BlockHasher{BlockSize: blockSize, Scheme: scheme}}, nil
}

// Of returns the request's blocks; a last one that is not full is left out.
// They are good until the next call.
func (b *Blocks) Of(r *Request) Prompt {
	b.tokens = AppendTokens(b.tokens[:0], r)
	b.prompt.Locals = b.hasher.Append(b.prompt.Locals[:0], b.tokens, index.Extra{})
	b.prompt.Seqs = index.Chain(b.prompt.Seqs[:0], b.prompt.Locals)
	return b.prompt
}

// AppendTokens appends the request's prompt.
func AppendTokens(dst []uint32, r *Request) []uint32 {
	for i, id := range r.HashIDs {
		n := min(TraceBlock, r.InputLength-i*TraceBlock)
		for x := id * TraceBlock; n > 0; n-- {
			// splitmix64's mixing of a counter, cut to the size of a vocabulary.
			z := (x + 1) * 0x9e3779b97f4a7c15
			z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
			z = (z ^ z>>27) * 0x94d049bb133111eb
			dst = append(dst, uint32(z>>47)) // 17 bits: 131,072 tokens
			x++
		}
	}
	return dst
}
