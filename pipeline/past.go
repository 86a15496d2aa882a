package pipeline

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/schemas"
	"kvindex/snapshot"
)

// This file is about records that are lost: trimmed from the log, and in no
// snapshot that can be read.
//
// They may have retired a worker-rank, begun a newer epoch of it or removed its
// blocks, so whatever the rest of the log says of it can be above the truth: a
// late record of an epoch that was retired would bring back what is gone. Its
// events are therefore not applied until it is certain that the lost records do
// not matter any more:
//
//   - An epoch larger than the broker time at which the loss ends, in Unix
//     milliseconds, began after it, since producers count epochs so. Whatever
//     is lost was of an older one.
//   - Twice the grace after the loss, nobody remembers: what was heard last in
//     the loss is retired by then, and forgotten. What has been heard since is
//     known by its newest epoch, and begins empty here, incomplete; every block
//     that it holds from then on, it holds.
//
// Until then it is not certain either which records count. One that is refused here
// may be one that counts, if the lost records have had the rank forgotten, and so
// may be one that retires the worker: the loss then ends at that record instead.
//
// All this looks at the log alone.

// lostPast is where a loss ends.
type lostPast struct {
	from int64 // offset of the first record after it
	at   int64 // that record's broker time, unix milliseconds; never until it is seen
}

// over reports whether a loss no longer matters at a broker time.
func (l *lostPast) over(now, grace int64) bool {
	return l.at != never && now >= l.at+2*grace
}

// loses notes that nothing is known of what is before from, for the worker-ranks
// that the result is given to. at is when that was, or never.
func (p *partition) loses(from, at int64) *lostPast {
	l := &lostPast{from: from, at: at}
	if at == never {
		p.untimed = append(p.untimed, l)
	}
	return l
}

// time gives the losses that end at or before a record their time.
func (p *partition) time(r *kgo.Record) {
	p.untimed = slices.DeleteFunc(p.untimed, func(l *lostPast) bool {
		if r.Offset < l.from {
			return false
		}
		l.at = r.Timestamp.UnixMilli()
		return true
	})
}

// losesWorker has nothing known of a worker any more but what comes after a record
// at offset that retires it, if it counts: nobody knows.
func (p *partition) losesWorker(w *worker, offset, timestamp int64) {
	l := p.loses(offset+1, timestamp)
	for _, k := range w.ranks {
		if offset < k.restoredW || k.retired && k.past == nil {
			continue
		}
		if !k.retired {
			if k.blocks != nil {
				k.blocks.Clear()
			}
			k.incomplete.Store(true)
			k.show()
		}
		k.past, p.lost[k.id()] = l, l
		k.changedAt, k.saved.dirty = offset+1, true
		k.publish()
	}
}

// refuses is for a record of an unknown worker-rank that is not applied, though it
// may count, if the lost records have had the rank forgotten: what it retires is
// unknown then, and the rank itself has been heard. So the loss ends here.
func (p *partition) refuses(k *rank, r *kgo.Record, timestamp int64) {
	switch {
	case k.past == nil:
	case slices.ContainsFunc(p.batch.Events, func(e schemas.Event) bool { return e.Kind == schemas.KindRetired }):
		p.losesWorker(k.worker, r.Offset, timestamp)
	default:
		k.past = p.loses(r.Offset+1, timestamp)
		p.lost[k.id()] = k.past
	}
}

// lossOf returns what was last lost of a worker-rank, nil if nothing was.
func (p *partition) lossOf(id snapshot.ID) *lostPast { return later(p.lost[id], p.lostAll) }

// later returns that of two losses which ends later; nil is none.
func later(a, b *lostPast) *lostPast {
	if b == nil || a != nil && a.at >= b.at {
		return a
	}
	return b
}

// told is how a manifest or the floor tells of a loss: 0 if there is none.
func (l *lostPast) told() int64 {
	if l == nil {
		return 0
	}
	return l.at
}

// outlived reports whether a manifest that cannot be read has told for long
// enough that there was one.
func (p *partition) outlived(id snapshot.ID) bool {
	l := p.lost[id]
	return l == nil || l.over(p.clock.newest.Load(), p.grace())
}

// known reports whether what a worker-rank's records say can be applied. Of one
// that is unknown only the epoch, the producer and the seq are followed.
func (k *rank) known() bool { return k.past == nil }

// beginsAfter decides whether an epoch that begins at a broker time is free of
// what was lost, if anything was.
func (k *rank) beginsAfter(l *lostPast, timestamp, grace int64) {
	k.disputed = false
	k.past = nil
	if l != nil && k.epoch <= l.at && !l.over(timestamp, grace) {
		k.past = l
		k.incomplete.Store(true)
	}
	k.publish()
}

// outlives lets the worker-rank be known from a record on that is heard late
// enough, empty as it is.
func (k *rank) outlives(timestamp, grace int64) {
	if k.past != nil && !k.disputed && k.past.over(timestamp, grace) {
		k.past = nil
		k.publish()
	}
}

// dispute notes that a record claims the rank's epoch for another producer or
// model. If the epoch's beginning was lost, either may be the right one, and
// only a newer epoch tells.
func (k *rank) dispute() {
	k.incomplete.Store(true)
	k.disputed = k.past != nil
}

// loadUnknown puts back what a manifest says of a worker-rank whose past is
// lost, without its blocks.
func (p *partition) loadUnknown(m *schemas.Manifest, l *lostPast) {
	k := p.restored(m)
	if k == nil || k.retired {
		return
	}
	k.past = l
	k.disputed = m.Disputed
	k.incomplete.Store(true)
	k.saved.force = true
	k.publish()
}

// unknown counts the worker-ranks that are not answered because their past is lost.
func (p *partition) unknown() (n int) {
	p.listing.Range(func(_, v any) bool {
		if st := v.(*rank).status.Load(); st != nil && st.unknown && !st.retired {
			n++
		}
		return true
	})
	return n
}
