// This file is what a partition knows of a worker and of each of its ranks.

package pipeline

import (
	"sync/atomic"

	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// worker is one worker as one partition knows it. Its ranks are on the same
// partition, since the key of a record is the worker's name.
type worker struct {
	name  string
	ranks []*rank // few
}

func (w *worker) rank(n int32) *rank {
	for _, k := range w.ranks {
		if k.number == n {
			return k
		}
	}
	return nil
}

// saved reports whether the worker's snapshot holds a record at offset, whichever
// rank it is of: all ranks are written at once, so one without a manifest was
// forgotten, and what retired it is passed over with its sibling.
func (w *worker) saved(offset int64) bool {
	for _, k := range w.ranks {
		if offset < k.restoredW {
			return true
		}
	}
	return false
}

// rank is one worker-rank: what a record is applied to. It belongs to its
// partition's goroutine but for the atomics, which queries read.
type rank struct {
	worker    *worker
	partition *partition
	number    int32

	model        *query.Model
	blocks       *index.Worker // nil when retired or aside
	producer     string
	epoch        int64
	epochStarted int64 // broker time of the epoch's first record, unix milliseconds
	retired      bool
	retiredAt    int64     // broker time
	past         *lostPast // not nil: what its records say cannot be applied for what was lost before
	disputed     bool      // two producers or models claim the epoch, whose beginning is lost
	aside        bool      // another partition answers for it, or did: what its records say is not applied, and model has no index

	restoredW   int64 // records below were applied before the snapshot was taken
	firstOffset int64 // of its first record, which the floor must not pass before there is a manifest
	lastOffset  int64 // of its last record
	changedAt   int64 // offset after the last record that changed its blocks

	saved savedState

	elsewhere  atomic.Bool               // another partition answers for it: told by owners
	rivalled   atomic.Bool               // another partition has records of its epoch: told by owners
	incomplete atomic.Bool               // events were lost
	lastHeard  atomic.Int64              // broker time of the last record, unix milliseconds
	seq        atomic.Int64              // last one applied, -1 before any
	shown      [index.Tiers]atomic.Int64 // blocks held
	status     atomic.Pointer[rankStatus]
}

// rankStatus is what the workers listing shows of a rank beyond its atomics,
// replaced when it changes: once an epoch, not once a record.
type rankStatus struct {
	model   *query.Model
	epoch   int64
	retired bool
	unknown bool // its past is lost
	gone    bool // forgotten, but for the next record to find out
}

func (k *rank) id() snapshot.ID { return snapshot.ID{Worker: k.worker.name, Rank: k.number} }

func (k *rank) publish() {
	st := &rankStatus{model: k.model, epoch: k.epoch, retired: k.retired, unknown: k.past != nil, gone: k.retired && k.retiredAt == forgottenAt}
	k.status.Store(st)
	if owners := k.partition.stage.owners; st.gone {
		owners.release(k.worker.name, k)
	} else {
		owners.claims(k.worker.name, k.claim())
	}
}

func (k *rank) claim() claim {
	return claim{rank: k, partition: k.partition.number, epoch: k.epoch, since: k.epochStarted}
}

// begin starts an epoch from an empty cache, of a model got for it, nil if another
// partition answers for it. beginsAfter follows.
func (k *rank) begin(b *schemas.Batch, m *query.Model, timestamp int64) {
	if k.aside = m == nil; k.aside {
		m = batchModel(b).withoutIndex()
	}
	if k.blocks != nil && k.model != m {
		k.blocks.Retire()
		k.blocks = nil
	}
	switch {
	case k.aside:
	case k.blocks != nil:
		k.blocks.Clear()
	default:
		k.blocks = m.Index.AddWorker(k.worker.name, k.number, k)
	}
	k.leaveModel()
	k.model = m
	k.producer = string(b.Producer)
	k.epoch, k.epochStarted = b.Epoch, timestamp
	k.seq.Store(-1)
	k.retired, k.retiredAt = false, 0
	k.incomplete.Store(k.aside)
}

// stepAside has the rank hold nothing, since another partition answers for it.
func (k *rank) stepAside() {
	k.blocks.Retire()
	k.blocks = nil
	m := k.key().withoutIndex()
	k.leaveModel()
	k.model, k.aside = m, true
	k.incomplete.Store(true)
	k.publish()
	k.show()
}

// comeBack has the rank be answered again, of a model got for it. It begins empty
// and incomplete; every block that it is given from then on, it holds.
func (k *rank) comeBack(m *query.Model) {
	k.model, k.aside = m, false
	k.blocks = m.Index.AddWorker(k.worker.name, k.number, k)
	k.publish()
}

// key names the rank's model.
func (k *rank) key() modelKey {
	return modelKey{k.model.Name, int32(k.model.BlockSize), k.model.Hasher}
}

// leaveModel has the rank be of no model, as one that is not known any more.
func (k *rank) leaveModel() {
	if k.model != nil && k.model.Index != nil {
		k.partition.stage.models.release(k.model)
	}
	k.model = nil
}

// retire empties the rank for good; epoch and seq stay, so that a late record
// of the epoch cannot bring it back.
func (k *rank) retire(at int64) {
	if k.blocks != nil {
		k.blocks.Retire()
		k.blocks = nil
	}
	k.retired, k.retiredAt = true, at
	k.disputed, k.aside = false, false
	k.incomplete.Store(false)
	k.publish()
	k.show()
}

// show has the listing see how many blocks the rank holds.
func (k *rank) show() {
	for t := range k.shown {
		n := 0
		if k.blocks != nil {
			n = k.blocks.Len(index.Tier(t))
		}
		k.shown[t].Store(int64(n))
	}
}

// held returns how many blocks of all tiers the rank holds, as last shown.
func (k *rank) held() (n int64) {
	for t := range k.shown {
		n += k.shown[t].Load()
	}
	return n
}

// same reports whether the batch speaks of the model the epoch began with.
func (k *rank) same(b *schemas.Batch) bool {
	return k.key() == batchModel(b)
}
