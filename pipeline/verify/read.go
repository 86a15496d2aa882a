package verify

// This file feeds an Oracle from a topic.

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Read applies the committed records of a topic's partitions: of each in to,
// those from its offset in from, or else from the log's start, up to but not
// including its offset in to. It returns once all partitions got there, or with
// the first error; ctx bounds the wait for a to that the log has not reached.
//
// opts say how to reach the brokers. Read makes a client of its own: it must see
// transaction markers to know its position, as a partition may end in one. (A
// gap that compaction left at a partition's tail would not be seen; the events
// topic is not compacted.)
func (o *Oracle) Read(ctx context.Context, opts []kgo.Opt, topic string, from, to map[int32]int64) error {
	cl, err := kgo.NewClient(append(opts[:len(opts):len(opts)],
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.DisableFetchSessions(), // see consumer.ClientOptions
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return fmt.Errorf("topic %s: %w", topic, err)
	}
	defer cl.Close()
	position, err := start(ctx, cl, topic, from, to)
	if err != nil {
		return fmt.Errorf("topic %s: %w", topic, err)
	}
	offsets := make(map[int32]kgo.Offset)
	for p, at := range position {
		if at < to[p] {
			offsets[p] = kgo.NewOffset().At(at)
		}
	}
	if len(offsets) == 0 {
		return nil
	}
	cl.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: offsets})
	for left := len(offsets); left > 0; {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return fmt.Errorf("topic %s: %w; read up to %v of %v", topic, err, position, to)
		}
		fetches.EachError(func(_ string, p int32, e error) {
			err = fmt.Errorf("topic %s partition %d at offset %d: %w", topic, p, position[p], e)
		})
		if err != nil {
			return err
		}
		fetches.EachRecord(func(r *kgo.Record) {
			before := position[r.Partition]
			if before >= to[r.Partition] {
				return
			}
			if r.Offset < to[r.Partition] && !r.Attrs.IsControl() {
				o.Apply(r.Partition, r.Timestamp.UnixMilli(), r.Key, r.Value)
			}
			position[r.Partition] = r.Offset + 1
			if r.Offset+1 >= to[r.Partition] {
				left--
			}
		})
	}
	return nil
}

// start returns the offset to begin at of each partition in to.
func start(ctx context.Context, cl *kgo.Client, topic string, from, to map[int32]int64) (map[int32]int64, error) {
	position := make(map[int32]int64)
	missing := false
	for p := range to {
		at, ok := from[p]
		position[p] = at
		missing = missing || !ok
	}
	if !missing {
		return position, nil
	}
	starts, err := kadm.NewClient(cl).ListStartOffsets(ctx, topic)
	if err == nil {
		err = starts.Error()
	}
	if err != nil {
		return nil, err
	}
	for p := range to {
		if _, ok := from[p]; ok {
			continue
		}
		s, ok := starts.Lookup(topic, p)
		if !ok {
			return nil, fmt.Errorf("no partition %d", p)
		}
		position[p] = s.Offset
	}
	return position, nil
}
