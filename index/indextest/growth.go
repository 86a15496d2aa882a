// This file checks a structure whose slots become very many while it is in use.

package indextest

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"kvindex/index"
)

// RunGrowth lets four writers fill 10,000 slots, one after the other and all with
// blocks of one prompt, so that its first blocks have very many holders, while
// three readers check every answer. Then all slots but every hundredth lose them
// again. Run it with -race.
func RunGrowth(t *testing.T, empty func() index.Structure) {
	const (
		slots   = 10_000
		writers = 4
		readers = 3
		long    = 8
	)
	s, prompt := empty(), blocks("prompt", long)
	seqs := index.Chain(nil, prompt)
	depth := func(slot index.Slot) int { return 1 + int(slot*7)%long }

	// A slot's state: nothing, then maybe something, then its depth; and back.
	const none, some, all = 0, 1, 2
	state := make([]atomic.Uint32, slots)
	var failed atomic.Bool
	read := func(rng *rand.Rand, m *index.SlotMatches, before []uint32) {
		n := 1 + rng.IntN(long)
		k := 0
		for i := range state {
			before[i] = state[i].Load()
		}
		if rng.IntN(2) == 0 {
			k = 1 + rng.IntN(slots)
			s.FindBest(prompt[:n], k, index.FindOptions{}, m)
		} else {
			s.Find(prompt[:n], index.FindOptions{}, m)
		}
		got, bad := byDepth(m)
		if bad {
			failed.Store(true)
			t.Errorf("a slot twice, or without depth, in %d", len(m.Matches))
		}
		least := n + 1
		for slot, d := range got {
			least = min(least, d)
			if want := min(depth(slot), n); d > want || before[slot] == all && state[slot].Load() == all && d < want {
				failed.Store(true)
				t.Errorf("slot %d: depth %d, want %d", slot, d, want)
			}
		}
		deeper := 0 // left out, though they are among the best
		for i := range before {
			if _, found := got[index.Slot(i)]; !found && before[i] == all && state[i].Load() == all && (k == 0 || min(depth(index.Slot(i)), n) >= least) {
				deeper++
			}
		}
		if deeper > 0 {
			failed.Store(true)
			t.Errorf("best %d of %d blocks: %d slots are missing", k, n, deeper)
		}
	}
	during := func(write func(slot index.Slot)) {
		var writing, reading sync.WaitGroup
		var done atomic.Bool
		for g := range index.Slot(writers) {
			writing.Go(func() {
				for slot := g; slot < slots && !failed.Load(); slot += writers {
					write(slot)
				}
			})
		}
		for i := range uint64(readers) {
			reading.Go(func() {
				rng := rand.New(rand.NewPCG(3, i))
				var m index.SlotMatches
				before := make([]uint32, slots)
				for n := 0; (n < 3 || !done.Load()) && !failed.Load(); n++ {
					read(rng, &m, before)
				}
			})
		}
		writing.Wait()
		done.Store(true)
		reading.Wait()
		if failed.Load() {
			t.FailNow()
		}
		var m index.SlotMatches
		rng := rand.New(rand.NewPCG(4, 4))
		for range 5 {
			read(rng, &m, make([]uint32, slots))
		}
	}
	blocksOf := func(slot index.Slot) []index.SeqHash { return seqs[:depth(slot)] }

	during(func(slot index.Slot) {
		state[slot].Store(some)
		if _, err := s.Store(slot, part(prompt, 0, depth(slot))); err != nil {
			failed.Store(true)
			t.Error(err)
		}
		state[slot].Store(all)
	})
	during(func(slot index.Slot) {
		if slot%100 == 0 {
			return
		}
		state[slot].Store(some)
		if slot%2 == 0 {
			s.Remove(slot, blocksOf(slot))
		} else {
			s.Clear(slot)
		}
		state[slot].Store(none)
	})
	for slot := index.Slot(0); slot < slots; slot += 100 {
		s.Clear(slot)
	}
	if st := s.Stats(); st != (index.Stats{}) {
		t.Errorf("stats after all was cleared: %+v", st)
	}
}
