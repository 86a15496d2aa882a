package snapshot

// This file asks the broker whether a snapshot still fits its events topic.

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Source is an events topic as the broker knows it at a moment. A topic that
// was deleted and created again has another ID.
type Source struct {
	Topic      string
	ID         [16]byte
	Partitions int32
}

// FindSource asks the broker for the topic, past the client's caches: a topic
// created anew under the same name shows only in its ID.
func FindSource(ctx context.Context, cl *kgo.Client, topic string) (Source, error) {
	t, err := topicMetadata(ctx, cl, topic)
	if err != nil {
		return Source{}, fmt.Errorf("topic %s: metadata: %w", topic, err)
	}
	return Source{Topic: topic, ID: t.TopicID, Partitions: int32(len(t.Partitions))}, nil
}

func topicMetadata(ctx context.Context, cl *kgo.Client, topic string) (kmsg.MetadataResponseTopic, error) {
	req := kmsg.NewPtrMetadataRequest()
	rt := kmsg.NewMetadataRequestTopic()
	rt.Topic = kmsg.StringPtr(topic)
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return kmsg.MetadataResponseTopic{}, err
	}
	if len(resp.Topics) != 1 {
		return kmsg.MetadataResponseTopic{}, fmt.Errorf("broker answered for %d topics instead of one", len(resp.Topics))
	}
	return resp.Topics[0], kerr.ErrorForCode(resp.Topics[0].ErrorCode)
}

// Stale says why what the table has of the source's partition can't be used,
// or "" if it can: another topic id or number of partitions, or a log that
// was truncated below a manifest's W, which shows in the end offset of the
// manifest's leader epoch. All of the partition's snapshots are then discarded.
func Stale(ctx context.Context, cl *kgo.Client, src Source, partition int32, t *Table) (reason string, err error) {
	last := make(map[int32]ID) // of each leader epoch the worker-rank with the highest W
	for id, e := range t.entries {
		m := e.manifest
		if m == nil {
			continue
		}
		if m.TopicID != src.ID {
			return fmt.Sprintf("%v: manifest is of topic id %x, %s now has %x", id, m.TopicID, src.Topic, src.ID), nil
		}
		if m.Partitions != src.Partitions {
			return fmt.Sprintf("%v: manifest is of %d partitions, %s now has %d", id, m.Partitions, src.Topic, src.Partitions), nil
		}
		if m.LeaderEpoch >= 0 {
			if o, ok := last[m.LeaderEpoch]; !ok || t.entries[o].manifest.W < m.W {
				last[m.LeaderEpoch] = id
			}
		}
	}
	if f := t.floor; f != nil && (f.TopicID != src.ID || f.Partitions != src.Partitions) {
		return fmt.Sprintf("floor is of topic id %x and %d partitions, %s now has %x and %d", f.TopicID, f.Partitions, src.Topic, src.ID, src.Partitions), nil
	}
	for epoch, id := range last {
		end, err := epochEnd(ctx, cl, src.Topic, partition, epoch)
		if err != nil {
			return "", fmt.Errorf("topic %s partition %d: end offset of leader epoch %d: %w", src.Topic, partition, epoch, err)
		}
		if w := t.entries[id].manifest.W; end < w {
			return fmt.Sprintf("%v: W is %d, but leader epoch %d of %s partition %d ends at %d: the log was truncated", id, w, epoch, src.Topic, partition, end), nil
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
