// This file is the command bench index.

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/pprof"

	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/bench"
	"kvindex/cmd/kvindex/kvw"
)

func benchIndexCommand() command {
	c := bench.DefaultConfig()
	var profile string
	return command{
		use:   "index",
		short: "Measure an index structure on a workload",
		long: `Index drives a structure with the events and queries of a workload file (KVW1, see
"kvindex bench workload"), one slot a worker, and prints what that took as a JSON line.

Modes.
  seq    everything in file order on one thread, each event and query timed on its own;
         the digest of all answers shows whether two structures answered alike
  pool   events through index.Pool, queries by the goroutine that hands them over, as
         fast as it can; the time ends when the last event is applied
  mixed  readers ask a warm structure while events are applied, for --seconds; the
         events of each worker are a ring that leaves the structure as full as it was
  mem    memory after all events, a pair of worker and block and a distinct block
  dump   dumping all of it, and filling an empty structure with the dump
  scale  without a file: grows to --blocks of made-up conversations, with a line at
         each power of ten: memory, longest pause of the collector, query times

Only operations that are done count, never those waiting in a queue. cpu_share well
below 1, or cores_used below the goroutines at work, says that something else had
the processor: measure again. Compare figures of one machine and one hour.`,
		example: `  kvindex bench index --file conv-w64-best.kvw
  kvindex bench index --file conv-w64-best.kvw --mode mixed --readers 2 --event-workers 1 --seconds 5
  kvindex bench index --file conv-w64-best.kvw --mode pool --barrier --structure positional
  kvindex bench index --mode scale --blocks 100000000 --workers 1000
  kvindex bench index --file conv-w64-best.kvw --runs 20 --cpu-profile seq.pprof && go tool pprof seq.pprof`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&c.File, "file", c.File, "workload `file`")
			fs.Var(&choice{&c.Mode, bench.Modes()}, "mode", "measure in this `mode`")
			fs.Var(&choice{&c.Structure, bench.Structures()}, "structure", "`structure` to measure")
			fs.IntVar(&c.Runs, "runs", c.Runs, "seq, pool, dump: report the median of this `number` of runs")
			fs.IntVar(&c.EventWorkers, "event-workers", c.EventWorkers, "pool, mixed: `goroutines` that apply events")
			fs.BoolVar(&c.Barrier, "barrier", c.Barrier, "pool: let each query wait for the events before it, so that answers are exact")
			fs.IntVar(&c.Readers, "readers", c.Readers, "mixed: `goroutines` that query")
			fs.Float64Var(&c.Seconds, "seconds", c.Seconds, "mixed: measure for this many `seconds`, after one second of warm-up")
			fs.Float64Var(&c.BlocksPerSecond, "blocks-per-second", c.BlocksPerSecond, "mixed: `rate` of the events' blocks; 0: as fast as they are applied")
			fs.Int64Var(&c.Blocks, "blocks", c.Blocks, "scale: grow to this many `pairs` of worker and block")
			fs.IntVar(&c.Workers, "workers", c.Workers, "scale: `workers` in the fleet")
			fs.IntVar(&c.Queries, "queries", c.Queries, "scale: queries at each line")
			fs.BoolVar(&c.Positions, "positions", c.Positions, "give stored blocks their positions, as some producers do; files do not have them")
			fs.StringVar(&profile, "cpu-profile", "", "write a CPU profile to this `file`")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			if err := c.Validate(); err != nil {
				return usageError{err}
			}
			p := &benchProgress{con: con}
			defer p.end()
			stop, err := profileTo(profile)
			if err != nil {
				return err
			}
			return errors.Join(benchError(bench.Run(ctx, c, con.out, p)), stop())
		},
	}
}

// benchError makes what is wrong with the workload file a usage error: nothing
// was measured.
func benchError(err error) error {
	var format *kvw.FormatError
	var path *fs.PathError
	if errors.As(err, &format) || errors.As(err, &path) {
		return usageError{err}
	}
	return err
}

// profileTo profiles the processor until stop is called; not if the name is
// empty.
func profileTo(name string) (stop func() error, err error) {
	if name == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, fmt.Errorf("profile: %w", errors.Join(err, f.Close()))
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}
