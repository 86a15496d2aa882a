// This file is the way of records to Kafka: a bounded buffer, and what became of
// each record.

package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// recordBytes and recordEvents bound a record: the value's bytes, well below
	// the 1 MiB that brokers take by default, and its events.
	recordBytes  = 512 << 10
	recordEvents = 8192

	// recordOverhead is what a record in flight is taken to cost besides its
	// value, in bytes.
	recordOverhead = 256

	// feedShare is the part of the budget that one feed may have in flight, so
	// that a partition without a leader does not take it all at once.
	feedShare = 4

	// keptBytes is the largest value whose memory is used again.
	keptBytes = 64 << 10

	// linger is how long a record waits for others of its partition.
	linger = 2 * time.Millisecond
)

// leastBuffer is the least of a relay's budget, in bytes: room for the largest
// record in what a dump may use of one feed's share.
const leastBuffer = feedShare * 4 * recordBytes

// Producer is the part of a Kafka client that the relay writes with. TryProduce
// never blocks; it calls done once, from any goroutine, maybe before it returns,
// and until then the record must stay as it is. Records of one key that succeed
// are written in order.
type Producer interface {
	TryProduce(ctx context.Context, r *kgo.Record, done func(*kgo.Record, error))
}

// producerOptions are the options of a franz-go client that makes it a fit
// producer: idempotent and acknowledged by all replicas (franz-go's defaults),
// keys to partitions by murmur2 (likewise), never failing a record because it is
// old, bounded by the outlet rather than by the client.
func producerOptions() []kgo.Opt {
	return []kgo.Opt{
		kgo.ProducerBatchCompression(kgo.ZstdCompression(), kgo.NoCompression()),
		kgo.ProducerLinger(linger),
		kgo.MaxBufferedRecords(1 << 30),
	}
}

// outlet is what the feeds of a relay have in common: the client, the topic, and
// the budget of bytes in flight. Safe for concurrent use.
type outlet struct {
	to    Producer
	topic string
	name  []byte // of the producer, in records
	limit int64  // of used

	used atomic.Int64 // bytes in flight
	done atomic.Int64 // records that came to an end, well or not: progress
	pool sync.Pool    // of *sent

	renewed atomic.Int64 // when renew was last called to effect, Unix milliseconds

	// await returns true once done is no longer seen, and false after patience
	// or when stop closes. A test puts its own in place.
	await func(stop <-chan struct{}, seen int64, patience time.Duration) bool
}

// Errors of newOutlet.
var errBuffer = fmt.Errorf("buffer must be %d bytes or more", leastBuffer)

// newOutlet returns an outlet that writes to topic under the producer name,
// with at most limit bytes in flight. Error: errBuffer.
func newOutlet(to Producer, topic, name string, limit int64) (*outlet, error) {
	if limit < leastBuffer {
		return nil, errBuffer
	}
	o := &outlet{to: to, topic: topic, name: []byte(name), limit: limit}
	o.await = o.poll
	return o, nil
}

// poll is await: a look every few milliseconds, by a feed that has nothing
// better to do.
func (o *outlet) poll(stop <-chan struct{}, seen int64, patience time.Duration) bool {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for o.done.Load() == seen {
		select {
		case <-tick.C:
		case <-deadline.C:
			return o.done.Load() != seen
		case <-stop:
			return false
		}
	}
	return true
}

// renew has the client forget the topic, which was deleted and made anew: franz-go
// knows the old one by its id and fails every record until then.
func (o *outlet) renew(now time.Time) {
	const every = 5 * time.Second // one topic's end fails the records of all feeds
	client, ok := o.to.(interface{ PurgeTopicsFromProducing(...string) })
	last := o.renewed.Load()
	if !ok || now.Sub(time.UnixMilli(last)).Abs() < every || !o.renewed.CompareAndSwap(last, now.UnixMilli()) {
		return
	}
	go client.PurgeTopicsFromProducing(o.topic) // waits for the client's other work
}

// reserve takes n bytes of the budget if no more than limit are used then.
func (o *outlet) reserve(n, limit int64) bool {
	if o.used.Add(n) > limit {
		o.used.Add(-n)
		return false
	}
	return true
}

// sent is a record on its way. It belongs to the feed until it is produced, to
// the client until done, and is used again after.
type sent struct {
	record kgo.Record
	value  []byte
	by     *flight
	epoch  int64
	bytes  int64
	opens  bool                     // the epoch's first record
	done   func(*kgo.Record, error) // s.end, made once
}

func (o *outlet) get() *sent {
	if s, ok := o.pool.Get().(*sent); ok {
		return s
	}
	s := &sent{}
	s.done = s.end
	return s
}

// put takes back what is not in use any more.
func (o *outlet) put(s *sent) {
	if cap(s.value) <= keptBytes {
		s.by, s.record = nil, kgo.Record{}
		o.pool.Put(s)
	}
}

