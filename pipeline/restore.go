// This file restores a partition from its snapshots.

package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"kvindex/consumer"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// Restore implements consumer.Handler: it loads what the partition's snapshots
// hold and returns the offset from which the events are to be replayed.
//
// What it loads is exact per worker-rank, each at its own W; the replay starts
// at the floor, which lies at or below all of them, and each worker-rank takes
// only the records at or past its W.
func (p *partition) Restore(ctx context.Context) (int64, error) {
	_, span := p.startSpan("kvindex.restore")
	start, err := p.restore(ctx)
	if err != nil && ctx.Err() == nil {
		p.counts.add(restoreFailures, 1)
	}
	span.SetAttributes(
		attribute.Int64("kvindex.offset.replay_from", start),
		attribute.Int64("kvindex.offset.end", p.replayTo),
		attribute.Int64("kvindex.blocks", p.loaded),
		attribute.Int64("kvindex.worker_ranks", p.ranks.Load()),
		attribute.Int64("kvindex.snapshot.bytes", p.bytes.Load()),
		attribute.Float64("kvindex.snapshot.reading_seconds", p.reading.Seconds()),
		attribute.Float64("kvindex.snapshot.loading_seconds", p.loading.Seconds()),
	)
	endSpan(span, err)
	return start, err
}

func (p *partition) restore(ctx context.Context) (int64, error) {
	began := time.Now()
	p.Drop(nil) // what an attempt that failed half way has loaded
	topic, err := consumer.DescribeTopic(ctx, p.stage.aux, p.stage.cfg.Topic)
	if err != nil {
		return 0, err
	}
	found, err := consumer.ListBounds(ctx, p.stage.aux, p.stage.cfg.Topic, []int32{p.number})
	if err != nil {
		return 0, err
	}
	bounds := found[p.number]
	start, err := p.load(ctx, topic, bounds)
	if err != nil {
		return 0, err
	}
	p.topicID, p.position, p.replayTo = topic.ID, start, bounds.End
	p.reread.Store(0)
	p.took.Store(int64(time.Since(began)))
	p.got.Store(p.loaded)
	p.counts.add(restores, 1)
	p.log.Info("restored", "worker_ranks", p.ranks.Load(), "blocks", p.loaded, "log_start", bounds.Start, "replay_from", start, "end", bounds.End,
		"took", time.Since(began).Round(time.Millisecond), "reading", p.reading.Round(time.Millisecond), "loading", p.loading.Round(time.Millisecond))
	return start, nil
}

// load fills the partition from its snapshots and returns where to start.
func (p *partition) load(ctx context.Context, topic consumer.Topic, bounds consumer.Bounds) (int64, error) {
	p.loaded, p.blind, p.reading, p.loading = 0, false, 0, 0
	p.bytes.Store(0)
	if p.saver == nil {
		return p.fromStart(bounds), nil
	}
	began := time.Now()
	reader, err := p.readSnapshots(ctx)
	p.reading = time.Since(began)
	switch {
	case errors.Is(err, consumer.ErrNoTopic), errors.Is(err, errNoSnapshotPartition):
		p.blind = true
		level := slog.LevelWarn
		if bounds.Start > 0 {
			level = slog.LevelError // what was trimmed is nowhere else
		}
		p.log.Log(ctx, level, "no snapshots to restore from, the events are replayed from the log's start", "error", err, "offset", bounds.Start)
		return p.fromStart(bounds), nil
	case err != nil:
		return 0, err
	}
	bounds, reason, err := p.stale(ctx, topic, reader.Table())
	if err != nil {
		return 0, err
	}
	if reason != "" {
		p.counts.add(snapshotsDiscarded, 1)
		p.log.Error("snapshots are of another log and are discarded, the events are replayed from the log's start", "reason", reason, "offset", bounds.Start)
		return p.fromStart(bounds), nil
	}
	start, err := p.loadTable(reader.Table(), bounds, func() error { return reader.ReadToEnd(ctx) })
	if err == nil {
		p.saver.offer(reader)
	}
	return start, err
}

// stale says why what was read of the snapshot topic cannot be used, as
// snapshot.Stale does, and returns the log's bounds: those from after the reading,
// since what was read may be of records that came meanwhile. Another instance writes.
func (p *partition) stale(ctx context.Context, topic consumer.Topic, table *snapshot.Table) (b consumer.Bounds, reason string, err error) {
	found, err := consumer.ListBounds(ctx, p.stage.aux, topic.Name, []int32{p.number})
	if err != nil {
		return b, "", err
	}
	b = found[p.number]
	reason, err = snapshot.Stale(ctx, p.stage.aux, topic, p.number, b.End, table)
	return b, reason, err
}

// fromStart has the log replayed from its start: unless snapshots say better,
// nothing is known of what was trimmed.
func (p *partition) fromStart(bounds consumer.Bounds) int64 {
	if bounds.Start > 0 {
		p.lostAll = p.loses(bounds.Start, never)
	}
	return bounds.Start
}

