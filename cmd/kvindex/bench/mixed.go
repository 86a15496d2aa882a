// This file measures queries against a warm structure while events are applied.

package bench

import (
	"sync"
	"sync/atomic"
	"time"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Mixed is what readers and event workers did at the same time. An event counts
// when it was applied.
//
// Each worker's events are a ring: those of the file, then the removal of what it
// still holds, last stored first, 128 blocks an event. Worker w of W begins at w/W
// of its ring, applied before, so that no store is a duplicate and the structure
// stays about as full. One goroutine deals an event of each ring in turn to the
// event workers, at most 256 that are not applied yet. The readers go round the
// file's queries.
type Mixed struct {
	heading
	Readers       int     `json:"readers"`
	EventWorkers  int     `json:"event_workers"`
	Seconds       figure  `json:"seconds"`
	CoresUsed     figure  `json:"cores_used"`
	Offered       *figure `json:"blocks_per_s_offered"` // null: as fast as they are applied
	Queries       figure  `json:"queries_per_s"`
	QueriedBlocks figure  `json:"queried_blocks_per_s"`
	Events        figure  `json:"events_per_s"`
	EventBlocks   figure  `json:"event_blocks_per_s"`
	LogicalOps    figure  `json:"logical_ops_per_s"` // queries and events
	BlockOps      figure  `json:"block_ops_per_s"`   // hashes in queries and events
	queryLatencies
	RejectedEvents int64 `json:"rejected_events"` // refused, or with a parent or a block that was not held
	LivePairs      int64 `json:"live_pairs_at_end"`
}

// queryLatencies are those of single queries.
type queryLatencies struct {
	Mean figure `json:"query_mean_us"`
	P50  figure `json:"query_p50_us"`
	P99  figure `json:"query_p99_us"`
	P999 figure `json:"query_p999_us"`
}

func tellLatencies(l *latencies) queryLatencies {
	return queryLatencies{figure(l.meanUs()), figure(l.us(50)), figure(l.us(99)), figure(l.us(99.9))}
}

const (
	drainChunk  = 128 // blocks
	mixedWindow = 256 // events
)

// The phases of a mixed measurement.
const (
	warming int32 = iota
	measuring
	stopped
)

// counts are operations counted while measuring.
type counts struct{ ops, blocks, rejected int64 }

func (c *counts) add(d counts) {
	c.ops += d.ops
	c.blocks += d.blocks
	c.rejected += d.rejected
}

// dealer deals out the events of rings for ever.
type dealer struct {
	rings [][]*kvw.Op
	at    []int
	ring  int
}

// next returns the next event, nil if there are none at all.
func (d *dealer) next() *kvw.Op {
	for range d.rings {
		r := d.ring
		d.ring = (r + 1) % len(d.rings)
		if ring := d.rings[r]; len(ring) > 0 {
			op := ring[d.at[r]]
			d.at[r] = (d.at[r] + 1) % len(ring)
			return op
		}
	}
	return nil
}

func (b *bench) mixed() error {
	s := b.structure.empty()
	d := dealer{rings: b.workload.Rings(drainChunk)}
	done := 0
	b.progress.Start("operations to begin with", int64(len(b.workload.Ops)/2))
	for r, ring := range d.rings {
		start := len(ring) * r / len(d.rings)
		d.at = append(d.at, start)
		for _, op := range ring[:start] {
			apply(s, op)
			if err := b.step(done); err != nil {
				return err
			}
			done++
		}
	}

	var phase atomic.Int32
	var all sync.WaitGroup
	readers := make([]reader, b.Readers)
	for i := range readers {
		r := &readers[i]
		r.latencies = newLatencies()
		first := len(b.workload.Queries) * i / len(readers)
		all.Go(func() { r.read(s, b.workload.Queries, first, &phase) })
	}
	applied := make([]counts, b.EventWorkers)
	if b.EventWorkers > 0 {
		lanes := make([]chan *kvw.Op, b.EventWorkers)
		for i := range lanes {
			// One more is in the event worker's hands.
			lanes[i] = make(chan *kvw.Op, mixedWindow/b.EventWorkers-1)
			all.Go(func() { applied[i] = applyAll(s, lanes[i], &phase) })
		}
		all.Go(func() { b.feed(&d, lanes, &phase) })
	}
	// The readers and the dealer end with the phase, and the event workers with the
	// dealer, whatever happens.
	defer all.Wait()
	defer phase.Store(stopped)

	b.progress.Start("seconds", int64(b.WarmUp+b.Seconds))
	if err := b.wait(b.WarmUp); err != nil {
		return err
	}
	phase.Store(measuring)
	watch := startWatch(processTime)
	err := b.wait(b.Seconds)
	phase.Store(stopped)
	seconds, cores := watch.read()
	all.Wait()
	if err != nil {
		return err
	}

	var asked, events counts
	took := newLatencies()
	for i := range readers {
		asked.add(readers[i].counts)
		took.merge(readers[i].latencies)
	}
	for _, c := range applied {
		events.add(c)
	}
	rate := func(n int64) figure { return figure(float64(n) / seconds) }
	line := Mixed{
		heading:        b.heading(),
		Readers:        b.Readers,
		EventWorkers:   b.EventWorkers,
		Seconds:        figure(seconds),
		CoresUsed:      figure(cores),
		Queries:        rate(asked.ops),
		QueriedBlocks:  rate(asked.blocks),
		Events:         rate(events.ops),
		EventBlocks:    rate(events.blocks),
		LogicalOps:     rate(asked.ops + events.ops),
		BlockOps:       rate(asked.blocks + events.blocks),
		queryLatencies: tellLatencies(took),
		RejectedEvents: events.rejected,
		LivePairs:      s.Stats().Blocks,
	}
	if b.BlocksPerSecond > 0 {
		offered := figure(b.BlocksPerSecond)
		line.Offered = &offered
	}
	return b.tell(line)
}

// wait waits, and fails when the context has ended.
func (b *bench) wait(seconds float64) error {
	end := time.After(time.Duration(seconds * float64(time.Second)))
	passed := time.NewTicker(time.Second)
	defer passed.Stop()
	for {
		select {
		case <-passed.C:
			b.progress.Add(1)
		case <-end:
			return nil
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
	}
}

// feed deals events to the lanes until the end of the last phase, and closes
// the lanes.
func (b *bench) feed(d *dealer, lanes []chan *kvw.Op, phase *atomic.Int32) {
	begun, dealt := time.Now(), 0.0
	for phase.Load() != stopped {
		op := d.next()
		if op == nil {
			break
		}
		if b.BlocksPerSecond > 0 {
			due := begun.Add(time.Duration(dealt / b.BlocksPerSecond * float64(time.Second)))
			for phase.Load() != stopped && time.Now().Before(due) {
				time.Sleep(min(time.Until(due), 10*time.Millisecond))
			}
			dealt += float64(op.Blocks())
		}
		lanes[int(op.Worker)%len(lanes)] <- op
	}
	for _, lane := range lanes {
		close(lane)
	}
}

// applyAll applies the events of a lane until that is closed.
func applyAll(s index.Structure, lane <-chan *kvw.Op, phase *atomic.Int32) (c counts) {
	for op := range lane {
		ok := apply(s, op)
		if phase.Load() != measuring {
			continue
		}
		c.ops++
		c.blocks += int64(op.Blocks())
		if !ok {
			c.rejected++
		}
	}
	return c
}

// reader is one that asks.
type reader struct {
	counts
	latencies *latencies
}

func (r *reader) read(s index.Structure, queries [][]index.LocalHash, first int, phase *atomic.Int32) {
	if len(queries) == 0 {
		return
	}
	var m index.SlotMatches
	for i := first; ; i = (i + 1) % len(queries) {
		begun := time.Now()
		s.Find(queries[i], index.FindOptions{}, &m)
		took := time.Since(begun)
		switch phase.Load() {
		case measuring:
			r.latencies.record(took)
			r.ops++
			r.blocks += int64(len(queries[i]))
		case stopped:
			return
		}
	}
}
