// This file is one partition's goroutine: it restores, applies what is fetched, and is paused when it
// falls behind.

package consumer

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Partition is one partition's goroutine and what others may see of it. Its
// exported methods are safe for concurrent use.
type Partition struct {
	Number int32

	c       *Consumer
	handler Handler
	batches chan batch  // fetched, not yet applied; the poll goroutine is the only sender
	resets  chan error  // at most one waiting: why to restore again
	endings chan ending // at most one waiting: the newest look at where the log ends

	state    atomic.Int32
	position atomic.Int64 // next offset to apply
	end      atomic.Int64 // last stable offset as last heard
	start    atomic.Int64 // where reading began after the last restore
	target   int64        // catching up ends here; the goroutine's own
	pausing  sync.Mutex   // held while paused and the client change together
	paused   atomic.Bool
	pauses   atomic.Int64 // how many times it was paused
	awaited  ending       // to be reached, then told to the handler; the goroutine's own, zero if there is none
	problem  atomic.Pointer[string]
	waiters  waiters
}

// batch is what one poll fetched of the partition.
type batch struct {
	records []*kgo.Record
	end     int64 // last stable offset when they were fetched
}

// ending is where the log ended at a moment.
type ending struct {
	offset int64 // last stable offset
	at     time.Time
}

func newPartition(c *Consumer, n int32) *Partition {
	return &Partition{
		Number:  n,
		c:       c,
		handler: c.cfg.Handler(n),
		batches: make(chan batch, c.cfg.Buffer),
		resets:  make(chan error, 1),
		endings: make(chan ending, 1),
	}
}

// State returns where the partition stands.
func (p *Partition) State() State { return State(p.state.Load()) }

// Position returns the next offset to apply.
func (p *Partition) Position() int64 { return p.position.Load() }

// End returns the last stable offset as last heard: one past the last offset
// that can be read now.
func (p *Partition) End() int64 { return max(p.end.Load(), p.position.Load()) }

// Start returns the offset at which reading began after the last restore.
func (p *Partition) Start() int64 { return p.start.Load() }

// Paused reports whether fetching waits for the handler.
func (p *Partition) Paused() bool { return p.paused.Load() }

// Pauses returns how many times fetching has had to wait for the handler.
func (p *Partition) Pauses() int64 { return p.pauses.Load() }

// Problem returns the trouble that is being retried, or "".
func (p *Partition) Problem() string {
	if s := p.problem.Load(); s != nil {
		return *s
	}
	return ""
}

func (p *Partition) setProblem(err error) {
	if err == nil {
		if p.problem.Load() != nil {
			p.problem.Store(nil)
		}
		return
	}
	s := err.Error()
	p.problem.Store(&s)
}

// run is the partition's goroutine.
func (p *Partition) run(ctx, drain context.Context) {
	for p.restore(ctx) {
		reason := p.read(ctx)
		if reason == nil {
			break
		}
		log := p.c.cfg.Logger.With("topic", p.c.cfg.Topic, "partition", p.Number)
		log.Warn("restoring again", "offset", p.Position(), "reason", reason)
		p.state.Store(int32(Restoring))
		p.setProblem(reason)
		p.c.do(ctx, p.remove)
		for len(p.batches) > 0 {
			<-p.batches
		}
		// What else was found wrong before is what this restore is for: two
		// fetches under way fail alike.
		select {
		case <-p.resets:
		default:
		}
		p.handler.Drop(reason)
	}
	p.state.Store(int32(Draining))
	p.handler.Drain(drain)
}

// restore calls the handler until it succeeds and has the client fetch from
// where it says. It returns false when the context ended.
func (p *Partition) restore(ctx context.Context) bool {
	log := p.c.cfg.Logger.With("topic", p.c.cfg.Topic, "partition", p.Number)
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		if !p.awaitExistence(ctx) {
			return false
		}
		start, bounds, err := p.tryRestore(ctx)
		if err == nil {
			p.start.Store(start)
			p.position.Store(start)
			p.end.Store(bounds.End)
			p.target = bounds.End
			p.awaited = ending{}
			p.state.Store(int32(CatchingUp))
			p.moved()
			p.setProblem(nil)
			p.c.do(ctx, func() { p.add(start) })
			return ctx.Err() == nil
		}
		if ctx.Err() != nil {
			return false
		}
		log.Error("restore failed, trying again", "error", err, "wait", wait)
		p.setProblem(err)
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}

// awaitExistence waits while the topic, made anew with fewer partitions, has no
// such one. It returns false when the context ended.
func (p *Partition) awaitExistence(ctx context.Context) bool {
	for p.Number >= p.c.Topic().Partitions {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(p.c.cfg.Watch):
		}
	}
	return ctx.Err() == nil
}

func (p *Partition) tryRestore(ctx context.Context) (int64, Bounds, error) {
	start, err := p.handler.Restore(ctx)
	if err != nil {
		return 0, Bounds{}, err
	}
	// The end is asked for after the restore: what arrived meanwhile counts.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	bounds, err := ListBounds(ctx, p.c.cfg.Client, p.c.cfg.Topic, []int32{p.Number})
	return start, bounds[p.Number], err
}

