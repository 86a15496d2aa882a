// This file is the command snapshot inspect.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// inspectConfig is what the command is told.
type inspectConfig struct {
	kafka         kafkaAccess
	topic         string
	snapshotTopic string
	partitions    []int32
	timeout       time.Duration
	output        string
}

func snapshotCommand() command {
	var c inspectConfig
	return command{
		use:   "snapshot",
		short: "Look into the snapshots",
		sub: []command{{
			use:   "inspect",
			short: "List what the snapshot topic holds, and check it (exit code 3)",
			long: `Inspect reads the snapshot topic as a restore would, committed records only. For each
partition it lists the floor, from which a restore would replay, and for each worker-rank
the offset W up to which its snapshot holds everything, its size and its marks. Every
chunk is checked against its CRC-32C and decoded. The exit code is 3 if a restore would
have to discard anything.`,
			example: `  kvindex snapshot inspect
  kvindex snapshot inspect --partition 3 --output json`,
			flags: func(fs *pflag.FlagSet) {
				c.kafka.flags(fs)
				topicFlag(fs, &c.topic)
				snapshotTopicFlag(fs, &c.snapshotTopic)
				fs.Int32SliceVar(&c.partitions, "partition", nil, "look only at the partitions with these `numbers`")
				timeoutFlag(fs, &c.timeout, time.Minute, "give up after this `time`")
				outputFlag(fs, &c.output)
			},
			run: func(ctx context.Context, con *console, _ []string) error {
				ctx, cancel := context.WithTimeout(ctx, c.timeout)
				defer cancel()
				return c.run(ctx, con)
			},
		}},
	}
}

// inspected is one partition of the snapshot topic.
type inspected struct {
	Partition int32             `json:"partition"`
	Records   int64             `json:"records"` // read, superseded ones included
	Position  int64             `json:"position"`
	Floor     *int64            `json:"floor"` // null: there is none
	Written   *time.Time        `json:"floor_written"`
	Stale     string            `json:"stale,omitempty"` // why none of it can be used
	Bad       []string          `json:"bad_records,omitempty"`
	Workers   []inspectedWorker `json:"workers"`
}

// inspectedWorker is one worker-rank's snapshot.
type inspectedWorker struct {
	Worker     string    `json:"worker"`
	Rank       int32     `json:"dp_rank"`
	W          int64     `json:"w"`
	Generation int64     `json:"generation"`
	Model      string    `json:"model"`
	BlockSize  int32     `json:"block_size"`
	Hasher     string    `json:"hasher"`
	Epoch      int64     `json:"epoch"`
	Seq        int64     `json:"seq"`
	Chunks     int32     `json:"chunks"`
	Bytes      int64     `json:"bytes"`
	Blocks     int64     `json:"blocks"`
	LastHeard  time.Time `json:"last_heard"`
	Incomplete bool      `json:"incomplete"`
	Retired    bool      `json:"retired"`
	Problem    string    `json:"problem,omitempty"`
}

func (c *inspectConfig) run(ctx context.Context, con *console) error {
	if err := twoTopics(c.topic, c.snapshotTopic); err != nil {
		return err
	}
	cl, err := c.kafka.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	topic, err := consumer.DescribeTopic(ctx, cl, c.snapshotTopic)
	if err != nil {
		return err
	}
	// The events topic may be gone; its snapshots can be looked at all the same.
	source, err := consumer.DescribeTopic(ctx, cl, c.topic)
	gone := errors.Is(err, consumer.ErrNoTopic)
	if err != nil && !gone {
		return err
	}
	if len(c.partitions) == 0 {
		for p := range topic.Partitions {
			c.partitions = append(c.partitions, p)
		}
	}
	parts := []inspected{}
	problems := 0
	for _, p := range c.partitions {
		if p < 0 || p >= topic.Partitions {
			return usagef("topic %s has no partition %d", c.snapshotTopic, p)
		}
		part, n, err := c.inspect(ctx, cl, source, p)
		if err != nil {
			return err
		}
		parts, problems = append(parts, part), problems+n
	}
	if c.output == "json" {
		err = con.printJSON(parts)
	} else {
		for i := range parts {
			if gone {
				parts[i].Stale = "" // the same for all: said once, below
			}
		}
		err = printInspected(con, parts)
	}
	switch {
	case err != nil:
	case gone:
		err = checkf("topic %s does not exist: a restore would discard everything", c.topic)
	case problems > 0:
		err = checkf("a restore would discard something (problems: %d)", problems)
	}
	return err
}

