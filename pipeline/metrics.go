package pipeline

import (
	"context"
	"errors"
	"runtime"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"kvindex/consumer"
	"kvindex/pipeline/query"
)

// This file shows the stage's metrics. All here are read when scraped: what is
// counted on the way is an atomic, and costs no more.

// scraped is a partition as one scrape finds it.
type scraped struct {
	query.PartitionStatus
	p   *partition
	c   *consumer.Partition
	now time.Time
}

// partitionGauges are of each partition.
var partitionGauges = []struct {
	name, help string
	value      func(scraped) float64
}{
	{"kvindex_partition_position", "Next offset of the events topic to apply.", func(s scraped) float64 { return float64(s.Position) }},
	{"kvindex_partition_lag_offsets", "Offsets between the position and the last stable offset.", func(s scraped) float64 { return float64(s.Lag) }},
	{"kvindex_partition_behind_seconds", "Time since the partition was last known to have applied everything committed: it is behind, or the brokers are away.", func(s scraped) float64 { return s.p.behind(s.now).Seconds() }},
	{"kvindex_partition_newest_record_timestamp_seconds", "Broker's time of the newest event record applied, Unix seconds; 0: none.", func(s scraped) float64 { return float64(s.p.clock.newest.Load()) / 1000 }},
	{"kvindex_partition_floor_offset", "Offset from which a restart replays; everything before it may be trimmed. -1 if there is none.", func(s scraped) float64 { return float64(s.Floor) }},
	{"kvindex_partition_live", "1 if the partition is live, else 0.", func(s scraped) float64 { return truth(s.c.State() == consumer.Live) }},
	{"kvindex_partition_paused", "1 while fetching waits for the partition's goroutine.", func(s scraped) float64 { return truth(s.Paused) }},
	{"kvindex_partition_workers", "Worker-ranks known, retired ones included.", func(s scraped) float64 { return float64(s.PartitionStatus.Workers) }},
	{"kvindex_snapshot_duty", "1 if this instance writes the partition's snapshots.", func(s scraped) float64 { return truth(s.SnapshotDuty) }},
	{"kvindex_snapshot_age_seconds", "Time since this instance last wrote a round of the partition's snapshots; 0: not its duty, or none yet.", func(s scraped) float64 { return s.SnapshotAge.Seconds() }},
	{"kvindex_snapshot_held_seconds", "For how long an open transaction has held the last stable offset of the partition's snapshots; the stage's own last a minute at most. 0: none is open.", func(s scraped) float64 { return s.p.heldFor(s.now).Seconds() }},
	{"kvindex_restore_duration_seconds", "How long the last restore took until its replay began.", func(s scraped) float64 { return s.RestoreSeconds }},
	{"kvindex_restore_snapshot_bytes", "Bytes of snapshot records that the last restore read.", func(s scraped) float64 { return float64(s.p.bytes.Load()) }},
	{"kvindex_restore_blocks", "Blocks that the last restore put back.", func(s scraped) float64 { return float64(s.p.got.Load()) }},
	{"kvindex_restore_reread_records", "Records read again by the last restore.", func(s scraped) float64 { return float64(s.Reread) }},
}

// workerStates are the values of a label: a worker-rank is in the first that
// holds of it.
var workerStates = [...]struct {
	name  string
	holds func(k *rank, st *rankStatus, silent bool) bool
}{
	{"retired", func(_ *rank, st *rankStatus, _ bool) bool { return st.retired }},
	{"unknown", func(_ *rank, st *rankStatus, _ bool) bool { return st.unknown }},
	{"silent", func(_ *rank, _ *rankStatus, silent bool) bool { return silent }},
	{"incomplete", func(k *rank, _ *rankStatus, _ bool) bool { return k.incomplete.Load() || k.rivalled.Load() }},
	{"answered", func(*rank, *rankStatus, bool) bool { return true }},
}

// workersBy counts the worker-ranks in each of workerStates.
func (s *Stage) workersBy(now time.Time) (n [len(workerStates)]int64) {
	for _, p := range s.partitions() {
		p.listing.Range(func(_, v any) bool {
			k := v.(*rank)
			st := k.status.Load()
			if st == nil || st.gone || k.elsewhere.Load() {
				return true
			}
			silent := p.clock.age(k.lastHeard.Load(), now) > s.cfg.WorkerTTL
			for i := range workerStates {
				if workerStates[i].holds(k, st, silent) {
					n[i]++
					break
				}
			}
			return true
		})
	}
	return n
}

