package snapshot

// This file says what a round of writing is made of.

import (
	"fmt"

	"kvindex/schemas"
)

// Round is what one partition's writer is asked to write at once. All
// manifests, chunks and deletions of a round share one transaction.
type Round struct {
	Position   int64 // next offset of the source partition that the caller applies
	PastLostAt int64 // the floor's, see schemas.Floor
	Dumps      []Dump
	Refreshes  []Refresh
	Deletes    []ID // their manifest and all their chunks are removed
	// Unsaved are the worker-ranks of this partition that have no manifest as
	// far as the caller knows, those of Dumps included. The floor stays at or
	// below the first offset of each that has none after the round.
	Unsaved []Unsaved
}

// Dump is a worker-rank's whole state. The caller fills Manifest but for
// Format, Generation, TopicID, Partitions, Chunks, Bytes and CRC32C.
type Dump struct {
	Manifest schemas.Manifest
	Blocks   *Packed // read during Write only; nil: no blocks
}

// Refresh moves the W of a worker-rank whose blocks have not changed since the
// snapshot on the topic: a new manifest over the same generation's chunks.
type Refresh struct {
	Manifest schemas.Manifest // as Dump's
	Changed  int64            // offset after the last event that changed its blocks
}

// Unsaved is a worker-rank without a manifest.
type Unsaved struct {
	ID    ID
	First int64 // offset of the first record of its state
}

// Result is what became of a round.
type Result struct {
	Written []ID // dumped, refreshed or deleted
	Refused []Refusal
	Records int   // acknowledged
	Bytes   int64 // of their keys and values, before compression
	// Floor is the floor on the topic now, -1 if there is none.
	Floor        int64
	FloorWritten bool
	// CommitErr is a *CommitError if the floor could not be committed as the
	// group's offset. The round is good all the same, and the next one tries
	// again.
	CommitErr error
}

// Refusal is an item that was not written and why: ErrBehind, ErrChanged,
// ErrNoManifest (refresh of what is not there, or is damaged: dump it), what
// its record could not be encoded for, or ErrSibling.
type Refusal struct {
	ID  ID
	Err error
}

// CommitError is a floor that could not be committed as the group's offset.
type CommitError struct {
	Group     string
	Topic     string
	Partition int32
	Offset    int64
	Err       error
}

// Error returns the message.
func (e *CommitError) Error() string {
	return fmt.Sprintf("group %s: commit floor %d of topic %s partition %d: %v", e.Group, e.Offset, e.Topic, e.Partition, e.Err)
}

// Unwrap returns the cause.
func (e *CommitError) Unwrap() error { return e.Err }

// StepKind is what a Step acknowledged.
type StepKind uint8

// The steps of a round, in the order they can come in.
const (
	StepChunk       StepKind = iota // a chunk's record
	StepManifest                    // a manifest's record
	StepTombstone                   // the record that removes a chunk or manifest
	StepCommit                      // the transaction of all these
	StepFloor                       // the floor's record
	StepFloorCommit                 // the floor's transaction
	StepOffset                      // the group's offset
)

var stepNames = [...]string{"chunk", "manifest", "tombstone", "commit", "floor", "floor commit", "offset"}

// String returns the step's name.
func (k StepKind) String() string { return stepNames[k] }

// Step is something of a round that a broker has acknowledged.
type Step struct {
	Kind  StepKind
	ID    ID    // of StepChunk, StepManifest, StepTombstone
	Chunk int32 // of StepChunk, and of StepTombstone unless it is a manifest's: -1
}