// flight is what became of one feed's records. The feed's goroutine and Kafka's
// callbacks share it.
type flight struct {
	out   *outlet
	late  time.Duration // largest time between two acknowledgements within an epoch
	now   func() time.Time
	limit int64 // of bytes

	mu      sync.Mutex
	epoch   int64     // the feed's
	records int       // in flight, of any epoch
	bytes   int64     // of records
	acked   int64     // records of epoch acknowledged
	failed  int64     // the newest epoch that lost a record
	err     error     // why, the last one
	overdue int64     // the newest epoch of which a record was acknowledged late
	place   place     // of the epoch's last record that was acknowledged
	astray  int64     // the newest epoch of which a record does not come after the one before
	heard   time.Time // when the last record was acknowledged or, if later, the epoch began
	waiting time.Time // since when Kafka has acknowledged nothing of what is in flight
	lost    int64     // records that failed, ever
	known   bool      // Kafka has acknowledged a record, ever
}

// stalledAfter is how long Kafka may acknowledge nothing of what is in flight
// until that counts as trouble: longer than a change of a partition's leader.
const stalledAfter = 10 * time.Second

// place is where in the topic a record is.
type place struct {
	partition int32 // -1: there is no record
	offset    int64
}

var nowhere = place{-1, -1}

// follows reports whether a reader that comes by p goes on to q. It does not if
// the topic got more partitions, which moved the key, or if it was made anew or
// cut off, so that what was acknowledged is lost.
func (q place) follows(p place) bool {
	return p == nowhere || q.partition == p.partition && q.offset >= p.offset
}

// begin has the flight follow another epoch.
func (f *flight) begin(epoch int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.epoch, f.acked, f.heard, f.place = epoch, 0, f.now(), nowhere
}

// resume has the flight follow an epoch of the process before, of which the last
// record was acknowledged then and there.
func (f *flight) resume(epoch int64, heard time.Time, at place) {
	f.begin(epoch)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.heard, f.place = heard, at
}

// look returns a copy of what the flight knows.
func (f *flight) look() (l flightState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return flightState{
		records: f.records, bytes: f.bytes, acked: f.acked, heard: f.heard, err: f.err, lost: f.lost, place: f.place,
		stalled: f.records > 0 && since(f.now(), f.waiting) > stalledAfter, unheard: f.records > 0 && !f.known,
		failed: f.failed == f.epoch && f.epoch != 0, overdue: f.overdue == f.epoch && f.epoch != 0,
		astray: f.astray == f.epoch && f.epoch != 0,
	}
}

// flightState is a flight at one moment.
type flightState struct {
	records int   // in flight
	bytes   int64 // likewise
	acked   int64 // records of the current epoch
	heard   time.Time
	err     error // the last failure
	lost    int64 // failures
	failed  bool  // the current epoch lost a record
	overdue bool  // a record of the current epoch came too late after the one before
	astray  bool  // a record of the current epoch does not come after the one before
	stalled bool  // Kafka acknowledges nothing of what is in flight, for longer than stalledAfter
	unheard bool  // some are in flight, and Kafka has never acknowledged any
	place   place // of the current epoch's last record
}

// sound reports whether the stage has all of the current epoch that was acknowledged.
func (l *flightState) sound() bool { return !l.failed && !l.overdue && !l.astray }

// overdueAt reports whether a record written now would come too late after the
// one before.
func (f *flight) overdueAt(now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return since(now, f.heard) > f.late
}

// room takes n bytes of the feed's share and of the budget, if they are there. A
// dump, which can wait, leaves half of the one and a quarter of the other to what
// cannot: else what comes right after it would find no room, and make another
// dump due.
func (f *flight) room(n int64, dump bool) bool {
	share, budget := f.limit, f.out.limit
	if dump {
		share, budget = share/2, budget-budget/4
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.bytes+n > share || !f.out.reserve(n, budget) {
		return false
	}
	if f.records == 0 {
		f.waiting = f.now()
	}
	f.bytes += n
	f.records++
	return true
}

// produce sends s, for which there is room.
func (f *flight) produce(s *sent, key []byte, headers []kgo.RecordHeader) {
	s.by = f
	s.record = kgo.Record{Topic: f.out.topic, Key: key, Value: s.value, Headers: headers}
	f.out.to.TryProduce(context.Background(), &s.record, s.done)
}

// end is what Kafka calls, on a goroutine of its own. A record of an epoch that
// is over changes only the counts of what is in flight.
func (s *sent) end(r *kgo.Record, err error) {
	f := s.by
	now := f.now()
	f.mu.Lock()
	f.records--
	f.bytes -= s.bytes
	if err != nil {
		f.lost++
		f.err = err
		f.failed = max(f.failed, s.epoch)
	} else {
		if s.epoch == f.epoch {
			f.acked++
			// Without an offset it was a duplicate, which Kafka has from before.
			if at := (place{r.Partition, r.Offset}); at.offset >= 0 {
				if !at.follows(f.place) {
					f.astray = max(f.astray, s.epoch)
				}
				f.place = at
			}
		}
		if !s.opens && since(now, f.heard) > f.late {
			f.overdue = max(f.overdue, s.epoch)
		}
		f.heard, f.waiting, f.known = now, now, true
	}
	f.mu.Unlock()
	f.out.used.Add(-s.bytes)
	f.out.done.Add(1)
	if errors.Is(err, kerr.UnknownTopicID) {
		f.out.renew(now)
	}
	if err == nil { // the client may still look at a record that it gave up
		f.out.put(s)
	}
}

// since is the time from then to now, by the clock that shows more of it: the
// monotonic one stands still while the machine sleeps, the other can be set back.
func since(now, then time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}
