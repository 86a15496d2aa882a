// Package tracetest has an OTLP collector for tests: what it gets is what a real
// one would.
package tracetest

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"kvindex/testcontainers"
)

// Collector keeps the spans that it gets, over gRPC and HTTP. Its methods may be
// called from any goroutine.
type Collector struct {
	collector.UnimplementedTraceServiceServer

	mu    sync.Mutex
	spans []Span
}

// Span is a span as it arrived. Identifiers are in hexadecimal digits.
type Span struct {
	Name, Trace, ID, Parent string
	Kind                    tracepb.Span_SpanKind
	Start, End              time.Time
	Attributes              map[string]string // its own and its resource's, as text
	Links                   []string          // the linked spans' identifiers
}

// New starts a collector for the test's length and has the standard variables
// point to it: protocol is grpc or http/protobuf. All other OTEL_ variables are
// as if they were not set.
func New(t testing.TB, protocol string) *Collector {
	t.Helper()
	Clear(t)
	c := &Collector{}
	var endpoint string
	if protocol == "http/protobuf" {
		h := httptest.NewServer(c)
		t.Cleanup(h.Close)
		endpoint = h.URL
	} else {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		g := grpc.NewServer()
		collector.RegisterTraceServiceServer(g, c)
		go g.Serve(l)
		t.Cleanup(g.Stop)
		endpoint = "http://" + l.Addr().String()
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50") // milliseconds
	return c
}

// Clear makes a test independent of the environment that it runs in.
func Clear(t testing.TB) {
	for _, v := range []string{
		"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
		"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
		"OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
	} {
		t.Setenv(v, "")
	}
}

// Export implements the OTLP service.
func (c *Collector) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				c.spans = append(c.spans, arrived(s, rs.Resource.GetAttributes()))
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func arrived(s *tracepb.Span, resource []*common.KeyValue) Span {
	out := Span{
		Name:       s.Name,
		Trace:      hex.EncodeToString(s.TraceId),
		ID:         hex.EncodeToString(s.SpanId),
		Parent:     hex.EncodeToString(s.ParentSpanId),
		Kind:       s.Kind,
		Start:      time.Unix(0, int64(s.StartTimeUnixNano)),
		End:        time.Unix(0, int64(s.EndTimeUnixNano)),
		Attributes: map[string]string{},
	}
	for _, attributes := range [][]*common.KeyValue{resource, s.Attributes} {
		for _, a := range attributes {
			out.Attributes[a.Key] = text(a.Value)
		}
	}
	for _, l := range s.Links {
		out.Links = append(out.Links, hex.EncodeToString(l.SpanId))
	}
	return out
}

func text(v *common.AnyValue) string {
	switch v := v.GetValue().(type) {
	case *common.AnyValue_StringValue:
		return v.StringValue
	case *common.AnyValue_IntValue:
		return fmt.Sprint(v.IntValue)
	case *common.AnyValue_BoolValue:
		return fmt.Sprint(v.BoolValue)
	case *common.AnyValue_DoubleValue:
		return fmt.Sprint(v.DoubleValue)
	}
	return v.String()
}

// ServeHTTP implements OTLP over HTTP.
func (c *Collector) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	in := new(collector.ExportTraceServiceRequest)
	if err != nil || !strings.HasSuffix(req.URL.Path, "/v1/traces") || proto.Unmarshal(body, in) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	out, _ := c.Export(req.Context(), in)
	b, _ := proto.Marshal(out)
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.Write(b)
}

// Find returns the spans of a name that have arrived, of one trace unless that
// is empty.
func (c *Collector) Find(name, trace string) (found []Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.Name == name && (trace == "" || s.Trace == trace) {
			found = append(found, s)
		}
	}
	return found
}

// Len returns how many spans have arrived.
func (c *Collector) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.spans)
}

// Await waits for the first span that Find finds.
func (c *Collector) Await(t testing.TB, name, trace string) Span {
	t.Helper()
	var found []Span
	testcontainers.Eventually(t, 2*time.Minute, func() error {
		if found = c.Find(name, trace); len(found) == 0 {
			return fmt.Errorf("no span %s of trace %q", name, trace)
		}
		return nil
	})
	return found[0]
}

// Has fails the test for each attribute that is another.
func (s Span) Has(t testing.TB, want map[string]string) {
	t.Helper()
	for key, value := range want {
		if s.Attributes[key] != value {
			t.Errorf("%s: %s is %q, want %q", s.Name, key, s.Attributes[key], value)
		}
	}
}
