// This file measures requests: how many, how long, how many at once, panics.

package query

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc/codes"
)

type transport int

const (
	overGRPC transport = iota
	overHTTP
	transports
)

type method int

const (
	matchMethod method = iota
	matchManyMethod
	matchStreamMethod // one request of a stream
	workersMethod
	statusMethod
	mooncakeMethod // a query of Mooncake's API
	dynamoMethod   // of Dynamo's
	dropinMethod   // what else those have
	methods
)

var (
	transportNames = [transports]string{"grpc", "http"}
	methodNames    = [methods]string{"match", "match_many", "match_stream", "workers", "status", "mooncake", "dynamo", "dropin"}
)

// matches reports whether requests of the method ask Match.
func (m method) matches() bool {
	switch m {
	case matchMethod, matchManyMethod, matchStreamMethod, mooncakeMethod, dynamoMethod:
		return true
	}
	return false
}

// isDropin reports whether requests of the method are in the words of another
// indexer's API.
func (m method) isDropin() bool { return m == mooncakeMethod || m == dynamoMethod || m == dropinMethod }

const codesCount = int(codes.Unauthenticated) + 1

// instruments are the query side's metrics. Every set of attributes is made
// once, so that counting a request makes none.
type instruments struct {
	requests metric.Int64Counter
	duration metric.Float64Histogram
	inFlight metric.Int64UpDownCounter
	panics   metric.Int64Counter
	reloads  metric.Int64Counter // that failed
	refused  refused
	ignored  metric.Int64Counter

	counted [transports][methods][codesCount][]metric.AddOption
	flying  [transports][]metric.AddOption
	timed   [transports][methods][]metric.RecordOption
	api     [methods][]metric.AddOption
}

func newInstruments(meter metric.Meter, g *gate, u *unread) (*instruments, error) {
	var (
		in   instruments
		errs [11]error
	)
	in.requests, errs[0] = meter.Int64Counter("kvindex_query_requests",
		metric.WithDescription("Requests answered, by transport, method and gRPC code."))
	in.duration, errs[1] = meter.Float64Histogram("kvindex_query_duration",
		metric.WithUnit("s"),
		metric.WithDescription("Time to answer a request: over gRPC after it was decoded, over HTTP including reading and decoding it."),
		metric.WithExplicitBucketBoundaries(50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.5e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1))
	in.inFlight, errs[2] = meter.Int64UpDownCounter("kvindex_query_in_flight",
		metric.WithDescription("Requests being answered."))
	in.panics, errs[3] = meter.Int64Counter("kvindex_query_panics",
		metric.WithDescription("Requests that ended in a panic, answered as internal errors."))
	in.reloads, errs[4] = meter.Int64Counter("kvindex_query_reload_failures",
		metric.WithDescription("Changed files of certificates or tokens that cannot be used; their former content stays in use."))
	errs[5] = in.refused.init(meter)
	for i, gauge := range []struct {
		name, text string
		value      func() int64
	}{
		{"kvindex_query_working", "Match queries being worked on.", func() int64 { return int64(len(g.slots)) }},
		{"kvindex_query_working_limit", "Match queries worked on at once at most.", func() int64 { return int64(cap(g.slots)) }},
		{"kvindex_query_arriving", "Match queries whose headers are there and whose body is not yet.", g.arrivals},
		{"kvindex_query_queued", "Match queries that wait for others to end.", g.waiting.Load},
		{"kvindex_query_unread_bytes", "Bytes of answers that are ready and that their callers have not taken.", u.held},
	} {
		_, errs[6+i] = meter.Int64ObservableGauge(gauge.name, metric.WithDescription(gauge.text),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				o.Observe(gauge.value())
				return nil
			}))
	}
	in.ignored, errs[10] = meter.Int64Counter("kvindex_query_ignored_fields",
		metric.WithDescription("Unknown fields in requests to the drop-in APIs, which were ignored."))
	for _, m := range []method{mooncakeMethod, dynamoMethod} {
		in.api[m] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attribute.String("api", methodNames[m])))}
		in.ignoredFields(m, 0)
	}

	for t := range transports {
		tr := attribute.String("transport", transportNames[t])
		in.flying[t] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(tr))}
		for m := range methods {
			me := attribute.String("method", methodNames[m])
			in.timed[t][m] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(tr, me))}
			for c := range in.counted[t][m] {
				co := attribute.String("code", codeName(codes.Code(c)))
				in.counted[t][m][c] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(tr, me, co))}
			}
		}
	}
	in.panics.Add(context.Background(), 0) // a counter to alert on is there from the start
	in.reloads.Add(context.Background(), 0)
	return &in, errors.Join(errs[:]...)
}

// ignoredFields counts fields of a request that were passed over unknown.
func (in *instruments) ignoredFields(m method, n int) {
	in.ignored.Add(context.Background(), int64(n), in.api[m]...)
}

// begin counts a request in.
func (in *instruments) begin(t transport) {
	in.inFlight.Add(context.Background(), 1, in.flying[t]...)
}

// end counts it out. If the context holds a span that is sampled, its trace
// becomes an exemplar of how long such requests take.
func (in *instruments) end(ctx context.Context, t transport, m method, code codes.Code, start time.Time) {
	if int(code) >= codesCount {
		code = codes.Unknown
	}
	in.inFlight.Add(ctx, -1, in.flying[t]...)
	in.requests.Add(ctx, 1, in.counted[t][m][code]...)
	if code != codes.ResourceExhausted { // so many quick refusals would hide how long the others took
		in.duration.Record(ctx, time.Since(start).Seconds(), in.timed[t][m]...)
	}
}

// codeNames are the codes as the gRPC specification spells them.
var codeNames = [codesCount]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

func codeName(c codes.Code) string {
	if int(c) < codesCount {
		return codeNames[c]
	}
	return codeNames[codes.Unknown]
}
