// This file is all workers together, and the statistics of what they did.

package fleet

import "kvindex/index"

// Fleet is a number of workers with a cache each.
type Fleet struct {
	caches  []*cache
	removed []index.SeqHash
	stats   Stats
}

// Stats is what a fleet has done so far, in requests and blocks.
type Stats struct {
	Requests []int // by worker
	Wanted   int   // blocks of all prompts
	Hit      int   // of Wanted, found in the cache of the worker that was asked
	Stored   int
	Removed  int
}

// Served is what a request did to its worker's cache.
type Served struct {
	Hit     int               // leading blocks that were cached
	Stored  []index.LocalHash // the blocks from Hit on that are cached now; empty if none
	Parent  index.SeqHash     // of the first of Stored, if Hit > 0
	Removed []index.SeqHash   // gone before Stored came, least recently used first
}

// New returns a fleet of empty caches of that many blocks.
func New(workers, capacity int) *Fleet {
	f := &Fleet{stats: Stats{Requests: make([]int, workers)}}
	for range workers {
		f.caches = append(f.caches, newCache(capacity))
	}
	return f
}

// Serve gives a request to a worker. The result is good until the next call.
func (f *Fleet) Serve(worker int, p Prompt) Served {
	hit, end, removed := f.caches[worker].use(p.Seqs, f.removed[:0])
	f.removed = removed
	s := Served{Hit: hit, Removed: removed, Stored: p.Locals[hit:end]}
	if hit > 0 {
		s.Parent = p.Seqs[hit-1]
	}
	f.stats.Requests[worker]++
	f.stats.Wanted += len(p.Seqs)
	f.stats.Hit += hit
	f.stats.Stored += len(s.Stored)
	f.stats.Removed += len(removed)
	return s
}

// Depth returns how many leading blocks of a prompt a worker holds.
func (f *Fleet) Depth(worker int, p Prompt) int { return f.caches[worker].depth(p.Seqs) }

// Depths says how many leading blocks of a prompt each worker holds, appending
// to dst: what an index that is never late would answer.
func (f *Fleet) Depths(dst []int, p Prompt) []int {
	for _, c := range f.caches {
		dst = append(dst, c.depth(p.Seqs))
	}
	return dst
}

// Stats returns the counts so far, a copy.
func (f *Fleet) Stats() Stats {
	s := f.stats
	s.Requests = append([]int(nil), s.Requests...)
	return s
}

// HitShare is the share of all prompts' blocks that were cached where the
// request went, from 0 to 1.
func (s Stats) HitShare() float64 {
	if s.Wanted == 0 {
		return 0
	}
	return float64(s.Hit) / float64(s.Wanted)
}

// MaxOverMean is the busiest worker's requests over the mean worker's; 0
// without requests.
func (s Stats) MaxOverMean() float64 {
	most, total := 0, 0
	for _, n := range s.Requests {
		most = max(most, n)
		total += n
	}
	if total == 0 {
		return 0
	}
	return float64(most) * float64(len(s.Requests)) / float64(total)
}
