// This file makes the spans of records, under those of the requests that caused
// them.

package fleet

import (
	"context"
	"strconv"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// traced begins a record's span under the context's, if that is recorded, and
// has the record carry it; nil: it is not.
func traced(ctx context.Context, r *kgo.Record) trace.Span {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return nil
	}
	ctx, span := parent.TracerProvider().Tracer("kvindex/cmd/kvindex/fleet").Start(ctx, "kvindex.replay.produce",
		trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(
			semconv.MessagingSystemKafka,
			semconv.MessagingOperationName("produce"),
			semconv.MessagingOperationTypeSend,
			semconv.MessagingDestinationName(r.Topic),
			semconv.MessagingKafkaMessageKey(string(r.Key))))
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	for key, value := range fields {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: key, Value: []byte(value)})
	}
	return span
}

// endSpan ends it once the record is acknowledged or has failed.
func endSpan(span trace.Span, r *kgo.Record, err error) {
	if span == nil {
		return
	}
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	} else {
		span.SetAttributes(
			semconv.MessagingDestinationPartitionID(strconv.Itoa(int(r.Partition))),
			semconv.MessagingKafkaOffset(int(r.Offset)))
	}
	span.End()
}
