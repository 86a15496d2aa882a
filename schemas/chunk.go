package schemas

// This file encodes and decodes snapshot chunks.

import (
	"fmt"
	"unicode/utf8"

	"kvindex/index"
)

// AppendChunk appends c as a framed record to dst and returns the extended
// slice; it allocates only to grow dst. On an error it returns dst as it was.
// Errors: ErrInvalid, ErrTooLarge, as AppendBatch's.
func AppendChunk(dst []byte, c *Chunk) ([]byte, error) {
	if !utf8.ValidString(c.Worker) {
		return dst, fmt.Errorf("snapshot chunk: %w", errUTF8)
	}
	out := append(dst, chunkSchema.header[:]...)
	out = appendText(out, c.Worker)
	out = appendLong(out, int64(c.Rank))
	out = appendLong(out, c.Generation)
	out = appendLong(out, int64(c.Index))
	if len(c.Chains) > 0 {
		out = appendLong(out, int64(len(c.Chains)))
	}
	for i := range c.Chains {
		if c.Chains[i].Tier >= index.Tiers {
			return dst, fmt.Errorf("snapshot chunk: %w: chain %d: tier %d", ErrInvalid, i, c.Chains[i].Tier)
		}
		out = appendStored(out, c.Chains[i].Tier, &c.Chains[i].Stored)
	}
	return sized(dst, append(out, 0), "snapshot chunk")
}

// DecodeChunk decodes a framed record into c, whose storage it reuses: nothing
// is allocated once c has held a chunk as large of the same worker. The slices
// of c are good until the next decode into it, and do not alias value. After
// an error c holds no chains and is otherwise undefined. Errors: as
// Batch.Decode's.
func DecodeChunk(c *Chunk, value []byte) error {
	c.Chains, c.locals, c.hashes = c.Chains[:0], c.locals[:0], c.hashes[:0]
	r := chunkSchema.open(value, DefaultLimits)
	if w := r.text(); string(w) != c.Worker {
		c.Worker = string(w)
	}
	c.Rank = r.int()
	c.Generation = r.long()
	c.Index = r.int()
	var a array
	for n := r.block(&a, chainBytes, maxBlockCount); n > 0; n = r.block(&a, chainBytes, maxBlockCount) {
		for i := 0; i < n && r.err == nil; i++ {
			t, s := r.stored(&c.locals, &c.hashes)
			c.Chains = append(c.Chains, Chain{Tier: t, Stored: s})
		}
	}
	if err := r.end(); err != nil {
		c.Chains = c.Chains[:0]
		return fmt.Errorf("snapshot chunk: %w", err)
	}
	return nil
}
