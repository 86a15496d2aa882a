package pipeline

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// This file makes the stage's spans: of fetched batches whose producers are
// traced, of restores and of snapshot rounds. Without a tracer none of it runs.

// maxLinks bounds the producers that one batch's span names.
const maxLinks = 32

// contextHeader is where a record carries its producer's span, as W3C Trace
// Context writes it.
const contextHeader = "traceparent"

var propagator = propagation.TraceContext{}

// headers reads propagation fields from a record's headers.
type headers []kgo.RecordHeader

func (h headers) Get(key string) string {
	for i := range h {
		if h[i].Key == key {
			return string(h[i].Value)
		}
	}
	return ""
}

// Set is never called: nothing is written to a record that was read.
func (h headers) Set(string, string) {}

func (h headers) Keys() []string {
	keys := make([]string, len(h))
	for i := range h {
		keys[i] = h[i].Key
	}
	return keys
}

// sampled reports whether a traceparent may say that its span is sampled. It
// allocates nothing, so that records of which nobody keeps a trace stay cheap.
func sampled(traceparent []byte) bool {
	const flags = len("00-00000000000000000000000000000000-0000000000000000-0")
	if len(traceparent) <= flags {
		return false
	}
	return strings.IndexByte("13579bdf", traceparent[flags]) >= 0
}

// producers returns the distinct sampled spans that the records were produced
// under, at most 1 + maxLinks, and of how many records it left theirs out.
func producers(records []*kgo.Record) (spans []trace.SpanContext, left int) {
	var last []byte // a producer's records often share one
	for _, r := range records {
		i := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == contextHeader })
		if i < 0 || !sampled(r.Headers[i].Value) || last != nil && string(last) == string(r.Headers[i].Value) {
			continue
		}
		last = r.Headers[i].Value
		if len(spans) == 1+maxLinks {
			left++
			continue
		}
		sc := trace.SpanContextFromContext(propagator.Extract(context.Background(), headers(r.Headers)))
		if sc.IsSampled() && !slices.ContainsFunc(spans, sc.Equal) {
			spans = append(spans, sc)
		}
	}
	return spans, left
}

// batchSpan is the span of a fetched batch while it is applied.
type batchSpan struct {
	ctx    context.Context // what is measured belongs to
	span   trace.Span      // nil: none is kept
	before [len(spanCounts)]int64
}

// spanCounts are what a batch's span says that the batch did.
var spanCounts = [...]struct {
	counter counter
	name    string
}{
	{recordsApplied, "kvindex.records.applied"},
	{eventsApplied, "kvindex.events.applied"},
	{blocksStored, "kvindex.blocks.stored"},
	{blocksRemoved, "kvindex.blocks.removed"},
	{blocksOrphan, "kvindex.blocks.orphan"},
	{gaps, "kvindex.gaps"},
}

// startBatch begins a batch's span, if a sampled producer asks for it: as a
// child of the first one's, so that its trace goes on here, with links to the
// others.
func (p *partition) startBatch(records []*kgo.Record) batchSpan {
	b := batchSpan{ctx: context.Background()}
	if p.stage.tracer == nil {
		return b
	}
	spans, left := producers(records)
	if len(spans) == 0 {
		return b
	}
	links := make([]trace.Link, len(spans)-1)
	for i, sc := range spans[1:] {
		links[i].SpanContext = sc
	}
	ctx, span := p.stage.tracer.Start(trace.ContextWithRemoteSpanContext(b.ctx, spans[0]), "kvindex.apply",
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...), trace.WithAttributes(p.spanAttributes()...))
	if !span.IsRecording() {
		return b
	}
	b.ctx, b.span = ctx, span
	span.SetAttributes(
		semconv.MessagingOperationName("apply"),
		semconv.MessagingOperationTypeProcess,
		semconv.MessagingBatchMessageCount(len(records)),
		semconv.MessagingKafkaOffset(int(records[0].Offset)),
		attribute.Int64("kvindex.offset.last", records[len(records)-1].Offset),
		attribute.Int("kvindex.links.left_out", left),
	)
	for i, c := range spanCounts {
		b.before[i] = p.counts[c.counter].Load()
	}
	return b
}

// end ends the span with what became of the batch.
func (b *batchSpan) end(p *partition) {
	if b.span == nil {
		return
	}
	for i, c := range spanCounts {
		b.span.SetAttributes(attribute.Int64(c.name, p.counts[c.counter].Load()-b.before[i]))
	}
	b.span.End()
}

// spanAttributes say which partition a span is about.
func (p *partition) spanAttributes() []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingSystemKafka,
		semconv.MessagingDestinationName(p.stage.cfg.Topic),
		semconv.MessagingDestinationPartitionID(strconv.Itoa(int(p.number))),
		semconv.MessagingConsumerGroupName(p.stage.cfg.Group),
	}
}

// startSpan begins a span of the partition's own, under none; it records
// nothing without a tracer.
func (p *partition) startSpan(name string) (context.Context, trace.Span) {
	ctx := context.Background()
	if p.stage.tracer == nil {
		return ctx, trace.SpanFromContext(ctx)
	}
	return p.stage.tracer.Start(ctx, name, trace.WithAttributes(p.spanAttributes()...))
}

// endSpan ends it, as failed if there is an error.
func endSpan(span trace.Span, err error) {
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}
