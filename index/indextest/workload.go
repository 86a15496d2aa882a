// This file makes synthetic events and queries for benchmarks and churn.

package indextest

import (
	"math/rand/v2"

	"kvindex/index"
)

// Workload makes prompts like those of conversations: most begin with one of a
// few system prompts, and many continue an earlier prompt. The same seed gives the
// same prompts.
type Workload struct {
	rng     *rand.Rand
	systems [][]index.LocalHash
	recent  [][]index.LocalHash
}

// NewWorkload returns a Workload with that many system prompts of that many
// blocks.
func NewWorkload(seed uint64, systems, systemBlocks int) *Workload {
	w := &Workload{rng: rand.New(rand.NewPCG(seed, seed))}
	for range systems {
		w.systems = append(w.systems, w.Fresh(systemBlocks))
	}
	return w
}

// Fresh returns n blocks that no other prompt has.
func (w *Workload) Fresh(n int) []index.LocalHash {
	out := make([]index.LocalHash, n)
	for i := range out {
		out[i] = index.LocalHash(w.rng.Uint64() | 1)
	}
	return out
}

// Prompt returns a prompt that adds n blocks to a system prompt or, in half of
// the cases, to one of the last 256 prompts, unless that has more than
// maxBlocks. The caller must not change it.
func (w *Workload) Prompt(n, maxBlocks int) []index.LocalHash {
	var base []index.LocalHash
	if len(w.systems) > 0 {
		base = w.systems[w.rng.IntN(len(w.systems))]
	}
	if len(w.recent) > 0 && w.rng.IntN(2) == 0 {
		if r := w.recent[w.rng.IntN(len(w.recent))]; len(r)+n <= maxBlocks {
			base = r
		}
	}
	p := append(append(make([]index.LocalHash, 0, len(base)+n), base...), w.Fresh(n)...)
	if len(w.recent) < 256 {
		w.recent = append(w.recent, p)
	} else {
		w.recent[w.rng.IntN(len(w.recent))] = p
	}
	return p
}
