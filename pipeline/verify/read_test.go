package verify

import (
	"context"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
)

// A topic whose partitions end in a commit marker, in an aborted transaction
// and in nothing at all.
func TestRead(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, "kv-events"))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	opts := []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}
	cl, err := kgo.NewClient(append(opts, kgo.TransactionalID("t"), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic("kv-events"))...)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	transaction := func(end kgo.TransactionEndTry, steps ...step) {
		t.Helper()
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			key, value := s.record(t)
			if err := cl.ProduceSync(ctx, &kgo.Record{Partition: s.partition, Key: key, Value: value}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		if err := cl.EndTransaction(ctx, end); err != nil {
			t.Fatal(err)
		}
	}
	transaction(kgo.TryCommit,
		step{worker: "a", events: events(root(1))}, // offset 0
		step{partition: 1, worker: "b", events: events(root(3))})
	transaction(kgo.TryCommit, step{worker: "a", seq: 1, events: events(part(1, 4))})             // offset 2, marker 3
	transaction(kgo.TryAbort, step{partition: 1, worker: "b", epoch: 1, events: events(root(4))}) // offset 2, marker 3
	whole := map[int32]int64{0: 4, 1: 4, 2: 0}

	for _, c := range []struct {
		name string
		from map[int32]int64
		to   map[int32]int64
		want map[WorkerRank]index.Depths
	}{
		{"to the end", nil, whole, map[WorkerRank]index.Depths{{"a", 0}: {4, 4, 4, 4}, {"b", 0}: {3, 3, 3, 3}}},
		{"up to an offset", nil, map[int32]int64{0: 2, 1: 2}, map[WorkerRank]index.Depths{{"a", 0}: {1, 1, 1, 1}, {"b", 0}: {3, 3, 3, 3}}},
		{"from an offset", map[int32]int64{0: 2}, map[int32]int64{0: 4, 1: 4}, map[WorkerRank]index.Depths{{"b", 0}: {3, 3, 3, 3}}},
		{"nothing", nil, map[int32]int64{0: 0}, map[WorkerRank]index.Depths{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := New(time.Hour)
			if err := o.Read(ctx, opts, "kv-events", c.from, c.to); err != nil {
				t.Fatal(err)
			}
			if got := o.Depths("m", 16, prompt); !reflect.DeepEqual(got, c.want) {
				t.Errorf("depths %v, want %v", got, c.want)
			}
		})
	}
	t.Run("in two goes", func(t *testing.T) {
		o := New(time.Hour)
		half := map[int32]int64{0: 1, 1: 0, 2: 0}
		for _, to := range []map[int32]int64{half, whole} {
			from := maps.Clone(half)
			if to[0] == 1 {
				from = nil
			}
			if err := o.Read(ctx, opts, "kv-events", from, to); err != nil {
				t.Fatal(err)
			}
		}
		if got := o.Depths("m", 16, prompt)[WorkerRank{"a", 0}][index.Device]; got != 4 || o.Counts()["applied"] != 3 {
			t.Errorf("depth %d, counts %v", got, o.Counts())
		}
	})
	t.Run("beyond the end", func(t *testing.T) {
		for wait := 200 * time.Millisecond; ; wait *= 2 { // until it is long enough to come to the end
			short, cancel := context.WithTimeout(ctx, wait)
			err := New(time.Hour).Read(short, opts, "kv-events", nil, map[int32]int64{0: 5})
			cancel()
			if err == nil || ctx.Err() != nil {
				t.Fatalf("error %v, want the position", err)
			}
			if strings.Contains(err.Error(), "map[0:4]") {
				return
			}
		}
	})
	t.Run("no such partition", func(t *testing.T) {
		if err := New(time.Hour).Read(ctx, opts, "kv-events", nil, map[int32]int64{7: 5}); err == nil {
			t.Error("no error")
		}
	})
}
