package index

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// checkRuns checks what must hold of a RunIndex that nobody writes to.
func checkRuns(t *testing.T, x *RunIndex) {
	t.Helper()
	where := make(map[SeqHash]*run) // each block is in one run
	var inRuns, roots, runs int64
	for i := range x.table.Load().places {
		r := x.table.Load().places[i].run.Load()
		if r == nil || r == removed {
			continue
		}
		runs++
		if x.lookup(r.first, r.base, r.buf[0]) != r {
			t.Fatalf("run %x: not found by its first block", uint64(r.first))
		}
		if word, mask := x.table.Load().bit(x.mix(r.first)); word.Load()&mask == 0 {
			t.Fatalf("run %x: not in the filter", uint64(r.first))
		}
		if r.dead || r.ref.run.Load() != r || !r.mu.TryLock() {
			t.Fatalf("run %x: in the table and dead, locked or under another name", uint64(r.first))
		}
		r.mu.Unlock()
		n := r.n.Load()
		inRuns += int64(n)
		for p := range n {
			seq := r.seq(p)
			if other := where[seq]; other != nil {
				t.Fatalf("block %x: in the runs %x and %x", uint64(seq), uint64(r.first), uint64(other.first))
			}
			where[seq] = r
			if p > 0 && seq != Next(r.seq(p-1), r.buf[p]) {
				t.Fatalf("run %x: block %d has the wrong hash", uint64(r.first), p)
			}
		}
		var covering, tail uint32
		for s := range *x.slots.Load() {
			if c := r.cutoff(Slot(s)); c > n {
				t.Fatalf("run %x: slot %d holds %d of %d blocks", uint64(r.first), s, c, n)
			} else if c > 0 {
				covering++
			}
			if r.covers(Slot(s), n-1) {
				tail++
			}
		}
		if covering != r.covering || tail != r.tail || tail == 0 {
			t.Fatalf("run %x: covering %d, tail %d, counted as %d, %d", uint64(r.first), covering, tail, r.covering, r.tail)
		}
		if covering > 0 && r.base == 0 {
			roots++
		}
		if c := r.many.Load(); c != nil {
			live, used := 0, 0
			c.each(func(Slot, uint32) { live++ })
			for i := range c.words {
				if c.words[i].Load() != 0 {
					used++
				}
			}
			if live != c.live || used != c.used || live == 0 {
				t.Fatalf("run %x: a set of %d, %d words used, counted as %d, %d", uint64(r.first), live, used, c.live, c.used)
			}
		}
	}
	if inRuns != x.total().Entries || roots != x.roots.Load() || runs != x.runs.Load() {
		t.Fatalf("%d blocks, %d roots, %d runs, counted as %d, %d, %d", inRuns, roots, runs, x.total().Entries, x.roots.Load(), x.runs.Load())
	}
	pairs := int64(0)
	for _, k := range *x.slots.Load() {
		held, holes := 0, 0
		for _, r := range slices.Collect(distinct(where)) {
			for p := range r.n.Load() {
				if r.covers(k.slot, p) {
					held++
				}
			}
			if r.hole(k.slot) != nil {
				holes++
			}
		}
		if held != k.held || holes != k.holes {
			t.Fatalf("slot %d: %d blocks, %d holes, counted as %d, %d", k.slot, held, holes, k.held, k.holes)
		}
		if k.parked != nil {
			held += k.parked.held
			if k.parked.held == 0 {
				t.Fatalf("slot %d: keeps memory for no parked blocks", k.slot)
			}
		}
		pairs += int64(held)
	}
	if pairs != x.total().Blocks {
		t.Fatalf("%d pairs, counted as %d", pairs, x.total().Blocks)
	}
}

// distinct yields each run once.
func distinct(where map[SeqHash]*run) func(yield func(*run) bool) {
	seen := make(map[*run]bool)
	return func(yield func(*run) bool) {
		for _, r := range where {
			if !seen[r] {
				seen[r] = true
				if !yield(r) {
					return
				}
			}
		}
	}
}

