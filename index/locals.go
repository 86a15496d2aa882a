// This file turns sequence hashes back into the local hashes that a Query wants.

package index

import "errors"

// ErrNoSeqs is what Index.Locals fails with if the index's structure finds
// blocks by their local hashes only.
var ErrNoSeqs = errors.New("this index does not find blocks by their sequence hashes")

// SeqReader is a Structure that knows the blocks it holds by their sequence
// hashes alone.
type SeqReader interface {
	// Locals appends to dst the local hashes of leading ones of the blocks with
	// these sequence hashes, of which the first is a root and each other one the
	// child of the one before: of at least those that some slot holds in reach
	// during the whole call. It may be called from any goroutine at any moment and
	// waits for nobody.
	Locals(dst []LocalHash, seqs []SeqHash) []LocalHash
}

// Locals appends to dst the local hashes of a prompt's leading blocks, of which
// seqs are the sequence hashes, and returns it. It goes as far as any worker holds
// the prompt, or farther, so that a Find of what it found answers as one of the
// whole prompt. A list that is no chain is read up to where it is none. It fails
// with ErrNoSeqs.
func (x *Index) Locals(dst []LocalHash, seqs []SeqHash) ([]LocalHash, error) {
	s, ok := x.s.(SeqReader)
	if !ok {
		return dst, ErrNoSeqs
	}
	return s.Locals(dst, seqs), nil
}
