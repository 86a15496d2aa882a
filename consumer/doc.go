// Package consumer brings the partitions of one Kafka topic to goroutines.
//
// A Consumer reads every partition of the topic by direct assignment (no
// group): one goroutine polls, and each partition has one goroutine that alone
// calls its Handler, in order, so that whatever a handler owns needs no lock.
// Hand-over is one channel send a fetched batch and never blocks the poll: a
// partition whose channel is half full is paused at the client and resumed once
// it has drained below a quarter, so a slow partition holds a bounded number of
// batches and delays nobody else.
//
// A partition walks through
//
//	restoring -> catching-up -> live -> draining
//
// and goes back to restoring whenever what it was reading is gone: the log was
// trimmed past it, records were lost and truncated, or the topic was recreated.
// It never skips over a hole in silence: the client is told not to reset
// offsets, so that every such case surfaces as an error here.
//
// Positions count transaction markers and aborted records, which a reader of
// committed records is never handed, because a partition may end in one: the
// client keeps control records, and they are dropped here after they were
// counted.
package consumer
