// This file applies records: the rules of key, epoch, producer and sequence, then a record's events.

package pipeline

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// apply is what one record does to the partition's workers. Whatever is wrong
// with it is counted and logged with its place, and the next record goes on.
func (p *partition) apply(r *kgo.Record) {
	p.counts.add(recordsRead, 1)
	timestamp := r.Timestamp.UnixMilli()
	p.clock.heard(timestamp, p.arrived)
	if len(p.untimed) > 0 {
		p.time(r)
	}
	if timestamp >= p.nextExpiry {
		p.expire(r.Offset, timestamp)
	}

	b := &p.batch
	if err := p.decode(r); err != nil {
		p.bad(r, recordsUndecodable, err)
		return
	}
	if !bytes.Equal(r.Key, b.Worker) {
		p.bad(r, recordsKeyMismatch, fmt.Errorf("key %.64q, worker %.64q", r.Key, b.Worker))
		return
	}
	if err := sane(b); err != nil {
		p.bad(r, recordsInvalid, err)
		return
	}
	w := p.workers[string(b.Worker)]
	if w != nil {
		w.takeNotice(p)
	}
	var k *rank
	if w != nil {
		if k = w.rank(b.Rank); k != nil && r.Offset < k.restoredW {
			p.counts.add(recordsSkipped, 1)
			return
		}
	}
	if k == nil && w != nil && w.saved(r.Offset) {
		p.counts.add(recordsSkipped, 1)
		return
	}
	if k == nil && len(p.lost) > 0 {
		if l := p.lost[snapshot.ID{Worker: string(b.Worker), Rank: b.Rank}]; l != nil && r.Offset < l.from {
			p.counts.add(recordsSkipped, 1)
			return
		}
	}
	// A model that is not served makes no worker known, and a record that is
	// refused makes no model known: only one that begins an epoch here does.
	var m *query.Model
	if k == nil || b.Epoch > k.epoch {
		var err error
		if p.stage.owners.beaten(string(b.Worker), claim{partition: p.number, epoch: b.Epoch, since: timestamp}) {
			err = p.stage.models.allow(batchModel(b))
		} else {
			m, err = p.stage.models.get(batchModel(b))
		}
		if err != nil {
			p.bad(r, recordsRefusedModel, err)
			return
		}
	}
	if w == nil {
		w = &worker{name: string(b.Worker)}
		p.workers[w.name] = w
	}
	if k == nil {
		k = p.addRank(w, b.Rank, r.Offset)
	}
	if p.applyTo(k, m, r, timestamp) {
		k.lastHeard.Store(timestamp)
		if k.aside {
			p.bad(r, recordsWrongPartition, fmt.Errorf("worker %.64q belongs to another partition; its producer must partition by murmur2 of the key", b.Worker))
		}
	}
	k.lastOffset = r.Offset
	k.saved.weigh(len(r.Key) + len(r.Value))
	k.show()
	p.nextExpiry = min(p.nextExpiry, k.expiry(p.grace()))
	w.takeNotice(p)
}

// sane refuses what the schema allows and the contract does not.
func sane(b *schemas.Batch) error {
	switch {
	case len(b.Worker) == 0:
		return errors.New("no worker named")
	case len(b.Model) == 0:
		return errors.New("no model named")
	case b.BlockSize <= 0:
		return fmt.Errorf("block size %d", b.BlockSize)
	case b.Seq < -1 || b.Seq == -1 && len(b.Events) > 0:
		return fmt.Errorf("seq %d", b.Seq)
	case b.Rank < 0:
		return fmt.Errorf("dp_rank %d", b.Rank)
	}
	return nil
}

func (p *partition) addRank(w *worker, number int32, offset int64) *rank {
	k := &rank{worker: w, partition: p, number: number, firstOffset: offset, changedAt: offset}
	k.seq.Store(-1)
	w.ranks = append(w.ranks, k)
	p.ranks.Add(1)
	p.listing.Store(k.id(), k)
	// Its snapshot, if one is left of before it was forgotten, will be replaced; if
	// none is, a replay must still not begin among the records of that life.
	if g := p.forgotten[k.id()]; g != nil {
		if g.w < 0 {
			k.firstOffset = min(offset, g.first)
		}
		delete(p.forgotten, k.id())
	}
	return k
}

// unlist takes a rank out of the index and the listing: addRank's counterpart, but for
// its worker's ranks.
func (p *partition) unlist(k *rank) {
	if k.blocks != nil {
		k.blocks.Retire()
	}
	k.leaveModel()
	p.stage.owners.release(k.worker.name, k)
	p.ranks.Add(-1)
	p.listing.Delete(k.id())
}

func batchModel(b *schemas.Batch) modelKey {
	return modelKey{string(b.Model), b.BlockSize, b.Hasher}
}

