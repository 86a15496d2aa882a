// This file is what the query side needs of the stage.

package query

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvindex/index"
)

// What Source.Model fails with, to be wrapped with the model's name and, if it
// is ambiguous, its block sizes: clients are shown the text.
var (
	ErrUnknownModel   = errors.New("unknown model")
	ErrAmbiguousModel = errors.New("ambiguous model")
)

// ErrUnknownPartition is what Source.Applied fails with, to be wrapped with how many
// there are.
var ErrUnknownPartition = errors.New("unknown partition")

// Source is what the query side needs of the stage. All methods may be called
// from any goroutine, and all but AwaitApplied and Dump do not block.
type Source interface {
	// Readiness says whether every partition of this instance is live.
	Readiness() Readiness
	// Model finds the index to ask. blockSize 0 and hasher "" mean the only one there
	// is. Errors: ErrUnknownModel, ErrAmbiguousModel.
	Model(name string, blockSize int, hasher string) (Model, error)
	// Now is the stage's clock reading that Worker wants, taken once a query.
	Now() time.Time
	// Positions appends, by number, how far each partition is. It is asked before the
	// index is, so that the answer has every record below the offset that it shows.
	Positions(dst []Position) []Position
	// Applied reports whether the record at an offset of a partition, and all before
	// it, are in the index. Error: ErrUnknownPartition.
	Applied(partition int32, offset int64) (bool, error)
	// AwaitApplied waits for that until the context ends, whose error it returns then.
	AwaitApplied(ctx context.Context, partition int32, offset int64) error
	// Worker says how far to trust what is known of a worker-rank.
	Worker(w *index.Worker, now time.Time) WorkerState
	// Workers lists every worker-rank known, of all models if model is empty.
	Workers(model string) []WorkerStatus
	// Status describes the stage as a whole.
	Status() Status
	// Dump copies what worker-ranks hold, each of them as of one moment, waiting for the
	// partitions' goroutines until the context ends. Errors: ErrDumpTooLarge, the context's.
	Dump(ctx context.Context, f DumpFilter) ([]Held, error)
}

// Model is one model's index and how its blocks are hashed.
type Model struct {
	Name      string
	BlockSize int // tokens
	Hasher    index.Hasher
	Eagle     bool // see index.BlockHasher
	Index     *index.Index
}

// String tells models of one name apart.
func (m Model) String() string {
	return fmt.Sprintf("block size %d with hasher %s", m.BlockSize, m.Hasher)
}

// hasher makes local hashes from tokens. Opaque is about sequence hashes alone: those
// producers make local hashes as Flash does.
func (m Model) hasher() index.BlockHasher {
	scheme := m.Hasher
	if scheme == index.Opaque {
		scheme = index.Flash
	}
	return index.BlockHasher{BlockSize: m.BlockSize, Scheme: scheme, Eagle: m.Eagle}
}

// Readiness is whether queries can be answered whole.
type Readiness struct {
	Ready   bool
	Missing []string // one entry a partition that is not live, such as "kv-events/3: catching up, 1200 records behind"
}

// Position is how far one partition is.
type Position struct {
	Next   int64 // next offset to be applied; all before are
	Behind int64 // offsets from there to the end as last heard, 0 if within the ready lag
}

// WorkerState is how far to trust an answer about one worker-rank.
type WorkerState struct {
	Hidden     bool          // silent beyond the TTL, or moved to another partition: not to be answered
	Incomplete bool          // events were lost: it may hold more or less
	Age        time.Duration // since its last record
	Partition  int32
}

// WorkerStatus is one row of the workers listing.
type WorkerStatus struct {
	Worker     string
	Rank       int32
	Model      string
	BlockSize  int
	Hasher     index.Hasher
	Partition  int32
	Epoch      int64
	Seq        int64
	Blocks     [index.Tiers]int
	Age        time.Duration
	Silent     bool
	Incomplete bool
	Retired    bool
}

// Status describes the stage.
type Status struct {
	Ready      bool
	Group      string
	Instance   string
	Version    string
	Started    time.Time
	Events     TopicStatus
	Snapshots  TopicStatus
	Partitions []PartitionStatus
	Models     []ModelStatus
	Counters   map[string]int64 // by metric name without prefix
	Warnings   []string         // such as failing snapshots
}

// TopicStatus names a topic.
type TopicStatus struct {
	Name string
	ID   string // Kafka's, in hexadecimal; "" while the topic is not known
}

// PartitionStatus is where one partition stands.
type PartitionStatus struct {
	Partition      int32
	State          string // restoring, catching-up, live, draining
	Position       int64  // next offset to apply
	End            int64  // last stable offset known
	Lag            int64  // End - Position, in offsets
	StartedAt      int64  // offset at which replay began
	Reread         int64  // records read again at start that a snapshot's age made necessary
	Floor          int64  // last floor written or read, -1 if none
	SnapshotDuty   bool   // this instance writes the partition's snapshots
	SnapshotAge    time.Duration
	Workers        int
	Paused         bool
	RestoreSeconds float64
	Problem        string // why it is not live, or the last trouble
}

// ModelStatus is one model's size.
type ModelStatus struct {
	Model     string
	BlockSize int
	Hasher    index.Hasher
	Workers   int
	Blocks    int64
}
