package query

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/metadata"

	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/query/tracetest"
	"kvindex/testcontainers"
)

const (
	callerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	callerSpan  = "00f067aa0ba902b7"
)

// The query's span reaches a collector as a child of the caller's, whichever
// way the query and the spans travel.
func TestSpanIsAChildOfTheCallers(t *testing.T) {
	for _, protocol := range []string{"grpc", "http/protobuf"} {
		for _, transport := range []string{"grpc", "http"} {
			t.Run(transport+" exported by "+protocol, func(t *testing.T) {
				c := tracetest.New(t, protocol)
				t.Setenv("OTEL_SERVICE_NAME", "kvindex-test")
				tracer, shutdown, err := SetupTracing(t.Context(), Identity{Version: "v1", Instance: "i1"})
				if err != nil {
					t.Fatal(err)
				}
				s := serve(t, fleet(t), Config{Tracer: tracer})

				ask(t, s, transport, "00-"+callerTrace+"-"+callerSpan+"-01")
				if err := shutdown(t.Context()); err != nil { // flushes
					t.Fatal(err)
				}
				span := c.Await(t, spanName, callerTrace)
				if span.Parent != callerSpan || span.Kind != tracepb.Span_SPAN_KIND_SERVER {
					t.Errorf("parent %s, kind %v", span.Parent, span.Kind)
				}
				span.Has(t, map[string]string{
					"kvindex.model": "m", "kvindex.blocks": "3", "kvindex.workers": "3", "kvindex.depth": "3", "kvindex.depth_external": "3", "kvindex.age_ms": "1500", "kvindex.incomplete": "1",
					"service.name": "kvindex-test", "service.version": "v1", "service.instance.id": "i1",
				})
			})
		}
	}
}

// A caller that samples nothing costs the collector nothing.
func TestUnsampledCallerMakesNoSpan(t *testing.T) {
	c := tracetest.New(t, "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")+"/v1/traces")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	tracer, shutdown, err := SetupTracing(t.Context(), Identity{})
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, fleet(t), Config{Tracer: tracer})
	ask(t, s, "grpc", "00-"+callerTrace+"-"+callerSpan+"-00")
	ask(t, s, "http", "00-"+callerTrace+"-"+callerSpan+"-00")
	if err := shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := c.Len(); n > 0 {
		t.Errorf("%d spans", n)
	}
}