// applyTo applies the decoded record to the worker-rank it names: the rules of
// epoch, producer, identity and sequence first, then its events. m is the model
// of an epoch that begins. It reports whether the record was the worker-rank's
// next: what is refused or a duplicate shows nobody to be alive.
func (p *partition) applyTo(k *rank, m *query.Model, r *kgo.Record, timestamp int64) (heard bool) {
	b := &p.batch
	switch {
	case k.model == nil || b.Epoch > k.epoch:
		p.counts.add(epochs, 1)
		l := later(k.past, p.lossOf(k.id()))
		k.begin(b, m, timestamp)
		k.beginsAfter(l, timestamp, p.grace())
		k.changedAt = r.Offset + 1
	case b.Epoch < k.epoch:
		p.refuses(k, r, timestamp)
		p.bad(r, recordsStaleEpoch, fmt.Errorf("worker %q rank %d: epoch %d, newer is %d", k.worker.name, k.number, b.Epoch, k.epoch))
		return false
	case k.retired:
		p.refuses(k, r, timestamp)
		p.bad(r, recordsRetired, fmt.Errorf("worker %q rank %d: epoch %d was retired", k.worker.name, k.number, b.Epoch))
		return false
	case k.producer != string(b.Producer):
		k.dispute()
		p.refuses(k, r, timestamp)
		p.bad(r, recordsSecondProducer, fmt.Errorf("worker %q rank %d: epoch %d is producer %q's, not %.64q's", k.worker.name, k.number, k.epoch, k.producer, b.Producer))
		return k.disputed
	case !k.same(b):
		k.dispute()
		p.refuses(k, r, timestamp)
		p.bad(r, recordsIdentityChange, fmt.Errorf("worker %q rank %d: epoch %d is of model %q, blocks of %d tokens, hasher %s; the record of %.64q, %d, %s", k.worker.name, k.number, k.epoch,
			k.model.Name, k.model.BlockSize, k.model.Hasher, b.Model, b.BlockSize, b.Hasher))
		return k.disputed
	}
	seq := k.seq.Load()
	heartbeat := len(b.Events) == 0
	next := b.Seq > seq || heartbeat && b.Seq == seq
	if next {
		k.outlives(timestamp, p.grace())
	} else {
		p.refuses(k, r, timestamp)
	}
	if heartbeat {
		p.counts.add(recordsHeartbeat, 1)
	}
	switch {
	case b.Seq <= seq:
		if !heartbeat {
			p.bad(r, recordsDuplicate, fmt.Errorf("worker %q rank %d: seq %d was applied, last is %d", k.worker.name, k.number, b.Seq, seq))
		}
		return next
	case heartbeat || b.Seq != seq+1:
		k.incomplete.Store(true)
		if !k.aside {
			p.bad(r, gaps, fmt.Errorf("worker %q rank %d: records of seq %d to %d are missing", k.worker.name, k.number, seq+1, missingTo(b)))
		}
	}
	k.seq.Store(b.Seq)
	if heartbeat {
		return true
	}
	if k.aside && !k.elsewhere.Load() {
		if m, err := p.stage.models.get(k.key()); err != nil {
			p.bad(r, recordsRefusedModel, err)
		} else {
			k.comeBack(m)
		}
	}
	switch {
	case k.aside:
	case k.known():
		p.counts.add(recordsApplied, 1)
	default:
		p.counts.add(recordsUnknown, 1)
	}
	for i := range b.Events {
		e := &b.Events[i]
		if (k.aside || !k.known()) && e.Kind != schemas.KindRetired {
			continue
		}
		if !p.event(k, r, e, timestamp) {
			break
		}
	}
	return true
}

// missingTo is the last seq that a gap lacks: a heartbeat's own was sent before it.
func missingTo(b *schemas.Batch) int64 {
	if len(b.Events) == 0 {
		return b.Seq
	}
	return b.Seq - 1
}

// What is refused since its hashes are not those of the record's hasher.
var (
	errNoOpaque = errors.New("stored event without hashes in a record of hasher opaque")
	errOpaque   = errors.New("stored event with hashes in a record whose hasher is not opaque")
)

func (k *rank) store(e *schemas.Event) (index.Effect, error) {
	switch opaque := k.model.Hasher == index.Opaque; {
	case opaque && len(e.Stored.Hashes) == 0:
		return index.Effect{}, errNoOpaque
	case !opaque && len(e.Stored.Hashes) > 0:
		return index.Effect{}, errOpaque
	}
	return k.blocks.Store(e.Tier, e.Stored)
}

