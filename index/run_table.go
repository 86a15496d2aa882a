// This file is a RunIndex's table: the runs by their first blocks, found without
// locks.

package index

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	regionBits   = 6
	tableRegions = 1 << regionBits // parts of the table that have a lock each
	minRegion    = 8               // places in a region, at least
	filterBits   = 32              // bits of the filter a place
)

// runTable is an open-addressed array in regions, by the top bits of the mixed
// hash. It and its filter are replaced as one, with all regions locked.
type runTable struct {
	places []tablePlace
	filter []atomic.Uint64 // has at least the bits of all runs in the table
	size   uint64          // places in a region, a power of two
	shift  uint            // from a mixed hash, region bits shifted out, to a place in the region
}

// tablePlace is empty if it has no run. Its hash may be newer than its run or
// older, so that the run's own is what counts.
type tablePlace struct {
	seq atomic.Uint64
	run atomic.Pointer[run] // removed, if something may be further on
}

// tableRegion is what writers know of a region.
type tableRegion struct {
	mu     sync.Mutex
	live   int // runs
	used   int // runs and removed ones
	marked int // runs put into the filter since it is there
	_      [32]byte
}

// removed takes the place of a run that was taken out.
var removed = new(run)

func newRunTable(size int) *runTable {
	return &runTable{
		places: make([]tablePlace, size*tableRegions),
		filter: make([]atomic.Uint64, size*tableRegions*filterBits/64),
		size:   uint64(size),
		shift:  uint(64 - bits.TrailingZeros(uint(size))),
	}
}

// mix spreads a sequence hash over all bits, in a way that producers don't know.
func (x *RunIndex) mix(seq SeqHash) uint64 {
	h := (uint64(seq) ^ x.salt) * 0x9e3779b97f4a7c15
	return h ^ h>>32
}

// home returns the first place of a hash's region, and where in it to begin.
func (t *runTable) home(h uint64) (region, i uint64) {
	return (h >> (64 - regionBits)) * t.size, h << regionBits >> t.shift
}

// bit returns the filter's word and mask of a hash.
func (t *runTable) bit(h uint64) (*atomic.Uint64, uint64) {
	return &t.filter[h>>6&uint64(len(t.filter)-1)], 1 << (h & 63)
}

// touch reads a hash's home, so that it is in the cache soon.
//
//go:noinline
func (t *runTable) touch(h uint64) uint64 {
	base, i := t.home(h)
	return t.places[base+i].seq.Load()
}

// is reports whether r is the run that begins with this block.
func (r *run) is(seq SeqHash, pos uint32, local LocalHash) bool {
	return r.first == seq && r.base == pos && r != removed && r.buf[0] == local
}

// lookup returns the run that begins with this block, or nil.
func (x *RunIndex) lookup(seq SeqHash, pos uint32, local LocalHash) *run {
	t := x.table.Load()
	base, i := t.home(x.mix(seq))
	for {
		p := &t.places[base+i]
		r := p.run.Load()
		if r == nil {
			return nil
		}
		if p.seq.Load() == uint64(seq) && r.is(seq, pos, local) {
			return r
		}
		i = (i + 1) & (t.size - 1)
	}
}

// lockHead returns the run that begins with this block, locked, or nil.
func (x *RunIndex) lockHead(seq SeqHash, pos uint32, local LocalHash) *run {
	for {
		r := x.lookup(seq, pos, local)
		if r == nil {
			return nil
		}
		r.mu.Lock()
		if !r.dead {
			return r
		}
		r.mu.Unlock() // the table has another one by now, or none
	}
}

// insert puts a run into the table unless one that begins with the same block is
// there.
func (x *RunIndex) insert(r *run) bool {
	h := x.mix(r.first)
	g := &x.regions[h>>(64-regionBits)]
	g.mu.Lock()
	t := x.table.Load()
	for g.used*4 >= int(t.size)*3 || g.marked >= int(t.size)*4 {
		g.mu.Unlock()
		x.rebuild(t)
		g.mu.Lock()
		t = x.table.Load()
	}
	base, i := t.home(h)
	var free *tablePlace
	for {
		p := &t.places[base+i]
		old := p.run.Load()
		if old == nil {
			if free == nil {
				free = p
				g.used++
			}
			break
		}
		if old == removed {
			if free == nil {
				free = p
			}
		} else if p.seq.Load() == uint64(r.first) && old.is(r.first, r.base, r.buf[0]) {
			g.mu.Unlock()
			return false
		}
		i = (i + 1) & (t.size - 1)
	}
	word, mask := t.bit(h)
	if word.Load()&mask == 0 {
		word.Or(mask)
	}
	free.seq.Store(uint64(r.first))
	free.run.Store(r)
	g.live++
	g.marked++
	g.mu.Unlock()
	x.runs.Add(1)
	return true
}

// replace puts another object of the same run into the table.
func (x *RunIndex) replace(r, by *run) {
	h := x.mix(r.first)
	g := &x.regions[h>>(64-regionBits)]
	g.mu.Lock()
	t := x.table.Load()
	base, i := t.home(h)
	for t.places[base+i].run.Load() != r {
		i = (i + 1) & (t.size - 1)
	}
	t.places[base+i].run.Store(by)
	g.mu.Unlock()
}

// remove takes a run out of the table, and makes it smaller if it is nearly
// empty.
func (x *RunIndex) remove(r *run) {
	h := x.mix(r.first)
	g := &x.regions[h>>(64-regionBits)]
	g.mu.Lock()
	t := x.table.Load()
	base, i := t.home(h)
	for t.places[base+i].run.Load() != r {
		i = (i + 1) & (t.size - 1)
	}
	g.live--
	if t.places[base+(i+1)&(t.size-1)].run.Load() != nil {
		t.places[base+i].run.Store(removed)
	} else {
		// Nothing is further on: this place and removed ones before it are free.
		for {
			t.places[base+i].run.Store(nil)
			g.used--
			i = (i - 1) & (t.size - 1)
			if t.places[base+i].run.Load() != removed {
				break
			}
		}
	}
	g.mu.Unlock()
	if n := x.runs.Add(-1); t.size > minRegion && n*16 < int64(len(t.places)) {
		x.rebuild(t)
	}
}

// rebuild replaces the table by one of the right size, unless another goroutine
// was first.
func (x *RunIndex) rebuild(old *runTable) {
	for i := range x.regions {
		x.regions[i].mu.Lock()
	}
	if x.table.Load() == old {
		most := 0
		for i := range x.regions {
			most = max(most, x.regions[i].live)
		}
		size := minRegion
		for size*5 < most*8 {
			size *= 2
		}
		t := newRunTable(size)
		for i := range x.regions {
			g := &x.regions[i]
			g.used, g.marked = g.live, g.live
		}
		for i := range old.places {
			r := old.places[i].run.Load()
			if r == nil || r == removed {
				continue
			}
			h := x.mix(r.first)
			word, mask := t.bit(h)
			word.Or(mask)
			base, i := t.home(h)
			for t.places[base+i].run.Load() != nil {
				i = (i + 1) & (t.size - 1)
			}
			t.places[base+i].seq.Store(uint64(r.first))
			t.places[base+i].run.Store(r)
		}
		x.table.Store(t)
	}
	for i := range x.regions {
		x.regions[i].mu.Unlock()
	}
}
