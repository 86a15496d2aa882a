// This file is one partition of the stage as the consumer drives it.

package pipeline

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/schemas"
	"kvindex/snapshot"
)

// partition is the stage's consumer.Handler of one partition: the workers that
// live on it and the snapshots made of them. Everything belongs to the
// partition's goroutine but for what is marked as shared.
type partition struct {
	stage  *Stage
	number int32
	log    *slog.Logger

	workers     map[string]*worker
	topicID     [16]byte // of the log being read
	position    int64    // next offset to apply
	leaderEpoch int32    // of what is right before position, -1 if unknown
	nextExpiry  int64    // no worker-rank expires before this broker time
	arrived     time.Time
	timeDecode  bool          // the next record's decoding is measured
	batch       schemas.Batch // of the record under way, reused
	limiter     logLimiter
	save        saving
	forgotten   map[snapshot.ID]*goner    // worker-ranks whose manifest is to go
	lost        map[snapshot.ID]*lostPast // of worker-ranks whose manifest cannot be read
	lostAll     *lostPast                 // of all that have no manifest; nil if nothing is lost
	untimed     []*lostPast               // whose end has not been read yet
	spoiled     map[snapshot.ID]bool      // whose snapshot on the topic was damaged: a new manifest for it is not enough
	blind       bool                      // restored without the snapshot topic, which was not there
	loaded      int64                     // what restore put back: blocks
	reading     time.Duration             // that the restore spent on the snapshot topic
	loading     time.Duration             // that it spent on putting snapshots into the index
	replayTo    int64                     // the end when replay began: records before it are read again

	// Shared.
	counts  counters
	clock   brokerClock
	listing sync.Map // snapshot.ID -> *rank, for status
	ranks   atomic.Int64
	whole   atomic.Int64         // when everything committed was last known to be applied, in nanoseconds since epoch0; 0: never
	reread  atomic.Int64         // records read again since the last restore
	took    atomic.Int64         // nanoseconds the last restore took, until replay began
	got     atomic.Int64         // blocks that the last restore put back
	bytes   atomic.Int64         // of the snapshots that it read
	held    atomic.Pointer[held] // nil: no transaction is open on its snapshots
	passed  atomic.Int64         // worker-ranks on the snapshot topic that are not served here
	saver   *saver               // nil without snapshots
	dumps   chan dumpAsk         // asked for, one is answered at each Tick
}

func newPartition(s *Stage, n int32) *partition {
	p := &partition{
		stage:       s,
		number:      n,
		log:         s.log.With("topic", s.cfg.Topic, "partition", n),
		workers:     map[string]*worker{},
		forgotten:   map[snapshot.ID]*goner{},
		lost:        map[snapshot.ID]*lostPast{},
		spoiled:     map[snapshot.ID]bool{},
		leaderEpoch: -1,
		nextExpiry:  never,
		dumps:       make(chan dumpAsk, 1),
	}
	if s.cfg.SnapshotTopic != "" {
		p.saver = newSaver(p)
	}
	return p
}

// Apply implements consumer.Handler.
func (p *partition) Apply(records []*kgo.Record, next int64, epoch int32) {
	p.arrived = time.Now()
	span := p.startBatch(records)
	p.timeDecode = true
	bytes := 0
	for _, r := range records {
		bytes += len(r.Key) + len(r.Value)
		if hook := p.stage.beforeRecord; hook != nil {
			hook(p.number, r.Offset)
		}
		p.position = r.Offset
		p.apply(r)
		if r.Offset < p.replayTo {
			p.reread.Add(1)
		}
	}
	p.position, p.leaderEpoch = next, epoch
	p.counts.add(recordBytes, bytes)
	if len(records) > 0 {
		record(span.ctx, p.stage.measures.apply, p.arrived)
	}
	span.end(p)
}

// decode fills p.batch from a record.
func (p *partition) decode(r *kgo.Record) error {
	if !p.timeDecode {
		return p.stage.registry.DecodeBatch(&p.batch, r.Value)
	}
	p.timeDecode = false
	began := time.Now()
	err := p.stage.registry.DecodeBatch(&p.batch, r.Value)
	record(context.Background(), p.stage.measures.decode, began)
	return err
}

// grace is how long a worker-rank may be silent, and then be retired, in
// milliseconds of the broker's clock.
func (p *partition) grace() int64 { return p.stage.cfg.WorkerGrace.Milliseconds() }

// Current implements consumer.Handler.
func (p *partition) Current(at time.Time) {
	p.clock.upTo(at)
	p.whole.Store(int64(at.Sub(epoch0)))
}

// behind is for how long it has not been known that everything committed is
// applied; since the process began if it never was.
func (p *partition) behind(now time.Time) time.Duration {
	return max(0, now.Sub(epoch0)-time.Duration(p.whole.Load()))
}

// Tick implements consumer.Handler.
func (p *partition) Tick(now time.Time) error {
	for _, w := range p.workers {
		w.takeNotice(p)
	}
	p.serveDump()
	return p.saveTick(now)
}

// Drop implements consumer.Handler: everything read so far is of a log that is
// gone.
func (p *partition) Drop(reason error) {
	for _, w := range p.workers {
		for _, k := range w.ranks {
			p.unlist(k)
		}
	}
	clear(p.workers)
	clear(p.forgotten)
	clear(p.lost)
	clear(p.spoiled)
	p.lostAll, p.untimed = nil, nil
	p.position, p.leaderEpoch, p.nextExpiry = 0, -1, never
	p.clock.reset()
	p.save.incarnation++
	p.save.adopted, p.save.told = 0, nil
	p.save.passed = map[snapshot.ID]bool{}
	p.passed.Store(0)
	if p.saver != nil {
		p.saver.drop()
	}
}

// Drain implements consumer.Handler.
func (p *partition) Drain(ctx context.Context) { p.saveLast(ctx) }

// bad counts and logs a record, or an event of it, that is not applied as it
// stands. The log is thinned out, the counter is not.
func (p *partition) bad(r *kgo.Record, kind counter, err error) {
	p.counts.add(kind, 1)
	if passed, more := p.limiter.allow(kind, p.arrived); passed {
		p.log.Warn("record not applied as it stands", "offset", r.Offset, "reason", counterNames[kind].name, "error", err, "not_logged", more)
	}
}

// logLimiter lets a few lines of a kind through in each window.
type logLimiter [numCounters]struct {
	since  time.Time
	passed int
	held   int // since the last one that passed
}

const (
	logWindow = 10 * time.Second
	logBurst  = 5
)

// allow reports whether to log, and how many of the kind were held back since.
func (l *logLimiter) allow(kind counter, now time.Time) (bool, int) {
	k := &l[kind]
	if now.Sub(k.since) >= logWindow {
		k.since, k.passed = now, 0
	}
	if k.passed >= logBurst {
		k.held++
		return false, 0
	}
	held := k.held
	k.passed++
	k.held = 0
	return true, held
}
