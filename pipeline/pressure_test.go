package pipeline

// This file blocks one partition's goroutine under load: nobody else notices,
// and what waits for it waits at the broker, not in memory.

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/testcontainers"
)

// longEnv, set to anything, has the block last 30 s instead of 5:
//
//	KVINDEX_LONG=1 go test ./pipeline -run TestBlockedPartition -v
const longEnv = "KVINDEX_LONG"

func TestBlockedPartitionDelaysNobodyElse(t *testing.T) {
	const (
		partitions = 3
		blocked    = 0
		weight     = 32 << 10  // bytes of a record
		backlog    = 128 << 20 // bytes that pile up before the blocked partition, at least
		mostHeap   = 40 << 20  // bytes of heap that they may cost
	)
	hold := 5 * time.Second
	if os.Getenv(longEnv) != "" {
		hold = 30 * time.Second
	}

	// Its own process, so that the log's memory is not this one's.
	r := newRig(t, testcontainers.NewNative(t, testcontainers.NativeConfig{}), partitions)
	var blocking atomic.Bool
	release := make(chan struct{})
	in := r.start(func(s *Stage) {
		s.beforeRecord = func(partition int32, _ int64) {
			if partition == blocked && blocking.Load() {
				<-release
			}
		}
	})

	// A long producer name is weight without blocks, which the oracle would
	// take long to follow.
	cl := testcontainers.Client(t, r.broker, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(r.cfg.Topic),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
	var workers []*producer
	for p := range int32(partitions) {
		w := r.produce(fmt.Sprintf("w-%d", p), 0)
		w.partition = p
		w.batch.Producer = bytes.Repeat([]byte("p"), weight)
		workers = append(workers, w)
	}
	sent := make([]int64, partitions) // bytes
	n := uint64(0)
	round := func() {
		t.Helper()
		var recs []*kgo.Record
		for _, w := range workers {
			for range 32 {
				n++
				value := w.encode(stored(nil, locals(n%64, 4)...))
				recs = append(recs, &kgo.Record{Partition: w.partition, Key: w.batch.Worker, Value: value})
				sent[w.partition] += int64(len(value))
			}
		}
		if err := cl.ProduceSync(t.Context(), recs...).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	// othersApply waits until all but the blocked partition are at the end and
	// returns how long that took.
	othersApply := func() time.Duration {
		t.Helper()
		ends := testcontainers.StableOffsets(t, r.broker, r.cfg.Topic)
		began := time.Now()
		in.eventually(func() error {
			for p, at := range in.Positions(nil) {
				if p != blocked && at.Next < ends[p] {
					return fmt.Errorf("partition %d: position %d of %d", p, at.Next, ends[p])
				}
			}
			return nil
		})
		return time.Since(began)
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}

	var free, beside []time.Duration
	for range 10 {
		round()
		free = append(free, othersApply())
	}
	in.caughtUp()
	least := heap()

	blocking.Store(true)
	stuck := in.Positions(nil)[blocked].Next
	sent[blocked] = 0
	var most int64
	for until := time.Now().Add(hold); time.Now().Before(until) || sent[blocked] < backlog; {
		round()
		beside = append(beside, othersApply())
		now := heap()
		least = min(least, now) // what earlier tests left goes meanwhile
		most = max(most, now-least)
	}
	status := in.Status().Partitions[blocked]
	if status.Position != stuck || !status.Paused {
		t.Errorf("blocked partition: position %d, paused %v, want it stuck at %d and paused", status.Position, status.Paused, stuck)
	}
	if status.Lag <= 0 {
		t.Errorf("blocked partition: lag %d, want what was produced meanwhile", status.Lag)
	}
	if most > mostHeap {
		t.Errorf("the heap grew by up to %d MiB while %d MiB waited, want at most %d", most>>20, sent[blocked]>>20, mostHeap>>20)
	}
	slices.Sort(free)
	slices.Sort(beside)
	t.Logf("others caught up after each of %d rounds in %v (median; %v before the block), at most %v; %d MiB waited, heap grew by up to %d MiB",
		len(beside), beside[len(beside)/2], free[len(free)/2], beside[len(beside)-1], sent[blocked]>>20, most>>20)
	if slowest := beside[len(beside)/2]; slowest > free[len(free)/2]+hold/2 {
		t.Errorf("others catch up in %v beside a blocked partition, in %v without", slowest, free[len(free)/2])
	}

	blocking.Store(false)
	close(release)
	in.same(1, 100)
	if in.Status().Partitions[blocked].Paused {
		t.Error("the partition that caught up is still paused")
	}
	if n := in.counted(restores); n != partitions {
		t.Errorf("%d restores, want one a partition: nothing was lost", n)
	}
}
