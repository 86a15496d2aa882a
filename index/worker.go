// This file is what a worker-rank's events do to an index.

package index

import "sync/atomic"

// Worker is one worker-rank of an Index: the sets of blocks it holds, one a
// tier. Its methods are called by one goroutine at a time, but for Len, which
// any may call. Different workers do not wait for one another.
type Worker struct {
	Name string
	Rank int32
	Tag  any // the caller's

	x      *Index
	slots  [Tiers]Slot          // + 1; 0 for a lower tier that is not in use
	unions [Tiers]atomic.Uint32 // slot + 1 of what a lower tier and those before it hold together, 0 if the tier is not in use; read by Finds
	lower  int                  // lower tiers in use
	blocks [Tiers]atomic.Int64
	rest   []SeqHash // leave's
	dead   bool
}

// slot returns the worker's slot of a tier in use.
func (w *Worker) slot(t Tier) Slot {
	if w.dead {
		panic("BUG: retired worker used")
	}
	return w.slots[t] - 1
}

// unused reports whether a tier holds nothing since it is not in use.
func (w *Worker) unused(t Tier) bool { return w.slots[t] == 0 && !w.dead }

// Store adds a chain of blocks to what the worker-rank holds in a tier. Its
// errors are Structure.Store's; an event that is refused changes nothing. The first
// one of a lower tier copies what the tiers before it hold.
func (w *Worker) Store(t Tier, s Stored) (Effect, error) {
	if w.unused(t) {
		if err := s.check(); err != nil {
			return Effect{}, err
		}
		w.open(t)
	}
	if w.lower > 0 {
		if err := w.join(t, s); err != nil {
			return Effect{}, err
		}
	}
	e, err := w.x.s.Store(w.slot(t), s)
	w.blocks[t].Add(int64(e.Stored))
	return e, err
}

// Remove takes each of the blocks out of what the worker-rank holds in a tier.
func (w *Worker) Remove(t Tier, hashes []SeqHash) Effect {
	if w.unused(t) {
		return Effect{Unknown: len(hashes)}
	}
	e := w.x.s.Remove(w.slot(t), hashes)
	w.blocks[t].Add(-int64(e.Removed))
	if w.lower > 0 && e.Removed > 0 {
		w.leave(t, hashes)
	}
	return e
}

// Clear empties all tiers and returns how many blocks they held.
func (w *Worker) Clear() int {
	n := w.clear(Device)
	for t := Host; w.lower > 0; t++ {
		if w.slots[t] != 0 {
			n += w.clear(t)
			w.close(t)
		}
	}
	return n
}

// clear empties a tier in use, but not the unions that it is in.
func (w *Worker) clear(t Tier) int {
	n := w.x.s.Clear(w.slot(t))
	w.blocks[t].Store(0)
	return n
}

// ClearTier empties a tier and returns how many blocks it held.
func (w *Worker) ClearTier(t Tier) int {
	if w.unused(t) {
		return 0
	}
	held := w.heldIn(t)
	n := w.clear(t)
	if t != Device {
		w.close(t)
	}
	w.leave(t, held)
	return n
}

// Holds reports whether the worker-rank holds a block in a tier.
func (w *Worker) Holds(t Tier, h SeqHash) bool {
	return !w.unused(t) && w.x.s.Holds(w.slot(t), h)
}

// Len returns how many blocks the worker-rank holds in a tier, those out of
// reach included. Any goroutine may call it, also after Retire.
func (w *Worker) Len(t Tier) int { return int(w.blocks[t].Load()) }

// Retire clears all tiers, takes the worker-rank out of the index and returns
// how many blocks it held. Only Len and the fields may be used afterwards.
func (w *Worker) Retire() int {
	n := w.Clear()
	w.dead = true
	x := w.x
	x.mu.Lock()
	defer x.mu.Unlock()
	x.giveSlot(w.slots[Device] - 1)
	x.publish()
	named := x.byName[w.Name]
	for i, o := range named {
		if o == w {
			last := len(named) - 1
			named[i], named[last] = named[last], nil
			named = named[:last]
			break
		}
	}
	if len(named) == 0 {
		delete(x.byName, w.Name)
	} else {
		x.byName[w.Name] = named
	}
	x.workers--
	return n
}

// Dump yields the blocks that the worker-rank holds, each once, as chains of one
// or more, tier by tier, parents before children, until yield returns false.
// Stored again into an empty worker of any index they answer alike. The Stored's
// slices are good only during the call, and must not be written to; yield must not
// change the worker. Stored.Singles takes a chain apart.
func (w *Worker) Dump(yield func(t Tier, s Stored) bool) {
	more := true
	for t := range Tier(Tiers) {
		if w.unused(t) {
			continue
		}
		w.x.s.Dump(w.slot(t), func(s Stored) bool {
			more = yield(t, s)
			return more
		})
		if !more {
			return
		}
	}
}
