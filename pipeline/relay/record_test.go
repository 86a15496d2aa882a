// This file tests how events are cut into records.

package relay

import (
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
	"kvindex/schemas"
)

// chainEvent is a stored event of n blocks, their contents from seed on.
func chainEvent(n int, seed uint64, s index.Stored, t index.Tier) schemas.Event {
	for i := range n {
		s.Locals = append(s.Locals, index.LocalHash((seed+uint64(i)+1)*0x9e3779b97f4a7c15))
	}
	return schemas.Event{Kind: schemas.KindStored, Tier: t, Stored: s}
}

// singles are a chain's blocks, each with its parent and position.
type single struct {
	tier      index.Tier
	seq       index.SeqHash
	parent    index.SeqHash
	hasParent bool
	position  int32
}

func singlesOf(events []schemas.Event) (all []single) {
	for _, e := range events {
		for s := range e.Stored.Singles() {
			seq := index.SeqHash(s.Locals[0])
			if s.HasParent {
				seq = index.Next(s.Parent, s.Locals[0])
			}
			all = append(all, single{e.Tier, seq, s.Parent, s.HasParent, s.Position})
		}
	}
	return all
}

// TestSplit cuts random events at random bounds. The pieces say the same of the
// same blocks, in order, and each record is within the bounds, as encoded too.
func TestSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var in []schemas.Event
		var removed []index.SeqHash
		clears := 0
		for range rapid.IntRange(0, 12).Draw(t, "events") {
			tier := index.Tier(rapid.IntRange(0, index.Tiers-1).Draw(t, "tier"))
			n := rapid.IntRange(1, 90).Draw(t, "blocks")
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0:
				in = append(in, schemas.Event{Kind: schemas.KindCleared, AllTiers: true})
				clears++
			case 1, 2:
				e := schemas.Event{Kind: schemas.KindRemoved, Tier: tier}
				for i := range n {
					e.Removed = append(e.Removed, index.SeqHash(len(removed)+i))
				}
				removed = append(removed, e.Removed...)
				in = append(in, e)
			case 3:
				in = append(in, chainEvent(n, rapid.Uint64().Draw(t, "seed"), index.Stored{}, tier))
			default:
				s := index.Stored{Parent: 77, HasParent: true, Position: rapid.SampledFrom([]int32{index.NoPosition, 1, 500, 1<<31 - 200}).Draw(t, "position")}
				in = append(in, chainEvent(n, rapid.Uint64().Draw(t, "seed"), s, tier))
			}
		}
		s := splitter{
			maxBytes:  rapid.IntRange(storedOverhead+hashBytes, 900).Draw(t, "bytes"),
			maxEvents: rapid.IntRange(1, 5).Draw(t, "events a record"),
		}
		keep := rapid.Bool().Draw(t, "copied")
		want, got := newHeld(), newHeld()
		var chains, pieces []single
		var gone []index.SeqHash
		s.emit = func(events []schemas.Event) bool {
			if len(events) == 0 || len(events) > s.maxEvents {
				t.Fatalf("a record of %d events", len(events))
			}
			empty, _ := schemas.AppendBatch(nil, &schemas.Batch{})
			full, err := schemas.AppendBatch(nil, &schemas.Batch{Events: events})
			if err != nil || len(full)-len(empty) > s.maxBytes+3 { // the count of events
				t.Fatalf("%d bytes of events, limit %d: %v", len(full)-len(empty), s.maxBytes, err)
			}
			pieces = append(pieces, singlesOf(events)...)
			for _, e := range events {
				gone = append(gone, e.Removed...)
				if e.Kind == schemas.KindCleared {
					clears--
				}
			}
			got.apply(events)
			return true
		}
		for i := range in {
			chains = append(chains, singlesOf(in[i:i+1])...)
			want.apply(in[i : i+1])
			e := in[i]
			if keep {
				e.Stored.Locals = append([]index.LocalHash(nil), e.Stored.Locals...)
			}
			if !s.add(&e, keep) {
				t.Fatal("no more wanted")
			}
			if keep {
				clear(e.Stored.Locals)
			}
		}
		s.flush()
		if !got.equal(&want) || clears != 0 {
			t.Fatalf("the pieces say %v, want %v", got, want)
		}
		if len(pieces) != len(chains) || len(gone) != len(removed) {
			t.Fatalf("%d blocks stored and %d removed, want %d and %d", len(pieces), len(gone), len(chains), len(removed))
		}
		for i := range pieces {
			if pieces[i] != chains[i] {
				t.Fatalf("block %d: %+v, want %+v", i, pieces[i], chains[i])
			}
		}
		for i := range gone {
			if gone[i] != removed[i] {
				t.Fatalf("removal %d: %d, want %d", i, gone[i], removed[i])
			}
		}
	})
}

// TestSplitEnds: once no more is wanted, none is given, and what was gathered is
// forgotten.
func TestSplitEnds(t *testing.T) {
	calls := 0
	s := splitter{maxBytes: 200, maxEvents: 4, emit: func([]schemas.Event) bool { calls++; return false }}
	e := chainEvent(1000, 1, index.Stored{}, 0)
	if s.add(&e, false) || calls != 1 || len(s.events) != 0 || s.bytes != 0 {
		t.Fatalf("%d records, %d events and %d bytes left", calls, len(s.events), s.bytes)
	}
}
