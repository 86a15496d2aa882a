// This file is the command bench query.

package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/bench"
)

func benchQueryCommand() command {
	c := bench.DefaultQueryConfig()
	var short bool
	var prefix []string
	return command{
		use:   "query",
		short: "Measure what the query side can do, and how long it takes",
		long: `Query starts a stage's query side in a process of its own, over an index that is made up
and written to, without Kafka, and asks it by a clock that waits for no answer: a
latency is from when a request was due, whatever held it up. It prints a JSON line for
each rate, and at last a table on standard error.

Of each transport, prompt length and number of workers:
  step        rates, each twice the last, then in steps of 15 %
  saturation  the highest at which 98 % were answered, and half of them within 10 ms
  half        at half of that
  empty       the same rate of requests for nothing: a health check over gRPC, a probe
              over HTTP, on a stream a request with no request in it
  bare        the same rate of the same messages, of a gRPC server with nothing behind
With --overload TIME then
  overload    four times saturation
  after       half of saturation, at once; recovery_ms is until the last trouble

Every depth in one of 32 answers is compared with the truth; a wrong one is an error.
sent_late_p99_us far above the empty echo's latency says that this process, or the
machine, was short of processors: measure again. Prompts are of 16 tokens a block.`,
		example: `  kvindex bench query
  kvindex bench query --blocks 3750 --workers 1000 --transports grpc,stream
  kvindex bench query --transports grpc --overload 20s
  taskset -c 0 kvindex bench query --server-prefix taskset,-c,1 --tokens`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringSliceVar(&c.Transports, "transports", c.Transports, "ask over these `transports`")
			fs.IntSliceVar(&c.Blocks, "blocks", c.Blocks, "lengths of the prompts, in `blocks`")
			fs.IntSliceVar(&c.Workers, "workers", c.Workers, "`workers` that hold the prompts, each a part: a server for each number")
			fs.BoolVar(&c.Tokens, "tokens", c.Tokens, "send tokens, not local hashes")
			fs.Float64Var(&c.BlocksPerSecond, "blocks-per-second", c.BlocksPerSecond, "`rate` of the blocks that are stored and removed meanwhile")
			fs.DurationVar(&c.Step, "step", c.Step, "`time` for each step")
			fs.DurationVar(&c.For, "for", c.For, "`time` for each measurement")
			fs.IntVar(&c.Connections, "connections", c.Connections, "gRPC `connections`")
			fs.DurationVar(&c.Overload, "overload", c.Overload, "then offer four times what it can do, for that `time`; 0: not")
			fs.Int64Var(&c.Held, "held", c.Held, "`blocks` that the workers hold besides the prompts")
			fs.StringSliceVar(&prefix, "server-prefix", nil, "run the server by this `command,argument,...`, such as taskset,-c,1")
			fs.BoolVar(&short, "short", short, "measure next to nothing: whether it works")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			if short {
				c.Held, c.MostRate, c.Slowest = min(c.Held, 10000), 2000, time.Minute
				c.Step, c.For, c.Overload = 50*time.Millisecond, 100*time.Millisecond, min(c.Overload, 200*time.Millisecond)
			}
			if err := c.Validate(); err != nil {
				return usageError{err}
			}
			p := &benchProgress{con: con}
			defer p.end()
			return bench.RunQuery(ctx, c, benchServerStarter(prefix), con.out, con.err, p)
		},
	}
}

const benchServerName = "bench-query-server"

// benchServerCommand is the process that is asked.
func benchServerCommand() command {
	var c bench.ServerConfig
	return command{
		use:   benchServerName,
		short: "Be what bench query asks, until standard input ends",
		long: `Bench-query-server is started by "kvindex bench query". It writes where it listens as a
JSON line, and for each line that it is sent what it has used so far.`,
		example: "  kvindex bench-query-server --blocks 192 --workers 64",
		hidden:  true,
		flags: func(fs *pflag.FlagSet) {
			fs.IntSliceVar(&c.Blocks, "blocks", nil, "lengths of the prompts")
			fs.IntVar(&c.Workers, "workers", 1, "workers that hold them")
			fs.Float64Var(&c.BlocksPerSecond, "blocks-per-second", 0, "blocks to write")
			fs.Int64Var(&c.Held, "held", 0, "blocks to hold besides")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			return bench.ServeQueries(ctx, c, con.in, con.out)
		},
	}
}

// benchServerStarter runs this program as such a process, by the command prefix if
// there is one.
func benchServerStarter(prefix []string) bench.Starter {
	return func(ctx context.Context, c bench.ServerConfig) (io.WriteCloser, io.Reader, func() error, error) {
		self, err := os.Executable()
		if err != nil {
			return nil, nil, nil, err
		}
		var blocks []string
		for _, n := range c.Blocks {
			blocks = append(blocks, strconv.Itoa(n))
		}
		args := append(slices.Clone(prefix), self, benchServerName, "--blocks", strings.Join(blocks, ","), "--workers", strconv.Itoa(c.Workers),
			"--blocks-per-second", strconv.FormatFloat(c.BlocksPerSecond, 'f', -1, 64), "--held", strconv.FormatInt(c.Held, 10))
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, envPrefix+"_") })
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, nil, nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, nil, nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, nil, nil, err
		}
		return in, out, cmd.Wait, nil
	}
}
