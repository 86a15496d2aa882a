// This file cuts events into records.

package relay

import (
	"kvindex/index"
	"kvindex/schemas"
)

// What an event takes of a record at most, besides 8 bytes a hash: the union's
// branch, the tier, the parent, the position, and the arrays' counts and ends.
const (
	storedOverhead  = 1 + 1 + 9 + 6 + 5 + 1 + 1
	removedOverhead = 1 + 1 + 5 + 1
	clearedOverhead = 1 + 2
	hashBytes       = 8
)

// splitter gathers events into records of bounded size. A chain that does not
// fit goes on in the next record, below its last block's sequence hash; a list
// of removals goes on too. The records, applied in order, mean what the events
// mean.
type splitter struct {
	maxBytes  int // of the events; more than storedOverhead + hashBytes
	maxEvents int

	// emit takes the events of one record, good during the call, and returns
	// false if no more are wanted.
	emit func([]schemas.Event) bool

	events []schemas.Event
	bytes  int
	kept   []index.LocalHash // copies of events' Locals
}

// add adds an event, and reports whether more are wanted. Its slices must be
// good until flush, unless keep is set: then they are copied.
func (s *splitter) add(e *schemas.Event, keep bool) bool {
	switch e.Kind {
	case schemas.KindStored:
		return s.stored(e.Tier, e.Stored, keep)
	case schemas.KindRemoved:
		return s.removed(e.Tier, e.Removed)
	default:
		if !s.fits(clearedOverhead) && !s.flush() {
			return false
		}
		s.put(*e, clearedOverhead)
		return true
	}
}

// fits reports whether there is room for an event of n bytes.
func (s *splitter) fits(n int) bool {
	return len(s.events) < s.maxEvents && s.bytes+n <= s.maxBytes
}

func (s *splitter) put(e schemas.Event, bytes int) {
	s.events = append(s.events, e)
	s.bytes += bytes
}

// hashes returns how many of n hashes there is room for, in an event with that
// overhead.
func (s *splitter) hashes(n, overhead int) int {
	return min(n, (s.maxBytes-s.bytes-overhead)/hashBytes)
}

func (s *splitter) stored(t index.Tier, rest index.Stored, keep bool) bool {
	for len(rest.Locals) > 0 {
		if !s.fits(storedOverhead+hashBytes) && !s.flush() {
			return false
		}
		n := s.hashes(len(rest.Locals), storedOverhead)
		part := rest
		part.Locals = rest.Locals[:n]
		rest.Locals = rest.Locals[n:]
		if len(rest.Locals) > 0 {
			rest = below(rest, part.Locals)
		}
		if keep {
			s.kept = append(s.kept, part.Locals...)
			part.Locals = s.kept[len(s.kept)-n:]
		}
		s.put(schemas.Event{Kind: schemas.KindStored, Tier: t, Stored: part}, storedOverhead+n*hashBytes)
	}
	return true
}

// below is s, placed after the chain that locals make where it was.
func below(s index.Stored, locals []index.LocalHash) index.Stored {
	for _, l := range locals {
		if s.HasParent {
			s.Parent = index.Next(s.Parent, l)
		} else {
			s.Parent, s.HasParent = index.SeqHash(l), true
		}
	}
	if s.Position != index.NoPosition {
		s.Position += int32(len(locals))
	}
	return s
}

func (s *splitter) removed(t index.Tier, rest []index.SeqHash) bool {
	for len(rest) > 0 {
		if !s.fits(removedOverhead+hashBytes) && !s.flush() {
			return false
		}
		n := s.hashes(len(rest), removedOverhead)
		s.put(schemas.Event{Kind: schemas.KindRemoved, Tier: t, Removed: rest[:n]}, removedOverhead+n*hashBytes)
		rest = rest[n:]
	}
	return true
}

// flush emits what is gathered, if anything is, forgets it, and reports whether
// more is wanted.
func (s *splitter) flush() bool {
	if len(s.events) == 0 {
		return true
	}
	more := s.emit(s.events)
	s.events, s.bytes, s.kept = s.events[:0], 0, s.kept[:0]
	return more
}
