// This file answers queries: it searches the structure, turns slots into
// workers without ever mistaking one for its successor, filters and selects.

package index

// Query asks for the leading blocks that workers hold.
type Query struct {
	Locals    []LocalHash        // of the prompt's full blocks, from the first
	Workers   []string           // if not empty, only these workers (all their ranks)
	Keep      func(*Worker) bool // if not nil, workers it refuses are left out, before TopK
	TopK      int                // if > 0, only the k deepest, ties broken anew from query to query
	EarlyExit bool               // stop once at most one worker still matches; Keep is not asked before
}

// Match is how deep one worker-rank's device tier matches.
type Match struct {
	Worker *Worker
	Depth  int // leading blocks held, > 0
}

// Result is a caller-owned answer; reused, it makes queries free of allocation.
// The zero value is ready. It serves one Find at a time.
type Result struct {
	Matches     []Match // each worker-rank at most once; deepest first if TopK was given, else in no order
	LowerBounds bool    // EarlyExit stopped the search: the depths are lower bounds

	slots SlotMatches
	only  SlotSet
	all   []Match
	lots  []uint64
}

// reuseRetries is how often a Find starts over because slots changed hands
// under it before it holds back those who hand them out.
const reuseRetries = 3

// Find makes r the answer to q. Workers that hold none of the query's leading
// blocks are absent. It runs on the caller's goroutine and never waits for a
// worker's events. With TopK and without EarlyExit it looks only at as many slots
// as can be among the k deepest, as long as Keep refuses none of those.
func (x *Index) Find(q *Query, r *Result) {
	turn := uint64(0)
	if q.TopK > 0 {
		turn = x.queries.Add(1)
		if !q.EarlyExit {
			n := x.searchOwned(q, r, turn)
			r.keep(q.Keep)
			if len(r.Matches) == n || n < q.TopK {
				return
			}
			// Others take the places of those that were refused.
		}
	}
	x.searchOwned(q, r, 0)
	r.keep(q.Keep)
	if q.TopK > 0 {
		r.selectDeepest(q.TopK, turn)
	}
}

// keep leaves out the workers that f refuses.
func (r *Result) keep(f func(*Worker) bool) {
	if f == nil {
		return
	}
	kept := r.Matches[:0]
	for _, m := range r.Matches {
		if f(m.Worker) {
			kept = append(kept, m)
		}
	}
	r.Matches = kept
}

// searchOwned fills r with workers, each credited with what it held itself: all
// that match or, if best is not 0, the q.TopK deepest ones, of which best draws
// lots among equals. It returns how many slots that were: fewer workers if some
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
	if len(q.Workers) > 0 {
		r.only.Reset()
		opt.Only = &r.only
		if !locked {
			x.mu.RLock()
		}
		for _, name := range q.Workers {
			for _, w := range x.byName[name] {
				r.only.Add(w.slots[Device] - 1)
			}
		}
		if !locked {
			x.mu.RUnlock()
		}
	}
	var found []SlotMatch
	if best != 0 {
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

// selectDeepest leaves the k deepest of r's matches, deepest first.
func (r *Result) selectDeepest(k int, turn uint64) {
	all := r.slots.Matches[:0]
	for i, m := range r.Matches {
		all = append(all, SlotMatch{Slot(i), m.Depth}) // numbers in place of slots
	}
	r.slots.Matches = all
	r.all = append(r.all[:0], r.Matches...)
	r.Matches = r.Matches[:0]
	for _, m := range selectDeepest(all, k, turn, &r.lots) {
		r.Matches = append(r.Matches, r.all[m.Slot])
	}
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
