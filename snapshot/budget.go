package snapshot

// This file limits how many bytes a second snapshots write.

import (
	"sync"
	"time"
)

// Budget is a token bucket of bytes, for any number of goroutines; one serves
// all partitions of an instance. It is full at first. A nil Budget, or one of
// no bytes a second, sets no limit.
type Budget struct {
	rate, burst float64 // bytes a second; bytes

	mu     sync.Mutex
	tokens float64   // below 0 after something larger than what was there
	last   time.Time // of the last Spend
}

// NewBudget returns a budget of so many bytes a second, of which burst, or one
// second's worth if burst is less, can be saved up.
func NewBudget(bytesPerSecond, burst int64) *Budget {
	b := &Budget{rate: float64(bytesPerSecond), burst: float64(max(burst, bytesPerSecond))}
	b.tokens = b.burst
	return b
}

// Spend takes n bytes and reports whether that was allowed: as long as anything
// is left, so that a dump larger than the bucket is paid off afterwards and not
// refused for ever. Time does not run backwards here: an earlier now adds nothing.
func (b *Budget) Spend(now time.Time, n int64) bool {
	if b == nil || b.rate <= 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.last.IsZero() {
		if d := now.Sub(b.last); d > 0 {
			b.tokens = min(b.burst, b.tokens+d.Seconds()*b.rate)
			b.last = now
		}
	} else {
		b.last = now
	}
	if b.tokens <= 0 {
		return false
	}
	b.tokens -= float64(n)
	return true
}
