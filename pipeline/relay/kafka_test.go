// This file tests feeds with a real client and a broker.

package relay

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"kvindex/pipeline/relay/engine"
	"kvindex/testcontainers"
)

// topicLog returns what a topic's partition has of each worker.
func topicLog(t *testing.T, b testcontainers.Broker, topic string) map[string][]*kgo.Record {
	t.Helper()
	all := map[string][]*kgo.Record{}
	for _, partition := range testcontainers.ReadCommitted(t, b, topic) {
		for _, r := range partition {
			all[string(r.Key)] = append(all[string(r.Key)], r)
		}
	}
	return all
}

// meaning reads records of one worker-rank.
func meaning(t *testing.T, records []*kgo.Record) *reader {
	t.Helper()
	var log []written
	for _, r := range records {
		log = append(log, written{r.Timestamp, r.Value})
	}
	return readAll(t, log, testGrace)
}

// removedBatch takes out what storedBatch stored.
func removedBatch(n int, hash uint64) *engine.Batch {
	e := engine.Event{Kind: engine.Removed}
	for i := range n {
		e.Hashes = append(e.Hashes, hash+uint64(i))
	}
	return &engine.Batch{Events: []engine.Event{e}}
}

// calm ticks until the feeds write and have nothing in flight.
func calm(t *testing.T, feeds ...*feed) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		for _, f := range feeds {
			f.tick(time.Now(), false)
			if s := f.status(); f.state != writing || s.InFlight > 0 {
				return fmt.Errorf("%s is %s for %s with %d in flight", s.Worker, s.State, s.Cause, s.InFlight)
			}
		}
		return nil
	})
}

// TestRecordsInKafka: records of a worker-rank are in its worker's partition, in
// order, with the worker as the key, and carry the trace of their batch.
func TestRecordsInKafka(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		topic := testcontainers.NewTopic(t, b, "events", 8, nil)
		client := testcontainers.Client(t, b, producerOptions()...)
		out, err := newOutlet(client, topic, "relay-test", 64<<20)
		if err != nil {
			t.Fatal(err)
		}
		spans := tracetest.NewSpanRecorder()
		tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
		var feeds []*feed
		for i := range 6 {
			c := testConfig(time.Now)
			c.worker, c.rank = fmt.Sprintf("worker-%d", i/2), int32(i%2)
			if i == 0 {
				c.tracer = tracer
			}
			f, err := newFeed(c, out)
			if err != nil {
				t.Fatal(err)
			}
			feeds = append(feeds, f)
			f.empty(i != 3, causeStart)
			f.at(position{next: 0})
		}
		const batches = 200
		for i := range batches {
			for _, f := range feeds {
				f.applyBatch(storedBatch(20, uint64(i)*100))
				if i%3 == 2 {
					f.applyBatch(removedBatch(20, uint64(i-1)*100))
				}
				f.at(position{next: f.pos.next + 1})
			}
		}
		calm(t, feeds...)
		log := topicLog(t, b, topic)
		if len(log) != 3 {
			t.Errorf("%d keys, want 3", len(log))
		}
		for i, f := range feeds {
			records := slices.Clone(log[f.cfg.worker])
			partition := records[0].Partition
			if want := kgo.StickyKeyPartitioner(nil).ForTopic(topic).Partition(records[0], 8); int(partition) != want {
				t.Errorf("%s is in partition %d, want %d", f.cfg.worker, partition, want)
			}
			records = slices.DeleteFunc(records, func(r *kgo.Record) bool {
				if r.Partition != partition {
					t.Errorf("%s is in partitions %d and %d", f.cfg.worker, partition, r.Partition)
				}
				return rankOf(t, r) != f.cfg.rank
			})
			r, mind := meaning(t, records), heldBy(f.mapping)
			if r.incomplete != (i == 3) || r.refused > 0 || !r.held.equal(&mind) || r.seq != f.record.Seq || len(r.held[0]) == 0 {
				t.Errorf("feed %d: %d blocks up to seq %d, incomplete %t, %d refused", i, len(r.held[0]), r.seq, r.incomplete, r.refused)
			}
			for _, r := range records {
				if i > 0 && len(r.Headers) > 0 {
					t.Fatalf("headers %v without a trace", r.Headers)
				}
			}
		}
		var traced []string
		for _, r := range log["worker-0"] {
			for _, h := range r.Headers {
				if h.Key != "traceparent" {
					t.Errorf("header %s", h.Key)
				}
				traced = append(traced, string(h.Value))
			}
		}
		ended := spans.Ended()
		if len(ended) != len(traced) || len(ended) != batches+batches/3 {
			t.Fatalf("%d spans, %d records with one", len(ended), len(traced))
		}
		for i, s := range ended {
			id, of := s.SpanContext().SpanID(), s.SpanContext().TraceID()
			if want := "00-" + hex.EncodeToString(of[:]) + "-" + hex.EncodeToString(id[:]) + "-01"; traced[i] != want {
				t.Fatalf("record %d has %s, want %s", i, traced[i], want)
			}
			if s.Name() != "kvindex.relay.batch" || len(s.Attributes()) != 5 {
				t.Fatalf("span %s %v", s.Name(), s.Attributes())
			}
		}
	})
}

