// This file asks brokers about a topic and the bounds of its log.

package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Topic is what the brokers say of a topic at one moment. It is asked for with
// a raw request: the client's own metadata cache would hide a topic that was
// deleted and made anew under the same name.
type Topic struct {
	Name       string
	ID         [16]byte
	Partitions int32
}

// ErrNoTopic is wrapped by DescribeTopic's error when the topic does not exist.
var ErrNoTopic = errors.New("topic does not exist")

// DescribeTopic asks the brokers for the topic's id and partition count.
func DescribeTopic(ctx context.Context, cl *kgo.Client, name string) (Topic, error) {
	t, err := Metadata(ctx, cl, name)
	switch {
	case errors.Is(err, kerr.UnknownTopicOrPartition):
		return Topic{}, fmt.Errorf("topic %s: %w", name, ErrNoTopic)
	case err != nil:
		return Topic{}, fmt.Errorf("topic %s: metadata: %w", name, err)
	}
	return Topic{Name: name, ID: t.TopicID, Partitions: int32(len(t.Partitions))}, nil
}

// Metadata asks a broker for all it knows of the topic. The error is the topic's,
// such as kerr.UnknownTopicOrPartition, or that of asking.
func Metadata(ctx context.Context, cl *kgo.Client, name string) (kmsg.MetadataResponseTopic, error) {
	req := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = kmsg.StringPtr(name)
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return kmsg.MetadataResponseTopic{}, err
	}
	if len(resp.Topics) != 1 {
		return kmsg.MetadataResponseTopic{}, fmt.Errorf("%d topics in the answer, want 1", len(resp.Topics))
	}
	return resp.Topics[0], kerr.ErrorForCode(resp.Topics[0].ErrorCode)
}

// Bounds are the offsets between which a partition's committed records lie.
type Bounds struct {
	Start int64 // first offset still in the log
	End   int64 // last stable offset: one past the last offset a reader of committed records can reach
}

// ListBounds asks the partitions' leaders for their bounds. Partitions that
// could not be asked are absent, and the error says why.
func ListBounds(ctx context.Context, cl *kgo.Client, topic string, partitions []int32) (map[int32]Bounds, error) {
	starts, err1 := listOffsets(ctx, cl, topic, partitions, -2, readCommitted)
	ends, err2 := listOffsets(ctx, cl, topic, partitions, -1, readCommitted)
	out := make(map[int32]Bounds, len(partitions))
	for p, s := range starts {
		if e, ok := ends[p]; ok {
			out[p] = Bounds{Start: s, End: e}
		}
	}
	return out, errors.Join(err1, err2)
}

// ListEnds asks the partitions' leaders where their logs end, records of open
// transactions included. Its result is as that of ListBounds.
func ListEnds(ctx context.Context, cl *kgo.Client, topic string, partitions []int32) (map[int32]int64, error) {
	return listOffsets(ctx, cl, topic, partitions, -1, readUncommitted)
}

// Isolation levels of a ListOffsets request.
const (
	readUncommitted int8 = iota
	readCommitted
)

// listOffsets resolves a special timestamp (-2 start, -1 end, which is the last stable
// offset if only what is committed is read) to an offset, for each partition. The
// client splits the request by leader.
func listOffsets(ctx context.Context, cl *kgo.Client, topic string, partitions []int32, timestamp int64, isolation int8) (map[int32]int64, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	req.IsolationLevel = isolation
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = topic
	for _, p := range partitions {
		rp := kmsg.NewListOffsetsRequestTopicPartition()
		rp.Partition, rp.Timestamp, rp.CurrentLeaderEpoch = p, timestamp, -1
		rt.Partitions = append(rt.Partitions, rp)
	}
	req.Topics = append(req.Topics, rt)

	out := make(map[int32]int64, len(partitions))
	var errs error
	for _, shard := range cl.RequestSharded(ctx, req) {
		if shard.Err != nil {
			errs = errors.Join(errs, fmt.Errorf("topic %s: list offsets: %w", topic, shard.Err))
			continue
		}
		for _, t := range shard.Resp.(*kmsg.ListOffsetsResponse).Topics {
			for _, p := range t.Partitions {
				if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
					errs = errors.Join(errs, fmt.Errorf("topic %s partition %d: list offsets: %w", topic, p.Partition, err))
					continue
				}
				out[p.Partition] = p.Offset
			}
		}
	}
	return out, errs
}
