// This file makes a broker compact a topic now.

package testcontainers

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// compactTimeout bounds a compaction. The brokers started here need 1 to 3 s; an outside one may clean only every 15 s.
const compactTimeout = 2 * time.Minute

// compactNow are the topic configs under which a real broker compacts at once.
var compactNow = map[string]string{
	"segment.ms":                "100",
	"min.cleanable.dirty.ratio": "0.01",
	"min.compaction.lag.ms":     "0",
	"max.compaction.lag.ms":     "200",
	"delete.retention.ms":       "0",
}

// Compact has the broker compact a topic (of cleanup.policy=compact) and returns, by partition, how many committed records that
// removed. It waits until, before each partition's last stable offset as it was at the call, only the last record of each key
// is left and no tombstone; records after an open transaction's first offset are not touched.
//
// A real broker compacts no segment that it still appends to, and begins a new one only on an append. The appends that make it
// do so are transactions that are aborted: they move the end offset, and a read_committed reader never sees them. So the log's
// last committed record may lie any distance before its end afterwards, with gaps and markers between. The topic's
// configs are what they were.
func Compact(t testing.TB, b Broker, topic string) (removed []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), compactTimeout)
	defer cancel()
	removed, err := compact(ctx, b, topic)
	if err != nil {
		t.Fatalf("compact topic %s: %v", topic, err)
	}
	return removed
}

func compact(ctx context.Context, b Broker, topic string) (removed []int, err error) {
	before, err := readCommitted(ctx, b, topic)
	if err != nil {
		return nil, err
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers()...), kgo.MetadataMinAge(250*time.Millisecond),
		kgo.TransactionalID(Name("compact-filler")), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	adm := kadm.NewClient(cl)
	ends, err := offsetsOf(ctx, adm, topic, (*kadm.Client).ListCommittedOffsets)
	if err != nil {
		return nil, err
	}
	restore, err := alterConfigs(ctx, adm, topic, compactNow)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, restore()) }()

	var after [][]*kgo.Record
	err = poll(ctx, func() error {
		if err := appendAborted(ctx, cl, topic, len(ends)); err != nil {
			return stop(err)
		}
		if k, ok := b.(*Kfake); ok {
			k.Cluster().Compact()
		}
		if after, err = readCommitted(ctx, b, topic); err != nil {
			return stop(err)
		}
		for p := range after {
			after[p] = upTo(after[p], ends[p])
			if err := compacted(after[p]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for p := range before {
		removed = append(removed, len(upTo(before[p], ends[p]))-len(after[p]))
	}
	return removed, nil
}

// upTo returns the records before offset end.
func upTo(records []*kgo.Record, end int64) []*kgo.Record {
	for i, r := range records {
		if r.Offset >= end {
			return records[:i]
		}
	}
	return records
}

// compacted returns nil if each key is there once and has a value.
func compacted(records []*kgo.Record) error {
	last := make(map[string]int64)
	for _, r := range records {
		if at, ok := last[string(r.Key)]; ok {
			return fmt.Errorf("%s[%d] still has key %q at offset %d and at %d", r.Topic, r.Partition, r.Key, at, r.Offset)
		}
		if r.Value == nil {
			return fmt.Errorf("%s[%d] still has the tombstone of key %q at offset %d", r.Topic, r.Partition, r.Key, r.Offset)
		}
		last[string(r.Key)] = r.Offset
	}
	return nil
}

// appendAborted appends to every partition a transaction that is aborted.
func appendAborted(ctx context.Context, cl *kgo.Client, topic string, partitions int) error {
	if err := cl.BeginTransaction(); err != nil {
		return err
	}
	var records []*kgo.Record
	for p := range partitions {
		records = append(records, &kgo.Record{Topic: topic, Partition: int32(p), Key: []byte("compact-filler"), Value: []byte("aborted")})
	}
	if err := cl.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return fmt.Errorf("produce filler records: %w", err)
	}
	if err := cl.EndTransaction(ctx, kgo.TryAbort); err != nil {
		return fmt.Errorf("abort filler records: %w", err)
	}
	return nil
}

// alterConfigs sets topic configs and returns what puts the former ones back.
func alterConfigs(ctx context.Context, adm *kadm.Client, topic string, configs map[string]string) (restore func() error, err error) {
	described, err := adm.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return nil, err
	}
	rc, err := described.On(topic, nil)
	if err == nil {
		err = rc.Err
	}
	if err != nil {
		return nil, err
	}
	former := make(map[string]*string) // nil: not set on the topic
	for _, c := range rc.Configs {
		if _, ok := configs[c.Key]; ok && c.Source.String() == "DYNAMIC_TOPIC_CONFIG" {
			former[c.Key] = c.Value
		}
	}
	var set, unset []kadm.AlterConfig
	for k, v := range configs {
		set = append(set, kadm.AlterConfig{Op: kadm.SetConfig, Name: k, Value: &v})
		if f := former[k]; f != nil {
			unset = append(unset, kadm.AlterConfig{Op: kadm.SetConfig, Name: k, Value: f})
		} else {
			unset = append(unset, kadm.AlterConfig{Op: kadm.DeleteConfig, Name: k})
		}
	}
	alter := func(ctx context.Context, configs []kadm.AlterConfig) error {
		resp, err := adm.AlterTopicConfigs(ctx, configs, topic)
		if err != nil {
			return err
		}
		_, err = resp.On(topic, func(r *kadm.AlterConfigsResponse) error { return r.Err })
		return err
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), opTimeout) // also after the caller's has ended
		defer cancel()
		return alter(ctx, unset)
	}, alter(ctx, set)
}
