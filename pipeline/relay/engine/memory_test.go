// This file tests that memory is that of what is held.

package engine

import (
	"runtime"
	"testing"

	"kvindex/index"
)

// TestMemoryIsFlat stores and removes ever new blocks round a fixed number held,
// every tenth batch out of reach at first.
func TestMemoryIsFlat(t *testing.T) {
	const live, blocks, rounds = 100, 8, 20_000
	m := newMapping(t, VLLM, 16)
	var batch Batch
	var out Output
	apply := func(p []byte) {
		if err := batch.Decode(p, Limits{}); err != nil {
			t.Fatal(err)
		}
		out.Reset()
		for i := range batch.Events {
			m.Apply(&batch.Events[i], &out)
		}
	}
	heap := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	var before uint64
	for i := range rounds {
		if i == rounds/10 {
			before = heap()
		}
		p := blocksPayload(1, blocks, uint64(i*blocks))
		if i%10 == 0 {
			if err := batch.Decode(p, Limits{}); err != nil {
				t.Fatal(err)
			}
			orphan := batch.Events[0]
			orphan.Parent, orphan.HasParent = 1, true
			m.Apply(&orphan, &out)
		} else {
			apply(p)
		}
		if i >= live {
			apply(removedPayload(blocks, uint64((i-live)*blocks)))
		}
	}
	if after := heap(); after > before+before/5 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
	known, aside := m.Hashes()
	if known+aside != live*blocks || m.Len(index.Device) != known || m.Counts[UnknownRemoved] > 0 {
		t.Errorf("%d known, %d aside, %d held: %s", known, aside, m.Len(index.Device), counted(&m.Counts))
	}
}