// observe registers the stage's metrics.
func (s *Stage) observe(provider metric.MeterProvider) error {
	meter := provider.Meter("kvindex/pipeline")
	var (
		instruments []metric.Observable
		errs        []error
	)
	gauge := func(name, help string) metric.Float64ObservableGauge {
		g, err := meter.Float64ObservableGauge(name, metric.WithDescription(help))
		instruments, errs = append(instruments, g), append(errs, err)
		return g
	}
	counter := func(name, help string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithDescription(help))
		instruments, errs = append(instruments, c), append(errs, err)
		return c
	}

	var totals [numCounters]metric.Int64ObservableCounter
	for k, c := range counterNames {
		totals[k] = counter("kvindex_"+c.name, c.help)
	}
	pauses := counter("kvindex_partition_pauses_total", "Times that fetching had to wait for the partition's goroutine.")
	ofPartition := make([]metric.Float64ObservableGauge, len(partitionGauges))
	for i, g := range partitionGauges {
		ofPartition[i] = gauge(g.name, g.help)
	}
	ready := gauge("kvindex_ready", "1 if every partition is live.")
	states := gauge("kvindex_partitions", "Partitions in each state.")
	reachable := gauge("kvindex_brokers_reachable", "1 if the events topic can be looked at; while it is 0, answers are from memory and nobody's silence counts.")
	away := gauge("kvindex_brokers_away_seconds", "Time since the events topic could last be looked at: near 0 while the brokers answer.")
	blocks := gauge("kvindex_index_blocks", "(block, worker-rank, tier) triples held.")
	entries := gauge("kvindex_index_entries", "Distinct blocks that a search can reach.")
	workers := gauge("kvindex_index_workers", "Worker-ranks in the index.")
	known := gauge("kvindex_workers", "Known worker-ranks, by state.")
	build := gauge("kvindex_build_info", "1, with what this process was built from.")

	about := metric.WithAttributes(attribute.String("version", s.cfg.Version), attribute.String("go_version", runtime.Version()))
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		now := time.Now()
		st := s.Status()
		o.ObserveFloat64(build, 1, about)
		o.ObserveFloat64(ready, truth(st.Ready))
		o.ObserveFloat64(reachable, truth(s.consumer.Problem() == ""))
		o.ObserveFloat64(away, now.Sub(s.consumer.Seen()).Seconds())
		var inState [consumer.Draining + 1]int
		ours, theirs := s.partitions(), s.consumer.Partitions()
		for i, p := range ours {
			at := metric.WithAttributes(attribute.Int("partition", int(p.number)))
			for k := range totals {
				o.ObserveInt64(totals[k], p.counts[k].Load(), at)
			}
			if i >= len(theirs) || i >= len(st.Partitions) {
				continue // the topic, made anew, has no such one; or it came just now
			}
			c := theirs[i]
			inState[c.State()]++
			o.ObserveInt64(pauses, c.Pauses(), at)
			look := scraped{st.Partitions[i], p, c, now}
			for i, g := range partitionGauges {
				o.ObserveFloat64(ofPartition[i], g.value(look), at)
			}
		}
		for state, n := range inState {
			o.ObserveFloat64(states, float64(n), metric.WithAttributes(attribute.String("state", consumer.State(state).String())))
		}
		for i, n := range s.workersBy(now) {
			o.ObserveFloat64(known, float64(n), metric.WithAttributes(attribute.String("state", workerStates[i].name)))
		}
		for _, m := range s.models.all() {
			at := metric.WithAttributes(attribute.String("model", m.Name), attribute.Int("block_size", m.BlockSize), attribute.String("hasher", m.Hasher.String()))
			stats := m.Index.Stats()
			o.ObserveFloat64(blocks, float64(stats.Blocks), at)
			o.ObserveFloat64(entries, float64(stats.Entries), at)
			o.ObserveFloat64(workers, float64(stats.Workers), at)
		}
		return nil
	}, instruments...)
	return errors.Join(append(errs, err)...)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
