// This file checks the topics, for topics create and topics check.

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// topicsReport is what check found.
type topicsReport struct {
	OK         bool     `json:"ok"`
	Topic      string   `json:"topic"`
	Snapshots  string   `json:"snapshot_topic"`
	Partitions int      `json:"partitions"`
	Problems   []string `json:"problems"`
}

// report checks both topics and tells the user.
func (c *topicsConfig) report(ctx context.Context, con *console, adm *kadm.Client) error {
	r, err := c.check(ctx, adm)
	if err != nil {
		return err
	}
	if c.output == "json" {
		err = con.printJSON(r)
	} else {
		for _, p := range r.Problems {
			fmt.Fprintln(con.out, con.outStyle.red("wrong: ")+p)
		}
		if r.OK {
			_, err = fmt.Fprintf(con.out, "%s and %s are as they should be, %d partitions each\n", r.Topic, r.Snapshots, r.Partitions)
		}
	}
	if !r.OK && err == nil {
		err = checkf("%d things are wrong with the topics", len(r.Problems))
		if len(r.Problems) == 1 {
			err = checkf("one thing is wrong with the topics")
		}
	}
	return err
}

// check compares the topics with what kvindex relies on.
func (c *topicsConfig) check(ctx context.Context, adm *kadm.Client) (topicsReport, error) {
	r := topicsReport{Topic: c.topic, Snapshots: c.snapshotTopic, Problems: []string{}}
	details, err := adm.ListTopics(ctx, c.topic, c.snapshotTopic)
	if err != nil {
		return r, fmt.Errorf("list topics: %w", err)
	}
	events, snapshots := details[c.topic], details[c.snapshotTopic]
	r.Partitions = len(events.Partitions)
	eventsThere, snapshotsThere := c.checkTopic(&r, c.topic, events), c.checkTopic(&r, c.snapshotTopic, snapshots)
	if n := len(snapshots.Partitions); eventsThere && snapshotsThere && n != r.Partitions {
		r.wrong(c.snapshotTopic, "has %d partitions and %s has %d: the numbers must be equal", n, c.topic, r.Partitions)
	}
	if eventsThere {
		get, err := settingsOf(ctx, adm, c.topic)
		if err != nil {
			return r, err
		}
		c.checkEvents(&r, get)
	}
	if snapshotsThere {
		get, err := settingsOf(ctx, adm, c.snapshotTopic)
		if err != nil {
			return r, err
		}
		c.checkSnapshots(&r, get)
	}
	r.OK = len(r.Problems) == 0
	return r, nil
}

// wrong adds a problem of a topic.
func (r *topicsReport) wrong(topic, format string, args ...any) {
	r.Problems = append(r.Problems, "topic "+topic+": "+fmt.Sprintf(format, args...))
}

// checkTopic checks what holds for either topic, and reports whether it exists.
func (c *topicsConfig) checkTopic(r *topicsReport, topic string, d kadm.TopicDetail) bool {
	if errors.Is(d.Err, kerr.UnknownTopicOrPartition) || d.Topic == "" {
		r.wrong(topic, `does not exist; "kvindex topics create" makes it`)
		return false
	}
	if d.Err != nil {
		r.wrong(topic, "%v", d.Err)
		return false
	}
	for _, p := range d.Partitions.Sorted() {
		if p.Err != nil {
			r.wrong(topic, "partition %d: %v", p.Partition, p.Err)
		}
	}
	if n := len(d.Partitions); c.asked["partitions"] && n != int(c.partitions) {
		r.wrong(topic, "has %d partitions, not the %d asked for", n, c.partitions)
	}
	if want := int(c.replication); c.asked["replication-factor"] && want > 0 {
		for _, p := range d.Partitions.Sorted() {
			if n := len(p.Replicas); n != want {
				r.wrong(topic, "partition %d has %d copies, not the %d asked for", p.Partition, n, want)
				break // the others are likely to be alike
			}
		}
	}
	return true
}

// checkEvents checks the settings of the events topic.
func (c *topicsConfig) checkEvents(r *topicsReport, get func(string) string) {
	if p := get("cleanup.policy"); p != "delete" {
		r.wrong(c.topic, "cleanup.policy is %s, must be delete: compaction would lose events", p)
	}
	if ts := get("message.timestamp.type"); ts != "LogAppendTime" {
		r.wrong(c.topic, "message.timestamp.type is %s, must be LogAppendTime: how long a worker has been silent is told by the broker's clock", ts)
	}
	asked := c.eventsSettings()
	for _, f := range []struct{ flag, key string }{{"retention", "retention.ms"}, {"retention-bytes", "retention.bytes"}} {
		if want := asked[f.key]; c.asked[f.flag] && want != "" && get(f.key) != want {
			r.wrong(c.topic, "%s is %s, not the %s asked for", f.key, get(f.key), want)
		}
	}
}

// checkSnapshots checks the settings of the snapshot topic.
func (c *topicsConfig) checkSnapshots(r *topicsReport, get func(string) string) {
	if p := get("cleanup.policy"); p != "compact" {
		r.wrong(c.snapshotTopic, "cleanup.policy is %s, must be compact: snapshots must neither be deleted by age nor pile up", p)
	}
	for _, least := range []struct {
		key string
		is  time.Duration
		why string
	}{
		{"min.compaction.lag.ms", minCompactionLag, "a restore must not have records compacted away under it"},
		{"delete.retention.ms", deleteRetention, "a reader that is late must still see what was deleted"},
	} {
		v, err := strconv.ParseInt(get(least.key), 10, 64)
		if err != nil || v < least.is.Milliseconds() {
			r.wrong(c.snapshotTopic, "%s is %s, must be at least %d: %s", least.key, get(least.key), least.is.Milliseconds(), least.why)
		}
	}
}

// settingsOf returns a topic's settings by name, those at the broker's default included.
func settingsOf(ctx context.Context, adm *kadm.Client, topic string) (get func(string) string, err error) {
	described, err := adm.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("read the settings of topic %s: %w", topic, err)
	}
	settings := map[string]string{}
	for _, d := range described {
		if d.Err != nil {
			return nil, fmt.Errorf("read the settings of topic %s: %w", topic, d.Err)
		}
		for _, s := range d.Configs {
			settings[s.Key] = s.MaybeValue()
		}
	}
	return func(key string) string {
		v, ok := settings[key]
		if !ok || v == "" {
			return "not set"
		}
		parts := strings.Split(v, ",") // "compact,delete" and "delete,compact" are the same
		slices.Sort(parts)
		return strings.Join(parts, ",")
	}, nil
}