// ask sends one match with the caller's trace context.
func ask(t *testing.T, s *Server, transport, traceparent string) {
	t.Helper()
	if transport == "grpc" {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", traceparent)
		if _, err := dial(t, s).Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Fatal(err)
		}
		return
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+s.HTTPAddr().String()+"/v1/match",
		strings.NewReader(`{"model":"m","tokens":[1,2,3,4,5,6,7,8,9,10,11,12]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Traceparent", traceparent)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
}

func TestTracingIsOffUnlessAskedFor(t *testing.T) {
	const endpoint = "http://127.0.0.1:1"
	cases := []struct {
		name string
		env  map[string]string
		on   bool
		err  string
	}{
		{"nothing set", nil, false, ""},
		{"endpoint", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, true, ""},
		{"endpoint of traces", map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}, true, ""},
		{"exporter otlp at its default endpoint", map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, true, ""},
		{"exporter none", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_EXPORTER": "none"}, false, ""},
		{"SDK disabled", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SDK_DISABLED": "true"}, false, ""},
		{"another exporter", map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, false, `OTEL_TRACES_EXPORTER is "zipkin"`},
		{"another protocol", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, false,
			`OTEL_EXPORTER_OTLP_PROTOCOL is "http/json"`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			tracetest.Clear(t)
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			tracer, shutdown, err := SetupTracing(t.Context(), Identity{})
			if (tracer != nil) != c.on || (err != nil) != (c.err != "") || (err != nil && !strings.Contains(err.Error(), c.err)) {
				t.Errorf("tracer %v, %v", tracer, err)
			}
			if err := shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestMetrics(t *testing.T) {
	provider, handler, err := SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, fleet(t), Config{Meters: provider, Metrics: handler})
	for _, a := range askers(t, s) {
		if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.ask(&pb.MatchRequest{Model: "x", Tokens: prompt}); err == nil {
			t.Fatal("no error")
		}
	}
	get(t, s, "/v1/status")
	_, text := get(t, s, "/metrics")
	for _, want := range []string{
		`kvindex_query_requests_total{code="OK",method="match",transport="grpc"} 1`,
		`kvindex_query_requests_total{code="OK",method="match",transport="http"} 1`,
		`kvindex_query_requests_total{code="NOT_FOUND",method="match",transport="grpc"} 1`,
		`kvindex_query_requests_total{code="NOT_FOUND",method="match",transport="http"} 1`,
		`kvindex_query_requests_total{code="OK",method="status",transport="http"} 1`,
		`kvindex_query_duration_seconds_count{method="match",transport="grpc"} 2`,
		`kvindex_query_duration_seconds_bucket{method="match",transport="http",le="5e-05"}`,
		`kvindex_query_duration_seconds_bucket{method="match",transport="http",le="1"} 2`,
		`kvindex_query_in_flight{transport="http"} 0`,
		`kvindex_query_panics_total 0`,
		`go_goroutines`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

// The trace of a sampled query is an exemplar of how long queries take, for who
// reads OpenMetrics; the older format has no place for it.
func TestExemplars(t *testing.T) {
	tracetest.New(t, "http/protobuf")
	tracer, shutdown, err := SetupTracing(t.Context(), Identity{})
	if err != nil {
		t.Fatal(err)
	}
	defer shutdown(t.Context())
	for _, transport := range []string{"grpc", "http"} {
		provider, handler, err := SetupMetrics()
		if err != nil {
			t.Fatal(err)
		}
		s := serve(t, fleet(t), Config{Tracer: tracer, Meters: provider, Metrics: handler})
		const exemplar = ` # {`
		scrape := func(accept string) string {
			w := httptest.NewRecorder()
			r := httptest.NewRequest("GET", "/metrics", nil)
			r.Header.Set("Accept", accept)
			handler.ServeHTTP(w, r)
			return w.Body.String()
		}
		const openMetrics = "application/openmetrics-text; version=1.0.0"
		ask(t, s, transport, "00-"+callerTrace+"-"+callerSpan+"-00")
		if text := scrape(openMetrics); strings.Contains(text, exemplar) {
			t.Errorf("%s: a query that is not sampled is an exemplar:\n%s", transport, text)
		}
		ask(t, s, transport, "00-"+callerTrace+"-"+callerSpan+"-01")
		text := scrape(openMetrics)
		found := regexp.MustCompile(`kvindex_query_duration_seconds_bucket\{method="match",transport="` + transport + `",le="[^"]+"\} \d+ # \{[^}]*trace_id="` + callerTrace + `"`).MatchString(text)
		if !found || !strings.HasSuffix(text, "# EOF\n") {
			t.Errorf("%s: no exemplar in\n%s", transport, text)
		}
		if text := scrape("text/plain"); strings.Contains(text, callerTrace) || strings.Contains(text, "# EOF") {
			t.Errorf("%s: the plain format has more than it may:\n%s", transport, text)
		}
	}
}

// A client's span is the parent of the instance's.
func TestClientSendsItsSpan(t *testing.T) {
	c := tracetest.New(t, "grpc")
	tracer, shutdown, err := SetupTracing(t.Context(), Identity{Service: "router"})
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, fleet(t), Config{Tracer: tracer})
	ctx, span := tracer.Start(t.Context(), "request")
	if _, err := dial(t, s).Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
		t.Fatal(err)
	}
	if err := shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := c.Await(t, spanName, span.SpanContext().TraceID().String())
	if id := span.SpanContext().SpanID().String(); got.Parent != id {
		t.Errorf("got %+v, want a child of %s", got, id)
	}
}

// Measuring a request allocates nothing of its own that grows.
func TestInstrumentsAllocateNothing(t *testing.T) {
	provider, _, err := SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	in, err := newInstruments(provider.Meter("test"), newGate(Limits{}.withDefaults()), newUnread(Limits{}.withDefaults()))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if got := testcontainers.LeastAllocs(100, func() {
		in.begin(overGRPC)
		in.end(t.Context(), overGRPC, matchMethod, 0, start)
	}); got != 0 {
		t.Errorf("%v allocations a request", got)
	}
}
