// This file is Pool: goroutines that apply the events of an Index's workers.

package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// What a Pool's methods fail with, besides a context's error.
var (
	ErrPoolStopped   = errors.New("pool is stopped")
	ErrPoolFailed    = errors.New("pool failed") // wrapped by a *PoolPanic
	ErrKnownWorker   = errors.New("worker is known already")
	ErrUnknownWorker = errors.New("unknown worker")
)

// PoolPanic is the panic of one of a Pool's goroutines. After it nobody knows what
// the index holds, so all methods fail with it.
type PoolPanic struct {
	Value any // nil if the goroutine was ended by runtime.Goexit
	Stack []byte
}

func (e *PoolPanic) Error() string { return fmt.Sprintf("%v: panic: %v", ErrPoolFailed, e.Value) }

// Unwrap returns ErrPoolFailed.
func (e *PoolPanic) Unwrap() error { return ErrPoolFailed }

// Pool applies events to an Index with a fixed number of goroutines, for
// programs that have no goroutine of their own for each worker. Until it is retired, a
// worker-rank belongs to the goroutine that had fewest when it was added, so that its
// events are applied in the order in which they were handed over; events of several
// workers are applied in parallel.
//
//	p := index.NewPool(index.New(index.NewRunIndex()), 4, 1024)
//	err := p.AddWorker("worker-7", 0, nil)
//	err = p.Store(ctx, "worker-7", 0, index.Device, stored)
//	err = p.Find(&query, &result) // at once, on this goroutine: perhaps before that store
//	err = p.Flush(ctx)            // from here on Find knows of it
//	err = p.Stop()                // once all is applied
//
// Each goroutine has a queue of a fixed number of events. If the queue is full, handing
// over an event waits until there is room, or until the context ends: then the event is
// not handed over. Slices in an event belong to the pool from then on, and must not be
// changed.
//
// All methods may be called by any goroutine at any moment. If several goroutines hand
// over events of one worker at once, their order is undefined. Handing over takes some
// 0.4 µs on top of the event's own work (BenchmarkPoolStore, on two busy cores), and
// allocates nothing.
type Pool struct {
	x     *Index
	lanes []*lane

	mu      sync.RWMutex
	workers map[poolID]*poolWorker // not those retired, even if that is still queued

	// Who puts something into a queue holds gate to read and looks at stopped then.
	// Stop sets that and takes gate to write, so that it closes no queue under
	// anyone's hands.
	gate    sync.RWMutex
	stopped atomic.Bool

	failed chan struct{} // closed after cause was set
	fail   sync.Once
	cause  *PoolPanic

	done sync.WaitGroup // the goroutines

	effect  [6]atomic.Int64
	refused atomic.Int64
}

type poolID struct {
	name string
	rank int32
}

// poolWorker is a worker and whose it is.
type poolWorker struct {
	*Worker
	lane    *lane
	retired bool // the lane's
}

// lane is one goroutine's.
type lane struct {
	queue   chan poolEvent
	workers int // guarded by Pool.mu
}

// poolEvent is what stands in a queue.
type poolEvent struct {
	kind   poolEventKind
	tier   Tier
	worker *poolWorker
	stored Stored // of removals, Hashes alone
	do     func(*Worker)
	done   chan<- struct{} // if not nil, told when it was applied; has room
}

type poolEventKind uint8

const (
	poolStore poolEventKind = iota
	poolRemove
	poolClear
	poolRetire
	poolDo
	poolFlush
)

// NewPool starts a pool of that many goroutines, each with a queue of that many
// events, both at least 1. The Index's workers must be added and written by the pool
// alone; it may be read besides. Stop ends the goroutines.
func NewPool(x *Index, goroutines, queue int) *Pool {
	p := &Pool{x: x, workers: make(map[poolID]*poolWorker), failed: make(chan struct{})}
	for range max(goroutines, 1) {
		l := &lane{queue: make(chan poolEvent, max(queue, 1))}
		p.lanes = append(p.lanes, l)
		p.done.Go(func() { p.run(l) })
	}
	return p
}

