package verify

// This file answers: which partition each worker is on, and how deep it matches.

import (
	"cmp"
	"maps"
	"math"
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
	for number, p := range o.partitions {
		for wr, r := range p.ranks {
			own := o.owner(wr.Worker)
			if own != nil && own.partition == number && !o.refused(wr.Worker, r, number) {
				o.resolved.ranks = append(o.resolved.ranks, owned{r, number, r.incomplete || !r.retired && o.rivalled(wr.Worker, own, r)})
			}
		}
	}
	slices.SortFunc(o.resolved.ranks, func(a, b owned) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	return o.resolved
}

// owner returns the claim that holds the worker, nil if none does.
func (o *Oracle) owner(worker string) (best *claim) {
	for _, c := range o.claims[worker] {
		if c.until == math.MaxInt64 && !o.beaten(worker, c) && (best == nil || c.beats(best)) {
			best = c
		}
	}
	return best
}

// beaten reports whether another partition had a better claim when, or after, c
// began.
func (o *Oracle) beaten(worker string, c *claim) bool {
	return slices.ContainsFunc(o.claims[worker], func(d *claim) bool {
		return d.partition != c.partition && d.beats(c) && d.until > c.since
	})
}

// refused reports whether the rank's epoch was refused although the worker is
// the partition's by now: because it was another's when, or after, it began.
func (o *Oracle) refused(worker string, r *rank, partition int32) bool {
	began := &claim{partition: partition, epoch: r.epoch, since: r.since}
	return slices.ContainsFunc(o.claims[worker], func(d *claim) bool {
		return d.partition != partition && d.beats(began) && d.until > r.since &&
			!slices.ContainsFunc(o.claims[worker], func(e *claim) bool { // d itself was refused
				return e.partition != d.partition && e.beats(d) && e.since <= d.since && d.since < e.until
			})
	})
}

func (c *claim) beats(d *claim) bool {
	return cmp.Or(cmp.Compare(c.epoch, d.epoch), cmp.Compare(d.since, c.since), cmp.Compare(d.partition, c.partition)) > 0
}

// rivalled reports whether another partition has records of the owner's epoch
// from after the worker-rank last began anew.
func (o *Oracle) rivalled(worker string, own *claim, r *rank) bool {
	return slices.ContainsFunc(o.claims[worker], func(d *claim) bool {
		return d.partition != own.partition && d.epoch == own.epoch && d.last >= r.began
	})
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
