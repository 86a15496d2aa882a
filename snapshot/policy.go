package snapshot

// This file decides when a worker-rank is written.

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// manifestBytes is about what a manifest and its key take.
const manifestBytes = 512

// Policy says when worker-ranks are due and how many share a round. It keeps
// no state and asks no clock. A zero field sets no limit.
type Policy struct {
	// MaxAge is how old a manifest may get: after it a worker-rank is dumped
	// if its blocks changed, and else gets its manifest anew with its W.
	MaxAge time.Duration
	// MinBytes of events make a worker-rank due at the earliest, however small
	// its dump would be: a transaction has its price too.
	MinBytes int64
	// RoundBytes and RoundCount bound a round, whose first item always fits.
	RoundBytes int64
	RoundCount int
}

// Counters are what a policy needs to know of a worker-rank.
type Counters struct {
	EventBytes  int64     // of its records at or past its manifest's W, or of all if it has none
	Blocks      int64     // held now
	Changed     bool      // its blocks are not those of its manifest
	HasManifest bool      // on the topic, and good
	Saved       time.Time // when its manifest was written, or its first record applied if it has none
	Force       bool      // due now whatever else: retired, or its snapshot is damaged
}

// Action is what is due.
type Action uint8

// The actions.
const (
	Wait       Action = iota // nothing is due
	RefreshNow               // only a manifest with the new W
	DumpNow                  // chunks and manifest
)

var actionNames = [...]string{"wait", "refresh", "dump"}

// String returns the action's name.
func (a Action) String() string { return actionNames[a] }

// EstimateBytes returns about how many bytes the dump of so many blocks takes:
// 8 a block, and a quarter of that for the heads of chains.
func EstimateBytes(blocks int64) int64 { return manifestBytes + 10*blocks }

// Due says what the worker-rank is due for. Events that weigh as much as the
// dump would make it due, so that snapshots never write more than the events
// did and a replay never reads much more than the state; so does age.
func (p Policy) Due(c Counters, now time.Time) Action {
	if c.Force {
		return DumpNow
	}
	if p.urgency(c, now) < 1 {
		return Wait
	}
	if c.Changed || !c.HasManifest {
		return DumpNow
	}
	return RefreshNow
}

// urgency is 1 when the worker-rank becomes due and grows from there.
func (p Policy) urgency(c Counters, now time.Time) float64 {
	if c.Force {
		return math.Inf(1)
	}
	u := float64(c.EventBytes) / float64(max(EstimateBytes(c.Blocks), p.MinBytes))
	if p.MaxAge > 0 {
		u = max(u, float64(now.Sub(c.Saved))/float64(p.MaxAge))
	}
	return u
}

// Candidate is a worker-rank that may be due.
type Candidate struct {
	ID ID
	Counters
}

// Pick is a worker-rank that is due and has its place in a round.
type Pick struct {
	ID     ID
	Action Action
	Bytes  int64 // about what it will write
}

// Plan appends the next round to dst: of the candidates that are due the most
// urgent ones, within the round's limits and the budget, which it charges. Ties
// go by worker and rank. It may reorder the candidates.
func (p Policy) Plan(dst []Pick, candidates []Candidate, b *Budget, now time.Time) []Pick {
	slices.SortFunc(candidates, func(x, y Candidate) int {
		if c := cmp.Compare(p.urgency(y.Counters, now), p.urgency(x.Counters, now)); c != 0 {
			return c
		}
		return x.ID.Compare(y.ID)
	})
	var count int
	var bytes int64
	for i := range candidates {
		c := &candidates[i]
		pick := Pick{ID: c.ID, Action: p.Due(c.Counters, now)}
		switch pick.Action {
		case Wait:
			return dst // and so are all that follow
		case RefreshNow:
			pick.Bytes = manifestBytes
		case DumpNow:
			pick.Bytes = EstimateBytes(c.Blocks)
		}
		if count > 0 && (p.RoundCount > 0 && count >= p.RoundCount || p.RoundBytes > 0 && bytes+pick.Bytes > p.RoundBytes) {
			return dst
		}
		if !b.Spend(now, pick.Bytes) {
			return dst
		}
		count++
		bytes += pick.Bytes
		dst = append(dst, pick)
	}
	return dst
}
