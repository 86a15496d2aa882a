// This file turns what the engine of one worker-rank says into records: it keeps
// the engine's cache in mind, begins epochs, and writes.

package relay

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/trace"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/schemas"
)

// feedConfig is what a feed must know. Fields without a word on it have no
// default.
type feedConfig struct {
	worker string // UTF-8, not empty
	rank   int32  // data parallel rank, from 0
	model  string // UTF-8, not empty
	source string // the engine's kind and endpoints: a checkpoint is good for the same ones only
	engine engine.Config
	limits engine.Limits // of a payload; engine's defaults

	heartbeat time.Duration // between heartbeats of a quiet engine; default 10 s
	grace     time.Duration // after which the stage retires a silent worker-rank; default 1 h
	patience  time.Duration // of a dump that waits for room without anything being acknowledged; default 10 s

	stateDir  string        // of checkpoints; empty: none
	saveEvery time.Duration // between checkpoints; default 30 s

	logger *slog.Logger
	tracer trace.Tracer     // nil: no spans, no trace context in headers
	stop   <-chan struct{}  // closes when the relay is to stop: a dump waits no longer. nil: never
	now    func() time.Time // default time.Now
}

// position is where in its engine's sequence a feed is.
type position struct {
	next int64  // number of the next batch; -1: not known
	sum  uint64 // checksum of the payload of the batch before
}

// feed is one worker-rank's way from engine events to records.
//
// An epoch begins with a heartbeat, of seq -1 if the engine is known to have held
// nothing (whole), or else of seq 0, which the stage takes as a gap: it marks the
// worker-rank incomplete until the engine clears its cache or the next epoch.
// Then comes all that is held, and then what changes. When records cannot be
// written, what the engine says is still kept in mind, and a new epoch says all
// of it once they can. So the engine is never made to wait, and nothing that it
// holds is lost.
//
// A feed belongs to one goroutine, but for status and counts.
type feed struct {
	cfg feedConfig
	out *outlet
	log *slog.Logger

	pos position // of what mapping is true for

	batch   engine.Batch
	mapping *engine.Mapping
	output  engine.Output
	flight  flight
	split   splitter
	record  schemas.Batch // what the feed's records have in common, and the next one's seq and events
	files   *files        // nil: no checkpoints
	troubles

	// The epoch. record has its number, seq, and producer.
	state    state
	why      cause // of the epoch that is due or, while writing, of this one
	whole    bool  // all that the engine holds is in mapping
	said     bool  // the stage takes the epoch for whole
	last     int64 // the highest epoch that ever was
	drain    bool  // nothing may be in flight when the next epoch begins
	failures int   // epochs that lost records, since one did not
	written  int64 // records of the epoch
	proven   int64 // so many of them acknowledged show that Kafka takes the epoch
	retryAt  time.Time
	wrote    time.Time          // when the last record was written
	headers  []kgo.RecordHeader // of the records of the batch at hand
	waits    bool               // send waits for room

	// Checkpoints.
	changed    bool       // since the last one
	savedAt    time.Time  // when the last one began
	saveEnd    time.Time  // when the last one that went well was seen to have ended
	saving     chan error // a save that goes on, or nil
	savedBytes int        // of the last one
	// owed: the ledger does not say of the last epoch, or still says that one before
	// can go on. No checkpoint is written before it is: it might be the one that the
	// ledger believes to be its own.
	owed    bool
	stuck   error  // a process after this one would believe what is not so
	unsaved string // why the last write failed, empty if it did not

	counts feedCounts
	mu     sync.Mutex
	seen   feedStatus // what status returns
}

// state is what a feed does with what the engine says. It is kept in mind in
// each state.
type state uint8

const (
	held    state = iota // nothing is to be written before release or empty
	due                  // an epoch is to begin
	opening              // the epoch's heartbeat is on its way, to see if Kafka takes it
	writing
)

var stateNames = [...]string{"held", "due", "opening", "writing"}

// String returns the state's name for the status.
func (s state) String() string { return stateNames[s] }

