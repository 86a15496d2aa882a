// This file sets OpenTelemetry up: traces by the standard environment
// variables, metrics for Prometheus.

package query

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Identity is how this process names itself in telemetry.
type Identity struct {
	Service  string // service.name, unless OTEL_SERVICE_NAME says otherwise; empty: kvindex
	Version  string // service.version
	Instance string // service.instance.id
}

// SetupTracing returns the tracer that the standard OTEL_ environment variables
// ask for and what sends its last spans and stops it. The tracer is nil, and
// nothing runs, unless an OTLP endpoint is set (OTEL_EXPORTER_OTLP_ENDPOINT or
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or OTEL_TRACES_EXPORTER is otlp;
// OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none turn it off again.
//
// The protocol is http/protobuf, or grpc if OTEL_EXPORTER_OTLP_PROTOCOL or
// OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so. The sampler follows the caller's
// decision unless OTEL_TRACES_SAMPLER says otherwise. Exporter, batch and
// resource variables are the SDK's.
func SetupTracing(ctx context.Context, id Identity) (trace.Tracer, func(context.Context) error, error) {
	off := func(context.Context) error { return nil }
	wanted, err := tracingWanted()
	if err != nil || !wanted {
		return nil, off, err
	}
	exporter, err := newExporter(ctx)
	if err != nil {
		return nil, off, fmt.Errorf("tracing: %w", err)
	}
	res, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithAttributes(
			attribute.String("service.name", cmp.Or(id.Service, "kvindex")),
			attribute.String("service.version", id.Version),
			attribute.String("service.instance.id", id.Instance),
		),
		resource.WithFromEnv(), // last, so that OTEL_SERVICE_NAME wins
	)
	if err != nil {
		return nil, off, fmt.Errorf("tracing: resource: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	return provider.Tracer("kvindex"), provider.Shutdown, nil
}

func tracingWanted() (bool, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false, nil
	}
	switch e := os.Getenv("OTEL_TRACES_EXPORTER"); e {
	case "otlp":
		return true, nil
	case "none":
		return false, nil
	case "":
		return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "", nil
	default:
		return false, fmt.Errorf("tracing: OTEL_TRACES_EXPORTER is %q: want otlp or none", e)
	}
}

func newExporter(ctx context.Context) (*otlptrace.Exporter, error) {
	name := "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
	protocol := os.Getenv(name)
	if protocol == "" {
		name = "OTEL_EXPORTER_OTLP_PROTOCOL"
		protocol = os.Getenv(name)
	}
	switch protocol {
	case "grpc":
		return otlptracegrpc.New(ctx)
	case "", "http/protobuf":
		return otlptracehttp.New(ctx)
	}
	return nil, fmt.Errorf("%s is %q: want grpc or http/protobuf", name, protocol)
}

// SetupMetrics returns a provider of meters and the handler that shows their
// instruments, and the Go runtime's and the process's own metrics, to
// Prometheus. Whoever accepts OpenMetrics gets exemplars too.
func SetupMetrics() (metric.MeterProvider, http.Handler, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	exporter, err := otelprom.New(
		otelprom.WithRegisterer(registry),
		otelprom.WithoutScopeInfo(),
		otelprom.WithoutTargetInfo(),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("metrics: %w", err)
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	return provider, promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}), nil
}
