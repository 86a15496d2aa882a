package schemas

// This file decodes event records of the current schema: the hot path.

import (
	"fmt"

	"kvindex/index"
)

// Least bytes of an item of each array, which bound how many can follow.
const (
	eventBytes = 1 // the union's branch, of a Retired
	chainBytes = 5 // tier, parent, position, and two empty arrays
	crcBytes   = 1
)

// Decode decodes a record written with the current schema, within
// DefaultLimits. Registry.DecodeBatch decodes those of other schemas too.
//
// The strings of b alias value. Nothing is allocated once b has held a record
// as large. After an error b holds no events and is otherwise undefined.
// Errors: ErrMagic, ErrUnknownSchema, ErrTruncated, ErrLeftover, ErrTooLarge,
// ErrInvalid.
func (b *Batch) Decode(value []byte) error {
	return b.decode(value, DefaultLimits)
}

func (b *Batch) decode(value []byte, l Limits) error {
	b.reset()
	r := batchSchema.open(value, l)
	b.Producer = r.text()
	b.Worker = r.text()
	b.Rank = r.int()
	b.Epoch = r.long()
	b.Seq = r.long()
	b.Timestamp = r.long()
	b.Model = r.text()
	b.BlockSize = r.int()
	b.Hasher = r.hasher()
	var a array
	for n := r.block(&a, eventBytes, l.MaxEvents); n > 0; n = r.block(&a, eventBytes, l.MaxEvents) {
		for range n {
			b.Events = append(b.Events, Event{})
			b.event(&r, &b.Events[len(b.Events)-1])
			if r.err != nil {
				break
			}
		}
	}
	if err := r.end(); err != nil {
		b.Events = b.Events[:0]
		return fmt.Errorf("event record: %w", err)
	}
	return nil
}

// reset empties b but keeps its storage.
func (b *Batch) reset() {
	*b = Batch{Events: b.Events[:0], locals: b.locals[:0], hashes: b.hashes[:0]}
}

func (b *Batch) event(r *reader, e *Event) {
	e.Kind = EventKind(r.choice(kinds))
	switch e.Kind {
	case KindStored:
		e.Tier, e.Stored = r.stored(&b.locals, &b.hashes)
	case KindRemoved:
		e.Tier = r.tier()
		at := len(b.hashes)
		b.hashes = hashes(r, b.hashes)
		e.Removed = b.hashes[at:len(b.hashes):len(b.hashes)]
	case KindCleared:
		e.AllTiers = r.choice(2) == 0
		if !e.AllTiers {
			e.Tier = r.tier()
		}
	}
}

func (r *reader) tier() index.Tier     { return index.Tier(r.choice(index.Tiers)) }
func (r *reader) hasher() index.Hasher { return index.Hasher(r.choice(int(index.Opaque) + 1)) }

// stored reads what events and chunks hold of a chain, its hashes into the
// given arenas.
func (r *reader) stored(locals *[]index.LocalHash, seqs *[]index.SeqHash) (t index.Tier, s index.Stored) {
	t = r.tier()
	if r.choice(2) == 1 {
		s.HasParent = true
		s.Parent = index.SeqHash(r.hash())
	}
	s.Position = index.NoPosition
	if r.choice(2) == 1 {
		s.Position = r.int()
	}
	at := len(*locals)
	*locals = hashes(r, *locals)
	s.Locals = (*locals)[at:len(*locals):len(*locals)]
	at = len(*seqs)
	*seqs = hashes(r, *seqs)
	s.Hashes = (*seqs)[at:len(*seqs):len(*seqs)]
	return t, s
}