// feedCounts counts what a feed did. Safe for concurrent use.
type feedCounts struct {
	batches       atomic.Int64 // of the engine, taken in
	payloads      atomic.Int64 // that could not be decoded
	removalsLost  atomic.Int64 // batches with removals that could not be read
	wrongRank     atomic.Int64 // batches of another rank
	records       atomic.Int64 // written, without heartbeats
	heartbeats    atomic.Int64
	blocksStored  atomic.Int64 // in records
	blocksRemoved atomic.Int64 // in records
	unwritten     atomic.Int64 // batches with changes that were only kept in mind
	encoding      atomic.Int64 // records that could not be encoded
	saves         atomic.Int64 // checkpoints written
	saveFailures  atomic.Int64 // checkpoints that could not be written or read
	epochs        [causes]atomic.Int64
	reasons       [engine.Reasons]atomic.Uint64
}

// feedStatus is a feed at some moment.
type feedStatus struct {
	Worker   string
	Rank     int32
	Model    string
	State    string // held, due, opening, writing
	Cause    string // of the epoch that is due or written
	Epoch    int64  // 0: none yet
	Seq      int64
	Whole    bool // all that the engine holds is known
	Blocks   [index.Tiers]int
	Known    int       // engine hashes
	Aside    int       // engine hashes whose content or parent is not known
	Problem  string    // what is wrong now, empty if nothing is
	InFlight int       // records
	Bytes    int64     // of those
	Stalled  bool      // Kafka acknowledges none of them
	Failed   int64     // records that Kafka refused, ever
	Heard    time.Time // when Kafka last acknowledged a record
	Saved    time.Time // when the last checkpoint was written
	Unsaved  string    // why the last write of state failed, empty if it did not
}

// newFeed returns a feed that holds nothing and writes nothing yet: it waits for
// restore, empty or release. Errors: those of engine.New, and what is wrong with
// the names.
func newFeed(c feedConfig, out *outlet) (*feed, error) {
	if c.worker == "" || !utf8.ValidString(c.worker) || c.model == "" || !utf8.ValidString(c.model) || c.rank < 0 {
		return nil, fmt.Errorf("worker %q, rank %d, model %q: names must be UTF-8 and not empty, ranks not negative", c.worker, c.rank, c.model)
	}
	m, err := engine.New(c.engine)
	if err != nil {
		return nil, err
	}
	c.heartbeat = cmp.Or(c.heartbeat, 10*time.Second)
	c.grace = cmp.Or(c.grace, time.Hour)
	c.patience = cmp.Or(c.patience, 10*time.Second)
	c.saveEvery = cmp.Or(c.saveEvery, 30*time.Second)
	if c.now == nil {
		c.now = time.Now
	}
	f := &feed{
		cfg: c, out: out, mapping: m, pos: position{next: -1}, why: causeStart,
		log:    c.logger.With("worker", c.worker, "rank", c.rank),
		flight: flight{out: out, late: c.grace / 2, now: c.now, limit: out.limit / feedShare},
		record: schemas.Batch{
			Producer: out.name, Worker: []byte(c.worker), Rank: c.rank, Seq: -1, Model: []byte(c.model),
			BlockSize: int32(c.engine.Hasher.BlockSize), Hasher: c.engine.Hasher.Scheme,
		},
		savedAt: c.now(),
	}
	f.troubles = troubles{log: f.log, now: c.now}
	// Names and numbers come on top of the events.
	head := len(out.name) + len(c.worker) + len(c.model) + 128
	f.split = splitter{maxBytes: recordBytes - head, maxEvents: recordEvents, emit: f.emit}
	if f.split.maxBytes < recordBytes/2 {
		return nil, fmt.Errorf("worker %.64q, model %.64q: names of more than %d bytes", c.worker, c.model, recordBytes/2)
	}
	if c.stateDir != "" {
		f.files = newFiles(c.stateDir, c.worker, c.rank)
	}
	f.publish()
	return f, nil
}

// apply takes in a payload of msgpack: a batch of the engine, the next one.
func (f *feed) apply(payload []byte) {
	if err := f.batch.Decode(payload, f.cfg.limits); err != nil {
		f.counts.batches.Add(1)
		f.count(&f.batch.Counts)
		f.unreadable(err)
		return
	}
	f.applyBatch(&f.batch)
}

