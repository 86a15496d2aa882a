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

// processors says no to queries when they do not keep up, by the line of goroutines that
// could run and wait for a processor. A query stands in it again and again, from its
// headers to the last byte of its answer, so that it is late long before the queue for a
// slot is. One goroutine at a time uses it. The zero times are of a line that was not too
// long.
type processors struct {
	waiting func() int // the line
	most    int        // that it should be
	looked  time.Time
	since   time.Time // it has been too long
	crowd   time.Time // when there were last queries enough to make it so
	share   float64   // of a query that may be let in
	let     time.Time // when one was, though they were behind
}

// behind looks, and reports whether a query that asks now should be refused. Once the
// line has been too long for some time, that is each when there are enough already, and
// else as many as bring the line back: twice too long, every second one. One each 5 ms
// is let in whatever made the line, and all are if it is not queries: if for 50 ms there
// were neither enough nor, as far as can be known, many. It costs about 60 ns.
func (p *processors) behind(now time.Time, enough, many bool) bool {
	if now.Sub(p.looked) > lookedFor {
		p.since = time.Time{}
	}
	p.looked = now
	if enough || many {
		p.crowd = now
	}
	line := p.waiting()
	switch {
	case line <= p.most:
		p.since = time.Time{}
		return false
	case p.since.IsZero():
		p.since = now
	}
	switch {
	case now.Sub(p.since) < behindFor, now.Sub(p.crowd) > lookedFor:
		return false
	case enough:
		return true
	}
	if p.share += float64(p.most) / float64(line); p.share < 1 && now.Sub(p.let) < behindFor {
		return true
	}
	p.share, p.let = max(0, p.share-1), now
	return false
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
