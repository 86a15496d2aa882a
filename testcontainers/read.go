// This file reads a topic to its end by raw fetches: the position is known even where the log ends in markers or gaps.

package testcontainers

import (
	"context"
	"fmt"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// ReadCommitted returns what a read_committed reader gets of the topic now, from each partition's start to its last stable
// offset, by partition. It shares no code with a consumer: tests may judge one by it.
func ReadCommitted(t testing.TB, b Broker, topic string) [][]*kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), opTimeout)
	defer cancel()
	all, err := readCommitted(ctx, b, topic)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func readCommitted(ctx context.Context, b Broker, topic string) (all [][]*kgo.Record, err error) {
	err = poll(ctx, func() error {
		// A leader that moves, or a broker that is starting, says so in an error that the next try may not get.
		if all, err = readOnce(ctx, b, topic); err != nil && !kerr.IsRetriable(err) {
			return stop(err)
		}
		return err
	})
	return all, err
}

func readOnce(ctx context.Context, b Broker, topic string) ([][]*kgo.Record, error) {
	// The last version whose fetches name a topic by its name; later ones want its id.
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers()...), kgo.MaxVersions(kversion.V3_0_0()))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	adm := kadm.NewClient(cl)
	starts, err := offsetsOf(ctx, adm, topic, (*kadm.Client).ListStartOffsets)
	if err != nil {
		return nil, err
	}
	ends, err := offsetsOf(ctx, adm, topic, (*kadm.Client).ListCommittedOffsets)
	if err != nil {
		return nil, err
	}
	topics, err := adm.ListTopics(ctx, topic)
	if err != nil {
		return nil, err
	}
	all := make([][]*kgo.Record, len(ends))
	for p := range ends {
		leader := cl.Broker(int(topics[topic].Partitions[int32(p)].Leader))
		all[p], err = readPartition(ctx, leader, topic, int32(p), starts[p], ends[p])
		if err != nil {
			return nil, fmt.Errorf("read %s[%d] up to offset %d: %w", topic, p, ends[p], err)
		}
	}
	return all, nil
}

// readPartition returns the committed records from offset from up to, but not including, offset to.
func readPartition(ctx context.Context, leader *kgo.Broker, topic string, partition int32, from, to int64) ([]*kgo.Record, error) {
	var records []*kgo.Record
	for from < to {
		req := kmsg.NewPtrFetchRequest()
		req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.IsolationLevel = 500, 1, 16<<20, 1
		p := kmsg.NewFetchRequestTopicPartition()
		p.Partition, p.FetchOffset, p.PartitionMaxBytes = partition, from, 16<<20
		ft := kmsg.NewFetchRequestTopic()
		ft.Topic, ft.Partitions = topic, append(ft.Partitions, p)
		req.Topics = append(req.Topics, ft)

		resp, err := req.RequestWith(ctx, leaderRequestor{leader})
		if err != nil {
			return nil, err
		}
		if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
			return nil, err
		}
		if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
			return nil, fmt.Errorf("at offset %d: the broker's answer names no such partition", from)
		}
		fp, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
			Offset: from, IsolationLevel: kgo.ReadCommitted(), Topic: topic, Partition: partition,
		}, &resp.Topics[0].Partitions[0], kgo.DefaultDecompressor(), nil)
		if fp.Err != nil {
			return nil, fmt.Errorf("at offset %d: %w", from, fp.Err)
		}
		for _, r := range fp.Records {
			if r.Offset < to {
				records = append(records, r)
			}
		}
		from = next
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("at offset %d: %w", from, err)
		}
	}
	return records, nil
}

// leaderRequestor sends a request to one broker, retrying what is retriable.
type leaderRequestor struct{ *kgo.Broker }

func (l leaderRequestor) Request(ctx context.Context, req kmsg.Request) (kmsg.Response, error) {
	return l.RetriableRequest(ctx, req)
}
