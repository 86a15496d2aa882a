// This file bounds how many queries are worked on at a time: a few at once, a
// short queue behind them, and no to all beyond.

package query

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// busyError refuses a query because there are too many. It is told from a request
// that is too large, whose gRPC code is the same.
type busyError struct {
	why  refusal
	text string
}

func (e *busyError) Error() string { return e.text }

// GRPCStatus makes it ResourceExhausted.
func (e *busyError) GRPCStatus() *status.Status { return status.New(codes.ResourceExhausted, e.text) }

// gate lets a number of queries work at once and some wait. Those that wait get
// in in the order of their coming.
type gate struct {
	slots   chan struct{}
	queue   int64
	wait    time.Duration
	waiting atomic.Int64

	full, late *busyError // made once: a refusal shall cost little
}

func newGate(l Limits) *gate {
	return &gate{
		slots: make(chan struct{}, l.MaxConcurrent),
		queue: int64(l.MaxQueue),
		wait:  l.QueueTimeout,
		full: &busyError{queueFull, fmt.Sprintf("busy: %d queries are worked on and %d wait: ask another instance, or again later",
			l.MaxConcurrent, l.MaxQueue)},
		late: &busyError{queueTimeout, fmt.Sprintf("busy: the query has waited for %v: ask another instance, or again later", l.QueueTimeout)},
	}
}

// look refuses a query that would find no place in the queue now. It takes
// nothing, so that a request can be asked about before it has been read: one that
// is slow to arrive keeps no place from others.
func (g *gate) look() error {
	if g.waiting.Load() >= g.queue && len(g.slots) == cap(g.slots) {
		return g.full
	}
	return nil
}

// enter waits for a slot, which leave gives back. It fails with a *busyError, or
// a status if the caller has gone.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.slots <- struct{}{}:
		return nil
	default:
	}
	if g.waiting.Add(1) > g.queue {
		g.waiting.Add(-1)
		return g.full
	}
	defer g.waiting.Add(-1)
	timer := time.NewTimer(g.wait)
	defer timer.Stop()
	select {
	case g.slots <- struct{}{}:
		return nil
	case <-timer.C:
		return g.late
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

func (g *gate) leave() { <-g.slots }