// loadTable fills the partition from what its snapshots say and returns where to
// start. again has the table filled with what came to the topic since.
func (p *partition) loadTable(table *snapshot.Table, bounds consumer.Bounds, again func() error) (int64, error) {
	began := time.Now()
	start, newest, damaged := p.loadRanks(table, bounds)
	if len(damaged) > 0 {
		// A slow reader can meet a round that compaction took apart under it. All are
		// loaded anew, so that the ranks of a worker are of one moment.
		if err := again(); err != nil {
			return 0, err
		}
		p.Drop(nil)
		start, newest, damaged = p.loadRanks(table, bounds)
	}
	p.loading = time.Since(began)
	for _, d := range damaged {
		p.counts.add(restoresDamaged, 1)
		p.damaged(table, d.id, bounds, start, newest, d.err)
	}
	if len(damaged) > 0 && bounds.Start == 0 {
		// The log has everything. What other worker-ranks of it are loaded
		// would have records passed over that matter to the damaged one.
		p.Drop(nil)
		p.loaded, start = 0, 0
		for _, d := range damaged {
			p.spoiled[d.id] = true
		}
	}
	return start, nil
}

// damagedRank is a worker-rank whose snapshot cannot be loaded, and why.
type damagedRank struct {
	id  snapshot.ID
	err error
}

// loadRanks loads the worker-ranks of a table into an empty partition and returns
// where to start, and newestW.
func (p *partition) loadRanks(table *snapshot.Table, bounds consumer.Bounds) (start int64, newest map[string]int64, damaged []damagedRank) {
	p.loaded = 0
	floor, hasFloor := table.Floor()
	for _, id := range table.IDs() {
		if m := table.Manifest(id); m != nil && hasFloor && m.W < floor.Offset {
			p.log.Error("snapshot of a worker-rank is older than the floor, which is not used", "worker", id.Worker, "rank", id.Rank, "offset", m.W, "floor", floor.Offset)
			hasFloor = false
		}
	}
	start = p.fromStart(bounds)
	if hasFloor && floor.Offset >= start {
		start, p.lostAll, p.untimed = floor.Offset, nil, nil
		if floor.PastLostAt != 0 {
			p.lostAll = p.loses(floor.Offset, floor.PastLostAt)
		}
	}
	newest = newestW(table)
	for _, id := range table.IDs() {
		if err := p.loadRank(table, id, bounds, newest); err != nil {
			damaged = append(damaged, damagedRank{id, err})
		}
	}
	return start, newest, damaged
}

// newestW returns of each worker the greatest W of its ranks. All of them are
// written at once, so one whose W is less is out of date: of the records since, those
// that retire the worker are passed over for its siblings, and so for it.
func newestW(table *snapshot.Table) map[string]int64 {
	newest := map[string]int64{}
	for _, id := range table.IDs() {
		if m := table.Manifest(id); m != nil {
			newest[id.Worker] = max(newest[id.Worker], m.W)
		}
	}
	return newest
}

// damaged does what is left to do about a worker-rank whose snapshot cannot be
// loaded. A log that was never trimmed makes up for it.
func (p *partition) damaged(table *snapshot.Table, id snapshot.ID, bounds consumer.Bounds, start int64, newest map[string]int64, err error) {
	log := p.log.With("worker", id.Worker, "rank", id.Rank, "snapshot_topic", p.stage.cfg.SnapshotTopic, "error", err)
	m := table.Manifest(id)
	if m != nil && m.W < newest[id.Worker] {
		m = nil
	}
	switch {
	case bounds.Start == 0:
		log.Error("snapshot of a worker-rank is damaged, all events are replayed from the log's start", "offset", 0)
	case m != nil && m.W >= bounds.Start:
		log.Error("snapshot of a worker-rank is damaged and the log was trimmed: its blocks are lost, it is incomplete until its next clear or epoch", "offset", m.W)
		if k := p.restored(m); k != nil {
			k.incomplete.Store(true)
			k.saved.force = true
		}
	case m != nil:
		log.Error("snapshot of a worker-rank is damaged and the log was trimmed past it: it is not answered until its next epoch or twice worker-grace later", "offset", m.W)
		p.loadUnknown(m, p.loses(start, never))
	default:
		// A sibling's record retires it too, and is passed over where the
		// sibling's own snapshot holds it.
		start = max(start, newest[id.Worker])
		log.Error("snapshot of a worker-rank is damaged and the log was trimmed: it is not answered until its next epoch or twice worker-grace later", "offset", start)
		p.lost[id] = p.loses(start, never)
	}
}

// topicPatience is how many more times a snapshot topic that does not exist is
// asked for before it is believed.
const topicPatience = 8

var errNoSnapshotPartition = errors.New("the snapshot topic has no such partition")

// readSnapshots reads the partition of the snapshot topic that belongs to this one.
func (p *partition) readSnapshots(ctx context.Context) (*snapshot.Reader, error) {
	t, err := consumer.DescribeTopic(ctx, p.stage.aux, p.stage.cfg.SnapshotTopic)
	for range topicPatience {
		// A broker that has just started may not have heard of the topic yet,
		// and to go on without snapshots that are there may lose what they hold.
		if !errors.Is(err, consumer.ErrNoTopic) {
			break
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(p.stage.topicPause):
		}
		t, err = consumer.DescribeTopic(ctx, p.stage.aux, p.stage.cfg.SnapshotTopic)
	}
	if err != nil {
		return nil, err
	}
	if p.number >= t.Partitions {
		return nil, fmt.Errorf("topic %s has %d partitions: %w", t.Name, t.Partitions, errNoSnapshotPartition)
	}
	reader := p.newReader()
	err = reader.ReadToEnd(ctx)
	p.bytes.Store(reader.Read().Bytes)
	return reader, err
}

