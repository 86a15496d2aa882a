// This file is the consumer: the goroutine that polls, the one that watches the topic, and the
// partitions that both serve.

package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Handler does one partition's work. All its methods are called from that
// partition's goroutine, one at a time.
type Handler interface {
	// Restore brings back what was saved and returns the offset to read from.
	// It is called first, and again after Reset. An error is retried with
	// back-off until the context ends.
	Restore(ctx context.Context) (start int64, err error)
	// Apply applies records, in offset order and free of control records;
	// next is the partition's position after them, and epoch the leader epoch
	// of what is right before it, a control record perhaps. There may be no
	// records, when only the position moved.
	Apply(records []*kgo.Record, next int64, epoch int32)
	// Current says that everything that was committed to the partition at that
	// moment has been applied. While brokers do not answer, or the partition is
	// behind, it is not called.
	Current(at time.Time)
	// Tick is called between batches, about every Config.Tick. An error has
	// the partition dropped and restored again.
	Tick(now time.Time) error
	// Drop forgets everything: what was read is no longer the log's. The next
	// call is Restore.
	Drop(reason error)
	// Drain is the last call.
	Drain(ctx context.Context)
}

// Config tells a Consumer what to read and how.
type Config struct {
	Client  *kgo.Client // made with ClientOptions; not closed here
	Topic   string
	Handler func(partition int32) Handler // makes a partition's handler
	Logger  *slog.Logger

	Buffer   int           // fetched batches a partition may hold before it is paused, at least 4
	ReadyLag int64         // offsets behind the end at which a partition that has caught up counts as live
	Tick     time.Duration // between calls of Handler.Tick
	Watch    time.Duration // between looks at the topic's id, partitions and end offsets
}

// errOverrun is a broken invariant of the hand-over, answered by reading again.
var errOverrun = errors.New("BUG: a paused partition was fetched")

// ErrRecreated is the reason of a Drop when the topic's id changed.
var ErrRecreated = errors.New("topic was deleted and created again")

// ClientOptions are the options a Config.Client must be made with, besides
// brokers and security.
func ClientOptions() []kgo.Opt {
	return []kgo.Opt{
		// Only committed records, and the position must count the markers.
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(),
		// A log trimmed past the position must be an error, not a jump.
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		// Resuming a paused partition waits for the fetch under way, which
		// without new data lasts this long.
		kgo.FetchMaxWait(500 * time.Millisecond),
		kgo.FetchMaxBytes(16 << 20),
		kgo.FetchMaxPartitionBytes(1 << 20),
		// A client that closes while a fetch begins races with itself about its
		// sessions, which save little: a fetch names its partitions instead.
		kgo.DisableFetchSessions(),
		// No limit on concurrent fetches: it would count long polls, and idle
		// brokers would hold up the busy ones. Memory is bounded by one fetch a
		// broker and what the partitions' channels hold.
	}
}

// Consumer reads one topic. Make it with New, then Run it once.
type Consumer struct {
	cfg Config

	mu       sync.Mutex
	parts    []*Partition       // by partition number; only ever appended to, also when a topic made anew has fewer
	topic    Topic              // as last seen
	commands []func()           // to be run by the poll goroutine between two polls
	wake     context.CancelFunc // ends the poll under way
	problem  string             // why the topic cannot be looked at, "" if it can
	seen     time.Time          // the last moment at which it could be; New's before
}

// New returns a Consumer that has not asked anything yet.
func New(cfg Config) *Consumer {
	cfg.Buffer = max(cfg.Buffer, 4)
	return &Consumer{cfg: cfg, seen: time.Now()}
}

// Partitions returns the partitions known so far that the topic has, by
// number. Safe for concurrent use.
func (c *Consumer) Partitions() []*Partition {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.parts), int(c.topic.Partitions))
	return c.parts[:n:n]
}

// everyPartition is Partitions with those that the topic has no more.
func (c *Consumer) everyPartition() []*Partition {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.parts[:len(c.parts):len(c.parts)]
}

// Topic returns the topic as last seen. Safe for concurrent use.
func (c *Consumer) Topic() Topic {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.topic
}

// Problem says why the topic cannot be looked at just now, or "": partitions
// then stay as they are. Safe for concurrent use.
func (c *Consumer) Problem() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.problem
}

// Seen returns the last moment at which the topic could be looked at, wholly:
// its metadata and where each partition ends. Before the first it is New's.
// Safe for concurrent use.
func (c *Consumer) Seen() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen
}

func (c *Consumer) setProblem(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.problem = err.Error()
		return
	}
	c.problem, c.seen = "", time.Now()
}

// Run reads until the context ends, then drains every partition and returns.
// It waits for the topic to exist. The drain context bounds Handler.Drain.
func (c *Consumer) Run(ctx, drain context.Context) error {
	if err := c.waitForTopic(ctx); err != nil {
		return err
	}
	var wg sync.WaitGroup
	c.grow(ctx, drain, &wg)
	wg.Go(func() { c.watch(ctx, drain, &wg) })
	c.poll(ctx)
	wg.Wait()
	return nil
}

