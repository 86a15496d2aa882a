// This file is the command status.

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvindex/pipeline/query"
	pb "kvindex/pipeline/query/kvindexpb"
)

func statusCommand() command {
	var stage stageAccess
	var output string
	var timeout time.Duration
	var workers bool
	return command{
		use:   "status",
		short: "Show the state of a stage (exit code 3 if it is not ready)",
		long: `Status shows the state of an instance: each partition's state, position and lag, the floor
from which a restart would replay, the models, and the counters. The exit code is 3 if it
is not ready, and 1 if it cannot be asked.`,
		example: `  kvindex status
  kvindex status --workers
  kvindex status --output json | jq '.partitions[] | {partition, state, lag}'`,
		flags: func(fs *pflag.FlagSet) {
			stage.flags(fs)
			timeoutFlag(fs, &timeout, 5*time.Second, "give up after this `time`")
			fs.BoolVar(&workers, "workers", false, "also list the worker-ranks (text only)")
			outputFlag(fs, &output)
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			cl, err := stage.dial(timeout)
			if err != nil {
				return err
			}
			defer cl.Close()
			st, err := cl.Status(ctx)
			if err != nil {
				return askError(stage.address, err)
			}
			if output == "json" {
				_, err = fmt.Fprintf(con.out, "%s\n", query.AppendJSON(nil, st))
			} else {
				err = printStatus(con, st)
			}
			if err == nil && workers && output == "text" {
				list, askErr := cl.Workers(ctx, "")
				if askErr != nil {
					return askError(stage.address, askErr)
				}
				err = printWorkers(con.out, list.Workers)
			}
			if err == nil && !st.Ready {
				err = checkf("the stage at %s is not ready", stage.address)
			}
			return err
		},
	}
}

func milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

// orDash is what a table shows for what there is none of.
func orDash(there bool, text string) string {
	if !there {
		return "-"
	}
	return text
}

func printStatus(con *console, st *pb.StatusResponse) error {
	w := con.out
	ready := con.outStyle.green("ready")
	if !st.Ready {
		ready = con.outStyle.red("not ready")
	}
	up := time.Since(time.UnixMilli(st.StartedMs)).Round(time.Second)
	fmt.Fprintf(w, "%s  %s in group %s, kvindex %s, up %v\n", ready, st.Instance, st.Group, st.Version, up)
	fmt.Fprintf(w, "events %s, snapshots %s\n", st.Events.GetName(), orDash(st.Snapshots.GetName() != "", st.Snapshots.GetName()))
	for _, m := range st.Missing {
		fmt.Fprintf(w, "%s %s\n", con.outStyle.red("missing:"), m)
	}
	for _, m := range st.Warnings {
		fmt.Fprintf(w, "%s %s\n", con.outStyle.yellow("warning:"), m)
	}
	fmt.Fprintln(w)
	var rows [][]string
	for _, p := range st.Partitions {
		state := p.State
		if p.Paused {
			state += ", paused"
		}
		rows = append(rows, []string{
			fmt.Sprint(p.Partition), state, fmt.Sprint(p.Position), fmt.Sprint(p.Lag),
			orDash(p.Floor >= 0, fmt.Sprint(p.Floor)),
			orDash(p.SnapshotDuty, "ours"),
			orDash(p.SnapshotAgeMs > 0, milliseconds(p.SnapshotAgeMs).Round(time.Second).String()),
			fmt.Sprint(p.Workers),
			fmt.Sprintf("%.2f s from %d, %d again", p.RestoreSeconds, p.StartedAt, p.Reread),
			p.Problem,
		})
	}
	if err := table(w, []string{"partition", "state", "position", "lag", "floor", "snapshots", "age", "workers", "restored", "problem"}, rows); err != nil {
		return err
	}
	rows = nil
	for _, m := range st.Models {
		rows = append(rows, []string{m.Model, fmt.Sprint(m.BlockSize), m.Hasher, fmt.Sprint(m.Workers), fmt.Sprint(m.Blocks)})
	}
	fmt.Fprintln(w)
	if err := table(w, []string{"model", "block size", "hasher", "workers", "blocks"}, rows); err != nil {
		return err
	}
	rows = nil
	for _, name := range slices.Sorted(maps.Keys(st.Counters)) {
		if n := st.Counters[name]; n != 0 {
			rows = append(rows, []string{name, fmt.Sprint(n)})
		}
	}
	fmt.Fprintln(w)
	return table(w, []string{"counted", ""}, rows)
}

func printWorkers(w io.Writer, workers []*pb.WorkerStatus) error {
	slices.SortFunc(workers, func(a, b *pb.WorkerStatus) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DpRank, b.DpRank))
	})
	var rows [][]string
	for _, k := range workers {
		var notes []string
		for note, is := range map[string]bool{"silent": k.Silent, "incomplete": k.Incomplete, "retired": k.Retired} {
			if is {
				notes = append(notes, note)
			}
		}
		slices.Sort(notes)
		rows = append(rows, []string{
			k.Worker, fmt.Sprint(k.DpRank), k.Model, fmt.Sprint(k.Partition), fmt.Sprint(k.Epoch), fmt.Sprint(k.Seq),
			fmt.Sprint(k.Blocks.GetDevice()), fmt.Sprint(k.Blocks.GetHost()), fmt.Sprint(k.Blocks.GetDisk()), fmt.Sprint(k.Blocks.GetExternal()),
			milliseconds(k.AgeMs).Round(100 * time.Millisecond).String(), strings.Join(notes, ", "),
		})
	}
	fmt.Fprintln(w)
	return table(w, []string{"worker", "rank", "model", "partition", "epoch", "seq", "device", "host", "disk", "external", "heard", ""}, rows)
}