// AddWorker makes a worker-rank known, without blocks, and assigns it to a
// goroutine. tag becomes its Worker.Tag. It fails with ErrKnownWorker until the
// worker-rank is retired. Added again then, it is another one, and queries may give
// both until the retirement is applied.
func (p *Pool) AddWorker(name string, rank int32, tag any) error {
	if err := p.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	id := poolID{name, rank}
	if p.workers[id] != nil {
		return ErrKnownWorker
	}
	least := p.lanes[0]
	for _, l := range p.lanes {
		if l.workers < least.workers {
			least = l
		}
	}
	least.workers++
	p.workers[id] = &poolWorker{Worker: p.x.AddWorker(name, rank, tag), lane: least}
	return nil
}

// Store hands over blocks to store; see Worker.Store. Whether the index takes
// them is seen in Stats alone.
func (p *Pool) Store(ctx context.Context, name string, rank int32, t Tier, s Stored) error {
	return p.send(ctx, name, rank, poolEvent{kind: poolStore, tier: t, stored: s})
}

// Remove hands over hashes of blocks to remove; see Worker.Remove.
func (p *Pool) Remove(ctx context.Context, name string, rank int32, t Tier, hashes []SeqHash) error {
	return p.send(ctx, name, rank, poolEvent{kind: poolRemove, tier: t, stored: Stored{Hashes: hashes}})
}

// Clear has a worker-rank lose all blocks of all tiers.
func (p *Pool) Clear(ctx context.Context, name string, rank int32) error {
	return p.send(ctx, name, rank, poolEvent{kind: poolClear})
}

// Retire has a worker-rank lose all blocks and leave the index, after the events
// handed over before; an event handed over while Retire runs may be lost. The
// goroutine's assignment is freed then. A worker-rank whose Retire fails stays.
func (p *Pool) Retire(ctx context.Context, name string, rank int32) error {
	id := poolID{name, rank}
	w, err := p.worker(id)
	if err == nil {
		err = p.put(ctx, w.lane, poolEvent{kind: poolRetire, worker: w})
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[id] == w { // else another goroutine retired it too
		delete(p.workers, id)
	}
	return nil
}

// Do has f called with a worker, after the events handed over before and with no
// other at work on it, and waits for it: to dump it, for one. f must not retire the
// worker, nor call the pool. If the context ends first, f may be called later.
func (p *Pool) Do(ctx context.Context, name string, rank int32, f func(*Worker)) error {
	done, called := make(chan struct{}, 1), false
	do := func(w *Worker) { called = true; f(w) }
	err := p.send(ctx, name, rank, poolEvent{kind: poolDo, do: do, done: done})
	if err == nil {
		err = p.await(ctx, done)
	}
	if err == nil && !called { // it was retired meanwhile
		err = errUnknown(poolID{name, rank})
	}
	return err
}

// Find makes r the answer to q, on the caller's goroutine and without waiting: see
// Index.Find. Events that wait in queues are not in it. It fails, with an empty r,
// when the pool failed or is stopped, since the answer would be stale.
func (p *Pool) Find(q *Query, r *Result) error {
	p.x.Find(q, r)
	// A goroutine may have failed during the search.
	if err := p.Err(); err != nil {
		r.Matches, r.LowerBounds = r.Matches[:0], false
		return err
	}
	return nil
}

// Flush waits until all events are applied that were handed over before it was
// called: queries that begin after it see them.
func (p *Pool) Flush(ctx context.Context) error {
	done := make(chan struct{}, len(p.lanes))
	for _, l := range p.lanes {
		if err := p.put(ctx, l, poolEvent{kind: poolFlush, done: done}); err != nil {
			return err
		}
	}
	for range p.lanes {
		if err := p.await(ctx, done); err != nil {
			return err
		}
	}
	return nil
}

// Stop takes no more events, waits until all that were handed over are applied
// and ends the goroutines. The Index stays as it is then, and may be read. A pool
// that failed leaves its queues as they are and Stop returns why, without waiting
// for a goroutine that may be stuck. Stopping again does no harm.
func (p *Pool) Stop() error {
	if p.stopped.CompareAndSwap(false, true) {
		p.gate.Lock()
		for _, l := range p.lanes {
			close(l.queue)
		}
		p.gate.Unlock()
	}
	applied := make(chan struct{})
	go func() {
		p.done.Wait()
		close(applied)
	}()
	select {
	case <-applied:
	case <-p.failed:
	}
	return p.failure()
}

// Err returns nil while the pool is ready: ErrPoolStopped, or a *PoolPanic, from
// then on when it is not.
func (p *Pool) Err() error {
	if err := p.failure(); err != nil {
		return err
	}
	if p.stopped.Load() {
		return ErrPoolStopped
	}
	return nil
}

// PoolStats counts what a pool's events did so far.
type PoolStats struct {
	Effect         // of all events together, in blocks
	Refused  int64 // stores that the index refused
	Queued   int   // events handed over and not begun
	Assigned []int // workers of each goroutine
}

// Stats returns the counts so far. Those of one event may be in it in part.
func (p *Pool) Stats() PoolStats {
	var st PoolStats
	for i, n := range effects(&st.Effect) {
		*n = int(p.effect[i].Load())
	}
	st.Refused = p.refused.Load()
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, l := range p.lanes {
		st.Queued += len(l.queue)
		st.Assigned = append(st.Assigned, l.workers)
	}
	return st
}

// effects returns the counts of an Effect.
func effects(e *Effect) [6]*int {
	return [...]*int{&e.Stored, &e.Duplicate, &e.Orphan, &e.Contradiction, &e.Removed, &e.Unknown}
}

func (p *Pool) failure() error {
	select {
	case <-p.failed:
		return p.cause
	default:
		return nil
	}
}

// worker returns a worker-rank that is not retired.
func (p *Pool) worker(id poolID) (*poolWorker, error) {
	p.mu.RLock()
	w := p.workers[id]
	p.mu.RUnlock()
	if w != nil {
		return w, nil
	}
	if err := p.Err(); err != nil {
		return nil, err
	}
	return nil, errUnknown(id)
}

func errUnknown(id poolID) error {
	return fmt.Errorf("%w: %s rank %d", ErrUnknownWorker, id.name, id.rank)
}

// send hands an event to its worker's goroutine.
func (p *Pool) send(ctx context.Context, name string, rank int32, e poolEvent) (err error) {
	if e.worker, err = p.worker(poolID{name, rank}); err != nil {
		return err
	}
	return p.put(ctx, e.worker.lane, e)
}

func (p *Pool) put(ctx context.Context, l *lane, e poolEvent) error {
	// A select with several ready cases takes any of them.
	if err := cmp.Or(p.Err(), ctx.Err()); err != nil {
		return err
	}
	p.gate.RLock()
	defer p.gate.RUnlock()
	if p.stopped.Load() {
		return ErrPoolStopped
	}
	select {
	case l.queue <- e:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.failed:
		return p.cause
	}
}

// await waits for an event to be applied.
func (p *Pool) await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.failed:
		return p.cause
	}
}