func rankOf(t *testing.T, r *kgo.Record) int32 {
	t.Helper()
	var one reader
	one.grace, one.held = testGrace, newHeld()
	one.read(t, written{r.Timestamp, r.Value})
	return one.batch.Rank
}

// TestBrokerPauses: while a broker does not answer, the feed takes in what the
// engine says, within its budget; after, a new epoch has it all.
func TestBrokerPauses(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "events", 1, nil)
	client := testcontainers.Client(t, b, producerOptions()...)
	out, err := newOutlet(client, topic, "relay-test", leastBuffer)
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFeed(testConfig(time.Now), out)
	if err != nil {
		t.Fatal(err)
	}
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(10, 1))
	calm(t, f)

	answers := make(chan struct{})
	cluster := b.Cluster()
	cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		cluster.SleepControl(func() { <-answers })
		return nil, nil, false
	})
	const most = 10_000
	i := uint64(1)
	for ; f.state == writing && i < most; i++ {
		f.applyBatch(storedBatch(128, i*1000))
	}
	if f.state != due || f.why != causeNoRoom || i < 100 {
		t.Fatalf("%s for %s after %d batches", f.state, f.why, i)
	}
	for range 100 {
		f.applyBatch(storedBatch(128, i*1000))
		f.applyBatch(removedBatch(100, (i-50)*1000))
		f.tick(time.Now(), true)
		i++
	}
	if s := f.status(); s.State != "due" || s.Cause != "no_room" || s.Bytes > leastBuffer/feedShare || f.counts.unwritten.Load() < 200 {
		t.Errorf("status %+v, %d batches unwritten", s, f.counts.unwritten.Load())
	}
	close(answers)
	calm(t, f)
	r, mind := meaning(t, topicLog(t, b, topic)[f.cfg.worker]), heldBy(f.mapping)
	if r.incomplete || r.refused > 0 || !r.held.equal(&mind) || r.epoch != f.record.Epoch || f.counts.epochs[causeNoRoom].Load() != 1 {
		t.Errorf("%d blocks of %d, incomplete %t, %d refused", len(r.held[0]), len(mind[0]), r.incomplete, r.refused)
	}
	f.applyBatch(storedBatch(1, 7))
	calm(t, f)
	if f.record.Epoch != r.epoch || f.counts.epochs[causeNoRoom].Load() != 1 {
		t.Errorf("another epoch, for %s", f.why)
	}
}

// TestTopicComesLater: a topic that is missing fails records; the feed tries
// again, less and less often, and says all when there is one.
func TestTopicComesLater(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	client := testcontainers.Client(t, b, producerOptions()...)
	topic := testcontainers.Name("events")
	out, err := newOutlet(client, topic, "relay-test", leastBuffer)
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFeed(testConfig(time.Now), out)
	if err != nil {
		t.Fatal(err)
	}
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(10, 1))
	testcontainers.Eventually(t, patience, func() error {
		f.tick(time.Now(), true)
		if f.failures == 0 {
			return fmt.Errorf("no failure: %+v", f.status())
		}
		return nil
	})
	if s := f.status(); s.State != "due" || s.Cause != "kafka_failed" || s.Failed == 0 {
		t.Errorf("status %+v", s)
	}
	if _, err := testcontainers.Admin(t, b).CreateTopic(t.Context(), 1, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	f.applyBatch(storedBatch(10, 100))
	calm(t, f)
	r := meaning(t, topicLog(t, b, topic)[f.cfg.worker])
	if r.incomplete || r.refused > 0 || len(r.held[0]) != 20 {
		t.Errorf("%d blocks, incomplete %t, %d refused", len(r.held[0]), r.incomplete, r.refused)
	}
}