// unreadable is told of a payload that could not be decoded, of which nothing
// was applied: what the engine holds is not certain any more.
func (f *feed) unreadable(err error) {
	f.counts.payloads.Add(1)
	f.say("payload of the engine cannot be read", "error", err)
	f.empty(false, causePayload)
}

// applyBatch takes in a decoded batch.
func (f *feed) applyBatch(b *engine.Batch) {
	f.counts.batches.Add(1)
	f.count(&b.Counts)
	switch {
	case b.HasRank && b.Rank != f.cfg.rank:
		f.counts.wrongRank.Add(1)
		f.say("batch is of another rank: the number of ranks, or the first, is not the engine's", "got", b.Rank)
		f.problem(fmt.Sprintf("the engine at this endpoint says it is rank %d, not %d", b.Rank, f.cfg.rank))
		f.empty(false, causeRank)
		return
	case b.LostRemovals > 0:
		f.counts.removalsLost.Add(1)
		f.say("batch has removals that cannot be read", "removals", b.LostRemovals)
		f.empty(false, causePayload)
		return
	}
	if b.HasRank {
		f.problem("")
	}
	f.changed = true
	f.output.Reset()
	for i := range b.Events {
		f.mapping.Apply(&b.Events[i], &f.output)
	}
	grown := f.mapping.Counts[engine.WindowGrown] > 0
	f.count(&f.mapping.Counts)
	f.mapping.Counts = engine.Counts{}
	for i := range f.output.Events {
		if f.output.Events[i].Kind == schemas.KindCleared {
			f.whole = true
		}
	}
	if grown {
		// The engine did not clear anything: it holds blocks that were left out
		// before.
		f.whole = false
		f.end(causeWindow, false)
	}
	f.check()
	switch {
	case f.state == writing:
		f.write(f.output.Events)
	case len(f.output.Events) > 0:
		f.counts.unwritten.Add(1)
	}
	f.settle()
}

// at says where in the engine's sequence the feed is, after each batch and each
// empty.
func (f *feed) at(p position) {
	f.changed = f.changed || p != f.pos
	f.pos = p
}

// count adds to the counts by reason.
func (f *feed) count(c *engine.Counts) {
	for i, n := range c {
		if n > 0 {
			f.counts.reasons[i].Add(n)
		}
	}
}

// empty is told that what the feed holds in mind is the engine's no more: it
// restarted (whole: all that it holds comes next), or its events were lost. A
// new epoch says so at once if it can. It costs nothing if the stage knows
// already.
func (f *feed) empty(whole bool, why cause) {
	f.check()
	known, aside := f.mapping.Hashes()
	f.changed = f.changed || known+aside > 0 || whole != f.whole
	same := whole == f.whole && known == 0 && f.state != held
	f.mapping.Clear()
	f.whole = whole
	switch {
	case same:
	case f.state == held:
		f.state, f.why = due, why
	default:
		f.end(why, false)
	}
	f.settle()
}

// release has an epoch begin with all that is in mind, if there was none since the
// feed was made.
func (f *feed) release() {
	if f.state == held {
		f.state = due
	}
	f.settle()
}

// end ends the epoch that is written or opening; another is due. With drain it
// begins only when nothing is in flight and half of the budget is free.
func (f *feed) end(why cause, drain bool) {
	f.drain = f.drain || drain
	if f.state == held {
		return
	}
	if f.state != due {
		f.say("epoch ends: "+why.String(), "epoch", f.record.Epoch, "seq", f.record.Seq)
	}
	f.state, f.why = due, why
	f.publish()
}

// check ends the epoch if a record of it was lost or was too late.
func (f *feed) check() {
	if f.state != writing && f.state != opening {
		return
	}
	switch l := f.flight.look(); {
	case l.failed:
		f.say("Kafka refused a record", "topic", f.out.topic, "error", l.err)
		f.failures++
		f.retryAt = f.cfg.now().Add(backoff(f.failures))
		f.end(causeFailed, true)
	case l.astray:
		f.say("the topic has other partitions than before, or lost some of what it had")
		f.end(causeTopic, true)
	case l.overdue:
		f.end(causeSilence, true)
	case f.state == writing && l.acked >= f.proven:
		f.failures = 0
	}
}

