package pipeline

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"kvindex/pipeline/query"
)

// observe registers the stage's metrics. All are read when scraped: what is
// counted on the way is an atomic, and costs no more.
func (s *Stage) observe(provider metric.MeterProvider) error {
	meter := provider.Meter("kvindex/pipeline")
	var instruments []metric.Observable
	add := func(o metric.Observable, err error) error {
		instruments = append(instruments, o)
		return err
	}

	var totals [numCounters]metric.Int64ObservableCounter
	for k, c := range counterNames {
		var err error
		totals[k], err = meter.Int64ObservableCounter("kvindex_"+c.name, metric.WithDescription(c.help))
		if err := add(totals[k], err); err != nil {
			return err
		}
	}
	gauges := []struct {
		name, help string
		value      func(query.PartitionStatus) int64
	}{
		{"kvindex_partition_position", "Next offset of the events topic to apply.", func(r query.PartitionStatus) int64 { return r.Position }},
		{"kvindex_partition_lag_offsets", "Offsets between the position and the last stable offset.", func(r query.PartitionStatus) int64 { return r.Lag }},
		{"kvindex_partition_floor_offset", "Offset from which a restart replays; everything before it may be trimmed. -1 if there is none.", func(r query.PartitionStatus) int64 { return r.Floor }},
		{"kvindex_partition_live", "1 if the partition is live, else 0.", func(r query.PartitionStatus) int64 { return truth(r.State == "live") }},
		{"kvindex_partition_paused", "1 while fetching waits for the partition's goroutine.", func(r query.PartitionStatus) int64 { return truth(r.Paused) }},
		{"kvindex_partition_workers", "Worker-ranks known, retired ones included.", func(r query.PartitionStatus) int64 { return int64(r.Workers) }},
		{"kvindex_snapshot_duty", "1 if this instance writes the partition's snapshots.", func(r query.PartitionStatus) int64 { return truth(r.SnapshotDuty) }},
		{"kvindex_restore_reread_records", "Records read again by the last restore.", func(r query.PartitionStatus) int64 { return r.Reread }},
	}
	seconds := []struct {
		name, help string
		value      func(query.PartitionStatus) float64
	}{
		{"kvindex_restore_duration_seconds", "What the last restore took until its replay began.", func(r query.PartitionStatus) float64 { return r.RestoreSeconds }},
		{"kvindex_snapshot_age_seconds", "Since this instance last wrote a round of the partition's snapshots.", func(r query.PartitionStatus) float64 { return r.SnapshotAge.Seconds() }},
	}
	gaugeOf := make([]metric.Int64ObservableGauge, len(gauges))
	for i, g := range gauges {
		var err error
		gaugeOf[i], err = meter.Int64ObservableGauge(g.name, metric.WithDescription(g.help))
		if err := add(gaugeOf[i], err); err != nil {
			return err
		}
	}
	secondsOf := make([]metric.Float64ObservableGauge, len(seconds))
	for i, g := range seconds {
		var err error
		secondsOf[i], err = meter.Float64ObservableGauge(g.name, metric.WithDescription(g.help))
		if err := add(secondsOf[i], err); err != nil {
			return err
		}
	}
	blocks, err := meter.Int64ObservableGauge("kvindex_index_blocks", metric.WithDescription("(block, worker-rank, tier) pairs held."))
	if err := add(blocks, err); err != nil {
		return err
	}
	workers, err := meter.Int64ObservableGauge("kvindex_index_workers", metric.WithDescription("Worker-ranks in the index."))
	if err := add(workers, err); err != nil {
		return err
	}
	reachable, err := meter.Int64ObservableGauge("kvindex_brokers_reachable", metric.WithDescription("1 if the events topic can be looked at; while it is 0, answers are from memory and nobody's silence counts."))
	if err := add(reachable, err); err != nil {
		return err
	}
	ready, err := meter.Int64ObservableGauge("kvindex_ready", metric.WithDescription("1 if every partition is live."))
	if err := add(ready, err); err != nil {
		return err
	}

	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		st := s.Status()
		o.ObserveInt64(ready, truth(st.Ready))
		o.ObserveInt64(reachable, truth(s.consumer.Problem() == ""))
		for _, p := range s.partitions() {
			at := metric.WithAttributes(attribute.Int("partition", int(p.number)))
			for k := range totals {
				o.ObserveInt64(totals[k], p.counts[k].Load(), at)
			}
		}
		for _, r := range st.Partitions {
			at := metric.WithAttributes(attribute.Int("partition", int(r.Partition)))
			for i := range gauges {
				o.ObserveInt64(gaugeOf[i], gauges[i].value(r), at)
			}
			for i := range seconds {
				o.ObserveFloat64(secondsOf[i], seconds[i].value(r), at)
			}
		}
		for _, m := range st.Models {
			at := metric.WithAttributes(attribute.String("model", m.Model), attribute.Int("block_size", m.BlockSize), attribute.String("hasher", m.Hasher.String()))
			o.ObserveInt64(blocks, m.Blocks, at)
			o.ObserveInt64(workers, int64(m.Workers), at)
		}
		return nil
	}, instruments...)
	return err
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