// TestClose waits for what is in flight as long as it may.
func TestClose(t *testing.T) {
	k := &fakeKafka{now: time.Now}
	c := testConfig(time.Now)
	c.stateDir = t.TempDir()
	f := newTestFeed(t, k, c)
	f.empty(true, causeStart)
	f.at(position{next: 1})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.close(ctx)
	}()
	cancel()
	<-done
	again := newTestFeed(t, k, c)
	if _, ok := again.restore(); !ok || again.state != held {
		t.Errorf("restored: %t; %s though a record may be lost", ok, again.state)
	}
	if !strings.Contains(again.status().Cause, "restored") {
		t.Errorf("cause %s", again.status().Cause)
	}
}

// TestPartitionsAdded: a worker whose partition is another one, since the topic
// has more of them, is told of there from the beginning: the stage refuses its
// epoch on another partition.
func TestPartitionsAdded(t *testing.T) {
	const before, after = 2, 16
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "events", before, nil)
	client := testcontainers.Client(t, b, append(producerOptions(), kgo.MetadataMaxAge(100*time.Millisecond), kgo.MetadataMinAge(50*time.Millisecond))...)
	out, err := newOutlet(client, topic, "relay-test", leastBuffer)
	if err != nil {
		t.Fatal(err)
	}
	partition := func(worker string, partitions int) int {
		return kgo.StickyKeyPartitioner(nil).ForTopic(topic).Partition(&kgo.Record{Key: []byte(worker)}, partitions)
	}
	c := testConfig(time.Now)
	for i := 0; partition(c.worker, before) == partition(c.worker, after); i++ {
		c.worker = fmt.Sprintf("worker-%d", i)
	}
	f, err := newFeed(c, out)
	if err != nil {
		t.Fatal(err)
	}
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(10, 1))
	calm(t, f)
	first := f.record.Epoch
	testcontainers.AddPartitions(t, b, topic, after)
	n := uint64(1000)
	testcontainers.Eventually(t, patience, func() error {
		f.applyBatch(storedBatch(1, n))
		n++
		calm(t, f)
		if f.record.Epoch == first {
			return fmt.Errorf("still epoch %d", first)
		}
		return nil
	})
	var there []*kgo.Record
	for _, r := range topicLog(t, b, topic)[c.worker] {
		if int(r.Partition) == partition(c.worker, after) {
			there = append(there, r)
		}
	}
	r, mind := meaning(t, there), heldBy(f.mapping)
	if r.epoch != f.record.Epoch || r.incomplete || !r.held.equal(&mind) {
		t.Errorf("epoch %d of %d, %d blocks of %d, incomplete %t", r.epoch, f.record.Epoch, len(r.held[0]), len(mind[0]), r.incomplete)
	}
	epoch := f.record.Epoch
	f.applyBatch(storedBatch(1, n))
	calm(t, f)
	if f.record.Epoch != epoch {
		t.Errorf("another epoch, for %s", f.why)
	}
}

// TestTopicMadeAnew: a topic that was deleted and made again has lost what was
// written to it.
func TestTopicMadeAnew(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "events", 1, nil)
	client := testcontainers.Client(t, b, append(producerOptions(), kgo.MetadataMaxAge(100*time.Millisecond), kgo.MetadataMinAge(50*time.Millisecond))...)
	out, err := newOutlet(client, topic, "relay-test", leastBuffer)
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFeed(testConfig(time.Now), out)
	if err != nil {
		t.Fatal(err)
	}
	f.empty(true, causeStart)
	for i := range uint64(10) {
		f.applyBatch(storedBatch(10, 1+i*10))
		calm(t, f)
	}
	if _, err := testcontainers.Admin(t, b).DeleteTopics(t.Context(), topic); err != nil {
		t.Fatal(err)
	}
	if _, err := testcontainers.Admin(t, b).CreateTopic(t.Context(), 1, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	n := uint64(1000)
	defer func() {
		t.Logf("last error %v, lost %d, epoch %d seq %d", f.flight.look().err, f.flight.look().lost, f.record.Epoch, f.record.Seq)
	}()
	testcontainers.Eventually(t, patience, func() error {
		f.applyBatch(storedBatch(1, n))
		n++
		calm(t, f)
		r, mind := meaning(t, topicLog(t, b, topic)[f.cfg.worker]), heldBy(f.mapping)
		if r.epoch != f.record.Epoch || r.incomplete || !r.held.equal(&mind) {
			return fmt.Errorf("%d blocks of %d, incomplete %t", len(r.held[0]), len(mind[0]), r.incomplete)
		}
		return nil
	})
}
