package consumer

import (
	"context"
	"sync"
	"sync/atomic"
)

// This file lets others wait until a partition has applied a record. As long as
// nobody waits it costs the partition's goroutine one load a batch.

// waiters are those who wait for one partition.
type waiters struct {
	n    atomic.Int32 // in list; set before the position is looked at, so that none is missed
	mu   sync.Mutex
	list map[*waiter]struct{}
}

// waiter waits for the record at an offset.
type waiter struct {
	offset  int64
	applied chan struct{} // closed once it is
}

// AppliedTo returns the offset before which every record has been applied and has not
// been dropped since. While the partition is being restored that is 0.
func (p *Partition) AppliedTo() int64 {
	switch p.State() {
	case CatchingUp, Live:
		return p.position.Load()
	}
	return 0
}

// Applied reports whether the record at offset is before AppliedTo.
func (p *Partition) Applied(offset int64) bool { return p.AppliedTo() > offset }

// AwaitApplied waits for Applied until the context ends, whose error it returns then.
func (p *Partition) AwaitApplied(ctx context.Context, offset int64) error {
	for {
		w := &waiter{offset, make(chan struct{})}
		p.waiters.add(w)
		if p.Applied(offset) {
			p.waiters.remove(w)
			return nil
		}
		select {
		case <-w.applied: // and dropped again, perhaps
			if p.Applied(offset) {
				return nil
			}
		case <-ctx.Done():
			p.waiters.remove(w)
			return ctx.Err()
		}
	}
}

func (ws *waiters) add(w *waiter) {
	ws.n.Add(1)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.list == nil {
		ws.list = map[*waiter]struct{}{}
	}
	ws.list[w] = struct{}{}
}

func (ws *waiters) remove(w *waiter) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if _, ok := ws.list[w]; ok {
		delete(ws.list, w)
		ws.n.Add(-1)
	}
}

// moved is called after the position or the state has changed, by the partition's goroutine.
func (p *Partition) moved() {
	if p.waiters.n.Load() != 0 {
		p.waiters.wake(p.position.Load())
	}
}

// wake tells those whose record is below the position.
func (ws *waiters) wake(position int64) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.list {
		if w.offset < position {
			close(w.applied)
			delete(ws.list, w)
			ws.n.Add(-1)
		}
	}
}