// inspect reads one partition and says how many problems it has.
func (c *inspectConfig) inspect(ctx context.Context, cl *kgo.Client, source consumer.Topic, partition int32) (part inspected, problems int, err error) {
	part = inspected{Partition: partition, Workers: []inspectedWorker{}}
	r := snapshot.NewReader(snapshot.ReaderConfig{
		Client:    cl,
		Topic:     c.snapshotTopic,
		Partition: partition,
		Progress:  func(p snapshot.Progress) { part.Records = p.Records },
		Bad: func(b snapshot.BadRecord) {
			part.Bad = append(part.Bad, fmt.Sprintf("offset %d, key %s: %v", b.Offset, b.Key, b.Err))
		},
		Logger: slog.Default(),
	})
	if err := r.ReadToEnd(ctx); err != nil {
		return part, 0, err
	}
	t := r.Table()
	part.Position = r.Position()
	if f, ok := t.Floor(); ok {
		written := time.UnixMilli(f.Written).UTC()
		part.Floor, part.Written = &f.Offset, &written
	}
	if part.Stale, err = c.stale(ctx, cl, source, partition, t); err != nil {
		return part, 0, err
	}
	problems = len(part.Bad)
	if part.Stale != "" && (part.Floor != nil || len(t.IDs()) > 0) {
		problems++
	}
	for _, id := range t.IDs() {
		w := inspectedWorker{Worker: id.Worker, Rank: id.Rank}
		if _, err := t.Load(id, func(chain schemas.Chain) error {
			w.Blocks += int64(len(chain.Locals))
			return nil
		}); err != nil {
			w.Problem = err.Error()
			problems++
		}
		if m := t.Manifest(id); m != nil {
			w.W, w.Generation, w.Chunks, w.Bytes = m.W, m.Generation, m.Chunks, m.Bytes
			w.Model, w.BlockSize, w.Hasher, w.Epoch, w.Seq = m.Model, m.BlockSize, m.Hasher.String(), m.Epoch, m.Seq
			w.LastHeard, w.Incomplete, w.Retired = time.UnixMilli(m.LastHeard).UTC(), m.Incomplete, m.Retired
		}
		part.Workers = append(part.Workers, w)
	}
	return part, problems, nil
}

// stale says why a restore would discard the whole partition, if it would.
func (c *inspectConfig) stale(ctx context.Context, cl *kgo.Client, source consumer.Topic, partition int32, t *snapshot.Table) (string, error) {
	if source.Name == "" {
		return fmt.Sprintf("topic %s does not exist", c.topic), nil
	}
	if partition >= source.Partitions {
		return fmt.Sprintf("topic %s has no such partition", c.topic), nil
	}
	bounds, err := consumer.ListBounds(ctx, cl, source.Name, []int32{partition})
	if err != nil {
		return "", err
	}
	return snapshot.Stale(ctx, cl, source, partition, bounds[partition].End, t)
}

func printInspected(con *console, parts []inspected) error {
	ago := func(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }
	for i, p := range parts {
		if i > 0 {
			fmt.Fprintln(con.out)
		}
		floor := "no floor"
		if p.Floor != nil {
			floor = fmt.Sprintf("floor %d, written %s", *p.Floor, ago(*p.Written))
		}
		fmt.Fprintf(con.out, "%s: %s; %d worker-ranks; %d records up to offset %d\n",
			con.outStyle.bold(fmt.Sprintf("partition %d", p.Partition)), floor, len(p.Workers), p.Records, p.Position)
		if p.Stale != "" && (p.Floor != nil || len(p.Workers) > 0) {
			fmt.Fprintln(con.out, con.outStyle.red("unusable: ")+p.Stale)
		}
		for _, b := range p.Bad {
			fmt.Fprintln(con.out, con.outStyle.red("bad record: ")+b)
		}
		if len(p.Workers) == 0 {
			continue
		}
		var rows [][]string
		for _, w := range p.Workers {
			var marks []string
			if w.Incomplete {
				marks = append(marks, "incomplete")
			}
			if w.Retired {
				marks = append(marks, "retired")
			}
			if w.Problem != "" {
				marks = append(marks, w.Problem)
			}
			rows = append(rows, []string{
				w.Worker, fmt.Sprint(w.Rank), fmt.Sprint(w.W), fmt.Sprint(w.Generation), fmt.Sprint(w.Chunks), fmt.Sprint(w.Bytes), fmt.Sprint(w.Blocks),
				w.Model, fmt.Sprint(w.Epoch), fmt.Sprint(w.Seq), ago(w.LastHeard), strings.Join(marks, "; "),
			})
		}
		if err := table(con.out, []string{"worker", "rank", "W", "generation", "chunks", "bytes", "blocks", "model", "epoch", "seq", "heard", ""}, rows); err != nil {
			return err
		}
	}
	return nil
}
