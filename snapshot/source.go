package snapshot

// This file asks the broker whether a snapshot still fits its events topic.

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/consumer"
)

// Stale says why what the table has of the source's partition can't be used,
// or "" if it can: another topic id or number of partitions, or a log that
// was truncated below the floor or a manifest's W, which shows in the end offset of the
// manifest's leader epoch. All of the partition's snapshots are then discarded.
// end is the log's, as it was after the table was read.
func Stale(ctx context.Context, cl *kgo.Client, src consumer.Topic, partition int32, end int64, t *Table) (reason string, err error) {
	last := make(map[int32]ID) // of each leader epoch the worker-rank with the highest W
	for id, e := range t.entries {
		m := e.manifest
		if m == nil {
			continue
		}
		if m.TopicID != src.ID {
			return fmt.Sprintf("%v: manifest is of topic id %x, %s now has %x", id, m.TopicID, src.Name, src.ID), nil
		}
		if m.Partitions != src.Partitions {
			return fmt.Sprintf("%v: manifest is of %d partitions, %s now has %d", id, m.Partitions, src.Name, src.Partitions), nil
		}
		if m.LeaderEpoch >= 0 {
			if o, ok := last[m.LeaderEpoch]; !ok || t.entries[o].manifest.W < m.W {
				last[m.LeaderEpoch] = id
			}
		}
	}
	if f := t.floor; f != nil && (f.TopicID != src.ID || f.Partitions != src.Partitions) {
		return fmt.Sprintf("floor is of topic id %x and %d partitions, %s now has %x and %d", f.TopicID, f.Partitions, src.Name, src.ID, src.Partitions), nil
	}
	if f := t.floor; f != nil && f.Offset > end {
		return fmt.Sprintf("floor is %d, but %s partition %d ends at %d: the log was truncated", f.Offset, src.Name, partition, end), nil
	}
	for epoch, id := range last {
		end, err := epochEnd(ctx, cl, src.Name, partition, epoch)
		if err != nil {
			return "", fmt.Errorf("topic %s partition %d: end offset of leader epoch %d: %w", src.Name, partition, epoch, err)
		}
		if w := t.entries[id].manifest.W; end < w {
			return fmt.Sprintf("%v: W is %d, but leader epoch %d of %s partition %d ends at %d: the log was truncated", id, w, epoch, src.Name, partition, end), nil
		}
	}
	return "", nil
}

// epochEnd returns the offset after the last record of a leader epoch.
func epochEnd(ctx context.Context, cl *kgo.Client, topic string, partition, epoch int32) (int64, error) {
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	req.ReplicaID = -1
	rt := kmsg.NewOffsetForLeaderEpochRequestTopic()
	rt.Topic = topic
	rp := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
	rp.Partition = partition
	rp.LeaderEpoch = epoch
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return 0, err
	}
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			return p.EndOffset, kerr.ErrorForCode(p.ErrorCode)
		}
	}
	return 0, fmt.Errorf("broker answered for no partition")
}
