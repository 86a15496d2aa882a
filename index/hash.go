package index

// BlockHasher turns the tokens of a prompt into local hashes.
type BlockHasher struct {
	BlockSize int
	Scheme    Hasher // Flash or Dynamo
}

// Extra is what besides tokens goes into a local hash.
type Extra struct {
	LoRA string
	Salt string
	MM   []MMHash
}

// MMHash is a multimodal input's hash and the tokens it covers ... (seam: H1 decides per DESIGN)
type MMHash = uint64

// Append appends the local hashes of the full blocks of tokens.
func (h BlockHasher) Append(dst []LocalHash, tokens []uint32, x Extra) []LocalHash { panic("seam") }

// Chain appends the sequence hashes of a root chain.
func Chain(dst []SeqHash, locals []LocalHash) []SeqHash { panic("seam") }

// Next returns the sequence hash of a block after prev.
func Next(prev SeqHash, l LocalHash) SeqHash { panic("seam") }
