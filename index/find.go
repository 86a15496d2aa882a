// This file answers queries: it searches the structure, turns slots into
// workers without ever mistaking one for its successor, filters and selects.

package index

import "math/bits"

// Query asks for the leading blocks that workers hold.
type Query struct {
	Locals    []LocalHash        // of the prompt's full blocks, from the first
	Workers   []string           // if not empty, only these workers (all their ranks)
	Keep      func(*Worker) bool // if not nil, workers it refuses are left out, before TopK
	TopK      int                // if > 0, only the k deepest: by device tier, of equal ones by device and host, and so on (of 32,768 blocks or more, not by the last tiers); ties broken anew from query to query
	MinDepth  int                // leave out, before TopK, workers whose deepest depth, of all tiers, is less; not for EarlyExit, whose depths may be short
	EarlyExit bool               // stop once at most one worker still matches; Keep is not asked before
}

// Match is how deep one worker-rank's device tier matches.
type Match struct {
	Worker *Worker
	Depth  int // leading blocks held in the device tier; 0 only if lower tiers hold some
}

// Depths are a worker-rank's cumulative depths, in blocks: at each tier, how many
// leading blocks of the query are each held in that tier or one before it. No one is
// less than the one before, and the last is > 0.
type Depths [Tiers]int

// Result is a caller-owned answer; reused, it makes queries free of allocation.
// The zero value is ready. It serves one Find at a time.
type Result struct {
	Matches     []Match // each worker-rank at most once; deepest first if TopK was given, else in no order
	LowerBounds bool    // EarlyExit stopped the search: the depths are lower bounds

	tiered bool     // unions were searched
	depths []Depths // of Matches, if tiered

	slots     SlotMatches
	only      SlotSet
	places    []uint32 // by device slot, where in Matches its worker is, + 1; all 0 between searches
	all       []Match
	allDepths []Depths
	lots      []uint64
}

// Depths returns by tier how deep Matches[i] is.
func (r *Result) Depths(i int) Depths {
	if r.tiered {
		return r.depths[i]
	}
	d := r.Matches[i].Depth
	return Depths{d, d, d, d}
}

// reuseRetries is how often a Find starts over, because slots changed hands during
// it, before it takes the lock under which they are handed out.
const reuseRetries = 3

// Find makes r the answer to q. Workers that hold none of the query's leading
// blocks in any tier are absent. It runs on the caller's goroutine and never waits for
// a worker's events. With TopK, without EarlyExit and as long as no worker has a
// lower tier, it looks only at as many slots as can be among the k deepest, if Keep
// refuses none of those. A worker with lower tiers counts as several for EarlyExit,
// which stops the less for it.
func (x *Index) Find(q *Query, r *Result) {
	turn := uint64(0)
	if q.TopK > 0 {
		turn = x.queries.Add(1)
		if !q.EarlyExit {
			n := x.searchOwned(q, r, turn)
			r.keep(q.Keep)
			if r.tiered {
				r.deepEnough(q.MinDepth)
				r.selectDeepest(q.TopK, len(q.Locals), turn)
				return
			}
			if len(r.Matches) == n || n < q.TopK {
				r.deepEnough(q.MinDepth)
				return
			}
			// Others take the places of those that were refused.
		}
	}
	x.searchOwned(q, r, 0)
	r.keep(q.Keep)
	r.deepEnough(q.MinDepth)
	if q.TopK > 0 {
		r.selectDeepest(q.TopK, len(q.Locals), turn)
	}
}

// deepEnough leaves out the workers whose deepest depth is below least.
func (r *Result) deepEnough(least int) {
	if least > 1 { // no match is shallower
		r.filter(func(i int) bool { return r.Depths(i)[Tiers-1] >= least })
	}
}

// keep leaves out the workers that f refuses; a nil f refuses none.
func (r *Result) keep(f func(*Worker) bool) {
	if f != nil {
		r.filter(func(i int) bool { return f(r.Matches[i].Worker) })
	}
}

// filter keeps the matches whose index f accepts.
func (r *Result) filter(f func(i int) bool) {
	kept := r.Matches[:0]
	for i, m := range r.Matches {
		if f(i) {
			if r.tiered {
				r.depths[len(kept)] = r.depths[i]
			}
			kept = append(kept, m)
		}
	}
	r.Matches = kept
}

