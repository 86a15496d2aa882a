// This file bounds how many queries there are at a time: a few that are worked
// on, a short queue behind them, and no to all beyond.

package query

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"runtime"
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

// gate lets a query arrive once its headers are there, gives it a place once it has
// arrived, and a slot to work in when its turn has come. Places bound how long one
// waits, and those that arrive the memory, slots the processor's time. Slots are given
// in the order of asking.
//
// No query is let in while no place is free, and only so many arrive at a time that
// few arrive in vain. They hold no places: a client may send the headers of hundreds
// before the message of the first, and until that is there the places would be idle.
//
// A query that takes long to arrive is cut off when the next one needs room: slow
// senders keep nobody out.
//
// Most of what a query costs is not work in a slot but the way of its message and of
// its answer through gRPC or net/http. When the processors are behind with that, queries
// are let in only up to the number of slots, and not all of those, so that who is let in
// is soon answered.
type gate struct {
	slots   chan struct{}
	wait    time.Duration // for a slot
	waiting atomic.Int64

	places   int
	room     int           // for those that arrive
	patience time.Duration // after which one of them can be cut off
	mu       sync.Mutex
	free     int                                         // places
	arriving list.List                                   // of *place, oldest first
	busy     func(now time.Time, enough, many bool) bool // of processors

	full, crowded, behind, late, slow *busyError // made once: a refusal shall cost little
}

// arrivingPerPlace is how many may arrive for each place. Fewer leave places idle when
// a client's messages come late, more have to be refused once they are there.
const arrivingPerPlace = 2

func newGate(l Limits) *gate {
	places := l.MaxConcurrent + l.MaxQueue
	return &gate{
		slots:    make(chan struct{}, l.MaxConcurrent),
		wait:     l.QueueTimeout,
		places:   places,
		room:     arrivingPerPlace * places,
		patience: l.Deadline,
		free:     places,
		busy:     (&processors{waiting: runnableGoroutines(), most: l.MaxRunnable * runtime.GOMAXPROCS(0)}).behind,
		full: &busyError{queueFull, fmt.Sprintf("busy: all places for %d queries at work and %d waiting are taken: ask another instance, or again later",
			l.MaxConcurrent, l.MaxQueue)},
		crowded: &busyError{queueFull, fmt.Sprintf("busy: %d queries are arriving: ask another instance, or again later", arrivingPerPlace*places)},
		behind:  &busyError{processorsBehind, "busy: the processors are behind: ask another instance, or again later"},
		late:    &busyError{queueTimeout, fmt.Sprintf("busy: the query has waited for %v: ask another instance, or again later", l.QueueTimeout)},
		slow:    &busyError{slowSender, "busy: the query arrives too slowly, and others need the room"},
	}
}

// place is one query's, or will be when it has arrived. One goroutine at a time uses it.
type place struct {
	gate *gate
	cut  func()        // ends the arrival of a query for another's sake; nil: it is there
	from time.Time     // when it was let in
	at   *list.Element // in arriving; nil once it has arrived or was cut off; guarded by gate.mu, as held is
	held bool
	gone bool // it was cut off, for which cut may be called even after its end
	slot bool
}

// admit lets a query in, to be ended with end, or fails with a *busyError. If the
// query has yet to arrive, cut is called, from another goroutine, when it takes too
// long; nil: it is there. Up to unseen others may be waiting before the gate.
func (g *gate) admit(unseen int, cut func()) (*place, error) {
	p := &place{gate: g, cut: cut, from: time.Now()}
	g.mu.Lock()
	if in := g.arriving.Len() + g.places - g.free; g.busy(p.from, in >= cap(g.slots), in+unseen > cap(g.slots)) {
		g.mu.Unlock()
		return nil, g.behind
	}
	if g.free <= 0 {
		g.mu.Unlock()
		return nil, g.full
	}
	if cut == nil {
		p.take()
		g.mu.Unlock()
		return p, nil
	}
	var out *place
	if g.arriving.Len() >= g.room {
		out = g.arriving.Front().Value.(*place)
		if p.from.Sub(out.from) < g.patience {
			g.mu.Unlock()
			return nil, g.crowded
		}
		out.here()
		out.gone = true
	}
	p.at = g.arriving.PushBack(p)
	g.mu.Unlock()
	if out != nil {
		out.cut()
	}
	return p, nil
}

// take gives it a place, under the lock.
func (p *place) take() {
	p.held = true
	p.gate.free--
}

// arrived gives it a place if there is one.
func (p *place) arrived() error {
	g := p.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case p.at == nil:
		return g.slow
	case g.free <= 0:
		return g.full
	}
	p.here()
	p.take()
	return nil
}

// work waits for a slot for a query that has arrived. It fails with a *busyError,
// or a status if the caller has gone.
func (p *place) work(ctx context.Context) error {
	g := p.gate
	if p.cut != nil {
		if err := p.arrived(); err != nil {
			return err
		}
	}
	return p.turn(ctx, g.wait, g.late)
}

// turn waits for a slot. It fails with late once it has waited for so long, or a status
// if the caller has gone.
func (p *place) turn(ctx context.Context, long time.Duration, late error) error {
	g := p.gate
	select {
	case g.slots <- struct{}{}:
		p.slot = true
		return nil
	default:
	}
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	timer := time.NewTimer(long)
	defer timer.Stop()
	select {
	case g.slots <- struct{}{}:
		p.slot = true
		return nil
	case <-timer.C:
		return late
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

// errNoTurn is that a query has not got a slot again before its time was over.
var errNoTurn = errors.New("no slot was free again before the time was over")

// outside gives the slot and the place of a query at work to others while f waits. It
// fails with errNoTurn once due is over, or a status if the caller has gone: then the
// query has no slot, and must not work.
func (p *place) outside(ctx context.Context, due time.Time, f func()) error {
	g := p.gate
	p.end()
	f()
	g.mu.Lock()
	p.take() // it has been let in before, so there may be more than places
	g.mu.Unlock()
	return p.turn(ctx, time.Until(due), errNoTurn)
}
