// This file is RunIndex: the layout of its data, why it is right with many
// goroutines at work, and its small methods.

package index

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// RunIndex is a Structure made of runs: append-only arrays of consecutive
// blocks, shared by all slots that hold them. It refuses opaque hashes.
//
//	table: first hash -> run                 run (128 bytes)              buffer
//	+-----------+------+          +--------------------------------+     +----------------------+
//	| seq | *run ------+--------->| first, base, count, buf -------+---->| local hashes [cap]   |
//	| seq | *run       |          | two words, set of more words   |     | sequence hashes [cap]|
//	| ...              |          |--------------------------------|     +----------------------+
//	+------------------+          | lock, parent, holes, tail, ref |
//	| filter: bits     |          +--------------------------------+
//	+------------------+              ^                          ^
//	                                  | current object           |
//	slot (private to its writer)      |                          | found by hashing:
//	+---------------------------+   +-+------+                   | next = xxh3(last matched, local)
//	| journal: address -> ref,  |-->| runRef |                   another run whose parent is a
//	|   position                |   +--------+                   block somewhere in the first
//	| table: hash -> address    |
//	| two bytes an address      |
//	| parked, claims            |
//	+---------------------------+
//
// A block is in exactly one run. What follows a block is the next one of its run,
// or another run's first; only first blocks are in the table. Runs never split and
// know no children: where a query leaves a run, its next sequence hash is looked
// up. Slots 1 and 2 have a prompt each, and slot 3 of both the start, like this:
//
//	slot 1 stores a b c d e      run A  a b c d e      words 1:5  2:2  3:2
//	slot 2 stores a b x y        run X      x y        words 2:2
//	slot 3 stores a b            a query a b x z: A matches 2, next = xxh3(seq of b, x)
//	                             is X's first; X matches 1: slot 2 has 3, 1 and 3 have 2
//
// Coverage. How many leading blocks of a run a slot holds is one atomic word: slot
// and cutoff. Two words are in the run, more in a set: open-addressed, or an array
// by slot once a third of all slots are in it. What a slot holds of a run behind a
// hole is a bitmap that searches do not see.
//
// Searches. Find gives each slot of the first run a depth, and at each further run
// raises those of slots that held all before. FindBest goes along the query first
// and then back from the deepest run: whoever is found there held more than anybody
// who is only found further up, so it ends when it has enough.
//
// A slot's own memory. A journal of stretches (run, position, length) gives each
// block that the slot got an address. A hash table of addresses has the ends of
// events, where nearly all events go on. What is not in it is looked for by two bytes
// of its hash, at the position that the event says or everywhere; those bytes are
// read from the runs when they are first needed. Where that takes too long, all blocks
// go into the table. What all this finds is a hint, and checked in the run; from
// time to time it is written anew, without what the slot has no more. Blocks whose
// parent is not held are parked in a forest of the slot's own until it is; the
// positions that events claimed for blocks behind holes, where they are not the true
// ones, are in a map.
//
// Why it is right:
//
//   - Content below a published count never changes. A run that lost blocks at
//     its end is sealed: it takes no others there, and has to be left for another.
//   - Each fact is one atomic word: a search that reads a cutoff knows that the
//     slot held those blocks at that moment. A word keeps its place while its cutoff
//     is above 0, and sets are replaced by copies, so a search that goes through
//     them once misses no slot that held a block all along, and a slot seen twice
//     is taken once.
//   - A larger or smaller copy of a run replaces it in the table; the old one
//     stays as it was then. Whoever has it loaded it before, so that was during its
//     call. The collector keeps it.
//   - A block is made at the end of its parent's run, under the run's lock, if no
//     run begins with it; else it becomes a run's first block, by insert-if-absent
//     under the region's lock, after its parent's run was seen to be unable to take
//     it: it goes on otherwise, is full, or is sealed, each for good. (That it goes on
//     otherwise can be seen without its lock: if those blocks are lost, it is sealed.
//     A run that finds its next block to begin another one is sealed too.) So two
//     writers cannot make two of a block: whoever makes one holds its parent, which
//     keeps the parent's run alive.
//   - One writer a slot: what the slot holds changes only under its own hands, so
//     that what it found without a lock is still there when it has one.
//
// Locks, in the order in which they are taken: growing; a run; regions of the table,
// in order. Nobody waits for a run's lock while holding another's. Searches take
// none.
//
// Blocks of one sequence hash are one block. A producer that makes hashes collide on
// purpose may see blocks counted twice in its own slot; runs that begin with the
// same hash are told apart by position and content, so it hides nobody else's.
//
// Goroutines share the fields by what they do to them: 64 bytes that nearly nobody
// writes, then parts of 64 bytes for different writers.
type RunIndex struct {
	salt  uint64 // keeps chosen hashes from colliding in the tables
	table atomic.Pointer[runTable]
	slots atomic.Pointer[[]*slotRuns] // by slot; grows under growing and never shrinks

	// Tests make these small.
	maxRun   uint32 // blocks of a run, at most, which bounds what a copy costs
	slack    int    // what a journal may have too much in any case
	scanFree uint64 // bytes that may be scanned in any case before all blocks go into a slot's table
	scanEach uint64 // and bytes for each block of the journal
	_        [8]byte

	regions [tableRegions]tableRegion
	lanes   [16]runLane

	runs    atomic.Int64 // in the table
	roots   atomic.Int64 // runs of position 0 whose first block is held by a slot
	growing sync.Mutex
}

