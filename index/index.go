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
	devices SlotSet              // device slots in use
	lower   int                  // slots of other tiers in use
	workers int

	owners  atomic.Pointer[[]*owner] // of each slot that was ever handed out, published after growing
	only    atomic.Pointer[SlotSet]  // copy of devices, nil while lower is 0
	reuses  atomic.Uint64            // counts slots handed out again, before their new owner is in owners
	queries atomic.Uint64            // counts Finds with TopK, to break ties by
}

// owner is whom a slot's blocks are credited to: nil for a free slot and for
// slots of tiers that answers leave out.
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
	w.slots[Device] = x.takeSlot(w, Device) + 1
	x.byName[name] = append(x.byName[name], w)
	x.workers++
	return w
}

// takeSlot hands out the least free slot. x.mu is held.
func (x *Index) takeSlot(w *Worker, t Tier) Slot {
	slot, reused := x.free.first()
	if reused {
		x.free.Remove(slot)
		// A Find that may have seen the last owner's blocks must not credit
		// them to this one. It compares reuses before and after; the last owner
		// cleared the slot before it became free.
		x.reuses.Add(1)
	} else {
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
	}
	if t == Device {
		x.devices.Add(slot)
		(*x.owners.Load())[slot].worker.Store(w)
	} else {
		x.lower++
	}
	x.publishDevices()
	return slot
}

// giveSlot takes back a slot that holds nothing. x.mu is held.
func (x *Index) giveSlot(slot Slot, t Tier) {
	if t == Device {
		x.devices.Remove(slot)
		(*x.owners.Load())[slot].worker.Store(nil)
	} else {
		x.lower--
	}
	x.free.Add(slot)
	x.publishDevices()
}

// publishDevices tells Finds which slots to search. With device slots alone
// that is all of them, which costs nothing. x.mu is held.
func (x *Index) publishDevices() {
	if x.lower == 0 {
		x.only.Store(nil)
		return
	}
	x.only.Store(&SlotSet{words: append([]uint64(nil), x.devices.words...)})
}

// Stats returns the index's size. It is cheap enough for every metrics scrape.
func (x *Index) Stats() Stats {
	st := x.s.Stats()
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
