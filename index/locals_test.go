package index_test

import (
	"errors"
	"slices"
	"testing"

	"kvindex/index"
)

// Only runs are found by sequence hashes; another structure says that it cannot
// rather than answer that nobody holds anything.
func TestLocalsBySeqs(t *testing.T) {
	prompt := chainOf("prompt", 300)
	seqs := index.Chain(nil, prompt)
	x := index.New(index.NewRunIndex())
	store(t, x.AddWorker("a", 0, nil), index.Device, prompt[:200]...)
	store(t, x.AddWorker("b", 0, nil), index.Host, append(slices.Clone(prompt[:7]), 1, 2, 3)...)
	for _, n := range []int{0, 1, 8, 200, 300} {
		got, err := x.Locals(nil, seqs[:n])
		if want := prompt[:min(n, 200)]; err != nil || !slices.Equal(got, want) {
			t.Errorf("of %d blocks: %d, %v, want %d", n, len(got), err, len(want))
		}
	}
	for name, s := range map[string]index.Structure{
		"positional": index.NewPositionalIndex(0), "radix": index.NewRadixTree(0), "concurrent radix": index.NewConcurrentRadixTree(),
	} {
		if got, err := index.New(s).Locals(nil, seqs); !errors.Is(err, index.ErrNoSeqs) || len(got) > 0 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// Reused memory makes it free of allocation.
func TestLocalsAllocatesNothing(t *testing.T) {
	prompt := chainOf("prompt", 300)
	seqs := index.Chain(nil, prompt)
	x := index.New(index.NewRunIndex())
	store(t, x.AddWorker("a", 0, nil), index.Device, prompt...)
	buf := make([]index.LocalHash, 0, len(seqs))
	if n := testing.AllocsPerRun(10, func() { buf, _ = x.Locals(buf[:0], seqs) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
