// This file asks at a rate, by a clock that waits for nobody.

package bench

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// result is what became of a request.
type result int

const (
	wasAnswered result = iota
	wasRefused         // as busy
	hasFailed
)

// tally is what became of the requests of one load.
type tally struct {
	mu                      sync.Mutex
	due                     int64
	answered, refused, late *latencies
	failed, unsent, checked int64
	err                     error     // the first failure
	trouble                 time.Time // due time of the last one refused, or answered after more than a second
}

func newTally() *tally {
	return &tally{answered: newLatencies(), refused: newLatencies(), late: newLatencies()}
}

// count enters one request: when it was due, when it was sent, and that it has ended
// now.
func (t *tally) count(due, sent time.Time, r result, checked bool, err error) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.late.record(sent.Sub(due))
	switch r {
	case wasAnswered:
		t.answered.record(now.Sub(due))
		if checked {
			t.checked++
		}
	case wasRefused:
		t.refused.record(now.Sub(due))
	case hasFailed:
		if t.failed++; t.err == nil {
			t.err = err
		}
	}
	if (r != wasAnswered || now.Sub(due) > time.Second) && due.After(t.trouble) {
		t.trouble = due
	}
}

// lane sends requests, one or several at a time.
type lane interface {
	// run asks one request for each time that it is given, until there are no more, and
	// returns when all have ended.
	run(ctx context.Context, due <-chan time.Time, t *tally)
}

// lanes is all that asks over one transport.
type lanes struct {
	of    []lane
	close func()
}

// grace is how long answers may take after the last request was due.
const grace = 10 * time.Second

// offer asks rate requests a second for d, each when it is due, and waits for what
// became of all. Those that no lane is free for wait, at most a second's; beyond they
// are counted as unsent.
func (l *lanes) offer(ctx context.Context, rate float64, d time.Duration) (*tally, error) {
	ctx, cancel := context.WithTimeout(ctx, d+grace)
	defer cancel()
	t := newTally()
	due := make(chan time.Time, int(max(rate, 64)))
	var all sync.WaitGroup
	for _, one := range l.of {
		all.Go(func() { one.run(ctx, due, t) })
	}
	runtime.LockOSThread() // pause may hold up the thread
	start, unsent, n := time.Now(), int64(0), int64(0)
	for ctx.Err() == nil {
		at := time.Duration(float64(n) / rate * float64(time.Second))
		if at >= d {
			break
		}
		for wait := at - time.Since(start); wait > 0; wait = at - time.Since(start) {
			pause(wait)
		}
		n++
		select {
		case due <- start.Add(at):
		default:
			unsent++
		}
	}
	runtime.UnlockOSThread()
	close(due)
	all.Wait()
	t.due, t.unsent = n, unsent
	if unsent > 0 {
		t.trouble = start.Add(d)
	}
	return t, context.Cause(ctx)
}
