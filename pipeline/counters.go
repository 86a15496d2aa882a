// This file names what a partition counts.

package pipeline

import "sync/atomic"

// counter is one of the things a partition counts. Every record and every
// block that was not simply applied is in one of them.
type counter int

const (
	recordsRead counter = iota
	recordBytes
	recordsApplied
	recordsHeartbeat
	recordsSkipped        // below the worker-rank's W: its snapshot has them
	recordsUndecodable    // no schema, wrong magic, truncated, absurd counts ...
	recordsKeyMismatch    // the key is not the worker named inside
	recordsInvalid        // decodes, but says what cannot be
	recordsWrongPartition // the worker belongs to another partition
	recordsStaleEpoch
	recordsRetired // of an epoch that was retired
	recordsSecondProducer
	recordsIdentityChange // model, block size or hasher within an epoch
	recordsDuplicate
	recordsUnknown      // of a worker-rank whose past is lost
	recordsRefusedModel // not among the configured models, or too many
	gaps
	epochs
	eventsApplied
	eventsRejected
	eventsOpaque
	blocksStored
	blocksDuplicate
	blocksOrphan
	blocksContradiction
	blocksRemoved
	removesUnknown
	workersRetired
	workersForgotten
	workersMoved
	restores
	restoreFailures
	restoresDamaged
	snapshotsDiscarded
	snapshotRounds
	snapshotFailures
	snapshotBytes
	snapshotFenced
	snapshotRefused
	numCounters
)

// counterNames are the counters' names in metrics and status, without the
// kvindex_ prefix; help is what /metrics says of them.
var counterNames = [numCounters]struct{ name, help string }{
	recordsRead:           {"records_read_total", "Event records read."},
	recordBytes:           {"record_bytes_total", "Bytes of the keys and values of the event records read."},
	recordsApplied:        {"records_applied_total", "Event records applied."},
	recordsHeartbeat:      {"records_heartbeat_total", "Heartbeats."},
	recordsSkipped:        {"records_skipped_total", "Event records that a restored snapshot already held."},
	recordsUndecodable:    {"records_undecodable_total", "Event records that cannot be decoded, skipped."},
	recordsKeyMismatch:    {"records_key_mismatch_total", "Event records whose key is not their worker, refused."},
	recordsInvalid:        {"records_invalid_total", "Event records that decode but make no sense, refused."},
	recordsWrongPartition: {"records_wrong_partition_total", "Event records of a worker that belongs to another partition, refused."},
	recordsStaleEpoch:     {"records_stale_epoch_total", "Event records of an older epoch, ignored."},
	recordsRetired:        {"records_retired_total", "Event records of a retired worker-rank's epoch, refused."},
	recordsSecondProducer: {"records_second_producer_total", "Event records of a second producer within an epoch, refused."},
	recordsIdentityChange: {"records_identity_change_total", "Event records that change model, block size or hasher within an epoch, refused."},
	recordsDuplicate:      {"records_duplicate_total", "Event records applied before, ignored."},
	recordsUnknown:        {"records_unknown_past_total", "Event records of worker-ranks whose past is lost: followed, but not applied."},
	recordsRefusedModel:   {"records_refused_model_total", "Event records of a model that is not served here, refused."},
	gaps:                  {"sequence_gaps_total", "Times that records of a worker-rank were missing."},
	epochs:                {"epochs_total", "New epochs, each from an empty cache."},
	eventsApplied:         {"events_applied_total", "Cache events applied."},
	eventsRejected:        {"events_rejected_total", "Cache events that break the contract (own parent, null hash, no blocks), rejected."},
	eventsOpaque:          {"events_opaque_total", "Stored events with hashes in records whose hasher is not opaque, rejected."},
	blocksStored:          {"blocks_stored_total", "Blocks newly held."},
	blocksDuplicate:       {"blocks_duplicate_total", "Blocks stored that were held already."},
	blocksOrphan:          {"blocks_orphan_total", "Blocks stored whose parent was not held."},
	blocksContradiction:   {"blocks_contradiction_total", "Blocks whose stated position contradicts their parent's."},
	blocksRemoved:         {"blocks_removed_total", "Blocks no longer held."},
	removesUnknown:        {"removes_unknown_total", "Removed hashes that were not held."},
	workersRetired:        {"workers_retired_total", "Worker-ranks retired, by their producer or after silence."},
	workersForgotten:      {"workers_forgotten_total", "Retired worker-ranks whose epoch is no longer remembered."},
	workersMoved:          {"workers_moved_total", "Worker-ranks dropped because another partition took their worker over."},
	restores:              {"restores_total", "Restores finished."},
	restoreFailures:       {"restore_failures_total", "Restores that failed and are tried again."},
	restoresDamaged:       {"restores_damaged_total", "Worker-ranks whose snapshot was damaged."},
	snapshotsDiscarded:    {"snapshots_discarded_total", "Times that a partition's snapshots were of another log and were discarded."},
	snapshotRounds:        {"snapshot_rounds_total", "Snapshot rounds written."},
	snapshotFailures:      {"snapshot_failures_total", "Snapshot rounds that failed and are tried again."},
	snapshotBytes:         {"snapshot_bytes_total", "Bytes of snapshot records written, before compression."},
	snapshotRefused:       {"snapshot_refused_total", "Worker-ranks that a round left out: behind what is on the topic, or to be dumped whole."},
	snapshotFenced:        {"snapshot_fenced_total", "Times that another instance took over writing a partition's snapshots."},
}

// counters is one partition's; adding is safe from any goroutine.
type counters [numCounters]atomic.Int64

func (c *counters) add(k counter, n int) {
	if n != 0 {
		c[k].Add(int64(n))
	}
}