// add and remove run on the poll goroutine.
func (p *Partition) add(start int64) {
	p.c.cfg.Client.AddConsumePartitions(map[string]map[int32]kgo.Offset{
		p.c.cfg.Topic: {p.Number: kgo.NewOffset().At(start)},
	})
}

func (p *Partition) remove() {
	p.c.cfg.Client.RemoveConsumePartitions(p.c.topicPartition(p.Number))
	p.resume()
}

func (c *Consumer) topicPartition(n int32) map[string][]int32 {
	return map[string][]int32{c.cfg.Topic: {n}}
}

// read applies what is fetched until the context ends (nil) or the partition
// has to be restored again (the reason).
func (p *Partition) read(ctx context.Context) error {
	tick := time.NewTicker(p.c.cfg.Tick)
	defer tick.Stop()
	p.advance()
	for {
		select {
		case <-ctx.Done():
			return nil
		case reason := <-p.resets:
			return reason
		case b := <-p.batches:
			p.apply(b)
			if p.Paused() && len(p.batches) <= cap(p.batches)/4 {
				p.resume()
			}
		case e := <-p.endings:
			p.setProblem(nil)
			p.await(e)
			p.advance()
		case now := <-tick.C:
			if err := p.handler.Tick(now); err != nil {
				return err
			}
		}
	}
}

// apply hands a batch to the handler, without its control records.
func (p *Partition) apply(b batch) {
	records := b.records
	last := records[len(records)-1]
	next := last.Offset + 1
	kept := records[:0]
	for _, r := range records {
		if !r.Attrs.IsControl() {
			kept = append(kept, r)
		}
	}
	p.handler.Apply(kept, next, last.LeaderEpoch)
	p.position.Store(next)
	p.reached()
	p.moved()
	p.advance()
}

// await has the handler told when the end is reached. One that is awaited
// already stays: under steady load the newest is never reached.
func (p *Partition) await(e ending) {
	if p.awaited.at.IsZero() {
		p.awaited = e
	}
	p.reached()
}

// reached tells the handler once everything is applied up to where the log
// ended at the moment that is awaited.
func (p *Partition) reached() {
	if e := p.awaited; !e.at.IsZero() && p.position.Load() >= e.offset {
		p.awaited = ending{}
		p.handler.Current(e.at)
	}
}

// advance moves from catching up to live once the end as it was after the
// restore is reached and what came since is within the ready lag.
func (p *Partition) advance() {
	if p.State() != CatchingUp || p.position.Load() < p.target {
		return
	}
	if lag := p.End() - p.position.Load(); lag > p.c.cfg.ReadyLag {
		return
	}
	p.state.Store(int32(Live))
	if err := p.handler.Tick(time.Now()); err != nil {
		p.reset(err)
	}
	p.c.cfg.Logger.Info("live", "topic", p.c.cfg.Topic, "partition", p.Number,
		"start", p.start.Load(), "position", p.position.Load())
}

// handOver runs on the poll goroutine and never blocks: the partition is paused
// while half of its channel is still free, and a paused one is fetched no more.
func (p *Partition) handOver(b batch) {
	p.raiseEnd(b.end)
	p.setProblem(nil)
	if len(p.batches) >= cap(p.batches)/2 {
		p.pausing.Lock()
		if !p.paused.Swap(true) {
			p.pauses.Add(1)
			p.c.cfg.Client.PauseFetchPartitions(p.c.topicPartition(p.Number))
		}
		p.pausing.Unlock()
	}
	select {
	case p.batches <- b:
	default:
		// Cannot be: a resumed partition has three quarters of its channel free.
		p.reset(errOverrun)
	}
}

func (p *Partition) resume() {
	p.pausing.Lock()
	defer p.pausing.Unlock()
	if p.paused.Swap(false) {
		p.c.cfg.Client.ResumeFetchPartitions(p.c.topicPartition(p.Number))
	}
}

// fetchFailed runs on the poll goroutine.
func (p *Partition) fetchFailed(err error) {
	log := p.c.cfg.Logger.With("topic", p.c.cfg.Topic, "partition", p.Number, "offset", p.Position())
	if lost(err) {
		log.Error("what should be read next is gone from the log", "error", err)
		p.reset(err)
		return
	}
	p.setProblem(err)
	log.Warn("fetching failed, trying again", "error", err)
}

// ended is told where the log ends. Only the watch goroutine calls it.
func (p *Partition) ended(e ending) {
	p.raiseEnd(e.offset)
	select {
	case <-p.endings: // an older one that was not looked at
	default:
	}
	p.endings <- e
}

func (p *Partition) raiseEnd(end int64) {
	for {
		old := p.end.Load()
		if end <= old || p.end.CompareAndSwap(old, end) {
			return
		}
	}
}

// reset asks for a new restore; one reason at a time is enough.
func (p *Partition) reset(reason error) {
	select {
	case p.resets <- reason:
	default:
	}
}
