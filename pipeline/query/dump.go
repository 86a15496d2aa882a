// This file is what a dump is: everything that workers hold, block by block.

package query

import (
	"errors"

	"kvindex/index"
)

// ErrDumpTooLarge is what Source.Dump fails with if there are more blocks than may be.
var ErrDumpTooLarge = errors.New("too many blocks for a dump")

// DumpFilter says what a dump is of.
type DumpFilter struct {
	Model     string
	BlockSize int    // tokens
	Worker    string // only this one; empty: all
	MaxBlocks int    // more fail with ErrDumpTooLarge
}

// Held is a chain of blocks that a worker-rank holds in a tier. The blocks of a
// worker-rank and tier come parents before children; those behind holes are among them.
type Held struct {
	Worker string
	Rank   int32
	Tier   index.Tier
	Chain  index.Stored
}

// Blocks returns how many blocks those are.
func Blocks(held []Held) (n int) {
	for _, h := range held {
		n += len(h.Chain.Locals)
	}
	return n
}
