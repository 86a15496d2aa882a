package schemas

// This file holds what an event record says, as the stage reads it.

import "kvindex/index"

// Batch is one record of the events topic, KvEventBatch: what one worker-rank's
// cache did, in order.
//
// A decoded Batch is owned by its caller and reused from record to record. Its
// byte slices alias the record's value and its event slices alias the Batch's
// own storage: both are good until the next decode into it.
type Batch struct {
	Producer  []byte // instance that wrote the record; changes only with Epoch
	Worker    []byte // equals the record's key
	Rank      int32  // dp_rank, from 0
	Epoch     int64  // the engine's incarnation; larger is newer and starts empty
	Seq       int64  // of this record within (worker, rank, epoch), from 0; on a heartbeat the last one, or -1 before any
	Timestamp int64  // producer's clock, unix milliseconds; informative only
	Model     []byte // constant within Epoch, as the next two
	BlockSize int32  // tokens a block
	Hasher    index.Hasher
	Events    []Event // empty: a heartbeat

	locals []index.LocalHash // what Events' Locals alias
	hashes []index.SeqHash   // what Events' Hashes and Removed alias
}

// EventKind tells which of the four events an Event is.
type EventKind uint8

// The kinds, in the order of the schema's union.
const (
	KindStored EventKind = iota
	KindRemoved
	KindCleared
	KindRetired

	kinds = 4 // how many there are
)

// Event is one change of a worker-rank's cache.
type Event struct {
	Kind     EventKind
	Tier     index.Tier      // of KindStored, KindRemoved, and KindCleared unless AllTiers
	AllTiers bool            // KindCleared of the whole worker-rank
	Stored   index.Stored    // of KindStored
	Removed  []index.SeqHash // of KindRemoved
}
