// Package snapshot keeps the state of worker-ranks on a compacted Kafka topic
// and gets it back: so that a restart reads what is held now instead of
// everything that ever happened, and so that the events topic can be trimmed.
//
// # What is on the topic
//
// Partition p of the snapshot topic belongs to partition p of the events topic.
// Compaction keeps the last record of each key:
//
//	manifest/<rank>/<worker>    what the worker-rank's snapshot is: its W, generation, chunks' checksums
//	chunk/<rank>/<n>/<worker>   a part of its blocks, at most 512 KiB
//	floor                       where replay of the events partition starts
//
// Values are Avro, single-object framed (package schemas). W is the next offset
// to apply to the worker-rank: its snapshot is its state before W, exactly,
// whatever offset the rest of the partition was at. So nothing waits: the
// goroutine that applies a partition's events dumps one due worker-rank between
// two batches (Packed), and another goroutine writes it (Writer).
//
// A chunk's key has no generation, so a dump replaces the one before. A manifest
// counts only with all the chunks it names, of its generation, right by CRC-32C
// and total bytes. One that does not is damaged: it is said so, loads nothing,
// and its worker-rank is replayed from the log's start instead. A manifest and the
// floor end with a checksum of their own, since a wrong offset in them would have
// events passed over.
//
// # Who writes
//
// One writer a partition, and Kafka sees to it: the transactional id is
// <group>-snapshot-<topic>-<p>. Take asks for the id's next epoch, upon which
// the broker refuses the former writer and aborts what it left open; then reads
// the partition to its end; and only then the writer writes. Nothing can appear
// on the partition between that read and the writer's first record but by a
// still newer writer, and then the first record is refused. So the writer's
// Table is what is on the topic, and it compares: a W or a floor below what is
// there is refused (ErrBehind), for the instance that asks lags behind an
// earlier writer. A refresh, a new W over old chunks, is refused if the blocks
// changed after the W that is there (ErrChanged).
//
// In replica mode a Duty, a small consumer group over the snapshot topic, says
// who should take which partition. It is a hint: two instances that both believe
// they are meant fence one another, and nothing else happens.
//
// # A round, and a death after each step
//
// A round writes the chunks, manifests and tombstones of any number of
// worker-ranks in one transaction; then the floor in another, which is the
// least of every manifest's W, of the first offset of each worker-rank that has
// no manifest, and of the partition's position, and only ever rises; then the
// floor as the group's offset. Where the writer dies:
//
//	after                     on the topic                                  a restore is right because
//	any record of the first   the old state; an open transaction            read committed stops below it, and the old state was
//	                                                                        whole; the next writer's Take aborts it, if not the
//	                                                                        broker after a minute
//	the first one's commit    the new state, the old floor                  the old floor is at or below every W there is: more is
//	                                                                        replayed than need be, and each worker-rank takes only
//	                                                                        what is at or past its W
//	the floor's record        the same; an open transaction                 the same
//	the floor's commit        the new state and floor; the group's offset   the group's offset is for people and tools. Being too
//	                          lags                                          low it only lets less be trimmed
//	the group's offset        everything
//
// Were the floor written before its manifests, a death between would lose the
// events from an old W up to the floor. If the answer to a commit is lost, the
// writer does not know which row it is in. It takes the duty anew, which aborts
// the transaction if it was open, and reads: then it knows.
//
// # Reading
//
// Reader reads from the log's start to the last stable offset. At that offset
// every transaction is decided, so the table there is what some number of whole
// rounds left; it takes in nothing past it, where a response may cut a
// transaction in two. (A broker acknowledges a commit before its marker is in
// the partition. A reader that comes in between stops below the transaction; a
// writer's Take waits for it.) It goes by position, not by records: a log may end in a
// transaction's marker, in a gap that compaction left, in aborted records or
// below an open transaction, and a reader that waited for a last record would
// wait for ever.
//
// Compaction must not remove what a slow reader has yet to come to: a chunk
// whose successor lies beyond the target. min.compaction.lag.ms, an hour, sees
// to that. Past it, the snapshot shows as damaged; reading on to the present end
// mends it. Tombstones stay for delete.retention.ms, so that a reader that has
// seen a chunk sees that it is gone.
//
// # Cost
//
// Packing takes some 10 ns a block and loading less than 5 besides the index's own
// work; on the topic a block is 8 bytes (16 with an opaque hash) and a chain
// some 15. A transaction takes 20 to 30 ms on a real broker, whatever its size
// up to some MiB, so small worker-ranks share one. Policy makes a worker-rank
// due when its events since W weigh as much as its dump would: snapshots never
// write more than the events did, and a replay never reads much more than the
// state.
package snapshot
