package query

import (
	"context"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

const (
	callerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	callerSpan  = "00f067aa0ba902b7"
)

// receiver is an OTLP collector that hands on what it gets.
type receiver struct {
	collector.UnimplementedTraceServiceServer
	got chan *tracepb.ResourceSpans
}

func (r *receiver) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	for _, rs := range req.ResourceSpans {
		r.got <- rs
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	in := new(collector.ExportTraceServiceRequest)
	if err != nil || req.URL.Path != "/v1/traces" || proto.Unmarshal(body, in) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	out, _ := r.Export(req.Context(), in)
	b, _ := proto.Marshal(out)
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.Write(b)
}

// listen starts the receiver for a protocol and returns its endpoint.
func (r *receiver) listen(t *testing.T, protocol string) string {
	t.Helper()
	if protocol == "http/protobuf" {
		h := httptest.NewServer(r)
		t.Cleanup(h.Close)
		return h.URL
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	collector.RegisterTraceServiceServer(g, r)
	go g.Serve(l)
	t.Cleanup(g.Stop)
	return "http://" + l.Addr().String()
}

// clearOTEL makes a test independent of the environment it runs in.
func clearOTEL(t *testing.T) {
	for _, v := range []string{
		"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
		"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
		"OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	} {
		t.Setenv(v, "")
	}
}

// The query's span reaches a collector as a child of the caller's, whichever
// way the query and the spans travel.
func TestSpanIsAChildOfTheCallers(t *testing.T) {
	for _, protocol := range []string{"grpc", "http/protobuf"} {
		for _, transport := range []string{"grpc", "http"} {
			t.Run(transport+" exported by "+protocol, func(t *testing.T) {
				clearOTEL(t)
				rec := &receiver{got: make(chan *tracepb.ResourceSpans, 10)}
				t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", rec.listen(t, protocol))
				t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
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
				var rs *tracepb.ResourceSpans
				select {
				case rs = <-rec.got:
				case <-time.After(5 * time.Second):
					t.Fatal("no span within 5 s")
				}
				span := rs.ScopeSpans[0].Spans[0]
				if got := hex.EncodeToString(span.TraceId); got != callerTrace {
					t.Errorf("trace %s", got)
				}
				if got := hex.EncodeToString(span.ParentSpanId); got != callerSpan {
					t.Errorf("parent %s", got)
				}
				if span.Name != "kvindex.match" || span.Kind != tracepb.Span_SPAN_KIND_SERVER {
					t.Errorf("name %s, kind %v", span.Name, span.Kind)
				}
				attrs := map[string]string{}
				for _, a := range append(span.Attributes, rs.Resource.Attributes...) {
					attrs[a.Key] = strings.Trim(regexp.MustCompile(`^\w+_value:`).ReplaceAllString(a.Value.String(), ""), `"`)
				}
				for key, want := range map[string]string{
					"kvindex.model": "m", "kvindex.blocks": "3", "kvindex.workers": "3", "kvindex.depth": "3", "kvindex.depth_external": "3", "kvindex.age_ms": "1500", "kvindex.incomplete": "1",
					"service.name": "kvindex-test", "service.version": "v1", "service.instance.id": "i1",
				} {
					if attrs[key] != want {
						t.Errorf("%s is %q, want %q", key, attrs[key], want)
					}
				}
			})
		}
	}
}

// A caller that samples nothing costs the collector nothing.
func TestUnsampledCallerMakesNoSpan(t *testing.T) {
	clearOTEL(t)
	rec := &receiver{got: make(chan *tracepb.ResourceSpans, 10)}
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", rec.listen(t, "http/protobuf")+"/v1/traces")
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
	select {
	case rs := <-rec.got:
		t.Errorf("got %v", rs)
	default:
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
			clearOTEL(t)
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
	clearOTEL(t)
	rec := &receiver{got: make(chan *tracepb.ResourceSpans, 10)}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", rec.listen(t, "http/protobuf"))
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
	clearOTEL(t)
	rec := &receiver{got: make(chan *tracepb.ResourceSpans, 10)}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", rec.listen(t, "grpc"))
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
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
	got := (<-rec.got).ScopeSpans[0].Spans[0]
	if id := span.SpanContext().SpanID(); got.Name != spanName || hex.EncodeToString(got.ParentSpanId) != id.String() {
		t.Errorf("got %v, want a child of %s", got, id)
	}
}

// Measuring a request allocates nothing of its own that grows.
func TestInstrumentsAllocateNothing(t *testing.T) {
	provider, _, err := SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	in, err := newInstruments(provider.Meter("test"), newGate(Limits{}.withDefaults()))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if got := testing.AllocsPerRun(100, func() {
		in.begin(overGRPC)
		in.end(t.Context(), overGRPC, matchMethod, 0, start)
	}); got != 0 {
		t.Errorf("%v allocations a request", got)
	}
}
