// This file starts the query's span under its caller's, and has our own clients
// name theirs. The former is used only if there is a tracer: without one a
// request passes none of it.

package query

import (
	"context"
	"net/http"
	"path"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

const spanName = "kvindex.match"

// traceparent and tracestate, as W3C Trace Context writes them.
var propagator = propagation.TraceContext{}

// traceGRPC puts a span around each Match.
func traceGRPC(tracer trace.Tracer) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if m, ours := methodOf(info.FullMethod); !ours || !m.matches() {
			return next(ctx, req)
		}
		md, _ := metadata.FromIncomingContext(ctx)
		ctx, span := tracer.Start(propagator.Extract(ctx, mdCarrier(md)), spanName,
			trace.WithSpanKind(trace.SpanKindServer),
			trace.WithAttributes(
				attribute.String("rpc.system", "grpc"),
				attribute.String("rpc.service", pb.KVIndex_ServiceDesc.ServiceName),
				attribute.String("rpc.method", path.Base(info.FullMethod))))
		defer span.End()
		resp, err := next(ctx, req)
		span.SetAttributes(attribute.Int("rpc.grpc.status_code", int(status.Code(err))))
		endSpan(span, err)
		return resp, err
	}
}

// traceHTTP puts a span around each match.
func traceHTTP(tracer trace.Tracer, next httpAnswer) httpAnswer {
	return func(w http.ResponseWriter, r *http.Request, s *httpScratch) error {
		ctx, span := tracer.Start(propagator.Extract(r.Context(), propagation.HeaderCarrier(r.Header)), spanName,
			trace.WithSpanKind(trace.SpanKindServer),
			trace.WithAttributes(
				attribute.String("http.request.method", r.Method),
				attribute.String("http.route", r.URL.Path)))
		defer span.End()
		s.ctx = ctx
		err := next(w, r.WithContext(ctx), s)
		span.SetAttributes(attribute.Int("http.response.status_code", httpStatus(err)))
		endSpan(span, err)
		return err
	}
}

// endSpan says how the query ended. Only what is our fault is an error, as
// OpenTelemetry has it for servers.
func endSpan(span trace.Span, err error) {
	switch st := status.Convert(err); st.Code() {
	case codes.Internal, codes.Unknown, codes.Unavailable, codes.DeadlineExceeded, codes.DataLoss, codes.Unimplemented:
		span.SetStatus(otelcodes.Error, st.Message())
	}
}

// mdCarrier reads propagation headers from gRPC metadata.
type mdCarrier metadata.MD

func (c mdCarrier) Get(key string) string {
	if v := metadata.MD(c).Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

func (c mdCarrier) Set(key, value string) { metadata.MD(c).Set(key, value) }

func (c mdCarrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}
