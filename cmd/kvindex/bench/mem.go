// This file measures memory.

package bench

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Mem is the memory that a structure has after all events of a workload, less
// what the process had before. Heap bytes are those of live objects, as the
// allocator rounds their sizes up; resident ones are taken after all free memory
// was given back.
type Mem struct {
	heading
	LivePairs            int    `json:"live_pairs"`      // of worker and block
	DistinctBlocks       int    `json:"distinct_blocks"` // held by any worker
	HeapMiB              figure `json:"heap_mib"`
	ResidentMiB          figure `json:"resident_mib"`
	HeapBytesPair        figure `json:"heap_bytes_per_pair"`
	HeapBytesDistinct    figure `json:"heap_bytes_per_distinct_block"`
	ResidentBytesPair    figure `json:"resident_bytes_per_pair"`
	ResidentBytesPerDist figure `json:"resident_bytes_per_distinct_block"`
}

// memory is what the process has, in bytes.
type memory struct{ heap, resident float64 }

func memoryNow() memory {
	// What a sync.Pool has is gone after two collections.
	runtime.GC()
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return memory{float64(m.HeapAlloc), float64(resident())}
}

func (b *bench) mem() error {
	w := b.workload
	pairs, distinct := w.Live()
	before := memoryNow()
	s, err := b.filled()
	if err != nil {
		return err
	}
	after := memoryNow()
	if held := s.Stats().Blocks; held != int64(pairs) {
		return fmt.Errorf("the structure holds %d blocks, and after the workload's events it should be %d", held, pairs)
	}
	runtime.KeepAlive(w)
	heap, resident := figure(after.heap-before.heap), figure(after.resident-before.resident)
	return b.tell(Mem{
		heading:              b.heading(),
		LivePairs:            pairs,
		DistinctBlocks:       distinct,
		HeapMiB:              heap / (1 << 20),
		ResidentMiB:          resident / (1 << 20),
		HeapBytesPair:        heap / figure(pairs),
		HeapBytesDistinct:    heap / figure(distinct),
		ResidentBytesPair:    resident / figure(pairs),
		ResidentBytesPerDist: resident / figure(distinct),
	})
}
