// This file sends what a fleet's caches did to Kafka.

package fleet

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/schemas"
)

// ProducerConfig says how a Producer's records look.
type ProducerConfig struct {
	Topic     string
	Workers   []string // names; a worker is named by its index here
	Model     string
	BlockSize int // tokens
	Hasher    index.Hasher
	Epoch     int64 // of every worker: unix milliseconds of the start do
}

// inFlight bounds the records that are not acknowledged yet; a sender waits
// beyond it. It is below the client's own bound, which waits without a context.
const inFlight = 8192

// Producer writes the event records of a fleet's workers, each worker's in
// order. Its methods may be called from any goroutine.
type Producer struct {
	cfg  ProducerConfig
	cl   *kgo.Client
	slot chan struct{} // one taken for each record in flight

	mu      sync.Mutex // a worker's records are handed to the client in the order of their seq
	workers []producing

	records, heartbeats, failed atomic.Int64
	firstErr                    atomic.Pointer[error]
}

// producing is a worker as its producer sees it.
type producing struct {
	seq  int64 // of the last record, -1 before any
	last time.Time
}

// ProducerOptions are what the client of a Producer must have been made with,
// besides the brokers. The partitioner stays the client's default: murmur2 over
// the key, as Java's.
func ProducerOptions() []kgo.Opt {
	return []kgo.Opt{
		kgo.ProducerBatchCompression(kgo.ZstdCompression(), kgo.NoCompression()),
		kgo.ProducerLinger(2 * time.Millisecond), // the index should not lag by much more
		kgo.MaxBufferedRecords(inFlight + 1),
	}
}

// NewProducer returns a Producer over a client, which stays the caller's to
// close.
func NewProducer(cl *kgo.Client, cfg ProducerConfig) *Producer {
	p := &Producer{cfg: cfg, cl: cl, slot: make(chan struct{}, inFlight), workers: make([]producing, len(cfg.Workers))}
	for i := range p.workers {
		p.workers[i].seq = -1
	}
	return p
}

// Send writes one record for what a request did to a worker's cache, if it did
// anything, and returns how many events it has. It waits while too many records
// are unacknowledged; a broker that is away for a while loses nothing. An error
// is ctx's, or that the record cannot be written.
func (p *Producer) Send(ctx context.Context, worker int, s Served) (int, error) {
	var events []schemas.Event
	if len(s.Removed) > 0 {
		events = append(events, schemas.Event{Kind: schemas.KindRemoved, Removed: s.Removed})
	}
	if len(s.Stored) > 0 {
		events = append(events, schemas.Event{Kind: schemas.KindStored, Stored: index.Stored{
			Parent:    s.Parent,
			HasParent: s.Hit > 0,
			Position:  int32(s.Hit),
			Locals:    s.Stored,
		}})
	}
	if len(events) == 0 {
		return 0, nil
	}
	return len(events), p.write(ctx, worker, events, 0)
}

// Heartbeats keeps workers from looking dead: each one that has been silent for
// longer than every sends a record without events. It returns when ctx ends.
func (p *Producer) Heartbeats(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every / 4)
	defer tick.Stop()
	for {
		for w := range p.workers {
			if err := p.write(ctx, w, nil, every); err != nil && ctx.Err() == nil {
				p.fail(err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// write sends one record, but none if the worker sent one less than quiet ago.
func (p *Producer) write(ctx context.Context, worker int, events []schemas.Event, quiet time.Duration) error {
	select {
	case p.slot <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	w := &p.workers[worker]
	now := time.Now()
	if quiet > 0 && now.Sub(w.last) < quiet {
		<-p.slot
		return nil
	}
	seq := w.seq
	if len(events) > 0 {
		seq++
	}
	key := []byte(p.cfg.Workers[worker])
	value, err := schemas.AppendBatch(nil, &schemas.Batch{
		Producer:  fmt.Appendf(nil, "replay-%d", p.cfg.Epoch),
		Worker:    key,
		Epoch:     p.cfg.Epoch,
		Seq:       seq,
		Timestamp: now.UnixMilli(),
		Model:     []byte(p.cfg.Model),
		BlockSize: int32(p.cfg.BlockSize),
		Hasher:    p.cfg.Hasher,
		Events:    events,
	})
	if err != nil {
		<-p.slot
		return fmt.Errorf("worker %s: %w", key, err)
	}
	w.seq, w.last = seq, now
	// The record must go out even if ctx ends meanwhile: a hole in the sequence
	// would count as lost events.
	record := &kgo.Record{Topic: p.cfg.Topic, Key: key, Value: value}
	span := traced(ctx, record)
	p.cl.Produce(context.WithoutCancel(ctx), record, func(r *kgo.Record, err error) {
		<-p.slot
		endSpan(span, r, err)
		switch {
		case err != nil:
			p.fail(fmt.Errorf("topic %s, worker %s: %w", r.Topic, r.Key, err))
		case len(events) > 0:
			p.records.Add(1)
		default:
			p.heartbeats.Add(1)
		}
	})
	return nil
}

func (p *Producer) fail(err error) {
	p.failed.Add(1)
	p.firstErr.CompareAndSwap(nil, &err)
}

// Err is the first error that made a record fail, nil if none did. The worker's
// events then have a hole.
func (p *Producer) Err() error {
	if err := p.firstErr.Load(); err != nil {
		return *err
	}
	return nil
}

// Produced is what a Producer has written so far, in acknowledged records.
type Produced struct {
	Records    int64 `json:"records"` // with events
	Heartbeats int64 `json:"heartbeats"`
	Failed     int64 `json:"failed"` // not written
}

// Produced returns the counts so far.
func (p *Producer) Produced() Produced {
	return Produced{p.records.Load(), p.heartbeats.Load(), p.failed.Load()}
}

// Flush waits until every record sent is acknowledged or has failed.
func (p *Producer) Flush(ctx context.Context) error { return p.cl.Flush(ctx) }