func (p *partition) newReader() *snapshot.Reader {
	said := time.Now()
	return snapshot.NewReader(snapshot.ReaderConfig{
		Client:    p.stage.aux,
		Topic:     p.stage.cfg.SnapshotTopic,
		Partition: p.number,
		Logger:    p.log,
		Progress: func(g snapshot.Progress) {
			if now := time.Now(); now.Sub(said) > 2*time.Second && g.Position < g.Target {
				said = now
				p.log.Info("reading snapshots", "from", g.Start, "at", g.Position, "to", g.Target, "bytes", g.Bytes)
			}
		},
	})
}

// loadRank puts one worker-rank back as its snapshot says.
func (p *partition) loadRank(table *snapshot.Table, id snapshot.ID, bounds consumer.Bounds, newest map[string]int64) error {
	if err := table.Check(id); err != nil {
		return err
	}
	m := table.Manifest(id)
	if w := newest[id.Worker]; m.W < w {
		return fmt.Errorf("its W is %d, but that of another rank of the worker %d", m.W, w)
	}
	if m.W < bounds.Start && !m.Retired {
		p.log.Error("the log was trimmed past a worker-rank's snapshot: it is not answered until its next epoch or twice worker-grace later",
			"worker", id.Worker, "rank", id.Rank, "offset", m.W, "log_start", bounds.Start)
		p.loadUnknown(m, p.loses(bounds.Start, never))
		return nil
	}
	k := p.restored(m)
	if k == nil {
		return nil
	}
	if k.blocks != nil {
		if _, err := table.Load(id, func(c schemas.Chain) error {
			_, err := k.blocks.Store(c.Tier, c.Stored)
			return err
		}); err != nil {
			p.unload(k)
			return err
		}
	}
	k.show()
	p.loaded += k.held()
	return nil
}

// restored makes the worker-rank that a manifest describes, empty; nil if its model is
// not served. Of one that another partition answers for, or that is retired, blocks
// stays nil.
func (p *partition) restored(m *schemas.Manifest) *rank {
	key := modelKey{m.Model, m.BlockSize, m.Hasher}
	aside := !m.Retired && p.stage.owners.beaten(m.Worker, claim{partition: p.number, epoch: m.Epoch, since: m.EpochStarted})
	model, err := key.withoutIndex(), p.stage.models.allow(key)
	if !aside {
		model, err = p.stage.models.get(key)
	}
	if err != nil {
		p.save.passed[snapshot.ID{Worker: m.Worker, Rank: m.Rank}] = true
		p.passed.Store(int64(len(p.save.passed)))
		p.log.Warn("snapshot of a worker-rank is passed over", "worker", m.Worker, "rank", m.Rank, "error", err)
		return nil
	}
	w := p.workers[m.Worker]
	if w == nil {
		w = &worker{name: m.Worker}
		p.workers[m.Worker] = w
	}
	// Where its first record is, no manifest says: without one the floor would
	// have to stay at the log's start.
	k := p.addRank(w, m.Rank, 0)
	k.model, k.producer, k.epoch, k.epochStarted = model, m.Producer, m.Epoch, m.EpochStarted
	k.seq.Store(m.Seq)
	if m.PastLostAt != 0 {
		k.past, k.disputed = p.loses(m.W, m.PastLostAt), m.Disputed
		p.lost[k.id()] = k.past
	}
	k.lastHeard.Store(m.LastHeard)
	k.lastOffset, k.restoredW, k.changedAt = m.LastOffset, m.W, m.W
	// Due as soon as the partition is live: whoever crashes again and again
	// must not replay more each time.
	k.saved = savedState{manifest: true, w: m.W, at: time.Now().Add(-p.stage.cfg.SnapshotMaxAge)}
	k.aside = aside
	k.incomplete.Store(m.Incomplete || aside)
	p.leaderEpoch = max(p.leaderEpoch, m.LeaderEpoch)
	p.clock.heard(m.LastHeard, time.Now())
	switch {
	case m.Retired: // its epoch counts: a late record on another partition must not bring it back
		k.retire(m.RetiredAt)
	case aside:
		k.publish()
	default:
		k.blocks = model.Index.AddWorker(k.worker.name, k.number, k)
		k.publish()
	}
	p.nextExpiry = min(p.nextExpiry, k.expiry(p.grace()))
	return k
}

// unload takes back a worker-rank whose blocks turned out to be damaged.
func (p *partition) unload(k *rank) {
	p.unlist(k)
	w := k.worker
	for i, other := range w.ranks {
		if other == k {
			w.ranks = append(w.ranks[:i], w.ranks[i+1:]...)
			break
		}
	}
}