// waitForTopic asks for the topic until it is there, saying so as it waits.
func (c *Consumer) waitForTopic(ctx context.Context) error {
	for wait := time.Duration(0); ; wait = min(max(2*wait, 100*time.Millisecond), 5*time.Second) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
		t, err := describe(ctx, c.cfg.Client, c.cfg.Topic)
		if err == nil {
			c.setTopic(t)
			c.setProblem(nil)
			return nil
		}
		if ctx.Err() == nil {
			c.setProblem(err)
			c.cfg.Logger.Warn("waiting for the topic", "topic", c.cfg.Topic, "error", err)
		}
	}
}

// describe is DescribeTopic with a deadline, so that a dead broker is noticed.
func describe(ctx context.Context, cl *kgo.Client, topic string) (Topic, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return DescribeTopic(ctx, cl, topic)
}

func (c *Consumer) setTopic(t Topic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.topic = t
}

// grow starts the partitions that have no goroutine yet.
func (c *Consumer) grow(ctx, drain context.Context, wg *sync.WaitGroup) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := int32(len(c.parts)); n < c.topic.Partitions; n++ {
		p := newPartition(c, n)
		c.parts = append(c.parts, p)
		wg.Go(func() { p.run(ctx, drain) })
	}
}

// do has the poll goroutine run f between two polls and waits for it, so that
// no batch fetched before f is handed over after it.
func (c *Consumer) do(ctx context.Context, f func()) {
	done := make(chan struct{})
	c.mu.Lock()
	c.commands = append(c.commands, func() { f(); close(done) })
	if c.wake != nil {
		c.wake()
	}
	c.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// poll is the one goroutine that fetches.
func (c *Consumer) poll(ctx context.Context) {
	for ctx.Err() == nil {
		pollCtx, cancel := context.WithCancel(ctx)
		c.mu.Lock()
		commands := c.commands
		c.commands, c.wake = nil, cancel
		parts := c.parts
		c.mu.Unlock()
		for _, f := range commands {
			f()
		}
		fetches := c.cfg.Client.PollFetches(pollCtx)
		cancel()
		if fetches.IsClientClosed() {
			return
		}
		fetches.EachPartition(func(ftp kgo.FetchTopicPartition) {
			if ftp.Topic != c.cfg.Topic || int(ftp.Partition) >= len(parts) || ftp.Partition < 0 {
				return // the error of a poll that was woken
			}
			p := parts[ftp.Partition]
			if ftp.Err != nil {
				p.fetchFailed(ftp.Err)
			}
			if len(ftp.Records) > 0 {
				p.handOver(batch{records: ftp.Records, end: ftp.LastStableOffset})
			}
		})
	}
}

// watch looks at the topic every so often: its id, its partitions and where
// each of them ends.
func (c *Consumer) watch(ctx, drain context.Context, wg *sync.WaitGroup) {
	tick := time.NewTicker(c.cfg.Watch)
	defer tick.Stop()
	failing := false
	for {
		err := c.look(ctx, drain, wg)
		c.setProblem(err)
		if failed := err != nil; failed != failing && ctx.Err() == nil {
			failing = failed
			if failed {
				c.cfg.Logger.Warn("cannot look at the topic", "topic", c.cfg.Topic, "error", err)
			} else {
				c.cfg.Logger.Info("the topic can be looked at again", "topic", c.cfg.Topic)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (c *Consumer) look(ctx, drain context.Context, wg *sync.WaitGroup) error {
	t, err := describe(ctx, c.cfg.Client, c.cfg.Topic)
	if err != nil {
		return err
	}
	switch old := c.Topic(); {
	case t.ID != old.ID:
		c.cfg.Logger.Warn("the topic was deleted and created again: everything read from it is dropped",
			"topic", t.Name, "old_id", fmt.Sprintf("%x", old.ID), "new_id", fmt.Sprintf("%x", t.ID))
		c.setTopic(t)
		// The client holds on to the old id until the topic is purged.
		c.do(ctx, func() { c.cfg.Client.PurgeTopicsFromClient(c.cfg.Topic) })
		for _, p := range c.everyPartition() {
			p.reset(fmt.Errorf("topic %s partition %d: %w", t.Name, p.Number, ErrRecreated))
		}
		c.grow(ctx, drain, wg)
	case t.Partitions > old.Partitions:
		c.cfg.Logger.Warn("the topic has more partitions than before: workers whose key now maps elsewhere must begin a new epoch",
			"topic", t.Name, "before", old.Partitions, "now", t.Partitions)
		c.setTopic(t)
		c.grow(ctx, drain, wg)
	}
	numbers := make([]int32, 0, t.Partitions)
	for _, p := range c.Partitions() {
		numbers = append(numbers, p.Number)
	}
	reqCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	asked := time.Now()
	bounds, err := ListBounds(reqCtx, c.cfg.Client, c.cfg.Topic, numbers)
	for _, p := range c.Partitions() {
		if b, ok := bounds[p.Number]; ok {
			p.ended(ending{b.End, asked})
		}
	}
	return err
}

// lost says whether a fetch error means that the log no longer holds what the
// partition would read next, so that it has to restore.
func lost(err error) bool {
	var loss *kgo.ErrDataLoss
	return errors.As(err, &loss) || errors.Is(err, kerr.OffsetOutOfRange)
}
