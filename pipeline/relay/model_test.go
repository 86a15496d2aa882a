// This file plays random engines, Kafkas and restarts against a feed, and holds
// what the records say to what the engine holds.

package relay

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
)

// engineBatch is a batch as the engine published it, and what a relay gets of it.
type engineBatch struct {
	events  []engine.Event
	lost    []engine.Event // removals that the relay can't read
	payload []byte         // not nil: cannot be read at all
}

// model is the world of the test.
type model struct {
	*rapid.T
	dir    string
	clock  time.Time // true time, and the broker's
	shift  time.Duration
	kafka  fakeKafka
	feed   *feed
	starts int
	small  int64 // room, in bytes

	log   []engineBatch // of this incarnation
	truth *engine.Mapping
	out   engine.Output
	first int // the oldest of log that is still in the replay buffer
	// incarnation of the engine stands for the checksums that tell one.
	incarnation uint64

	epochs map[int64]int64 // last seq by epoch
	newest int64
	batch  schemas.Batch
}

const modelBlocks = 12

var modelMedia = [index.Tiers]string{"GPU", "CPU", "DISK", "EXTERNAL"}

func (m *model) now() time.Time { return m.clock.Add(m.shift) }

func newTruth(t tb) *engine.Mapping {
	mapping, err := engine.New(testConfig(nil).engine)
	if err != nil {
		t.Fatal(err)
	}
	return mapping
}

// start starts a relay.
func (m *model) start() {
	c := testConfig(m.now)
	c.stateDir = m.dir
	m.starts++
	out := &outlet{to: &m.kafka, topic: "t", name: fmt.Appendf(nil, "relay-%d", m.starts), limit: m.small}
	out.await = func(_ <-chan struct{}, seen int64, _ time.Duration) bool {
		for out.done.Load() == seen {
			if len(m.kafka.pending) == 0 || rapid.IntRange(0, 9).Draw(m.T, "patience is out") == 0 {
				return false
			}
			m.kafkaActs()
		}
		return true
	}
	f, err := newFeed(c, out)
	if err != nil {
		m.Fatal(err)
	}
	f.split.maxBytes, f.split.maxEvents = 150, 3
	f.flight.limit = m.small
	f.files.sync = func(*os.File) error { return nil }
	m.feed = f
	pos, ok := f.restore()
	switch {
	case ok && pos.sum == m.incarnation && int(pos.next) >= m.first && int(pos.next) <= len(m.log):
		m.replay(int(pos.next))
	default:
		f.empty(m.first == 0, causeStart)
		m.replay(m.first)
	}
	f.release()
}

func (m *model) at(next int) { m.feed.at(position{next: int64(next), sum: m.incarnation}) }

func (m *model) replay(from int) {
	m.at(from)
	for i := from; i < len(m.log); i++ {
		m.deliver(i)
	}
}

// deliver gives the feed batch i.
func (m *model) deliver(i int) {
	switch b := &m.log[i]; {
	case b.payload != nil:
		m.feed.apply(b.payload)
	default:
		m.feed.applyBatch(&engine.Batch{Events: b.events, LostRemovals: len(b.lost)})
	}
	m.at(i + 1)
}

func (m *model) tier() index.Tier {
	return rapid.SampledFrom([]index.Tier{0, 0, 0, 1, 1, 2, 3}).Draw(m.T, "tier")
}

// block i of the engine's follows block (i-1)/2: the engine's hash is 100+i.
func (m *model) store() engine.Event {
	i := rapid.IntRange(0, modelBlocks-1).Draw(m.T, "block")
	e := engine.Event{Kind: engine.Stored, BlockSize: 2, Medium: []byte(modelMedia[m.tier()])}
	n := rapid.IntRange(1, 4).Draw(m.T, "blocks")
	var path []int
	for at := i; ; at = (at - 1) / 2 {
		path = append([]int{at}, path...)
		if len(path) == n && at > 0 {
			e.Parent, e.HasParent = uint64(100+(at-1)/2), true
			break
		}
		if at == 0 {
			break
		}
	}
	for _, b := range path {
		e.Hashes = append(e.Hashes, uint64(100+b))
		e.Tokens = append(e.Tokens, uint32(b), 7)
	}
	e.Usable = len(e.Tokens)
	return e
}

func (m *model) remove() engine.Event {
	e := engine.Event{Kind: engine.Removed, Medium: []byte(modelMedia[m.tier()])}
	for range rapid.IntRange(1, 6).Draw(m.T, "removals") {
		e.Hashes = append(e.Hashes, uint64(100+rapid.IntRange(0, modelBlocks-1).Draw(m.T, "block")))
	}
	return e
}

