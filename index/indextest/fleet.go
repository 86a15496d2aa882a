// This file is the oracle of a whole index.

package indextest

import (
	"kvindex/index"
)

// WorkerRank names a worker-rank of a Fleet.
type WorkerRank struct {
	Worker string
	Rank   int32
}

// Fleet is an oracle at the level of an index.Index: worker-ranks and tiers
// over an Oracle. A worker-rank is there from its first event on. It is for one
// goroutine at a time.
type Fleet struct {
	oracle *Oracle
	slots  map[WorkerRank]index.Slot // of the device tier, the others following
}

// NewFleet returns an empty Fleet, which refuses opaque hashes.
func NewFleet() *Fleet {
	return &Fleet{oracle: NewOracle(), slots: make(map[WorkerRank]index.Slot)}
}

// NewOpaqueFleet returns an empty Fleet, which takes opaque hashes.
func NewOpaqueFleet() *Fleet {
	return &Fleet{oracle: NewOpaqueOracle(), slots: make(map[WorkerRank]index.Slot)}
}

func (f *Fleet) slot(w WorkerRank, t index.Tier) index.Slot {
	first, ok := f.slots[w]
	if !ok {
		first = index.Slot(len(f.slots) * index.Tiers)
		f.slots[w] = first
	}
	return first + index.Slot(t)
}

// Store does what index.Worker.Store does.
func (f *Fleet) Store(w WorkerRank, t index.Tier, s index.Stored) (index.Effect, error) {
	return f.oracle.Store(f.slot(w, t), s)
}

// Remove does what index.Worker.Remove does.
func (f *Fleet) Remove(w WorkerRank, t index.Tier, hashes []index.SeqHash) index.Effect {
	return f.oracle.Remove(f.slot(w, t), hashes)
}

// Clear does what index.Worker.Clear does, and index.Worker.Retire too.
func (f *Fleet) Clear(w WorkerRank) (n int) {
	for t := range index.Tier(index.Tiers) {
		n += f.ClearTier(w, t)
	}
	return n
}

// ClearTier does what index.Worker.ClearTier does.
func (f *Fleet) ClearTier(w WorkerRank, t index.Tier) int {
	return f.oracle.Clear(f.slot(w, t))
}

// Len does what index.Worker.Len does.
func (f *Fleet) Len(w WorkerRank, t index.Tier) int { return f.oracle.Len(f.slot(w, t)) }

// Holds does what index.Worker.Holds does.
func (f *Fleet) Holds(w WorkerRank, t index.Tier, h index.SeqHash) bool {
	return f.oracle.Holds(f.slot(w, t), h)
}

// Blocks returns how many blocks all worker-ranks hold in all tiers.
func (f *Fleet) Blocks() int64 { return f.oracle.Stats().Blocks }

// Find returns how many leading blocks of the query each worker-rank holds by
// tier, each block in that tier or one before it; those that hold none are left out.
func (f *Fleet) Find(query []index.LocalHash) map[WorkerRank]index.Depths {
	out := make(map[WorkerRank]index.Depths)
	for w, first := range f.slots {
		var d index.Depths
		var slots []index.Slot
		for t := range d {
			slots = append(slots, first+index.Slot(t))
			d[t] = f.oracle.together(slots, query)
		}
		if d != (index.Depths{}) {
			out[w] = d
		}
	}
	return out
}
