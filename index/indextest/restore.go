// This file checks a structure that is restored while it is in use.

package indextest

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"kvindex/index"
)

// RunRestore restores dumps of many slots, with holes and orphans, by four
// goroutines at once, while four writers change other slots of the same prompts
// and three readers ask. Each answer must have been possible, and in the end the
// restored slots are what was dumped. Run it with -race.
func RunRestore(t *testing.T, empty func() index.Structure) {
	const (
		slots     = 40 // restored
		restorers = 4
		writers   = 4 // each of a slot of its own, after those
		readers   = 3
		base      = 4 // blocks that every prompt has and every writer always
	)
	rng := rand.New(rand.NewPCG(3, 3))
	var prompts [][]index.LocalHash
	for range 30 {
		p := blocks("base", base)
		for len(p) < 60 {
			p = append(p, index.LocalHash(1+rng.IntN(2)*rng.IntN(2)))
		}
		prompts = append(prompts, p)
	}
	from, oracle := empty(), NewOracle()
	for slot := range index.Slot(slots) {
		for range 10 {
			p := prompts[rng.IntN(len(prompts))]
			at, start := rng.IntN(len(p)), rng.IntN(2)*rng.IntN(len(p))
			ev := part(p, start, start+1+rng.IntN(len(p)-start))
			lost := index.Chain(nil, p)[at : at+1]
			for _, s := range []index.Structure{from, oracle} {
				if _, err := s.Store(slot, ev); err != nil {
					t.Fatal(err)
				}
				s.Remove(slot, lost)
			}
		}
	}

	to := empty()
	for w := range index.Slot(writers) {
		_, _ = to.Store(slots+w, part(prompts[0], 0, base))
	}
	var restoring, using sync.WaitGroup
	var done atomic.Bool
	for g := range index.Slot(restorers) {
		restoring.Go(func() {
			for slot := g; slot < slots; slot += restorers {
				from.Dump(slot, func(chain index.Stored) bool {
					if e, err := to.Store(slot, chain); err != nil || e.Stored != len(chain.Locals) {
						t.Errorf("slot %d, %+v: %+v, %v", slot, chain, e, err)
						return false
					}
					return true
				})
			}
		})
	}
	for w := range index.Slot(writers) {
		using.Go(func() {
			rng := rand.New(rand.NewPCG(4, uint64(w)))
			for n := 0; n < 30 || !done.Load(); n++ {
				p := prompts[rng.IntN(len(prompts))]
				_, _ = to.Store(slots+w, part(p, 0, len(p)))
				seqs := index.Chain(nil, p)[base:]
				if rng.IntN(2) == 0 {
					slices.Reverse(seqs)
				}
				to.Remove(slots+w, seqs)
			}
		})
	}
	for r := range readers {
		using.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(r)))
			var m index.SlotMatches
			for n := 0; n < 30 || !done.Load(); n++ {
				p := prompts[rng.IntN(len(prompts))]
				to.Find(p, index.FindOptions{}, &m)
				got, bad := byDepth(&m)
				whole := oracle.Depths(p)
				for slot, d := range got {
					if slot < slots && d > whole[slot] {
						bad = true
					}
				}
				for w := range index.Slot(writers) {
					if got[slots+w] < base {
						bad = true
					}
				}
				if bad {
					t.Errorf("while %v are restored: %v", whole, got)
					return
				}
			}
		})
	}
	restoring.Wait()
	done.Store(true)
	using.Wait()
	for w := range index.Slot(writers) {
		to.Clear(slots + w)
	}
	var m index.SlotMatches
	for _, p := range prompts {
		to.Find(p, index.FindOptions{}, &m)
		if got, bad := byDepth(&m); bad || !maps.Equal(got, oracle.Depths(p)) {
			t.Fatalf("after the restore: got %v, want %v", m.Matches, oracle.Depths(p))
		}
	}
	for slot := range index.Slot(slots) {
		if got, want := content(to, slot), content(oracle, slot); !maps.Equal(got, want) {
			t.Fatalf("slot %d after the restore: %v, want %v", slot, got, want)
		}
	}
	if got, want := to.Stats().Blocks, oracle.Stats().Blocks; got != want {
		t.Fatalf("after the restore: %d blocks, want %d", got, want)
	}
}