// publish has the engine make a batch.
func (m *model) publish() {
	var b engineBatch
	for range rapid.IntRange(0, 5).Draw(m.T, "events") {
		switch rapid.IntRange(0, 29).Draw(m.T, "event") {
		case 0:
			b.events = append(b.events, engine.Event{Kind: engine.Cleared})
		case 1, 2, 3, 4, 5, 6, 7, 8, 9:
			b.events = append(b.events, m.remove())
		default:
			b.events = append(b.events, m.store())
		}
	}
	switch rapid.IntRange(0, 29).Draw(m.T, "fault") {
	case 0:
		b.lost = append(b.lost, m.remove())
	case 1:
		b.payload = []byte{0xc1}
	}
	for i := range b.events {
		m.truth.Apply(&b.events[i], &m.out)
	}
	for i := range b.lost {
		m.truth.Apply(&b.lost[i], &m.out)
	}
	m.out.Reset()
	m.log = append(m.log, b)
}

// kafkaActs has Kafka take or refuse some of what is on the way to it.
func (m *model) kafkaActs() {
	n := len(m.kafka.pending)
	if n == 0 {
		return
	}
	some := rapid.IntRange(1, n).Draw(m.T, "records")
	if rapid.IntRange(0, 9).Draw(m.T, "refuses") == 0 {
		m.kafka.fail(some, rapid.IntRange(0, some).Draw(m.T, "written all the same"), errRefused)
	} else {
		m.kafka.ack(some)
	}
}

// see checks what does not depend on Kafka: numbers.
func (m *model) see(value []byte) {
	b := &m.batch
	if err := b.Decode(value); err != nil {
		m.Fatal(err)
	}
	if string(b.Worker) != "wörker" || b.Rank != 3 || string(b.Model) != "m" || b.BlockSize != 2 {
		m.Fatalf("record of %s %d %s %d", b.Worker, b.Rank, b.Model, b.BlockSize)
	}
	last, known := m.epochs[b.Epoch]
	switch {
	case !known:
		if b.Epoch <= m.newest {
			m.Fatalf("epoch %d after %d", b.Epoch, m.newest)
		}
		if len(b.Events) > 0 || b.Seq < -1 || b.Seq > 0 {
			m.Fatalf("epoch begins with seq %d and %d events", b.Seq, len(b.Events))
		}
		m.newest = b.Epoch
	case b.Epoch != m.newest:
		m.Fatalf("a record of epoch %d in epoch %d", b.Epoch, m.newest)
	case len(b.Events) == 0 && b.Seq != last || len(b.Events) > 0 && b.Seq != last+1:
		m.Fatalf("seq %d with %d events after %d", b.Seq, len(b.Events), last)
	case m.feed != nil && m.feed.state != writing:
		m.Fatalf("a record while %s", m.feed.state)
	}
	m.epochs[b.Epoch] = b.Seq
}

// settled has Kafka take everything, and checks what that comes to.
func (m *model) settled() {
	for i := 0; i == 0 || m.feed.state != writing || len(m.kafka.pending) > 0; i++ {
		if i == 200 {
			m.Fatalf("still %s for %s, %d in flight", m.feed.state, m.feed.why, len(m.kafka.pending))
		}
		m.kafka.ack(len(m.kafka.pending))
		m.clock = m.clock.Add(time.Second)
		m.feed.tick(m.now(), false)
	}
	r := readAll(m.T, m.kafka.log, testGrace)
	stage := verify.New(testGrace)
	for _, w := range m.kafka.log {
		stage.Apply(0, w.at.UnixMilli(), []byte("wörker"), w.value)
	}
	counts := stage.Counts()
	for _, never := range []string{
		"undecodable", "wrong_key", "invalid", "rejected", "identity_change", "second_producer", "duplicate", "stale_epoch",
	} {
		if counts[never] > 0 {
			m.Fatalf("%d: %s", counts[never], never)
		}
	}
	truth, mind := heldBy(m.truth), heldBy(m.feed.mapping)
	switch {
	case r.epoch != m.newest || r.seq != m.feed.record.Seq || r.refused > 0:
		m.Fatalf("read epoch %d up to seq %d with %d refused, written was %d up to %d", r.epoch, r.seq, r.refused, m.newest, m.feed.record.Seq)
	case r.incomplete == m.feed.whole:
		m.Fatalf("incomplete: %t, whole: %t", r.incomplete, m.feed.whole)
	case !r.held.equal(&mind):
		m.Fatalf("the records say %v, the feed %v", r.held, mind)
	case !r.incomplete && !r.held.equal(&truth):
		m.Fatalf("the records say %v, the engine holds %v", r.held, truth)
	case !r.held.within(&truth):
		m.Fatalf("the records say %v, the engine holds only %v", r.held, truth)
	case m.feed.flight.bytes != 0 || m.feed.out.used.Load() != 0:
		m.Fatalf("%d and %d bytes in flight of no record", m.feed.flight.bytes, m.feed.out.used.Load())
	}
}