// backoff is how long to wait after that many epochs that Kafka refused.
func backoff(failures int) time.Duration {
	return min(30*time.Second, time.Second<<min(failures-1, 5))
}

// settle begins an epoch if one is due and Kafka has room, and goes on with one
// that waits for Kafka. It is called often.
func (f *feed) settle() {
	f.check()
	switch f.state {
	case due:
		l := f.flight.look()
		if f.drain && (l.records > 0 || f.out.used.Load() > f.out.limit/2) || f.cfg.now().Before(f.retryAt) {
			return
		}
		f.begin()
	case opening:
		if f.flight.look().acked > 0 {
			f.dump()
		}
	}
}

// pending reports whether settle waits for nothing but Kafka's answer: whoever
// waits for the engine may then look in earlier.
func (f *feed) pending() bool { return f.state == due || f.state == opening }

// begin begins an epoch. If the one before was refused, Kafka must take the
// heartbeat before the rest is tried.
func (f *feed) begin() {
	f.last = max(f.last+1, f.cfg.now().UnixMilli())
	f.owed = f.files != nil
	f.paid()
	f.record.Producer, f.record.Epoch, f.record.Seq = f.out.name, f.last, -1
	if !f.whole {
		f.record.Seq = 0
	}
	f.said = f.whole
	f.flight.begin(f.last)
	f.state, f.written, f.proven = opening, 0, math.MaxInt64
	if !f.send(nil) {
		return
	}
	f.drain, f.retryAt = false, time.Time{}
	f.counts.epochs[f.why].Add(1)
	f.tell(slog.LevelInfo, "epoch begins: "+f.why.String(), "epoch", f.last, "whole", f.whole)
	if f.failures == 0 {
		f.dump()
	}
	f.publish()
}

// dump writes all that is held, after the epoch's first heartbeat.
func (f *feed) dump() {
	f.state = writing
	f.waits = true
	defer func() { f.waits = false }()
	more := true
	if f.whole && !f.said {
		// The engine cleared its cache after the heartbeat.
		f.said = true
		more = f.split.add(&schemas.Event{Kind: schemas.KindCleared, AllTiers: true}, true)
	}
	if more {
		f.mapping.Dump(func(t index.Tier, s index.Stored) bool {
			more = f.split.add(&schemas.Event{Kind: schemas.KindStored, Tier: t, Stored: s}, true)
			return more
		})
	}
	if more {
		f.split.flush()
	}
	f.proven = f.written
	f.publish()
}

// write writes what changed, in as many records as it takes.
func (f *feed) write(events []schemas.Event) {
	if len(events) == 0 {
		return
	}
	span := f.startSpan(events)
	defer span.end()
	for i := range events {
		if !f.split.add(&events[i], false) {
			return
		}
	}
	f.split.flush()
	f.said = f.whole
}

// emit writes a record of events, and reports whether the epoch goes on.
func (f *feed) emit(events []schemas.Event) bool {
	f.record.Seq++
	if !f.send(events) {
		f.record.Seq--
		return false
	}
	stored, removed := blocks(events)
	f.counts.records.Add(1)
	f.counts.blocksStored.Add(stored)
	f.counts.blocksRemoved.Add(removed)
	return true
}

// blocks counts the blocks that events store and remove.
func blocks(events []schemas.Event) (stored, removed int64) {
	for i := range events {
		stored += int64(len(events[i].Stored.Locals))
		removed += int64(len(events[i].Removed))
	}
	return stored, removed
}

// send writes a record with the seq at hand, a heartbeat if there are no events,
// and reports whether it was; if not, the epoch is over.
func (f *feed) send(events []schemas.Event) bool {
	now := f.cfg.now()
	if f.flight.overdueAt(now) {
		f.end(causeSilence, true)
		return false
	}
	f.record.Timestamp, f.record.Events = now.UnixMilli(), events
	s := f.out.get()
	value, err := schemas.AppendBatch(s.value[:0], &f.record)
	f.record.Events = nil
	if err != nil {
		f.counts.encoding.Add(1)
		f.say("record cannot be encoded", "error", err)
		f.failures++
		f.retryAt = now.Add(backoff(f.failures))
		f.end(causeFailed, true)
		return false
	}
	s.value, s.epoch, s.opens = value, f.record.Epoch, f.state == opening
	s.bytes = int64(len(value)) + recordOverhead
	if why := f.reserve(s.bytes); why != causeNone {
		f.out.put(s)
		f.end(why, true)
		return false
	}
	f.flight.produce(s, f.record.Worker, f.headers)
	f.wrote = now
	f.written++
	return true
}

