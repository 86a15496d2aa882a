// This file has what the source of a worker-rank counts.

package relay

import "sync/atomic"

// streamCounter is one of the things a source counts.
type streamCounter int

const (
	messages streamCounter = iota
	messageBytes
	malformed
	batches
	batchesReplayed
	gaps
	restarts
	connects
	disconnects
	connectFailures
	replaysComplete
	replaysRestarted
	replaysSkipped
	replaysTimedOut
	replaysFailed
	replaysDistrusted
	numStreamCounters
)

// streamCounts is one source's; adding is safe from any goroutine.
type streamCounts [numStreamCounters]atomic.Int64

func (c *streamCounts) add(k streamCounter, n int) { c[k].Add(int64(n)) }
