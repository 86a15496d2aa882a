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
}

// reuseRetries is how often a Find starts over because slots changed hands
// under it before it holds back those who hand them out.
const reuseRetries = 3

// Find makes r the answer to q. Workers that hold none of the query's leading
// blocks are absent. It runs on the caller's goroutine and never waits for a
// worker's events. TopK without EarlyExit is faster than without, where many
// workers match.
func (x *Index) Find(q *Query, r *Result) {
	best := q.TopK > 0 && !q.EarlyExit
	for {
		x.searchOwned(q, r, best)
		if q.Keep != nil {
			kept := r.Matches[:0]
			for _, m := range r.Matches {
				if q.Keep(m.Worker) {
					kept = append(kept, m)
				}
			}
			r.Matches = kept
		}
		// Of the best, some may have been refused, or belong to nobody any more:
		// others take their places.
		if !best || len(r.Matches) >= q.TopK || len(r.slots.Matches) < q.TopK {
			break
		}
		best = false
	}
	if q.TopK > 0 {
		r.Matches = selectDeepest(r.Matches, q.TopK, x.queries.Add(1))
	}
}

// searchOwned fills r with workers, each credited with what it held itself.
func (x *Index) searchOwned(q *Query, r *Result, best bool) {
	for range reuseRetries {
		before := x.reuses.Load()
		x.search(q, r, best, false)
		if x.reuses.Load() == before {
			return
		}
	}
	x.mu.RLock()
	x.search(q, r, best, true)
	x.mu.RUnlock()
}

// search fills r with the workers that own the matching slots, or the best q.TopK
// of them. It is right if no slot was handed out again meanwhile.
func (x *Index) search(q *Query, r *Result, best, locked bool) {
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
	if best {
		x.s.FindBest(q.Locals, q.TopK, opt, &r.slots)
	} else {
		x.s.Find(q.Locals, opt, &r.slots)
	}
	r.LowerBounds = r.slots.LowerBounds
	r.Matches = r.Matches[:0]
	owners := x.owners.Load()
	if owners == nil {
		return
	}
	for _, m := range r.slots.Matches {
		// A slot beyond the loaded owners was handed out after them.
		if int(m.Slot) >= len(*owners) {
			owners = x.owners.Load()
		}
		if w := (*owners)[m.Slot].worker.Load(); w != nil {
			r.Matches = append(r.Matches, Match{w, m.Depth})
		}
	}
}

// selectDeepest moves the k deepest matches to the front, deepest first, and
// returns them. Which of equal depths come first depends on turn, and over many
// turns each does equally often.
func selectDeepest(ms []Match, k int, turn uint64) []Match {
	turn *= 0x9e3779b97f4a7c15
	// The order of two workers of a depth: a hash of the slot and the turn, as
	// good as drawn by lot. Counting turns round would favour some workers when
	// several callers ask in step.
	lot := func(m *Match) uint64 {
		z := (uint64(m.Worker.slots[Device]) + turn) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>29) * 0x94d049bb133111eb
		return z ^ z>>32
	}
	less := func(a, b *Match) bool {
		if a.Depth != b.Depth {
			return a.Depth < b.Depth
		}
		return lot(a) < lot(b)
	}
	k = min(k, len(ms))
	heap := ms[:k] // least on top
	down := func(i, n int) {
		for {
			c := 2*i + 1
			if c >= n {
				return
			}
			if c+1 < n && less(&heap[c+1], &heap[c]) {
				c++
			}
			if !less(&heap[c], &heap[i]) {
				return
			}
			heap[i], heap[c] = heap[c], heap[i]
			i = c
		}
	}
	for i := k/2 - 1; i >= 0; i-- {
		down(i, k)
	}
	for i := k; i < len(ms); i++ {
		if less(&heap[0], &ms[i]) {
			heap[0] = ms[i]
			down(0, k)
		}
	}
	for n := k - 1; n > 0; n-- {
		heap[0], heap[n] = heap[n], heap[0]
		down(0, n)
	}
	return heap
}
