// This file checks a structure under writers that share all they hold and lose it
// again at different times.

package indextest

import (
	"slices"
	"sync"
	"testing"
	"time"

	"kvindex/index"
)

// RunTurnover has two writers store and remove the same chains as fast as they can.
// What a slot remembers of a chain that it has lost must not matter at the moment
// when the other ends it. In the end the answers must be what the writers' own books
// say.
func RunTurnover(t *testing.T, empty func() index.Structure) {
	const (
		writers, chains, length = 2, 1500, 16
		kept                    = 500 // chains that a writer holds
		enough                  = 1500 * time.Millisecond
	)
	load := NewWorkload(5, 0, 0)
	prompts, leafFirst := make([][]index.LocalHash, chains), make([][]index.SeqHash, chains)
	for i := range prompts {
		prompts[i] = load.Fresh(length)
		leafFirst[i] = index.Chain(nil, prompts[i])
		slices.Reverse(leafFirst[i])
	}
	s := empty()
	var writing sync.WaitGroup
	var stored [writers]int // how many chains
	for slot := range index.Slot(writers) {
		writing.Go(func() {
			n := 0
			for began := time.Now(); n < chains || time.Since(began) < enough; n++ {
				p := n % chains
				if got, err := s.Store(slot, index.Stored{Position: index.NoPosition, Locals: prompts[p]}); got != (index.Effect{Stored: length}) || err != nil {
					t.Errorf("slot %d, chain %d, store: %+v, %v", slot, n, got, err)
					break
				}
				if n < kept {
					continue
				}
				if got := s.Remove(slot, leafFirst[(n-kept)%chains]); got != (index.Effect{Removed: length}) {
					t.Errorf("slot %d, chain %d, remove: %+v", slot, n, got)
					break
				}
			}
			stored[slot] = n
		})
	}
	writing.Wait()
	if t.Failed() {
		return
	}
	var m index.SlotMatches
	for p, q := range prompts {
		s.Find(q, index.FindOptions{}, &m)
		got, bad := byDepth(&m)
		if bad {
			t.Fatalf("a slot twice, or without depth, in %v", m.Matches)
		}
		for slot, n := range stored {
			want := 0
			if ago := ((n-1-p)%chains + chains) % chains; ago < kept { // how many came after the chain's last time
				want = length
			}
			if got[index.Slot(slot)] != want {
				t.Fatalf("chain %d: slot %d has depth %d, want %d", p, slot, got[index.Slot(slot)], want)
			}
		}
	}
}
