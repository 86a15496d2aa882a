// This file decides which partition a worker belongs to.

package pipeline

import "sync"

// owners decides which partition a worker belongs to: the one where its newest
// epoch was seen, and of several that claim the same epoch the one whose first
// record of it is the oldest by the broker's clock. That is a function of the
// logs alone, so every instance and every restart comes to the same end
// whichever partition is read first.
//
// Partitions ask when a worker begins an epoch, not at every record.
type owners struct {
	mu      sync.Mutex
	workers map[string]claim
}

// claim is one partition's hold on a worker.
type claim struct {
	partition int32
	epoch     int64
	since     int64   // broker time of the epoch's first record there, unix milliseconds
	worker    *worker // the holder's; only its atomics are touched here
	renewed   bool    // the worker begins this epoch: rivals of an older one are of no matter
}

func newOwners() *owners { return &owners{workers: map[string]claim{}} }

// claim asks for a worker to belong to the claimant's partition. If it is
// granted, dropped says that the worker was lost to another partition before,
// so that what this one still holds of it must go. A partition that loses a
// worker is told through worker.lost, one that keeps it against a rival of the
// same epoch through worker.rival.
func (o *owners) claim(name string, c claim) (granted, dropped bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c.renewed {
		c.worker.rival.Store(false)
	}
	held, ok := o.workers[name]
	switch {
	case !ok || held.worker == c.worker:
	case c.epoch < held.epoch:
		return false, false
	case c.epoch == held.epoch:
		// Two partitions carry one epoch: a producer that partitions
		// differently. Whoever keeps the worker lacks what went elsewhere.
		if held.since < c.since || held.since == c.since && held.partition < c.partition {
			held.worker.rival.Store(true)
			return false, false
		}
		c.worker.rival.Store(true)
		held.worker.lost.Store(true)
	default:
		held.worker.lost.Store(true)
	}
	o.workers[name] = c
	return true, c.worker.lost.Swap(false)
}

// release gives up what the worker's partition holds of it, if it does.
func (o *owners) release(name string, w *worker) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.workers[name].worker == w {
		delete(o.workers, name)
	}
}
