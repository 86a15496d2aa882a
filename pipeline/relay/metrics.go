// This file has the relay's metrics. All are read when scraped.

package relay

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// rankCounters are the counters of a worker-rank.
var rankCounters = []struct {
	name, help string
	value      func(*rank) int64
}{
	{"messages_total", "Messages of the engine received; of a polled one, answers.", counted(messages)},
	{"message_bytes_total", "Bytes of payloads received, replays not among them.", counted(messageBytes)},
	{"malformed_messages_total", "Messages of the engine that were not understood and passed over.", counted(malformed)},
	{"source_batches_total", "Batches of the engine handed on, in order and once.", counted(batches)},
	{"replayed_batches_total", "Batches taken from a replay instead of the live messages, or besides.", counted(batchesReplayed)},
	{"gaps_total", "Times that batches or events of the engine were missing.", counted(gaps)},
	{"engine_restarts_total", "Times that an engine was found to be another process than before.", counted(restarts)},
	{"connects_total", "Connections made to the engine's publisher.", counted(connects)},
	{"disconnects_total", "Connections to the engine's publisher lost or given up; of a polled engine, answers lost.", counted(disconnects)},
	{"connect_failures_total", "Attempts to connect to the engine's publisher that failed.", counted(connectFailures)},
	{"payloads_unreadable_total", "Payloads that could not be decoded; each begins an epoch.", func(k *rank) int64 { return k.feed.counts.payloads.Load() }},
	{"removals_unreadable_total", "Batches with removals that could not be decoded; each begins an epoch.", func(k *rank) int64 { return k.feed.counts.removalsLost.Load() }},
	{"wrong_rank_batches_total", "Batches of another rank than the configured one, refused.", func(k *rank) int64 { return k.feed.counts.wrongRank.Load() }},
	{"records_total", "Records written, heartbeats not among them.", func(k *rank) int64 { return k.feed.counts.records.Load() }},
	{"heartbeats_total", "Heartbeats written.", func(k *rank) int64 { return k.feed.counts.heartbeats.Load() }},
	{"blocks_stored_total", "Blocks stored, in records.", func(k *rank) int64 { return k.feed.counts.blocksStored.Load() }},
	{"blocks_removed_total", "Blocks removed, in records.", func(k *rank) int64 { return k.feed.counts.blocksRemoved.Load() }},
	{"unwritten_batches_total", "Batches with changes that came while no records were written; the next epoch has what came of them.", func(k *rank) int64 { return k.feed.counts.unwritten.Load() }},
	{"records_failed_total", "Records that Kafka refused; each begins an epoch.", func(k *rank) int64 { return k.feed.status().Failed }},
	{"encoding_failures_total", "Records that could not be encoded.", func(k *rank) int64 { return k.feed.counts.encoding.Load() }},
	{"checkpoints_total", "Checkpoints written.", func(k *rank) int64 { return k.feed.counts.saves.Load() }},
	{"checkpoint_failures_total", "Checkpoints that could not be written or read.", func(k *rank) int64 { return k.feed.counts.saveFailures.Load() }},
}

func counted(c streamCounter) func(*rank) int64 {
	return func(k *rank) int64 { return k.counts[c].Load() }
}

// replayOutcomes are how questions to replay endpoints end.
var replayOutcomes = []struct {
	name  string
	count streamCounter
}{
	{"complete", replaysComplete}, {"restarted", replaysRestarted}, {"skipped", replaysSkipped},
	{"timeout", replaysTimedOut}, {"failed", replaysFailed}, {"distrusted", replaysDistrusted},
}