// reserve takes room for n bytes. A dump waits for it while Kafka still
// acknowledges something. If there is none, it says why the epoch ends.
func (f *feed) reserve(n int64) cause {
	for {
		seen := f.out.done.Load()
		if f.waits {
			if f.check(); f.state != writing {
				return f.why
			}
		}
		if f.flight.room(n, f.waits) {
			return causeNone
		}
		if !f.waits || !f.out.await(f.cfg.stop, seen, f.cfg.patience) {
			f.say("no room for a record: Kafka is away or too slow", "bytes in flight", f.out.used.Load())
			return causeNoRoom
		}
	}
}

// tick is called every second or so, between batches, with alive if the engine
// was just proven to be: a quiet one has a heartbeat sent. It also begins the
// epoch that is due, and writes the checkpoint that is.
func (f *feed) tick(now time.Time, alive bool) {
	f.settle()
	if alive && f.state == writing && since(now, f.wrote) >= f.cfg.heartbeat {
		f.beat()
	}
	f.checkpoint(now)
	f.publish()
}

// beat sends a heartbeat. It is not needed while a record is on its way.
func (f *feed) beat() {
	if f.flight.look().records > 0 {
		return
	}
	if f.send(nil) {
		f.counts.heartbeats.Add(1)
	}
	f.settle()
}

// close is called last, after the relay read the engine for the last time. It
// waits for what is in flight until ctx ends, and leaves a checkpoint from which
// the epoch can go on, if every record of it is acknowledged.
func (f *feed) close(ctx context.Context) {
	f.settle()
	for {
		seen := f.out.done.Load()
		if f.flight.look().records == 0 {
			break
		}
		if !f.out.await(ctx.Done(), seen, time.Minute) && ctx.Err() != nil {
			break
		}
	}
	f.check()
	f.leave()
	f.publish()
}

// status returns the feed as it was when it last looked. Safe for concurrent use.
func (f *feed) status() feedStatus {
	f.mu.Lock()
	s := f.seen
	f.mu.Unlock()
	l := f.flight.look()
	s.InFlight, s.Bytes, s.Stalled, s.Failed, s.Heard = l.records, l.bytes, l.stalled || l.unheard, l.lost, l.heard
	s.Problem = join(s.Problem, s.Unsaved)
	switch {
	case s.State != stateNames[writing] && s.Cause == causeFailed.String() && l.err != nil:
		s.Problem = join(s.Problem, fmt.Sprintf("Kafka refused a record of topic %s: %s", f.out.topic, l.err))
	case l.unheard:
		s.Problem = join(s.Problem, "Kafka has acknowledged no record of topic "+f.out.topic+" yet")
	case s.Stalled:
		s.Problem = join(s.Problem, "Kafka has acknowledged no record of topic "+f.out.topic+" for more than "+stalledAfter.String())
	}
	return s
}

// publish has status see the feed as it is.
func (f *feed) publish() {
	known, aside := f.mapping.Hashes()
	f.mu.Lock()
	defer f.mu.Unlock()
	problem := f.seen.Problem
	f.seen = feedStatus{
		Worker: f.cfg.worker, Rank: f.cfg.rank, Model: f.cfg.model,
		State: f.state.String(), Cause: f.why.String(), Epoch: f.record.Epoch, Seq: f.record.Seq, Whole: f.whole,
		Known: known, Aside: aside, Problem: problem, Saved: f.saveEnd, Unsaved: f.unsaved,
	}
	for t := range index.Tier(index.Tiers) {
		f.seen.Blocks[t] = f.mapping.Len(t)
	}
}

// problem sets what is wrong with the feed, empty if nothing is.
func (f *feed) problem(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen.Problem = text
}
