package pipeline

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/trace"
	sdktest "go.opentelemetry.io/otel/sdk/trace/tracetest"
	oteltrace "go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"kvindex/pipeline/query"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/query/tracetest"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// One trace leads from who caused the events, over the producer and Kafka, to
// their application and to an answer that has them; and the spans of the
// restore and of the snapshots that followed are there too.
func TestOneTraceFromProducerToAnswer(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		c := tracetest.New(t, "grpc")
		tracer, flush, err := query.SetupTracing(t.Context(), query.Identity{Service: "router"})
		if err != nil {
			t.Fatal(err)
		}
		r := newRig(t, b, 1)
		in := r.start()
		in.caughtUp()

		ctx, request := tracer.Start(t.Context(), "request")
		traceID := request.SpanContext().TraceID().String()
		p := r.produce("w", 0)
		prompt := locals(1, 4)
		producing := traced(tracer, ctx, p, stored(nil, prompt...))
		in.caughtUp()
		cl, err := client.Dial(in.GRPCAddr().String(), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer cl.Close()
		req := &pb.MatchRequest{Model: testModel}
		for _, l := range prompt {
			req.LocalHashes = append(req.LocalHashes, uint64(l))
		}
		resp, err := cl.Match(ctx, req)
		if err != nil || len(resp.Matches) != 1 || resp.Matches[0].DepthBlocks != 4 {
			t.Fatalf("%v, %v", resp, err)
		}
		request.End()
		in.saved()
		if err := flush(t.Context()); err != nil {
			t.Fatal(err)
		}

		c.Await(t, "request", traceID).Has(t, map[string]string{"service.name": "router"})
		if s := c.Await(t, "produce", traceID); s.ID != producing.SpanID().String() {
			t.Errorf("another producer: %+v", s)
		}
		apply := c.Await(t, "kvindex.apply", traceID)
		if apply.Parent != producing.SpanID().String() || apply.Kind != tracepb.Span_SPAN_KIND_CONSUMER {
			t.Errorf("applying is not the producing span's child: %+v", apply)
		}
		apply.Has(t, map[string]string{
			"service.name": "kvindex", "messaging.system": "kafka", "messaging.destination.name": r.cfg.Topic, "messaging.destination.partition.id": "0",
			"messaging.consumer.group.name": r.cfg.Group, "messaging.operation.type": "process", "messaging.batch.message_count": "1",
			"messaging.kafka.offset": "0", "kvindex.offset.last": "0", "kvindex.records.applied": "1", "kvindex.blocks.stored": "4",
		})
		match := c.Await(t, "kvindex.match", traceID)
		if match.Parent != request.SpanContext().SpanID().String() {
			t.Errorf("the answer is not the request's child: %+v", match)
		}
		match.Has(t, map[string]string{"kvindex.depth": "4", "kvindex.workers": "1", "kvindex.incomplete": "0"})
		if match.Start.Before(apply.End) {
			t.Errorf("answered from %v on, applied by %v", match.Start, apply.End)
		}
		c.Await(t, "kvindex.restore", "").Has(t, map[string]string{"messaging.destination.partition.id": "0", "kvindex.blocks": "0"})
		c.Await(t, "kvindex.snapshot", "").Has(t, map[string]string{"messaging.destination.partition.id": "0", "kvindex.snapshot.dumps": "1", "kvindex.snapshot.refused": "0"})
	})
}

// traced sends the producer's next record under a span, whose context it carries.
func traced(tracer oteltrace.Tracer, ctx context.Context, p *producer, events ...schemas.Event) oteltrace.SpanContext {
	p.r.t.Helper()
	ctx, span := tracer.Start(ctx, "produce", oteltrace.WithSpanKind(oteltrace.SpanKindProducer))
	defer span.End()
	rec := &kgo.Record{Partition: p.partition, Key: slices.Clone(p.batch.Worker), Value: p.encode(events...)}
	rec.Headers = traceparent(span.SpanContext())
	if err := p.cl.ProduceSync(ctx, rec).FirstErr(); err != nil {
		p.r.t.Fatal(err)
	}
	return span.SpanContext()
}

func traceparent(sc oteltrace.SpanContext) []kgo.RecordHeader {
	return []kgo.RecordHeader{
		{Key: "origin", Value: []byte("x")},
		{Key: contextHeader, Value: fmt.Appendf(nil, "00-%s-%s-%s", sc.TraceID(), sc.SpanID(), sc.TraceFlags())},
	}
}

// spanContext makes the n-th producer's.
func spanContext(n byte, flags oteltrace.TraceFlags) oteltrace.SpanContext {
	return oteltrace.NewSpanContext(oteltrace.SpanContextConfig{TraceID: oteltrace.TraceID{1, n}, SpanID: oteltrace.SpanID{2, n}, TraceFlags: flags, Remote: true})
}

