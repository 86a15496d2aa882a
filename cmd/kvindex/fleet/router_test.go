package fleet

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestRouting runs the synthetic trace through two fleets of equal caches. By
// the index the hit share is well above that at random, and near that of one
// cache without bound; no worker gets more than 1.25 times the mean.
func TestRouting(t *testing.T) {
	for _, c := range []struct{ requests, workers, capacity int }{
		{800, 16, 4096},
		{3000, 8, 2048},
		{3000, 64, 4096},
		{1000, 64, 16384},
	} {
		t.Run(fmt.Sprintf("%d requests to %d workers of %d", c.requests, c.workers, c.capacity), func(t *testing.T) {
			indexed, random, ideal := New(c.workers, c.capacity), New(c.workers, c.capacity), New(1, 1<<30)
			blocks := mustBlocks(t, 64)
			router, rng := NewRouter(c.workers, 1), rand.New(rand.NewPCG(1, 1))
			for _, r := range all(t, NewSynthetic(c.requests, 1)) {
				p := blocks.Of(r)
				indexed.Serve(router.Pick(len(p.Seqs), indexed.Depths(nil, p)), p)
				random.Serve(rng.IntN(c.workers), p)
				ideal.Serve(0, p)
			}
			got, rnd, best := indexed.Stats().HitShare(), random.Stats().HitShare(), ideal.Stats().HitShare()
			if got < 1.5*rnd || got < 0.8*best {
				t.Errorf("hit share %.3f by the index, %.3f at random, %.3f at best", got, rnd, best)
			}
			if load := indexed.Stats().MaxOverMean(); load > 1.25 {
				t.Errorf("the busiest worker got %.3f times the mean", load)
			}
		})
	}
}

// TestRouterIsEvenWithoutAnswers: with nothing known of any cache, and with one
// worker that seems to hold everything, requests still spread.
func TestRouterIsEvenWithoutAnswers(t *testing.T) {
	const workers, requests = 10, 1000
	for name, depths := range map[string][]int{"nothing known": nil, "one holds all": {50, 0, 0, 0, 0, 0, 0, 0, 0, 0}} {
		r := NewRouter(workers, 1)
		s := Stats{Requests: make([]int, workers)}
		for range requests {
			s.Requests[r.Pick(50, depths)]++
		}
		if s.MaxOverMean() > 1.25 {
			t.Errorf("%s: the busiest worker got %.3f times the mean", name, s.MaxOverMean())
		}
	}
}

// TestRouterShortRuns: a run of few requests is spread as evenly as whole
// requests can be, once the bound leaves no choice.
func TestRouterShortRuns(t *testing.T) {
	const workers = 16
	for requests := 1; requests <= 4*workers; requests++ {
		r := NewRouter(workers, 1)
		most := 0
		got := make([]int, workers)
		for range requests {
			w := r.Pick(8, []int{8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
			got[w]++
			most = max(most, got[w])
		}
		if even := (requests + workers - 1) / workers; most > even {
			t.Errorf("%d requests: one worker got %d, evenly it would be %d", requests, most, even)
		}
	}
}
