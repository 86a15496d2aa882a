package schemas

// This file holds what the snapshot records say.

import "kvindex/index"

// SnapshotFormat is the version of the snapshot records written here.
const SnapshotFormat = 1

// Manifest is the record that makes a worker-rank's snapshot: it names the
// state the chunks of the same Generation hold and the offset it was taken at.
type Manifest struct {
	Format       int32
	Worker       string
	Rank         int32
	Generation   int64    // larger is newer; chunks of another generation do not count
	W            int64    // next offset of the source partition to apply to this worker-rank
	LeaderEpoch  int32    // of what is right before W in the log, -1 if unknown
	TopicID      [16]byte // of the source topic
	Partitions   int32    // of the source topic when written
	Model        string
	BlockSize    int32
	Hasher       index.Hasher
	Epoch        int64  // the engine's
	EpochStarted int64  // broker time of the first record of Epoch, unix milliseconds
	Seq          int64  // last one applied, -1 before any
	Producer     string // of Epoch
	LastHeard    int64  // broker time of the last record, unix milliseconds
	LastOffset   int64  // of the last record of this worker-rank, whatever became of it
	Incomplete   bool
	PastLostAt   int64 // broker time of the first record after lost ones, unix milliseconds; 0 if what it holds is known
	Disputed     bool  // since then two producers or models claimed Epoch
	Retired      bool
	RetiredAt    int64    // broker time, unix milliseconds; only if Retired
	Chunks       int32    // how many
	Bytes        int64    // of all chunk values together
	CRC32C       []uint32 // one a chunk value
}

// Chunk is a part of one worker-rank's blocks, as chains: parents come before
// their children. A decoded one is owned by its caller and reused.
type Chunk struct {
	Worker     string
	Rank       int32
	Generation int64
	Index      int32 // from 0
	Chains     []Chain

	locals []index.LocalHash // what a decoded Chunk's Chains alias
	hashes []index.SeqHash
}

// Chain is a run of consecutive blocks of one tier.
type Chain struct {
	Tier index.Tier
	index.Stored
}

// Floor is the one record per partition that says where replay starts.
type Floor struct {
	Format     int32
	Offset     int64    // replaying the source partition from here gives everything that no manifest holds
	TopicID    [16]byte // of the source topic
	Partitions int32
	PastLostAt int64 // broker time of the first record after lost ones that no manifest makes up for, unix milliseconds; 0 if none
	Written    int64 // writer's clock, unix milliseconds; informative only
}
