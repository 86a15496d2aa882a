// This file computes local hashes from tokens and sequence hashes from local
// hashes.

package index

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/xxh3"
)

// hashSeed is the seed of every hash of blocks.
const hashSeed = 1337

// BlockHasher turns the tokens of a prompt into local hashes. Every producer of
// a model and everyone who asks about it must use the same one. The zero value
// is not useful: BlockSize must be above 0. It may be used by many goroutines.
type BlockHasher struct {
	BlockSize int    // tokens a block
	Scheme    Hasher // Flash or Dynamo

	// Eagle hashes windows of BlockSize+1 tokens, one every BlockSize tokens:
	// with EAGLE drafting a block's cache depends on the token after it too.
	Eagle bool
}

// Extra is what besides tokens goes into the local hashes of a prompt.
type Extra struct {
	LoRA string   // adapter's name, empty for the base model
	Salt string   // keeps tenants' caches apart; empty for none
	MM   []MMHash // multimodal inputs, in any order
}

// MMHash is one multimodal input of a prompt: what it is and where its
// placeholder tokens are. It counts in each block that has at least one of
// them. An input that is there several times is given several times; within a
// block it counts once.
type MMHash struct {
	Hash  uint64 // see MMIdentifier
	Start int    // first token, from the prompt's first
	End   int    // the token after the last
}

// Append appends the local hashes of the full blocks of tokens to dst; a last
// block that is not full is dropped. It allocates only if dst must grow, if a
// block has more than 16 multimodal inputs, or if its tokens, LoRA name and
// multimodal hashes take more than 2 KiB. A scheme whose hashes cannot be
// computed (Opaque) or a BlockSize below 1 gives none.
func (h BlockHasher) Append(dst []LocalHash, tokens []uint32, x Extra) []LocalHash {
	if h.BlockSize < 1 || (h.Scheme != Flash && h.Scheme != Dynamo) {
		return dst
	}
	seed := uint64(hashSeed)
	if x.Salt != "" {
		seed += xxh3.HashStringSeed(x.Salt, 1)
	}
	lora := x.LoRA
	if lora != "" && h.Scheme == Dynamo {
		seed += xxh3.HashString(lora)
		lora = ""
	}
	window := h.BlockSize
	if h.Eagle {
		window++
	}
	var bytes [2048]byte
	buf := bytes[:0]
	for start := 0; start+window <= len(tokens); start += h.BlockSize {
		// Appending token by token takes a fifth longer.
		buf = slices.Grow(buf[:0], 4*window)[:4*window]
		for i, t := range tokens[start : start+window] {
			binary.LittleEndian.PutUint32(buf[4*i:], t)
		}
		if lora != "" {
			buf = binary.LittleEndian.AppendUint32(buf, uint32(len(lora)))
			buf = append(buf, lora...)
		}
		if len(x.MM) > 0 {
			buf = appendMM(buf, x.MM, start, start+h.BlockSize)
		}
		dst = append(dst, LocalHash(xxh3.HashSeed(buf, seed)))
	}
	return dst
}

// Blocks returns how many local hashes Append makes of that many tokens.
func (h BlockHasher) Blocks(tokens int) int {
	if h.Eagle {
		tokens--
	}
	if h.BlockSize < 1 || tokens < 0 {
		return 0
	}
	return tokens / h.BlockSize
}

// appendMM appends the hashes of the inputs that have tokens in [start, end),
// sorted, each once.
func appendMM(buf []byte, mm []MMHash, start, end int) []byte {
	var array [16]uint64
	in := array[:0]
	for _, m := range mm {
		if max(m.Start, start) < min(m.End, end) {
			in = append(in, m.Hash)
		}
	}
	slices.Sort(in)
	for i, v := range in {
		if i == 0 || v != in[i-1] {
			buf = binary.LittleEndian.AppendUint64(buf, v)
		}
	}
	return buf
}

// MMIdentifier returns the hash of a multimodal input that is known by a
// string: of 64 hexadecimal digits (a SHA-256) the first 16 as a number, of any
// other string its xxh3. An empty one is no input: ok is false.
func MMIdentifier(id string) (hash uint64, ok bool) {
	if id == "" {
		return 0, false
	}
	if len(id) == 64 {
		if v, ok := hexPrefix(id); ok {
			return v, true
		}
	}
	return xxh3.HashString(id), true
}

// hexPrefix returns the first 16 of the hexadecimal digits s as a number, and
// whether s has nothing but such digits.
func hexPrefix(s string) (v uint64, ok bool) {
	for i := range len(s) {
		c := s[i]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		if i < 16 {
			v = v<<4 | uint64(c)
		}
	}
	return v, true
}

// Next returns the sequence hash of the block with local hash l that follows
// the one with sequence hash prev. It takes about 4 ns.
func Next(prev SeqHash, l LocalHash) SeqHash {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(prev))
	binary.LittleEndian.PutUint64(b[8:], uint64(l))
	return SeqHash(xxh3.HashSeed(b[:], hashSeed))
}

// Chain appends to dst the sequence hashes of the blocks locals, of which the
// first is a root. The sequence hash of a root is its local hash.
func Chain(dst []SeqHash, locals []LocalHash) []SeqHash {
	if len(locals) == 0 {
		return dst
	}
	prev := SeqHash(locals[0])
	dst = append(dst, prev)
	for _, l := range locals[1:] {
		prev = Next(prev, l)
		dst = append(dst, prev)
	}
	return dst
}