// A batch's span is the first sampled producer's child and names the others, up
// to a bound; without a sampled one there is none.
func TestProducersOfABatch(t *testing.T) {
	const on = oteltrace.FlagsSampled
	many := func(n int) (out []oteltrace.SpanContext) {
		for i := range n {
			out = append(out, spanContext(byte(i+1), on))
		}
		return out
	}
	cases := []struct {
		name     string
		records  []oteltrace.SpanContext // the zero value: no header
		want     []oteltrace.SpanContext
		leftOut  int
		extraHdr []kgo.RecordHeader // of one more record
	}{
		{name: "nobody", records: make([]oteltrace.SpanContext, 3)},
		{name: "not sampled", records: []oteltrace.SpanContext{spanContext(1, 0), spanContext(2, 0)}},
		{name: "one", records: []oteltrace.SpanContext{{}, spanContext(1, 0), spanContext(2, on), {}}, want: []oteltrace.SpanContext{spanContext(2, on)}},
		{name: "one, of many records", records: []oteltrace.SpanContext{spanContext(2, on), spanContext(2, on), spanContext(3, 0), spanContext(2, on)}, want: []oteltrace.SpanContext{spanContext(2, on)}},
		{name: "several", records: many(3), want: many(3)},
		{name: "too many", records: many(maxLinks + 4), want: many(maxLinks + 1), leftOut: 3},
		{name: "damaged", extraHdr: []kgo.RecordHeader{{Key: contextHeader, Value: []byte("00-zzz0000000000000000000000000000-0000000000000000-01--")}}},
		{name: "empty", extraHdr: []kgo.RecordHeader{{Key: contextHeader}}},
		{name: "zero", extraHdr: []kgo.RecordHeader{{Key: contextHeader, Value: []byte("00-00000000000000000000000000000000-0000000000000000-01")}}},
		{name: "huge", extraHdr: []kgo.RecordHeader{{Key: contextHeader, Value: make([]byte, 1<<20)}}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			exported := sdktest.NewInMemoryExporter()
			f := newFeed(t)
			f.p.stage.tracer = trace.NewTracerProvider(trace.WithSyncer(exported)).Tracer("test")
			var records []*kgo.Record
			for i, sc := range c.records {
				rec := &kgo.Record{Offset: int64(i)}
				if sc.IsValid() {
					rec.Headers = traceparent(sc)
				}
				records = append(records, rec)
			}
			if c.extraHdr != nil {
				records = append(records, &kgo.Record{Headers: c.extraHdr})
			}
			f.p.Apply(records, int64(len(records)), 0)
			spans := exported.GetSpans()
			if len(c.want) == 0 {
				if len(spans) > 0 {
					t.Errorf("got %v", spans)
				}
				return
			}
			if len(spans) != 1 || !spans[0].Parent.Equal(c.want[0]) || len(spans[0].Links) != len(c.want)-1 {
				t.Fatalf("got %+v", spans)
			}
			for i, l := range spans[0].Links {
				if !l.SpanContext.Equal(c.want[i+1]) {
					t.Errorf("link %d to %v", i, l.SpanContext)
				}
			}
			if !slices.Contains(spans[0].Attributes, attribute.Int("kvindex.links.left_out", c.leftOut)) {
				t.Errorf("attributes %v", spans[0].Attributes)
			}
		})
	}
}

// A batch costs no allocation for its telemetry: neither with metrics, nor with
// a tracer of which its producers ask nothing.
func TestTelemetryOfABatchAllocatesNothing(t *testing.T) {
	meters, _, err := query.SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	measured, err := newMeasures(meters)
	if err != nil {
		t.Fatal(err)
	}
	chain := locals(1, 64)
	for _, c := range []struct {
		name    string
		tracer  oteltrace.Tracer
		headers []kgo.RecordHeader
	}{
		{"no tracer, a sampled producer", nil, traceparent(spanContext(1, oteltrace.FlagsSampled))},
		{"a tracer, no producer", trace.NewTracerProvider().Tracer("test"), nil},
		{"a tracer, a producer that is not sampled", trace.NewTracerProvider().Tracer("test"), traceparent(spanContext(1, 0))},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFeed(t)
			f.p.stage.measures, f.p.stage.tracer = measured, c.tracer
			f.record.Headers = c.headers
			records := make([]*kgo.Record, 1)
			apply := func() {
				f.batch.Seq++
				f.batch.Events = append(f.batch.Events[:0], stored(nil, chain...))
				f.record.Value, _ = schemas.AppendBatch(f.record.Value[:0], &f.batch)
				f.record.Offset++
				records[0] = &f.record
				f.p.Apply(records, f.record.Offset+1, 0)
			}
			apply()
			if n := testcontainers.LeastAllocs(100, apply); n != 0 {
				t.Errorf("%v allocations a batch, want none", n)
			}
		})
	}
}

// A failed restore is a failed span, and counted.
func TestRestoreThatFailsIsSeen(t *testing.T) {
	exported := sdktest.NewInMemoryExporter()
	p := bare(t)
	p.stage.tracer = trace.NewTracerProvider(trace.WithSyncer(exported)).Tracer("test")
	var err error
	p.stage.aux, err = kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"), kgo.RequestRetries(0), kgo.RetryTimeout(time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer p.stage.aux.Close()
	if _, err := p.Restore(t.Context()); err == nil {
		t.Fatal("restored from nowhere")
	}
	spans := exported.GetSpans()
	if len(spans) != 1 || spans[0].Name != "kvindex.restore" || spans[0].Status.Description == "" {
		t.Errorf("spans %+v", spans)
	}
	if n := p.counts[restoreFailures].Load(); n != 1 {
		t.Errorf("%d failures counted", n)
	}
}
