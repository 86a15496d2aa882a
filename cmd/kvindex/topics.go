// This file is the commands topics create and topics check.

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"kvindex/consumer"
)

// The least that the snapshot topic's records must stay readable: longer than
// any restore and any pause of its writer.
const (
	minCompactionLag = time.Hour
	deleteRetention  = 24 * time.Hour
)

// topicsConfig is what both commands are told.
type topicsConfig struct {
	kafka          kafkaAccess
	topic          string
	snapshotTopic  string
	partitions     int32
	replication    int16
	retention      time.Duration
	retentionBytes int64
	output         string

	asked map[string]bool // names of create's flags that were given: what they say must be so
}

func topicsCommand() command {
	var c topicsConfig
	common := func(fs *pflag.FlagSet) {
		c.kafka.flags(fs)
		topicFlag(fs, &c.topic)
		snapshotTopicFlag(fs, &c.snapshotTopic)
	}
	return command{
		use:   "topics",
		short: "Create the topics, or check them",
		sub: []command{{
			use:   "create",
			short: "Create the topics that do not exist yet",
			long: `Create makes the events topic (deleted by age, stamped by the broker) and the snapshot
topic (compacted, as many partitions), with the settings that kvindex relies on. An
existing topic is left as it is. Then both are checked, as "topics check" does and
against the partitions, replication factor and retention that were asked for (not their
defaults). The exit code is 3 if anything is wrong.

The retention of the events limits how long all stages may be down; records before the
floors (the consumer group's offsets) can be deleted at any time.`,
			example: `  kvindex topics create
  kvindex topics create --brokers kafka:9092 --partitions 32 --replication-factor 3`,
			flags: func(fs *pflag.FlagSet) {
				common(fs)
				fs.Int32Var(&c.partitions, "partitions", 16, "`partitions` of each topic; can hardly be changed later")
				fs.Int16Var(&c.replication, "replication-factor", -1, "`copies` of each partition; -1: the broker's default")
				fs.DurationVar(&c.retention, "retention", 24*time.Hour, "keep events for this `time`; 0: the broker's default")
				fs.Int64Var(&c.retentionBytes, "retention-bytes", 0, "keep at most this many `bytes` of events a partition; 0: the broker's default")
			},
			run: func(ctx context.Context, con *console, _ []string) error {
				if err := twoTopics(c.topic, c.snapshotTopic); err != nil {
					return err
				}
				if c.partitions < 1 || c.retentionBytes < 0 || c.replication == 0 || c.replication < -1 {
					return usagef("partitions must be above 0, the replication factor too or -1, retention-bytes 0 or more")
				}
				c.asked = con.given()
				if err := c.withAdmin(ctx, func(adm *kadm.Client) error { return c.create(ctx, con, adm) }); err != nil {
					return err
				}
				if err := c.wait(ctx); err != nil {
					return err
				}
				// Another client: this one has cached that there were no such topics.
				return c.withAdmin(ctx, func(adm *kadm.Client) error { return c.report(ctx, con, adm) })
			},
		}, {
			use:   "check",
			short: "Say what is wrong with the topics (exit code 3)",
			long: `Check reports whatever about the topics would make a stage answer wrongly, restore wrongly
or not restore at all. The exit code is 3 if there is anything.`,
			example: `  kvindex topics check --brokers kafka:9092 --output json`,
			flags: func(fs *pflag.FlagSet) {
				common(fs)
				outputFlag(fs, &c.output)
			},
			run: func(ctx context.Context, con *console, _ []string) error {
				if err := twoTopics(c.topic, c.snapshotTopic); err != nil {
					return err
				}
				return c.withAdmin(ctx, func(adm *kadm.Client) error { return c.report(ctx, con, adm) })
			},
		}},
	}
}

// twoTopics refuses one topic for both: what is right for one is wrong for the other.
func twoTopics(events, snapshots string) error {
	switch {
	case events == "" || snapshots == "":
		return usagef("--topic and --snapshot-topic must not be empty")
	case events == snapshots:
		return usagef("events and snapshots need two topics, not %q twice", events)
	}
	return nil
}

func (c *topicsConfig) withAdmin(ctx context.Context, do func(*kadm.Client) error) error {
	cl, err := c.kafka.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	return do(kadm.NewClient(cl))
}

// eventsSettings are the events topic's, as it is created.
func (c *topicsConfig) eventsSettings() map[string]string {
	s := map[string]string{
		"cleanup.policy":         "delete",
		"message.timestamp.type": "LogAppendTime",
		"compression.type":       "producer",
	}
	if c.retention > 0 {
		s["retention.ms"] = strconv.FormatInt(c.retention.Milliseconds(), 10)
	}
	if c.retentionBytes > 0 {
		s["retention.bytes"] = strconv.FormatInt(c.retentionBytes, 10)
	}
	return s
}

// snapshotSettings are the snapshot topic's, as it is created.
func (c *topicsConfig) snapshotSettings() map[string]string {
	return map[string]string{
		"cleanup.policy":        "compact",
		"min.compaction.lag.ms": strconv.FormatInt(minCompactionLag.Milliseconds(), 10),
		"delete.retention.ms":   strconv.FormatInt(deleteRetention.Milliseconds(), 10),
		"compression.type":      "producer",
	}
}

// create creates the topics that do not exist.
func (c *topicsConfig) create(ctx context.Context, con *console, adm *kadm.Client) error {
	for _, t := range []struct {
		name     string
		settings map[string]string
	}{{c.topic, c.eventsSettings()}, {c.snapshotTopic, c.snapshotSettings()}} {
		configs := map[string]*string{}
		for k, v := range t.settings {
			configs[k] = &v
		}
		resp, err := adm.CreateTopic(ctx, c.partitions, c.replication, configs, t.name)
		switch {
		case errors.Is(err, kerr.TopicAlreadyExists):
			if con != nil {
				fmt.Fprintf(con.out, "%s exists, and stays as it is\n", t.name)
			}
		case err != nil:
			if resp.ErrMessage != "" {
				err = fmt.Errorf("%w: %s", err, resp.ErrMessage)
			}
			return fmt.Errorf("create topic %s: %w", t.name, err)
		case con != nil:
			fmt.Fprintf(con.out, "%s created, %d partitions\n", t.name, c.partitions)
		}
	}
	return nil
}

// wait returns once the brokers know both topics: one is created a moment
// before every broker has heard of it.
func (c *topicsConfig) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cl, err := c.kafka.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	for _, topic := range []string{c.topic, c.snapshotTopic} {
		for {
			t, err := consumer.DescribeTopic(ctx, cl, topic)
			if err == nil {
				numbers := make([]int32, t.Partitions)
				for i := range numbers {
					numbers[i] = int32(i)
				}
				_, err = consumer.ListBounds(ctx, cl, topic, numbers)
			}
			if err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("topic %s was created but cannot be used: %w", topic, err)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}
