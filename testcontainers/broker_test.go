// Every kind of broker does what the stage relies on.

package testcontainers

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// patience bounds what a broker needs a moment for.
const patience = 2 * time.Minute

// consume reads the topic with a plain client until it has n records.
func consume(t *testing.T, b Broker, topic string, n int, opts ...kgo.Opt) []*kgo.Record {
	t.Helper()
	cl := Client(t, b, append(opts, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	var got []*kgo.Record
	for len(got) < n {
		fetches := cl.PollFetches(deadline(t, patience))
		if err := fetches.Err(); err != nil {
			t.Fatalf("after %d of %d records: %v", len(got), n, err)
		}
		got = append(got, fetches.Records()...)
	}
	return got
}

// produce writes records with the given values to partition 0, the value as the key.
func produce(t *testing.T, cl *kgo.Client, topic string, values ...string) {
	t.Helper()
	for _, v := range values {
		r := &kgo.Record{Topic: topic, Key: []byte(v), Value: []byte(v)}
		if err := cl.ProduceSync(deadline(t, patience), r).FirstErr(); err != nil {
			t.Fatalf("produce %q: %v", v, err)
		}
	}
}

func values(records []*kgo.Record) (out []string) {
	for _, r := range records {
		out = append(out, string(r.Value))
	}
	return out
}

func equal[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func TestRoundTrip(t *testing.T) {
	Each(t, func(t *testing.T, b Broker) {
		topic := NewTopic(t, b, "round-trip", 2, map[string]string{"message.timestamp.type": "LogAppendTime"})
		produce(t, Client(t, b, kgo.RecordPartitioner(kgo.ManualPartitioner())), topic, "a", "b", "c")
		equal(t, "consumed", values(consume(t, b, topic, 3)), []string{"a", "b", "c"})
		equal(t, "end offsets", EndOffsets(t, b, topic), []int64{3, 0})

		DeleteRecords(t, b, topic, 0, 2)
		equal(t, "start offsets after deleting records", StartOffsets(t, b, topic), []int64{2, 0})
		equal(t, "left", values(ReadCommitted(t, b, topic)[0]), []string{"c"})

		AddPartitions(t, b, topic, 3)
		equal(t, "end offsets after adding a partition", EndOffsets(t, b, topic), []int64{3, 0, 0})
		RecreateTopic(t, b, topic, 1, nil)
		equal(t, "end offsets after recreating", EndOffsets(t, b, topic), []int64{0})
	})
}

// A transaction ends in a marker, which takes an offset and which no reader gets as a record.
func TestTransaction(t *testing.T) {
	Each(t, func(t *testing.T, b Broker) {
		topic := NewTopic(t, b, "transaction", 1, nil)
		cl := Client(t, b, kgo.TransactionalID(Name("tx")))
		for i, how := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit} {
			if err := cl.BeginTransaction(); err != nil {
				t.Fatal(err)
			}
			produce(t, cl, topic, fmt.Sprint(i))
			if err := cl.EndTransaction(deadline(t, patience), how); err != nil {
				t.Fatal(err)
			}
		}
		equal(t, "end: three records, three markers", EndOffsets(t, b, topic), []int64{6})
		equal(t, "committed", values(ReadCommitted(t, b, topic)[0]), []string{"0", "2"})
		equal(t, "consumed", values(consume(t, b, topic, 2, kgo.FetchIsolationLevel(kgo.ReadCommitted()))), []string{"0", "2"})

		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		produce(t, cl, topic, "open")
		equal(t, "end with a transaction open", EndOffsets(t, b, topic), []int64{7})
		equal(t, "stable with a transaction open", StableOffsets(t, b, topic), []int64{6})
	})
}

func TestCompact(t *testing.T) {
	Each(t, func(t *testing.T, b Broker) {
		topic := NewTopic(t, b, "compact", 2, map[string]string{"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000"})
		cl := Client(t, b, kgo.RecordPartitioner(kgo.ManualPartitioner()))
		produce(t, cl, topic, "a", "b", "a", "c", "a")
		tombstone := &kgo.Record{Topic: topic, Key: []byte("c")}
		if err := cl.ProduceSync(t.Context(), tombstone).FirstErr(); err != nil {
			t.Fatal(err)
		}
		equal(t, "removed", Compact(t, b, topic), []int{4, 0})
		left := ReadCommitted(t, b, topic)[0]
		equal(t, "left", values(left), []string{"b", "a"})
		equal(t, "offsets", []int64{left[0].Offset, left[1].Offset}, []int64{1, 4})

		described, err := Admin(t, b).DescribeTopicConfigs(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range described[0].Configs {
			if c.Key == "min.compaction.lag.ms" && c.MaybeValue() != "3600000" || c.Key == "segment.ms" && c.MaybeValue() != "604800000" {
				t.Errorf("config after the compaction: %s = %s", c.Key, c.MaybeValue())
			}
		}
	})
}

// A node is killed and comes back on its address with its data.
func TestRestart(t *testing.T) {
	for _, kind := range []struct {
		name    string
		start   func(*testing.T) Broker
		restart func(*testing.T, Broker)
	}{
		{"kfake with a data directory",
			func(t *testing.T) Broker { return NewKfake(t, KfakeConfig{DataDir: t.TempDir()}) },
			func(t *testing.T, b Broker) {
				if err := b.(*Kfake).Restart(); err != nil {
					t.Fatal(err)
				}
			}},
		{"kafka, its one node", func(t *testing.T) Broker { return NewNative(t, NativeConfig{}) }, killAndStart},
		{"kafka, one node of three", func(t *testing.T) Broker { return NewNative(t, NativeConfig{Nodes: 3}) }, killAndStart},
	} {
		t.Run(kind.name, func(t *testing.T) {
			b := kind.start(t)
			topic := NewTopic(t, b, "restart", 1, nil)
			cl := Client(t, b)
			produce(t, cl, topic, "before")
			addrs := b.Brokers()
			kind.restart(t, b)
			produce(t, cl, topic, "after")
			equal(t, "addresses", b.Brokers(), addrs)
			equal(t, "consumed", values(consume(t, b, topic, 2)), []string{"before", "after"})
		})
	}
}

// killAndStart kills node 0. A cluster goes on without it; it comes back in any case.
func killAndStart(t *testing.T, b Broker) {
	n := b.(*Native)
	if err := n.Kill(0); err != nil {
		t.Fatal(err)
	}
	if err := n.Kill(0); err == nil {
		t.Error("killing a node twice: no error")
	}
	if len(n.Brokers()) > 1 {
		topic := NewTopic(t, n, "without-a-node", 1, nil)
		produce(t, Client(t, n), topic, "from the others")
	}
	if err := n.Start(0); err != nil {
		t.Fatal(err)
	}
}

// A paused node holds its connections and answers nothing until it is resumed.
func TestPause(t *testing.T) {
	n := NewNative(t, NativeConfig{})
	topic := NewTopic(t, n, "pause", 1, nil)
	cl := Client(t, n)
	produce(t, cl, topic, "before")
	if err := n.Pause(0); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	cl.Produce(t.Context(), &kgo.Record{Topic: topic, Value: []byte("during")}, func(_ *kgo.Record, err error) { done <- err })
	select {
	case err := <-done:
		t.Errorf("a paused broker answered: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	if err := n.Resume(0); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("after the pause: %v", err)
		}
	case <-time.After(patience):
		t.Error("no answer after the pause")
	}
}
