// This file checks that a structure's memory is that of what is live.

package indextest

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"kvindex/index"
)

// churnEvents is how many blocks RunChurn stores and removes in each order of
// removal, and churnTime how long it does so at most with -short: a slow structure
// under the race detector would take minutes.
const (
	churnEvents = 1_000_000
	churnTime   = 2 * time.Second
)

// RunChurn stores and removes a million blocks round a fixed live set, in each
// order of removal, and checks that heap and entries end where they were.
func RunChurn(t *testing.T, empty func() index.Structure) {
	for _, order := range []string{"leaf first", "root first", "middle out", "random", "newest chain first", "by clear"} {
		t.Run(order, func(t *testing.T) { churn(t, empty(), order) })
	}
}

// churnSlot is what a slot of the churn holds: chains of the same length, all
// behind one root. Two each have the same content but for their second block.
type churnSlot struct {
	chains [][]index.LocalHash
}

func churn(t *testing.T, s index.Structure, order string) {
	const (
		slots  = 4
		chains = 20 // live, a slot
		length = 40 // of a chain, behind the root
		turn   = slots * chains * length
	)
	rng := rand.New(rand.NewPCG(7, 7))
	w := NewWorkload(7, 0, 0)
	root := w.Fresh(1)
	base := heap()
	all := make([]churnSlot, slots)
	var content []index.LocalHash
	add := func(slot int) {
		if rng.IntN(2) == 0 || content == nil {
			content = w.Fresh(length - 1)
		}
		chain := slices.Concat(root, w.Fresh(1), content)
		if _, err := s.Store(index.Slot(slot), part(chain, 0, len(chain))); err != nil {
			t.Fatal(err)
		}
		all[slot].chains = append(all[slot].chains, chain)
	}
	drop := func(slot int) {
		c := &all[slot]
		i := 0
		switch order {
		case "newest chain first":
			i = len(c.chains) - 2
		case "random":
			i = rng.IntN(len(c.chains) - 1)
		}
		seqs := index.Chain(nil, c.chains[i])[1:]
		switch order {
		case "random":
			rng.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
		case "middle out":
			// The two halves from their ends in the middle, in turn.
			up, down := slices.Clone(seqs[length/2:]), slices.Clone(seqs[:length/2])
			slices.Reverse(down)
			for i := range up {
				seqs[2*i], seqs[2*i+1] = up[i], down[i]
			}
		case "root first":
		default:
			slices.Reverse(seqs)
		}
		if e := s.Remove(index.Slot(slot), seqs); e.Removed != length {
			t.Fatalf("removed %d blocks of %d", e.Removed, length)
		}
		c.chains = slices.Delete(c.chains, i, i+1)
	}
	replaceAll := func() {
		for range chains {
			for slot := range slots {
				add(slot)
				drop(slot)
			}
		}
		if order == "by clear" {
			for slot := range slots {
				s.Clear(index.Slot(slot))
				all[slot].chains = nil
				for range chains {
					add(slot)
				}
			}
		}
	}
	for range chains {
		for slot := range slots {
			add(slot)
		}
	}
	replaceAll()
	replaceAll()
	live, before := heap(), s.Stats()
	events, start := 0, time.Now()
	for events < churnEvents && (!testing.Short() || time.Since(start) < churnTime) {
		replaceAll()
		events += 2 * turn
	}
	t.Logf("%d blocks stored and removed", events)
	after, now := heap(), s.Stats()
	if now != before || now.Blocks != slots*(chains*length+1) {
		t.Errorf("stats were %+v and are %+v", before, now)
	}
	if limit := live + (live-base)/4 + 64<<10; after > limit {
		t.Errorf("the same live set took %d KiB and takes %d KiB", (live-base)>>10, (after-base)>>10)
	}
	// A peak leaves little behind: a third at most while something is live (a
	// shared table may keep its size), and nothing when all is gone.
	for range 10 * chains {
		for slot := range slots {
			add(slot)
		}
	}
	peak := heap()
	for slot := range slots {
		for len(all[slot].chains) > chains {
			drop(slot)
		}
	}
	if small := heap(); small > live+(peak-live)/3 {
		t.Errorf("a live set of %d KiB takes %d KiB after a peak of %d KiB", (live-base)>>10, (small-base)>>10, (peak-base)>>10)
	}
	for slot := range slots {
		for len(all[slot].chains) > 1 {
			drop(slot)
		}
		s.Remove(index.Slot(slot), index.Chain(nil, all[slot].chains[0]))
		all[slot].chains = nil
	}
	if st := s.Stats(); st != (index.Stats{}) {
		t.Errorf("stats after all was removed: %+v", st)
	}
	if empty := heap(); empty > base+(peak-base)/20+64<<10 {
		t.Errorf("a peak of %d KiB left %d KiB", (peak-base)>>10, (empty-base)>>10)
	}
	runtime.KeepAlive(s)
}

// heap returns the bytes of live objects.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
