// This file tells whether the processors keep up with all that the process has to do.

package query

import (
	"runtime/metrics"
	"time"
)

const (
	// behindFor is how long the line must have been too long, at each look, before that
	// is more than a burst.
	behindFor = 5 * time.Millisecond
	// lookedFor is how long a look says something of what comes after it.
	lookedFor = 10 * behindFor
)

// processors tells whether they keep up, by the line of goroutines that could run and
// wait for a processor. A query stands in it again and again, from its headers to the
// last byte of its answer, so that it is late long before the queue for a slot is. The
// zero time is a line that was not too long. One goroutine at a time uses it.
type processors struct {
	waiting func() int // the line
	most    int        // that it should be
	looked  time.Time
	since   time.Time // it has been too long
}

// behind looks, and reports whether the line has been too long for some time. It costs
// about 60 ns.
func (p *processors) behind(now time.Time) bool {
	before := p.since
	if now.Sub(p.looked) > lookedFor {
		before = time.Time{}
	}
	p.looked = now
	switch {
	case p.waiting() <= p.most:
		p.since = time.Time{}
		return false
	case before.IsZero():
		p.since = now
	}
	return now.Sub(p.since) >= behindFor
}

// runnableGoroutines returns what counts the goroutines that wait for a processor.
func runnableGoroutines() func() int {
	s := []metrics.Sample{{Name: "/sched/goroutines/runnable:goroutines"}}
	return func() int {
		if metrics.Read(s); s[0].Value.Kind() != metrics.KindUint64 {
			return 0 // a Go that does not count them
		}
		return int(s[0].Value.Uint64())
	}
}
