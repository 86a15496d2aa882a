// This file is the operations of a workload.

package kvw

import (
	"iter"

	"kvindex/index"
)

// Kind says what an operation is.
type Kind uint8

// The kinds, as files number them.
const (
	Store Kind = iota + 1
	Remove
	Query
)

// Op is one operation: an event of a worker, or a query.
type Op struct {
	Kind   Kind
	Worker index.Slot        // Store and Remove
	Stored index.Stored      // Store; files have no position, so it is NoPosition
	Hashes []index.SeqHash   // Remove
	Query  []index.LocalHash // Query
}

// Blocks returns how many hashes the operation has.
func (o *Op) Blocks() int {
	switch o.Kind {
	case Store:
		return len(o.Stored.Locals)
	case Remove:
		return len(o.Hashes)
	}
	return len(o.Query)
}

// Seqs yields the sequence hashes of a store's blocks. Each takes about 5 ns.
func Seqs(s *index.Stored) iter.Seq[index.SeqHash] {
	return func(yield func(index.SeqHash) bool) {
		seq, chained := s.Parent, s.HasParent
		for _, l := range s.Locals {
			if chained {
				seq = index.Next(seq, l)
			} else {
				seq, chained = index.SeqHash(l), true
			}
			if !yield(seq) {
				return
			}
		}
	}
}

// Header is what a file says first.
type Header struct {
	Workers   uint32
	BlockSize uint32 // tokens
	Ops       uint64
}

const (
	magic      = "KVW1"
	headerSize = len(magic) + 4 + 4 + 8
	opsOffset  = headerSize - 8
)

// MaxWorkers bounds the workers of a file, because structures have memory for
// each slot up to the largest one that is used.
const MaxWorkers = 1 << 20
