package verify

// This file answers: which partition each worker is on, and how deep it matches.

import (
	"cmp"
	"maps"
	"slices"

	"kvindex/index"
)

// State is what is known of a worker-rank on the partition that owns its worker.
type State struct {
	WorkerRank
	Partition  int32
	Model      string
	BlockSize  int32
	Hasher     string
	Producer   string
	Epoch      int64
	Seq        int64 // last one, -1 before any
	Heard      int64 // timestamp of its last record, Unix milliseconds
	Incomplete bool
	Retired    bool
	Blocks     [index.Tiers]int // held, in reach or not
}

// resolution is the worker-ranks that count, with what follows from them.
type resolution struct {
	ranks  []owned // sorted by worker and rank
	leaves []leaf  // nil until asked for
}

type owned struct {
	*rank
	partition  int32
	incomplete bool
}

func (o *Oracle) resolve() *resolution {
	if o.resolved != nil {
		return o.resolved
	}
	o.resolved = new(resolution)
	workers := make(map[string][]owned)
	for number, p := range o.partitions {
		for wr, r := range p.ranks {
			workers[wr.Worker] = append(workers[wr.Worker], owned{r, number, r.incomplete})
		}
	}
	for _, all := range workers {
		for _, r := range all {
			beaten, rivalled := r.elsewhere(all)
			r.incomplete = r.incomplete || !r.retired && rivalled
			if !beaten {
				o.resolved.ranks = append(o.resolved.ranks, r)
			}
		}
	}
	slices.SortFunc(o.resolved.ranks, func(a, b owned) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	return o.resolved
}

// elsewhere reports whether another partition knows better of a rank of the worker,
// and whether one knows the rank's epoch.
func (r owned) elsewhere(all []owned) (beaten, rivalled bool) {
	for _, s := range all {
		if s.partition != r.partition {
			rivalled = rivalled || s.epoch == r.epoch
			beaten = beaten || cmp.Or(cmp.Compare(s.epoch, r.epoch), cmp.Compare(r.since, s.since), cmp.Compare(r.partition, s.partition)) > 0
		}
	}
	return beaten, rivalled
}

// Workers returns every worker-rank known, retired ones included, sorted.
func (o *Oracle) Workers() []State {
	var states []State
	for _, r := range o.resolve().ranks {
		s := State{
			WorkerRank: r.WorkerRank, Partition: r.partition,
			Model: r.model, BlockSize: r.blockSize, Hasher: r.hasher, Producer: r.producer,
			Epoch: r.epoch, Seq: r.seq, Heard: r.heard, Incomplete: r.incomplete, Retired: r.retired,
		}
		for t := range s.Blocks {
			s.Blocks[t] = len(r.tiers[t])
		}
		states = append(states, s)
	}
	return states
}

// Depths returns by tier how many of the query's leading blocks each worker-rank of
// the model holds, each block in that tier or one before it. Those that hold the first
// in no tier are absent.
func (o *Oracle) Depths(model string, blockSize int32, locals []index.LocalHash) map[WorkerRank]index.Depths {
	depths := make(map[WorkerRank]index.Depths)
	for _, r := range o.resolve().ranks {
		if r.model != model || r.blockSize != blockSize {
			continue
		}
		var d index.Depths
		for t := range d {
			if r.hasher == index.Opaque.String() {
				d[t] = follow(r.together(t), locals)
			} else {
				d[t] = r.leading(t, locals)
			}
		}
		if d != (index.Depths{}) {
			depths[r.WorkerRank] = d
		}
	}
	return depths
}

// leading returns how many leading blocks of the query are each in one of the tiers
// up to last.
func (r *rank) leading(last int, locals []index.LocalHash) int {
	var seq index.SeqHash
	for i, l := range locals {
		if i == 0 {
			seq = index.SeqHash(l)
		} else {
			seq = index.Next(seq, l)
		}
		held := false
		for _, tier := range r.tiers[:last+1] {
			_, in := tier[seq]
			held = held || in
		}
		if !held {
			return i
		}
	}
	return len(locals)
}

// together returns the opaque blocks of the tiers up to last.
func (r *rank) together(last int) map[index.SeqHash]block {
	all := r.own[index.Device]
	for t := 1; t <= last; t++ {
		if len(r.own[t]) == 0 {
			continue
		}
		all = maps.Clone(all)
		maps.Copy(all, r.own[t])
	}
	return all
}

// follow returns how many leading blocks of the query can be gone through from a
// first block to one whose parent it is, and so on, by local hashes.
func follow(held map[index.SeqHash]block, query []index.LocalHash) int {
	at := map[index.SeqHash]struct{}{}
	for n, local := range query {
		next := make(map[index.SeqHash]struct{})
		for seq, b := range held {
			_, below := at[b.parent]
			if b.local == local && b.hasParent == (n > 0) && (n == 0 || below) {
				next[seq] = struct{}{}
			}
		}
		if len(next) == 0 {
			return n
		}
		at = next
	}
	return len(query)
}