// rankGauges are the gauges of a worker-rank.
var rankGauges = []struct {
	name, help string
	value      func(*rank, *feedStatus) float64
}{
	{"live", "1 if the engine is connected and followed, else 0.", func(k *rank, _ *feedStatus) float64 {
		st, _, _ := k.status.get()
		return truth(st == stateLive)
	}},
	{"writing", "1 if records are written; 0 while they are not, as Kafka does not take them or the engine's past is asked for.", func(_ *rank, f *feedStatus) float64 {
		return truth(f.State == stateNames[writing] && !f.Stalled)
	}},
	{"whole", "1 if all that the engine holds is known.", func(_ *rank, f *feedStatus) float64 { return truth(f.Whole) }},
	{"hashes_aside", "Blocks that the engine holds and whose prefix is not known.", func(_ *rank, f *feedStatus) float64 { return float64(f.Aside) }},
	{"in_flight_bytes", "Bytes of records on their way to Kafka.", func(_ *rank, f *feedStatus) float64 { return float64(f.Bytes) }},
	{"checkpoint_age_seconds", "Since the last checkpoint was written; 0 if none was.", func(_ *rank, f *feedStatus) float64 {
		if f.Saved.IsZero() {
			return 0
		}
		return time.Since(f.Saved).Seconds()
	}},
	{"engine_heard_age_seconds", "Since the engine was last known to be alive; -1 if it never was.", func(k *rank, _ *feedStatus) float64 {
		at := k.status.lastHeard.Load()
		if at == 0 {
			return -1
		}
		return time.Since(time.Unix(0, at)).Seconds()
	}},
}

// observe registers the metrics.
func (r *Relay) observe(provider metric.MeterProvider) error {
	meter := provider.Meter("kvindex/pipeline/relay")
	var all []metric.Observable
	var failed error
	counter := func(name, help string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter("kvindex_relay_"+name, metric.WithDescription(help))
		if err != nil && failed == nil {
			failed = err
		}
		all = append(all, c)
		return c
	}
	gauge := func(name, help string) metric.Float64ObservableGauge {
		g, err := meter.Float64ObservableGauge("kvindex_relay_"+name, metric.WithDescription(help))
		if err != nil && failed == nil {
			failed = err
		}
		all = append(all, g)
		return g
	}
	counters := make([]metric.Int64ObservableCounter, len(rankCounters))
	for i, c := range rankCounters {
		counters[i] = counter(c.name, c.help)
	}
	gauges := make([]metric.Float64ObservableGauge, len(rankGauges))
	for i, g := range rankGauges {
		gauges[i] = gauge(g.name, g.help)
	}
	replays := counter("replays_total", "Requests to the engine's replay endpoint, by outcome.")
	epochs := counter("epochs_total", "Epochs begun, by cause.")
	leftOut := counter("left_out_total", "Blocks, events or fields of the engine that were not used or are worth a count, by reason.")
	blocks := gauge("blocks", "Blocks that the engine holds and that records tell of, by tier.")
	ready := gauge("ready", "1 if every worker-rank has caught up with its engine and records of it are written.")
	buffer := gauge("buffer_bytes", "Most bytes of records that may be on their way to Kafka.")
	used := gauge("buffer_used_bytes", "Bytes of records on their way to Kafka.")
	if failed != nil {
		return failed
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveFloat64(ready, truth(r.Status().Ready))
		o.ObserveFloat64(buffer, float64(r.cfg.BufferBytes))
		o.ObserveFloat64(used, float64(r.out.used.Load()))
		for _, k := range r.ranks {
			f := k.feed.status()
			of := []attribute.KeyValue{attribute.String("worker", f.Worker), attribute.Int("rank", int(f.Rank))}
			at := metric.WithAttributes(of...)
			with := func(key, value string) metric.MeasurementOption {
				return metric.WithAttributes(append(of[:2:2], attribute.String(key, value))...)
			}
			for i := range rankCounters {
				o.ObserveInt64(counters[i], rankCounters[i].value(k), at)
			}
			for i := range rankGauges {
				o.ObserveFloat64(gauges[i], rankGauges[i].value(k, &f), at)
			}
			for _, out := range replayOutcomes {
				o.ObserveInt64(replays, k.counts[out.count].Load(), with("outcome", out.name))
			}
			for c := causeNone + 1; c < causes; c++ {
				o.ObserveInt64(epochs, k.feed.counts.epochs[c].Load(), with("cause", c.String()))
			}
			for reason, n := range k.leftOut() {
				o.ObserveInt64(leftOut, n, with("reason", reason))
			}
			for t, n := range f.Blocks {
				o.ObserveFloat64(blocks, float64(n), with("tier", tierName(t)))
			}
		}
		return nil
	}, all...)
	return err
}

// leftOut returns the counts by reason that are not 0.
func (k *rank) leftOut() map[string]int64 {
	out := map[string]int64{}
	for i := range k.feed.counts.reasons {
		if n := k.feed.counts.reasons[i].Load(); n > 0 {
			out[engine.Reason(i).String()] = int64(n)
		}
	}
	return out
}

func tierName(t int) string { return index.Tier(t).String() }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