// searchOwned fills r with workers, each credited with what it held itself: all
// that match or, if best is not 0 and r is not tiered, the q.TopK deepest ones, of which
// best draws lots among equals. It returns how many slots that were: fewer workers if some
// belong to nobody any more.
func (x *Index) searchOwned(q *Query, r *Result, best uint64) (n int) {
	for range reuseRetries {
		before := x.reuses.Load()
		n = x.search(q, r, best, false)
		if x.reuses.Load() == before {
			return n
		}
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.search(q, r, best, true)
}

// search does searchOwned's work. It is right if no slot was handed out again
// meanwhile.
func (x *Index) search(q *Query, r *Result, best uint64, locked bool) (n int) {
	opt := FindOptions{Only: x.only.Load(), EarlyExit: q.EarlyExit}
	r.tiered = opt.Only != nil
	if len(q.Workers) > 0 {
		r.only.Reset()
		opt.Only, r.tiered = &r.only, false
		if !locked {
			x.mu.RLock()
		}
		for _, name := range q.Workers {
			for _, w := range x.byName[name] {
				r.only.Add(w.slots[Device] - 1)
				for t := Host; t < Tiers; t++ {
					if union := w.unions[t].Load(); union != 0 {
						r.only.Add(Slot(union - 1))
						r.tiered = true
					}
				}
			}
		}
		if !locked {
			x.mu.RUnlock()
		}
	}
	var found []SlotMatch
	if best != 0 && !r.tiered {
		x.s.FindBest(q.Locals, q.TopK, opt, &r.slots)
		found = selectDeepest(r.slots.Matches, q.TopK, best, &r.lots)
	} else {
		x.s.Find(q.Locals, opt, &r.slots)
		found = r.slots.Matches
	}
	r.LowerBounds = r.slots.LowerBounds
	r.Matches = r.Matches[:0]
	owners := x.owners.Load()
	if owners == nil {
		return 0
	}
	if r.tiered {
		r.gather(x, found)
		return len(found)
	}
	for _, m := range found {
		// A slot beyond the loaded owners was handed out after them.
		if int(m.Slot) >= len(*owners) {
			owners = x.owners.Load()
		}
		if w := (*owners)[m.Slot].worker.Load(); w != nil {
			r.Matches = append(r.Matches, Match{w, m.Depth})
		}
	}
	return len(found)
}

// gather puts what each worker's slots hold into one match.
func (r *Result) gather(x *Index, found []SlotMatch) {
	r.depths = r.depths[:0]
	owners := *x.owners.Load()
	for _, m := range found {
		if int(m.Slot) >= len(owners) {
			owners = *x.owners.Load()
		}
		w := owners[m.Slot].worker.Load()
		if w == nil {
			continue
		}
		t, ok := w.level(m.Slot)
		if !ok {
			continue
		}
		device := int(w.slots[Device] - 1)
		if device >= len(r.places) {
			r.places = append(r.places, make([]uint32, device+1+device/8-len(r.places))...)
		}
		if r.places[device] == 0 {
			r.Matches = append(r.Matches, Match{Worker: w})
			r.depths = append(r.depths, Depths{})
			r.places[device] = uint32(len(r.Matches))
		}
		r.depths[r.places[device]-1][t] = m.Depth
	}
	r.settle()
}

// settle makes the depths cumulative. A union of which nothing was found has no slot of
// its own, or was searched at another moment than the one before it: it holds at least
// what that one does.
func (r *Result) settle() {
	for i := range r.Matches {
		m, d := &r.Matches[i], &r.depths[i]
		r.places[m.Worker.slots[Device]-1] = 0
		for t := Host; t < Tiers; t++ {
			d[t] = max(d[t], d[t-1])
		}
		m.Depth = d[Device]
	}
}

// selectDeepest keeps the k deepest of r's matches, deepest first, with a query of that
// many blocks.
func (r *Result) selectDeepest(k, blocks int, turn uint64) {
	all := r.slots.Matches[:0]
	for i, m := range r.Matches {
		d := m.Depth
		if r.tiered {
			d = r.depths[i].order(blocks)
		}
		all = append(all, SlotMatch{Slot(i), d}) // numbers in place of slots
	}
	r.slots.Matches = all
	r.all = append(r.all[:0], r.Matches...)
	r.Matches = r.Matches[:0]
	if r.tiered {
		r.allDepths = append(r.allDepths[:0], r.depths...)
		r.depths = r.depths[:0]
	}
	for _, m := range selectDeepest(all, k, turn, &r.lots) {
		r.Matches = append(r.Matches, r.all[m.Slot])
		if r.tiered {
			r.depths = append(r.depths, r.allDepths[m.Slot])
		}
	}
}

// order returns a number that sorts depths, for a query of that many blocks, tier by
// tier. It has room for all tiers below 32,768 blocks, else for the first ones.
func (d Depths) order(blocks int) (n int) {
	each := bits.Len(uint(blocks))
	for t := 0; t < Tiers && (t+1)*each < 64; t++ {
		n = n<<each | d[t]
	}
	return n
}

// selectDeepest moves the k deepest matches to the front, deepest first, and
// returns them. Which of equal depths come first depends on turn, and over many
// turns each does equally often. It works in the memory of scratch.
func selectDeepest(ms []SlotMatch, k int, turn uint64, scratch *[]uint64) []SlotMatch {
	turn *= 0x9e3779b97f4a7c15
	// The order of two slots of a depth: a hash of the slot and the turn, as good as
	// drawn by lot. Counting turns round would favour some when several callers ask
	// in step.
	lot := func(s Slot) uint64 {
		z := (uint64(s) + turn) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>29) * 0x94d049bb133111eb
		return z ^ z>>32
	}
	k = min(k, len(ms))
	heap := ms[:k] // least on top
	lots := (*scratch)[:0]
	for i := range heap {
		lots = append(lots, lot(heap[i].Slot))
	}
	*scratch = lots
	less := func(a, b int) bool {
		if heap[a].Depth != heap[b].Depth {
			return heap[a].Depth < heap[b].Depth
		}
		return lots[a] < lots[b]
	}
	down := func(i, n int) {
		for {
			c := 2*i + 1
			if c >= n {
				return
			}
			if c+1 < n && less(c+1, c) {
				c++
			}
			if !less(c, i) {
				return
			}
			heap[i], heap[c] = heap[c], heap[i]
			lots[i], lots[c] = lots[c], lots[i]
			i = c
		}
	}
	for i := k/2 - 1; i >= 0; i-- {
		down(i, k)
	}
	for _, m := range ms[k:] {
		if m.Depth < heap[0].Depth {
			continue
		}
		if l := lot(m.Slot); m.Depth > heap[0].Depth || l > lots[0] {
			heap[0], lots[0] = m, l
			down(0, k)
		}
	}
	for n := k - 1; n > 0; n-- {
		heap[0], heap[n] = heap[n], heap[0]
		lots[0], lots[n] = lots[n], lots[0]
		down(0, n)
	}
	return heap
}
