// This file tells the time by the broker's clock.

package pipeline

import (
	"math"
	"sync/atomic"
	"time"
)

// never is a broker time that no record reaches.
const never = math.MaxInt64

// brokerClock is the broker's clock as one partition's records tell it: the
// newest timestamp, plus what went by here since it arrived. It never compares
// the broker's clock with this machine's.
//
// It stands still while it is not known that everything committed has been
// applied: when brokers do not answer or the partition is behind, nobody's
// silence means anything. Only the partition's goroutine sets it.
type brokerClock struct {
	newest  atomic.Int64 // unix milliseconds
	at      atomic.Int64 // when it arrived, in nanoseconds since epoch0
	current atomic.Int64 // when everything committed was last known to be applied, likewise
}

// epoch0 gives monotonic readings that fit an atomic.
var epoch0 = time.Now()

func (c *brokerClock) heard(timestamp int64, arrived time.Time) {
	if timestamp >= c.newest.Load() {
		c.newest.Store(timestamp)
		c.at.Store(int64(arrived.Sub(epoch0)))
	}
}

// upTo says that everything committed at that moment has been applied.
func (c *brokerClock) upTo(at time.Time) { c.current.Store(int64(at.Sub(epoch0))) }

// now returns the broker's time, in unix milliseconds, at this machine's now.
func (c *brokerClock) now(now time.Time) int64 {
	newest := c.newest.Load()
	if newest == 0 {
		return 0
	}
	known := min(int64(now.Sub(epoch0)), c.current.Load())
	return newest + max(0, known-c.at.Load())/int64(time.Millisecond)
}

// age returns how long ago, by the broker's clock, a timestamp was.
func (c *brokerClock) age(timestamp int64, now time.Time) time.Duration {
	return time.Duration(max(0, c.now(now)-timestamp)) * time.Millisecond
}

func (c *brokerClock) reset() {
	c.newest.Store(0)
	c.at.Store(0)
	c.current.Store(0)
}
