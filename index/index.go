// This file is the layer between workers and slots: it gives worker-ranks their
// slots and turns a structure's answers into answers about workers.

package index

import (
	"sync"
	"sync/atomic"
)

// Index answers for one model which of its workers hold the leading blocks of a
// prompt. All methods may be called from any goroutine at any moment.
type Index struct {
	s Structure

	mu      sync.RWMutex         // guards what follows, up to the blank line; Find takes it only with a name filter or after losing to reuse several times
	byName  map[string][]*Worker // workers by name, several of a name being ranks or one rank twice during a move
	free    SlotSet              // slots to reuse
	size    Slot                 // slots handed out so far
	owned   SlotSet              // slots with an owner: of device tiers and of unions
	lower   int                  // lower tiers in use, of all workers
	workers int

	owners  atomic.Pointer[[]*owner] // of each slot that was ever handed out, published after growing
	only    atomic.Pointer[SlotSet]  // copy of owned, nil while lower is 0: all slots are of device tiers then
	reuses  atomic.Uint64            // counts slots handed out again, before their new owner is in owners, and only's becoming other than nil, before unions are
	queries atomic.Uint64            // counts Finds with TopK, to break ties by
	inUnion atomic.Int64             // blocks in unions, which hold nothing of their own
}

// owner is whom a slot's blocks are credited to: nil for a free slot and for
// slots of lower tiers, of which answers know the unions alone.
type owner struct {
	worker atomic.Pointer[Worker]
}

// New returns an empty Index over an empty structure, which is the Index's
// alone from then on.
func New(s Structure) *Index {
	return &Index{s: s, byName: make(map[string][]*Worker)}
}

// AddWorker makes a worker-rank known, without blocks. tag is the caller's own,
// kept as given in Worker.Tag. Several workers of the same name and rank may
// exist at a time, each with blocks of its own, and answers give each of them.
func (x *Index) AddWorker(name string, rank int32, tag any) *Worker {
	w := &Worker{Name: name, Rank: rank, Tag: tag, x: x}
	x.mu.Lock()
	defer x.mu.Unlock()
	slot := x.takeSlot()
	w.slots[Device] = slot + 1
	x.own(slot, w)
	x.byName[name] = append(x.byName[name], w)
	x.workers++
	return w
}

// takeSlot hands out the least free slot, without an owner. x.mu is held.
func (x *Index) takeSlot() Slot {
	slot, reused := x.free.first()
	if reused {
		x.free.Remove(slot)
		// A Find that may have seen the last owner's blocks must not credit
		// them to the next one. It compares reuses before and after; the last owner
		// cleared the slot before it became free.
		x.reuses.Add(1)
		return slot
	}
	slot = x.size
	x.size++
	var grown []*owner
	if p := x.owners.Load(); p != nil {
		grown = *p
	}
	// Readers index only below the length they loaded, so appending in
	// place is safe.
	grown = append(grown, new(owner))
	x.owners.Store(&grown)
	return slot
}

// own credits a slot's blocks to w from now on. x.mu is held.
func (x *Index) own(slot Slot, w *Worker) {
	x.owned.Add(slot)
	(*x.owners.Load())[slot].worker.Store(w)
	x.publish()
}

// giveSlot takes back a slot that holds nothing. x.mu is held.
func (x *Index) giveSlot(slot Slot) {
	(*x.owners.Load())[slot].worker.Store(nil)
	x.owned.Remove(slot)
	x.free.Add(slot)
}

// publish tells Finds which slots to search. Without lower tiers that is all of
// them, which costs nothing. x.mu is held.
func (x *Index) publish() {
	if x.lower == 0 {
		x.only.Store(nil)
		return
	}
	x.only.Store(&SlotSet{words: append([]uint64(nil), x.owned.words...)})
}

// Stats returns the index's size. It is cheap enough for every metrics scrape.
func (x *Index) Stats() Stats {
	st := x.s.Stats()
	st.Blocks = max(0, st.Blocks-x.inUnion.Load()) // below 0 for a moment, under a writer
	x.mu.RLock()
	st.Workers = x.workers
	x.mu.RUnlock()
	return st
}

// Stats is an index's size.
type Stats struct {
	Workers int   // worker-ranks
	Blocks  int64 // (block, worker-rank, tier) triples held
	Entries int64 // distinct blocks that a search can reach
}