// run is a goroutine of the pool.
func (p *Pool) run(l *lane) {
	drained := false
	defer func() {
		if v := recover(); !drained { // v is nil after runtime.Goexit
			p.fail.Do(func() {
				p.cause = &PoolPanic{Value: v, Stack: debug.Stack()}
				close(p.failed)
			})
		}
	}()
	for e := range l.queue {
		if p.failure() != nil {
			break // another goroutine failed
		}
		p.apply(&e)
		if e.done != nil {
			e.done <- struct{}{}
		}
	}
	drained = true
}

func (p *Pool) apply(e *poolEvent) {
	w := e.worker
	if w != nil && w.retired {
		return // it was handed over while another goroutine retired the worker
	}
	switch e.kind {
	case poolStore:
		did, err := w.Store(e.tier, e.stored)
		if err != nil {
			p.refused.Add(1)
		}
		p.count(did)
	case poolRemove:
		p.count(w.Remove(e.tier, e.stored.Hashes))
	case poolClear:
		p.count(Effect{Removed: w.Clear()})
	case poolRetire:
		p.count(Effect{Removed: w.Retire()})
		w.retired = true
		p.mu.Lock()
		w.lane.workers--
		p.mu.Unlock()
	case poolDo:
		e.do(w.Worker)
	}
}

func (p *Pool) count(did Effect) {
	for i, n := range effects(&did) {
		if *n != 0 {
			p.effect[i].Add(int64(*n))
		}
	}
}