// runLane is what events of a part of the slots count and use again.
type runLane struct {
	scratch atomic.Pointer[[]SeqHash] // sequence hashes of an event, taken and given back
	blocks  atomic.Int64              // (block, slot) pairs
	entries atomic.Int64              // blocks in runs; only the sum of all lanes means something
	_       [40]byte
}

func (x *RunIndex) lane(slot Slot) *runLane {
	return &x.lanes[slot%Slot(len(x.lanes))]
}

// NewRunIndex returns an empty RunIndex.
func NewRunIndex() *RunIndex {
	x := &RunIndex{salt: rand.Uint64(), maxRun: 4096, slack: 512, scanFree: 1 << 16, scanEach: 64}
	x.table.Store(newRunTable(minRegion))
	x.slots.Store(new([]*slotRuns))
	return x
}

// slot returns a slot's own memory, nil if it never stored anything.
func (x *RunIndex) slot(slot Slot) *slotRuns {
	if all := *x.slots.Load(); int(slot) < len(all) {
		return all[slot]
	}
	return nil
}

// addSlot makes the slots up to this one known and returns its memory.
func (x *RunIndex) addSlot(slot Slot) *slotRuns {
	x.growing.Lock()
	defer x.growing.Unlock()
	all := *x.slots.Load()
	for n := len(all); n <= int(slot); n++ {
		// Readers index only below the length that they loaded, so that appending
		// in place is safe.
		k := &slotRuns{x: x, slot: Slot(n)}
		k.reset()
		all = append(all, k)
	}
	x.slots.Store(&all)
	return all[slot]
}

// Holds implements Structure.
func (x *RunIndex) Holds(slot Slot, h SeqHash) bool {
	k := x.slot(slot)
	if k == nil {
		return false
	}
	if _, ok := k.locate(h, NoPosition); ok {
		return true
	}
	return k.isParked(h)
}

// Len implements Structure.
func (x *RunIndex) Len(slot Slot) int {
	k := x.slot(slot)
	if k == nil {
		return 0
	}
	return k.len()
}

// Stats implements Structure. Entries counts the blocks of all runs, also those
// that all their holders have behind holes, unless nothing is in reach.
func (x *RunIndex) Stats() Stats {
	st := x.total()
	if x.roots.Load() == 0 {
		st.Entries = 0
	}
	return st
}

// total adds up what the lanes count.
func (x *RunIndex) total() (st Stats) {
	for i := range x.lanes {
		st.Blocks += x.lanes[i].blocks.Load()
		st.Entries += x.lanes[i].entries.Load()
	}
	// What moved from one lane to another meanwhile may be missing.
	st.Blocks, st.Entries = max(st.Blocks, 0), max(st.Entries, 0)
	return st
}