// Writers that make, lose and make again the same few blocks, in every order,
// never make one twice: that would hide it from searches.
func TestRunsStayDisjoint(t *testing.T) {
	const slots, rounds, events = 24, 4, 200
	// Prompts that part and meet again: a word over few contents.
	prompt := func(rng *rand.Rand) []LocalHash {
		out := make([]LocalHash, 0, 40)
		for range 1 + rng.IntN(4) {
			for i := range 1 + rng.IntN(10) {
				out = append(out, LocalHash(1+i))
			}
			out = append(out, LocalHash(1+rng.IntN(3)))
		}
		return out
	}
	for name, x := range map[string]*RunIndex{"usual": NewRunIndex(), "small": NewSmallRunIndex(true), "small, tabled": NewSmallRunIndex(false)} {
		t.Run(name, func(t *testing.T) {
			for round := range uint64(rounds) {
				var wg sync.WaitGroup
				for s := range Slot(slots) {
					wg.Go(func() {
						rng := rand.New(rand.NewPCG(round, uint64(s)))
						for range events {
							p := prompt(rng)
							seqs := Chain(nil, p)
							switch from := rng.IntN(len(p)); rng.IntN(9) {
							case 0, 1, 2, 3:
								_, _ = x.Store(s, Stored{Position: NoPosition, Locals: p})
							case 4:
								ev := Stored{Position: int32(from), Locals: p[from:]}
								if from > 0 {
									ev.Parent, ev.HasParent = seqs[from-1], true
								}
								_, _ = x.Store(s, ev)
							case 5:
								x.Remove(s, seqs[from:])
							case 6, 7:
								slices.Reverse(seqs)
								x.Remove(s, seqs[:from+1])
							case 8:
								if rng.IntN(10) == 0 {
									x.Clear(s)
								}
							}
						}
					})
				}
				wg.Wait()
				checkRuns(t, x)
			}
			for s := range Slot(slots) {
				x.Clear(s)
			}
			checkRuns(t, x)
			if st := x.Stats(); st != (Stats{}) {
				t.Fatalf("stats after all was cleared: %+v", st)
			}
		})
	}
}

// Dumps restored by several goroutines at once give runs that are disjoint and
// counted right. (That they hold what was dumped is checked for every structure.)
func TestRestoreAtOnce(t *testing.T) {
	const slots, restorers = 40, 4
	rng := rand.New(rand.NewPCG(3, 3))
	from := NewRunIndex()
	for s := range Slot(slots) {
		for range 10 {
			p := []LocalHash{LocalHash(1 + rng.IntN(2))}
			for range rng.IntN(60) {
				p = append(p, LocalHash(1+rng.IntN(2)*rng.IntN(2)))
			}
			_, _ = from.Store(s, Stored{Locals: p})
			at := rng.IntN(len(p))
			from.Remove(s, Chain(nil, p)[at:at+1])
		}
	}
	checkRuns(t, from)
	to := NewRunIndex()
	var restoring sync.WaitGroup
	for g := range Slot(restorers) {
		restoring.Go(func() {
			for s := g; s < slots; s += restorers {
				from.Dump(s, func(b Stored) bool {
					_, _ = to.Store(s, b)
					return true
				})
			}
		})
	}
	restoring.Wait()
	checkRuns(t, to)
	if got, want := to.Stats(), from.Stats(); got.Blocks != want.Blocks {
		t.Errorf("restored %d blocks of %d", got.Blocks, want.Blocks)
	}
}

// A set of coverage words takes every form as slots come and go, and goes.
func TestCoverageGrowsAndShrinks(t *testing.T) {
	const slots = 1000
	x := NewRunIndex()
	locals := make([]LocalHash, 50)
	for i := range locals {
		locals[i] = LocalHash(i + 1)
	}
	seqs := Chain(nil, locals)
	rng := rand.New(rand.NewPCG(1, 1))
	order := rng.Perm(slots)
	sawDense, sawWords := false, false
	look := func() {
		r := x.lookup(seqs[0], 0, locals[0])
		if r == nil {
			return
		}
		if c := r.many.Load(); c != nil {
			sawDense = sawDense || c.dense != nil
			sawWords = sawWords || c.dense == nil && sawDense
		}
	}
	for i, s := range order {
		_, _ = x.Store(Slot(s), Stored{Locals: locals[:1+s%50]})
		if i%100 == 0 {
			checkRuns(t, x)
		}
		look()
	}
	checkRuns(t, x)
	if !sawDense {
		t.Error("a run that all slots hold has no array by slot")
	}
	for i, s := range order {
		x.Remove(Slot(s), seqs[1+s%50/2:1+s%50])
		x.Remove(Slot(s), seqs[:1+s%50])
		if i%100 == 0 {
			checkRuns(t, x)
		}
		look()
	}
	if !sawWords {
		t.Error("the array by slot stayed to the last")
	}
	checkRuns(t, x)
	if n := x.runs.Load(); n != 0 {
		t.Errorf("%d runs left", n)
	}
}
