// This file has the span of an engine's batch, and the trace context that its
// records carry.

package relay

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"kvindex/schemas"
)

// batchSpan is the span of a batch while its records are written; the zero
// value is none.
type batchSpan struct {
	of   *feed
	span trace.Span
}

// startSpan begins the span of a batch that makes those events, if spans are
// made. Until its end, records carry its context.
func (f *feed) startSpan(events []schemas.Event) batchSpan {
	if f.cfg.tracer == nil {
		return batchSpan{}
	}
	stored, removed := blocks(events)
	ctx, span := f.cfg.tracer.Start(context.Background(), "kvindex.relay.batch",
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
			attribute.String("worker", f.cfg.worker), attribute.Int("rank", int(f.cfg.rank)),
			attribute.Int64("engine.seq", f.pos.next),
			attribute.Int64("blocks.stored", stored), attribute.Int64("blocks.removed", removed),
		))
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	f.headers = nil
	for key, value := range carrier {
		f.headers = append(f.headers, kgo.RecordHeader{Key: key, Value: []byte(value)})
	}
	return batchSpan{of: f, span: span}
}

func (s batchSpan) end() {
	if s.span != nil {
		s.span.End()
		s.of.headers = nil
	}
}
