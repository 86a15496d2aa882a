package pipeline

// What applying a record costs, from its bytes to the index, without Kafka.

import (
	"log/slog"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"

	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// bare returns a partition of a stage that is not connected to anything.
func bare(tb testing.TB) *partition {
	tb.Helper()
	cfg := DefaultConfig()
	cfg.Logger = slog.New(slog.DiscardHandler)
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return newPartition(s, 0)
}

// feed makes the records of one worker-rank and gives them to a partition.
type feed struct {
	tb     testing.TB
	p      *partition
	batch  schemas.Batch
	record kgo.Record
}

func newFeed(tb testing.TB) *feed {
	f := &feed{tb: tb, p: bare(tb)}
	f.batch = schemas.Batch{Producer: []byte("p"), Worker: []byte("worker-1"), Epoch: 1, Seq: -1, Model: []byte("m"), BlockSize: 64}
	f.record = kgo.Record{Key: f.batch.Worker, Timestamp: time.UnixMilli(1)}
	return f
}

// apply applies the next record with the events.
func (f *feed) apply(events ...schemas.Event) {
	if len(events) > 0 {
		f.batch.Seq++
	}
	f.batch.Events = events
	value, err := schemas.AppendBatch(f.record.Value[:0], &f.batch)
	if err != nil {
		f.tb.Fatal(err)
	}
	f.record.Value = value
	f.record.Offset++
	f.p.apply(&f.record)
}

// Once a worker-rank is known and its blocks are there, records cost no
// allocation. Blocks that are new cost what the index's maps need for them; the
// index's own tests say how much.
func TestApplyAllocatesNothingOnceWarm(t *testing.T) {
	chain := locals(1, 64)
	seqs := index.Chain(nil, chain)
	unknown := index.Chain(nil, locals(2, 64))
	for _, c := range []struct {
		name   string
		events []schemas.Event
	}{
		{"heartbeat", nil},
		{"blocks held already", []schemas.Event{stored(nil, chain...), stored(&seqs[31], chain[32:]...)}},
		{"removal of blocks not held", []schemas.Event{removed(unknown...)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFeed(t)
			f.apply(stored(nil, chain...))
			f.apply(c.events...)
			if n := testcontainers.LeastAllocs(100, func() { f.apply(c.events...) }); n != 0 {
				t.Errorf("%v allocations a record, want none", n)
			}
			if f.p.counts[recordsApplied].Load()+f.p.counts[recordsHeartbeat].Load() < 100 {
				t.Errorf("the records were not applied")
			}
		})
	}
}

// One record that stores 64 blocks and removes the 64 of 16 records before.
func BenchmarkApply(b *testing.B) {
	const blocks, window = 64, 16
	f := newFeed(b)
	var ring [window][]index.SeqHash
	next := make([]index.LocalHash, blocks)
	name := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		name++
		for i := range next {
			next[i] = index.LocalHash(name<<16 | uint64(i+1))
		}
		slot := &ring[name%window]
		events := [2]schemas.Event{stored(nil, next...), removed(*slot...)}
		n := 2
		if len(*slot) == 0 {
			n = 1
		}
		f.apply(events[:n]...)
		*slot = index.Chain((*slot)[:0], next)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2*blocks), "ns/block")
}

// A fetched batch of 64 records that each store again 16 blocks held already:
// what a record costs besides the index, and what telemetry adds to that.
func BenchmarkApplyBatch(b *testing.B) {
	const records = 64
	meters, _, err := query.SetupMetrics()
	if err != nil {
		b.Fatal(err)
	}
	measured, err := newMeasures(meters)
	if err != nil {
		b.Fatal(err)
	}
	tracer := trace.NewTracerProvider().Tracer("bench")
	for _, c := range []struct {
		name     string
		measures *measures
		tracer   oteltrace.Tracer
		headers  []kgo.RecordHeader
	}{
		{"telemetry=none", noMeasures, nil, nil},
		{"telemetry=metrics", measured, nil, nil},
		{"telemetry=tracer", measured, tracer, nil},
		{"telemetry=unsampled", measured, tracer, traceparent(spanContext(1, 0))},
		{"telemetry=sampled", measured, tracer, traceparent(spanContext(1, oteltrace.FlagsSampled))},
	} {
		b.Run(c.name, func(b *testing.B) {
			f := newFeed(b)
			f.p.stage.measures, f.p.stage.tracer = c.measures, c.tracer
			batch := make([]*kgo.Record, records)
			for i := range batch {
				batch[i] = &kgo.Record{Key: f.batch.Worker, Timestamp: time.UnixMilli(1), Headers: c.headers}
			}
			f.batch.Events = []schemas.Event{stored(nil, locals(1, 16)...)}
			offset := int64(0)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				for i := range batch {
					f.batch.Seq++
					batch[i].Value, _ = schemas.AppendBatch(batch[i].Value[:0], &f.batch)
					batch[i].Offset = offset
					offset++
				}
				b.StartTimer()
				f.p.Apply(batch, offset, 0)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/records, "ns/record")
		})
	}
}
