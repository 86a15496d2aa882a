package pipeline

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// This file is what is measured as it happens: once a fetched batch or a
// snapshot round, never once a record.

// measures are the stage's histograms, of all partitions together: which one is
// slow its lag tells, and a histogram a partition would be many series.
type measures struct {
	apply    metric.Float64Histogram
	decode   metric.Float64Histogram
	snapshot metric.Float64Histogram
}

// noMeasures measure nothing, until Run has a provider.
var noMeasures, _ = newMeasures(noop.NewMeterProvider())

func newMeasures(provider metric.MeterProvider) (*measures, error) {
	meter := provider.Meter("kvindex/pipeline")
	var errs [3]error
	histogram := func(err *error, name, help string, bounds ...float64) (h metric.Float64Histogram) {
		h, *err = meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(bounds...))
		return h
	}
	m := &measures{
		apply: histogram(&errs[0], "kvindex_apply_duration", "Time to apply a fetched batch of event records.",
			100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1),
		decode: histogram(&errs[1], "kvindex_decode_duration", "Time to decode an event record, measured on the first of each fetched batch.",
			250e-9, 500e-9, 1e-6, 2.5e-6, 5e-6, 10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 1e-3, 10e-3),
		snapshot: histogram(&errs[2], "kvindex_snapshot_duration", "Time to write a round of a partition's snapshots.",
			5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
	}
	return m, errors.Join(errs[:]...)
}

// record adds the time since began. A span in the context makes it an exemplar.
func record(ctx context.Context, h metric.Float64Histogram, began time.Time) {
	h.Record(ctx, time.Since(began).Seconds())
}
