// This file bounds how many queries there are at a time: a few that are worked
// on, a short queue behind them, and no to all beyond.

package query

import (
	"container/list"
	"context"
	"fmt"
	"sync"
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

// gate gives each query a place as soon as its headers are there, and a slot to
// work in once it has arrived. Places bound the memory of what is arriving and
// waiting, slots the processor's time. Slots are given in the order of asking.
//
// A query that takes long to arrive loses its place to the next that needs one:
// slow senders keep nobody out.
type gate struct {
	slots   chan struct{}
	wait    time.Duration // for a slot
	waiting atomic.Int64

	patience time.Duration // after which one that is arriving can lose its place
	mu       sync.Mutex
	free     int       // places
	arriving list.List // of *place, oldest first

	full, late, slow *busyError // made once: a refusal shall cost little
}

func newGate(l Limits) *gate {
	return &gate{
		slots:    make(chan struct{}, l.MaxConcurrent),
		wait:     l.QueueTimeout,
		patience: l.Deadline,
		free:     l.MaxConcurrent + l.MaxQueue,
		full: &busyError{queueFull, fmt.Sprintf("busy: all places for %d queries at work and %d waiting are taken: ask another instance, or again later",
			l.MaxConcurrent, l.MaxQueue)},
		late: &busyError{queueTimeout, fmt.Sprintf("busy: the query has waited for %v: ask another instance, or again later", l.QueueTimeout)},
		slow: &busyError{slowSender, "busy: the query arrives too slowly, and others need its place"},
	}
}

// place is one query's. One goroutine at a time uses it.
type place struct {
	gate *gate
	cut  func()        // ends the arrival of a query that has lost its place
	from time.Time     // when it began to arrive
	at   *list.Element // in arriving, nil once it has arrived
	held bool          // guarded by gate.mu, as at is
	slot bool
}

// admit gives a query a place, which end gives back, or fails with a *busyError.
// If the query has yet to arrive, cut is called, from another goroutine, when it
// takes too long; nil: it is there.
func (g *gate) admit(cut func()) (*place, error) {
	p := &place{gate: g, cut: cut, held: true}
	if cut != nil {
		p.from = time.Now()
	}
	g.mu.Lock()
	if g.free > 0 {
		g.free--
		p.arrives()
		g.mu.Unlock()
		return p, nil
	}
	oldest := g.arriving.Front()
	if oldest == nil || time.Since(oldest.Value.(*place).from) < g.patience {
		g.mu.Unlock()
		return nil, g.full
	}
	out := oldest.Value.(*place)
	g.arriving.Remove(oldest)
	out.at, out.held = nil, false
	p.arrives()
	g.mu.Unlock()
	out.cut()
	return p, nil
}

// arrives enters it into the list, under the lock.
func (p *place) arrives() {
	if p.cut != nil {
		p.at = p.gate.arriving.PushBack(p)
	}
}

// work waits for a slot for a query that has arrived. It fails with a *busyError,
// or a status if the caller has gone.
func (p *place) work(ctx context.Context) error {
	g := p.gate
	g.mu.Lock()
	held := p.held
	p.here()
	g.mu.Unlock()
	if !held {
		return g.slow
	}
	select {
	case g.slots <- struct{}{}:
		p.slot = true
		return nil
	default:
	}
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	timer := time.NewTimer(g.wait)
	defer timer.Stop()
	select {
	case g.slots <- struct{}{}:
		p.slot = true
		return nil
	case <-timer.C:
		return g.late
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// here takes it from the list, under the lock.
func (p *place) here() {
	if p.at != nil {
		p.gate.arriving.Remove(p.at)
		p.at = nil
	}
}

// end gives the place and the slot back. It may be called again.
func (p *place) end() {
	if p.slot {
		p.slot = false
		<-p.gate.slots
	}
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	p.here()
	if p.held {
		p.held = false
		p.gate.free++
	}
}

// arrivals is how many queries are arriving.
func (g *gate) arrivals() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return int64(g.arriving.Len())
}

// outside gives the slot and the place of a query at work to others while f waits.
func (g *gate) outside(f func()) {
	<-g.slots
	g.give(1)
	defer func() { // it has been let in before, so there may be one more than places
		g.give(-1)
		g.slots <- struct{}{}
	}()
	f()
}

func (g *gate) give(places int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free += places
}
