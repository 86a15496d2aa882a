// This file has the bounds of decoding and the errors of whole payloads.

package engine

import "errors"

// Errors of a whole payload. What was decoded before the fault is in the Batch
// and was really announced; what follows it is lost, as in a gap.
var (
	ErrTruncated     = errors.New("payload ends too early")
	ErrMalformed     = errors.New("payload is not well formed")
	ErrEnvelope      = errors.New("payload is not a batch of events")
	ErrTooLarge      = errors.New("payload is larger than allowed")
	ErrTooManyEvents = errors.New("payload has more events than allowed")
)

// Limits bound what a payload may ask for. A field that is 0 means its default.
//
// A Batch takes some 5 bytes of memory for each byte of the largest payload it
// decoded, and 450 for each event. JSON allocates up to 50 bytes for each of an event's,
// most of it garbage by then. Nesting needs no bound: unknown values
// are passed over without recursion.
type Limits struct {
	MaxBytes  int // of a payload; default 32 MiB
	MaxEvents int // of a payload; default 131,072
}

// DefaultLimits are the defaults of each field.
var DefaultLimits = Limits{MaxBytes: 32 << 20, MaxEvents: 1 << 17}

// Keys and tokens of lookahead take 40 and 12 bytes of memory for as little as one
// of a payload. An event that brings a payload's number of them beyond these is
// left out.
const (
	maxKeys  = 1 << 18
	maxAhead = 1 << 19
)

func (l Limits) withDefaults() Limits {
	if l.MaxBytes <= 0 {
		l.MaxBytes = DefaultLimits.MaxBytes
	}
	if l.MaxEvents <= 0 {
		l.MaxEvents = DefaultLimits.MaxEvents
	}
	return l
}
