// This file decides which partition a worker belongs to.

package pipeline

import (
	"cmp"
	"slices"
	"sync"
)

// owners decides which partition answers for a worker-rank that several know, or
// whose worker several know: one that belongs to a single partition has no records
// elsewhere.
//
// Each partition follows what its own log says of epochs, producers and sequence
// numbers, whatever the others say. A worker-rank of it counts unless another
// partition knows a newer epoch of the worker, of whatever rank; of the same epoch,
// unless another's first record is older by the broker's clock, or as old and the
// partition's number lower. The one that counts is never beaten on the way there,
// since epochs only grow, so nothing that it was given is ever dropped: whichever
// partition is read first, the end is the same.
//
// Only when a partition has forgotten a worker can one that was beaten count again.
// It begins empty then, and incomplete.
//
// Partitions ask when an epoch begins or a worker-rank goes, not at every record.
type owners struct {
	mu      sync.Mutex
	workers map[string][]claim // few: of each worker-rank that a partition knows
}

// claim is what a worker-rank's partition knows of it.
type claim struct {
	rank      *rank // whose only atomics are touched here
	partition int32
	epoch     int64
	since     int64 // broker time of the epoch's first record there, unix milliseconds
}

func newOwners() *owners { return &owners{workers: map[string][]claim{}} }

// compare is above 0 if c is the better claim to a worker.
func (c claim) compare(d claim) int {
	return cmp.Or(cmp.Compare(c.epoch, d.epoch), cmp.Compare(d.since, c.since), cmp.Compare(d.partition, c.partition))
}

// claims puts a claim in place of what its rank claimed before.
func (o *owners) claims(worker string, c claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.workers[worker]
	if i := slices.IndexFunc(all, func(d claim) bool { return d.rank == c.rank }); i >= 0 {
		if all[i] == c {
			return
		}
		all[i] = c
	} else {
		all = append(all, c)
	}
	o.workers[worker] = all
	judge(all)
}

// release takes back what a rank claims, if it does.
func (o *owners) release(worker string, k *rank) {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := slices.DeleteFunc(o.workers[worker], func(c claim) bool { return c.rank == k })
	if len(all) == 0 {
		delete(o.workers, worker)
		return
	}
	o.workers[worker] = all
	judge(all)
}

// beaten reports whether a claim would be beaten now.
func (o *owners) beaten(worker string, c claim) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	best, ok := rivalOf(c, o.workers[worker])
	return ok && best.compare(c) > 0
}

// judge tells all ranks of a worker, of which there is one at least, how their claims
// stand.
func judge(all []claim) {
	best := slices.MaxFunc(all, claim.compare)
	second, ok := rivalOf(best, all)
	for _, c := range all {
		rival, rivalled := best, true
		if c.partition == best.partition {
			rival, rivalled = second, ok
		}
		c.rank.elsewhere.Store(rivalled && rival.compare(c) > 0)
		c.rank.rivalled.Store(rivalled && rival.epoch == c.epoch)
	}
}

// rivalOf returns the best claim of all other partitions.
func rivalOf(c claim, all []claim) (best claim, ok bool) {
	for _, d := range all {
		if d.partition != c.partition && (!ok || d.compare(best) > 0) {
			best, ok = d, true
		}
	}
	return best, ok
}
