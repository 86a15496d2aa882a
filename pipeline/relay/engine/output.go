// This file collects the events that a Mapping makes.

package engine

import (
	"kvindex/index"
	"kvindex/schemas"
)

// Output is where a Mapping puts kvindex events, in the order in which they are
// to be applied. The zero value is ready to use. Removals that follow each
// other become one event, and so do stores that continue each other's chain.
type Output struct {
	// Events' slices are parts of the Output and good until Reset.
	Events []schemas.Event

	locals  []index.LocalHash
	removed []index.SeqHash
	tail    index.SeqHash // of the last event, if that is a stored one: its last block
}

// Reset empties o and keeps its memory.
func (o *Output) Reset() {
	*o = Output{Events: o.Events[:0], locals: o.locals[:0], removed: o.removed[:0]}
}

// stored adds a chain of blocks, of which the last one's sequence hash is tail.
func (o *Output) stored(t index.Tier, s index.Stored, tail index.SeqHash) {
	o.locals = append(o.locals, s.Locals...)
	if n := len(o.Events); n > 0 {
		last := &o.Events[n-1]
		if last.Kind == schemas.KindStored && last.Tier == t && s.HasParent && s.Parent == o.tail {
			last.Stored.Locals = o.locals[len(o.locals)-len(last.Stored.Locals)-len(s.Locals):]
			o.tail = tail
			return
		}
	}
	s.Locals = o.locals[len(o.locals)-len(s.Locals):]
	o.Events = append(o.Events, schemas.Event{Kind: schemas.KindStored, Tier: t, Stored: s})
	o.tail = tail
}

// remove adds the removal of one block.
func (o *Output) remove(t index.Tier, h index.SeqHash) {
	o.removed = append(o.removed, h)
	if n := len(o.Events); n > 0 {
		last := &o.Events[n-1]
		if last.Kind == schemas.KindRemoved && last.Tier == t {
			last.Removed = o.removed[len(o.removed)-len(last.Removed)-1:]
			return
		}
	}
	o.Events = append(o.Events, schemas.Event{Kind: schemas.KindRemoved, Tier: t, Removed: o.removed[len(o.removed)-1:]})
}

// cleared adds the clearing of all tiers.
func (o *Output) cleared() {
	o.Events = append(o.Events, schemas.Event{Kind: schemas.KindCleared, AllTiers: true})
}