// event applies one event; false ends the record, since the rank is retired.
func (p *partition) event(k *rank, r *kgo.Record, e *schemas.Event, timestamp int64) bool {
	changed := false
	switch e.Kind {
	case schemas.KindStored:
		effect, err := k.store(e)
		if err != nil {
			kind := eventsRejected
			if errors.Is(err, errOpaque) {
				kind = eventsOpaque
			}
			k.incomplete.Store(true)
			p.bad(r, kind, fmt.Errorf("worker %q rank %d: %w", k.worker.name, k.number, err))
			return true
		}
		changed = effect.Stored > 0
		p.counts.add(blocksStored, effect.Stored)
		p.counts.add(blocksDuplicate, effect.Duplicate)
		p.counts.add(blocksOrphan, effect.Orphan)
		p.counts.add(blocksContradiction, effect.Contradiction)
	case schemas.KindRemoved:
		effect := k.blocks.Remove(e.Tier, e.Removed)
		changed = effect.Removed > 0
		p.counts.add(blocksRemoved, effect.Removed)
		p.counts.add(removesUnknown, effect.Unknown)
	case schemas.KindCleared:
		if e.AllTiers {
			p.counts.add(blocksRemoved, k.blocks.Clear())
			k.incomplete.Store(false)
		} else {
			p.counts.add(blocksRemoved, k.blocks.ClearTier(e.Tier))
		}
		changed = true
	case schemas.KindRetired:
		if !k.known() {
			p.losesWorker(k.worker, r.Offset, timestamp)
			return false
		}
		for _, other := range k.worker.ranks {
			if r.Offset >= other.restoredW && !other.retired {
				p.counts.add(workersRetired, 1)
				other.retire(timestamp)
				other.changedAt, other.saved.dirty = r.Offset+1, true
			}
		}
		p.counts.add(eventsApplied, 1)
		return false
	}
	p.counts.add(eventsApplied, 1)
	if changed {
		k.changedAt = r.Offset + 1
	}
	return true
}

// expire applies the rule of silence before a record at offset with that
// timestamp: who was silent for the grace is retired, who has been retired for
// as long is forgotten. It looks at nothing but the log, so that a replay and
// every other instance retire at the same record.
func (p *partition) expire(offset, timestamp int64) {
	grace := p.grace()
	p.nextExpiry = never
	for _, w := range p.workers {
		kept := w.ranks[:0]
		for _, k := range w.ranks {
			due := offset >= k.restoredW && timestamp >= k.expiry(grace)
			switch {
			case due && k.retired:
				p.forget(k, timestamp)
				continue
			case due:
				p.counts.add(workersRetired, 1)
				p.log.Info("worker-rank retired after silence", "worker", w.name, "rank", k.number, "offset", offset)
				k.retire(k.lastHeard.Load() + grace)
				k.changedAt, k.saved.dirty = offset+1, true
				if timestamp >= k.expiry(grace) {
					p.forget(k, timestamp)
					continue
				}
			}
			p.nextExpiry = min(p.nextExpiry, k.expiry(grace))
			kept = append(kept, k)
		}
		clear(w.ranks[len(kept):])
		if w.ranks = kept; len(kept) == 0 {
			delete(p.workers, w.name)
		}
	}
}

// expiry is the broker time, in milliseconds, at which silence next changes the rank.
func (k *rank) expiry(grace int64) int64 {
	if k.retired {
		return k.retiredAt + grace
	}
	return k.lastHeard.Load() + grace
}

// forget takes a retired rank out of the partition's books. Its manifest goes
// once the floor is past its last record, since a replay from before would
// bring it back.
//
// So would a replay that begins among the records of one that was never
// written, and late ones that were refused would then count. That is why it is
// remembered too.
func (p *partition) forget(k *rank, timestamp int64) {
	p.counts.add(workersForgotten, 1)
	defer p.unlist(k) // what it says of itself comes first
	if p.saver == nil {
		return
	}
	m := p.manifest(k)
	m.W = -1
	if k.saved.manifest {
		m.W = k.saved.w
	}
	g := newGoner(m, k.lastOffset)
	g.first, g.at = k.firstOffset, timestamp
	p.forgotten[k.id()] = g
	if !p.hasDuty() {
		for id, g := range p.forgotten {
			if timestamp-g.at > standbyMemory.Milliseconds() {
				delete(p.forgotten, id)
			}
		}
	}
}

// standbyMemory is how long an instance that writes no snapshots remembers whom
// it forgot: longer than the floor, which another one writes, can lag behind.
const standbyMemory = 24 * time.Hour

// takeNotice does what other partitions' goroutines found out about the worker: that
// one of them answers for a rank, or that it has records of the rank's epoch.
func (w *worker) takeNotice(p *partition) {
	for _, k := range w.ranks {
		if k.retired {
			continue
		}
		if k.elsewhere.Load() && !k.aside {
			p.counts.add(workersMoved, 1)
			p.log.Warn("worker moved to another partition", "worker", w.name, "rank", k.number)
			k.stepAside()
			k.changedAt, k.saved.dirty = p.position+1, true
		}
		if k.rivalled.Load() && !k.incomplete.Swap(true) {
			k.saved.dirty = true
		}
	}
}
