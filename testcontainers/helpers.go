// This file has what tests need of any broker: names, clients, topics, offsets.

package testcontainers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// opTimeout bounds one administrative operation of a helper, retries included.
const opTimeout = time.Minute

// Name returns prefix with a random suffix: a topic, group or transactional id that no other test uses.
func Name(prefix string) string { return prefix + "-" + strings.ToLower(rand.Text()[:8]) }

// Client returns a client of b that ends with the test. It asks for metadata four times a second, so that new topics and new
// leaders are found soon; opts come last and win.
func Client(t testing.TB, b Broker, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(b.Brokers()...), kgo.MetadataMinAge(250 * time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	// A group member's client that is blocked in a rebalance would never close otherwise.
	t.Cleanup(cl.CloseAllowingRebalance)
	return cl
}

// Admin returns an administrative client of b that ends with the test. It caches metadata for a while: after a topic was
// recreated or grew, take a new one.
func Admin(t testing.TB, b Broker) *kadm.Client {
	t.Helper()
	return kadm.NewClient(Client(t, b))
}

// withAdmin runs f with a fresh administrative client (nothing cached) and a deadline.
func withAdmin(t testing.TB, b Broker, f func(context.Context, *kadm.Client) error) {
	t.Helper()
	if err := adminDo(t.Context(), b, f); err != nil {
		t.Fatal(err)
	}
}

func adminDo(ctx context.Context, b Broker, f func(context.Context, *kadm.Client) error) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers()...), kgo.MetadataMinAge(50*time.Millisecond))
	if err != nil {
		return err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	return f(ctx, kadm.NewClient(cl))
}

// NewTopic creates a topic named prefix with a random suffix, with the broker's default replication factor and the given topic
// configs, and returns its name once every partition has a leader. The topic is deleted after the test.
func NewTopic(t testing.TB, b Broker, prefix string, partitions int, configs map[string]string) string {
	t.Helper()
	topic := Name(prefix)
	createTopic(t, b, topic, partitions, configs)
	t.Cleanup(func() {
		// The test's context has ended, and a broker of its own may have too: what can't be deleted is no failure.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		adminDo(ctx, b, func(ctx context.Context, adm *kadm.Client) error { return deleteTopic(ctx, adm, topic) })
	})
	return topic
}

// RecreateTopic deletes a topic and creates another of the same name, with another topic id and without records.
func RecreateTopic(t testing.TB, b Broker, topic string, partitions int, configs map[string]string) {
	t.Helper()
	withAdmin(t, b, func(ctx context.Context, adm *kadm.Client) error { return deleteTopic(ctx, adm, topic) })
	createTopic(t, b, topic, partitions, configs)
}

func createTopic(t testing.TB, b Broker, topic string, partitions int, configs map[string]string) {
	t.Helper()
	cfg := make(map[string]*string)
	for k, v := range configs {
		cfg[k] = &v
	}
	withAdmin(t, b, func(ctx context.Context, adm *kadm.Client) error {
		// A real broker deletes asynchronously: the name may be taken for a moment more.
		err := poll(ctx, func() error {
			_, err := adm.CreateTopic(ctx, int32(partitions), -1, cfg, topic)
			if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
				return stop(err)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("create topic %s: %w", topic, err)
		}
		return awaitLeaders(ctx, b, topic, partitions)
	})
}

// AddPartitions grows the topic to the given count and waits until each partition has a leader.
func AddPartitions(t testing.TB, b Broker, topic string, partitions int) {
	t.Helper()
	withAdmin(t, b, func(ctx context.Context, adm *kadm.Client) error {
		resp, err := adm.UpdatePartitions(ctx, partitions, topic)
		if err == nil {
			err = resp.Error()
		}
		if err != nil {
			return fmt.Errorf("grow topic %s to %d partitions: %w", topic, partitions, err)
		}
		return awaitLeaders(ctx, b, topic, partitions)
	})
}

// awaitLeaders waits until the topic has so many partitions, each with a leader.
func awaitLeaders(ctx context.Context, b Broker, topic string, partitions int) error {
	return poll(ctx, func() error {
		return adminDo(ctx, b, func(ctx context.Context, adm *kadm.Client) error {
			topics, err := adm.ListTopics(ctx, topic)
			if err != nil {
				return err
			}
			td := topics[topic]
			if td.Err != nil || len(td.Partitions) != partitions {
				return fmt.Errorf("topic %s has %d partitions, want %d: %v", topic, len(td.Partitions), partitions, td.Err)
			}
			for _, p := range td.Partitions {
				if p.Err != nil || p.Leader < 0 {
					return fmt.Errorf("topic %s partition %d has no leader: %v", topic, p.Partition, p.Err)
				}
			}
			return nil
		})
	})
}

func deleteTopic(ctx context.Context, adm *kadm.Client, topic string) error {
	if _, err := adm.DeleteTopic(ctx, topic); err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
		return fmt.Errorf("delete topic %s: %w", topic, err)
	}
	return nil
}

// StartOffsets returns the first offset of each partition.
func StartOffsets(t testing.TB, b Broker, topic string) []int64 {
	t.Helper()
	return offsets(t, b, topic, (*kadm.Client).ListStartOffsets)
}

// EndOffsets returns each partition's high watermark: the offset after its last record, markers and open transactions included.
func EndOffsets(t testing.TB, b Broker, topic string) []int64 {
	t.Helper()
	return offsets(t, b, topic, (*kadm.Client).ListEndOffsets)
}

// StableOffsets returns each partition's last stable offset: where a read_committed reader ends, the first offset of the
// earliest open transaction or else the high watermark.
func StableOffsets(t testing.TB, b Broker, topic string) []int64 {
	t.Helper()
	return offsets(t, b, topic, (*kadm.Client).ListCommittedOffsets)
}

// listOffsets is one of kadm's methods that list one kind of offset.
type listOffsets func(*kadm.Client, context.Context, ...string) (kadm.ListedOffsets, error)

func offsets(t testing.TB, b Broker, topic string, list listOffsets) (out []int64) {
	t.Helper()
	withAdmin(t, b, func(ctx context.Context, adm *kadm.Client) (err error) {
		out, err = offsetsOf(ctx, adm, topic, list)
		return err
	})
	return out
}

// offsetsOf returns the topic's offsets in order of the partitions.
func offsetsOf(ctx context.Context, adm *kadm.Client, topic string, list listOffsets) ([]int64, error) {
	listed, err := list(adm, ctx, topic)
	if err == nil {
		err = listed.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("list offsets of topic %s: %w", topic, err)
	}
	sorted := listed.Offsets().Sorted()
	slices.SortFunc(sorted, func(a, b kadm.Offset) int { return cmp.Compare(a.Partition, b.Partition) })
	out := make([]int64, len(sorted))
	for i, o := range sorted {
		out[i] = o.At
	}
	return out, nil
}

// DeleteRecords moves the start of a partition's log to offset: what lies before is gone.
func DeleteRecords(t testing.TB, b Broker, topic string, partition int32, offset int64) {
	t.Helper()
	withAdmin(t, b, func(ctx context.Context, adm *kadm.Client) error {
		var o kadm.Offsets
		o.AddOffset(topic, partition, offset, -1)
		resp, err := adm.DeleteRecords(ctx, o)
		if err == nil {
			err = resp.Error()
		}
		if err != nil {
			return fmt.Errorf("delete records of %s[%d] before offset %d: %w", topic, partition, offset, err)
		}
		return nil
	})
}