// crash ends the relay without a word. What was on its way gets there, or not.
func (m *model) crash() {
	if m.feed.saving != nil { // a file is written by another goroutine: before or after, but not during the test's next step
		err := <-m.feed.saving
		m.feed.endSave(m.now(), err)
	}
	m.feed = nil
	for range rapid.IntRange(0, len(m.kafka.pending)).Draw(m.T, "get there") {
		m.kafka.write(m.kafka.pending[0])
		m.kafka.pending = m.kafka.pending[1:]
	}
	m.kafka.pending = nil
}

// away is what may happen while no relay is there.
func (m *model) away() {
	m.clock = m.clock.Add(time.Duration(rapid.SampledFrom([]int{0, 1, 60, 1790, 3700}).Draw(m.T, "seconds")) * time.Second)
	for range rapid.IntRange(0, 3).Draw(m.T, "batches missed") {
		m.publish()
	}
	if rapid.IntRange(0, 5).Draw(m.T, "rolls over") == 0 {
		m.first = rapid.IntRange(m.first, len(m.log)).Draw(m.T, "first")
	}
	if rapid.IntRange(0, 3).Draw(m.T, "engine restarts") == 0 {
		m.restartEngine()
		for range rapid.IntRange(0, 3).Draw(m.T, "batches missed") {
			m.publish()
		}
	}
}

func (m *model) restartEngine() {
	m.log, m.first = nil, 0
	m.incarnation++
	m.truth.Clear()
}

var modelSteps = []string{
	"batch", "batch", "batch", "batch", "batch", "batch", "batch", "kafka", "kafka", "kafka", "tick", "tick",
	"settle", "stop", "crash", "engine", "gap", "quiet", "stall", "hold",
}

// ended is a context that has ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// TestFeedAgainstModel: whatever the engine does, whatever Kafka does, however
// the relay ends: once all is calm the records say what the engine holds; or,
// after events of the engine were lost, no more than that, and that it is not
// all. Numbers of epochs only grow, those of records are contiguous.
func TestFeedAgainstModel(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(base, "")
		if err != nil {
			t.Fatal(err)
		}
		m := &model{
			T: t, dir: dir, clock: time.UnixMilli(1_800_000_000_000), truth: newTruth(t), epochs: map[int64]int64{},
			small: rapid.Int64Range(1200, 6000).Draw(t, "room"),
		}
		m.kafka.now = func() time.Time { return m.clock }
		m.kafka.seen = m.see
		m.start()
		for range rapid.IntRange(5, 80).Draw(t, "steps") {
			switch rapid.SampledFrom(modelSteps).Draw(t, "step") {
			case "batch":
				m.clock = m.clock.Add(time.Millisecond)
				m.publish()
				m.deliver(len(m.log) - 1)
			case "kafka":
				m.kafkaActs()
			case "tick":
				m.clock = m.clock.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
				m.feed.tick(m.now(), rapid.Bool().Draw(t, "alive"))
			case "settle":
				m.settled()
			case "stop":
				if rapid.Bool().Draw(t, "Kafka is there") {
					m.kafka.ack(len(m.kafka.pending))
				}
				m.feed.out.await = func(<-chan struct{}, int64, time.Duration) bool { return false }
				m.feed.close(ended)
				m.crash()
				m.away()
				m.start()
			case "crash":
				m.crash()
				m.away()
				m.shift -= time.Duration(rapid.SampledFrom([]int{0, 5, 10_000}).Draw(t, "clock goes back, seconds")) * time.Second
				m.start()
			case "engine":
				m.restartEngine()
				m.feed.empty(true, causeRestart)
				m.at(0)
			case "gap":
				m.publish()
				m.feed.empty(false, causeGap)
				m.at(len(m.log))
			case "quiet":
				m.kafka.ack(len(m.kafka.pending))
				m.clock = m.clock.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "seconds")) * time.Second)
			case "stall":
				m.clock = m.clock.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "seconds")) * time.Second)
			case "hold":
				m.feed.hold()
				m.publish()
				m.deliver(len(m.log) - 1)
				m.feed.release()
			}
		}
		m.settled()
	})
}
