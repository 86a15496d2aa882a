// Package verify says what the stage must answer, so that tests can hold it to
// that: an oracle that reads the same records and shares as little as possible
// with the stage.
//
// It imports neither the stage nor the snapshots nor the hot decoder. It decodes
// with goavro alone, keeps plain sets of sequence hashes a tier, and counts depths
// one block at a time, looking for each in one tier after the other; all that it takes
// from the index are the types and the chaining of one hash. It keeps every block ever
// stored and is made for tests, not for speed: some microseconds a block.
//
// # What a record does to a worker-rank
//
//   - Its worker must be its key, else it is refused; so is one without worker
//     or model, of a block size below 1, a rank below 0, or a seq below 0 (-1 is
//     for heartbeats). Refused like this it was not heard.
//   - An older epoch than the known one is ignored. A newer one, or the first
//     record ever, begins from an empty cache: complete, last seq -1.
//   - In the known epoch it is refused once the worker-rank is retired; refused
//     and the worker-rank incomplete if producer, model, block size or hasher
//     differ from the epoch's first record.
//   - A seq at or below the last is a duplicate and ignored. The next one is
//     applied. One beyond it is applied too, but records were lost: incomplete.
//     A heartbeat carries the last seq, so one above the last tells of lost
//     records as well.
//   - Its events happen in order. A stored event that the index refuses changes
//     nothing and makes the worker-rank incomplete; the others still happen.
//     Clearing all tiers makes it complete. Retired ends all ranks of the worker
//     on the partition, and the rest of the batch with them.
//
// # What time does
//
// Time is the broker's, read from the records of a partition alone: before a
// record of timestamp t is looked at, each worker-rank of its partition heard
// last at t - grace or before is retired, as of that moment + grace, and one
// retired at t - grace or before is forgotten, as if it had never been.
//
// # Which partition a worker is on
//
// Each partition is folded for itself; what of it counts is decided at the end. A
// worker-rank counts unless another partition knows a newer epoch of the worker, of
// whatever rank; of equal epochs, unless the other's first record is older, then
// unless its number is lower. If another partition knows the epoch of one that
// counts, it is incomplete. So the result does not depend on the order in which
// partitions are read.
//
// It serves every model; one that the stage is set not to serve has to be left
// out of a comparison. A worker-rank that counts again since another partition
// has forgotten the worker holds here what its own log says. The stage may hold less
// of it, and then says that it is incomplete.
package verify
