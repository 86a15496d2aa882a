// This file is the command bench query.

package main

import (
	"context"
	"fmt"
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
	c.Transports, c.MostRate = nil, 0
	var short bool
	var prefix []string
	var stage stageAccess
	var named bench.Stage
	var prompts string
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
machine, was short of processors: measure again. Prompts are of 16 tokens a block.

With --query-address it asks a stage that runs already, and starts and writes nothing.
That is a load on whoever uses it: rates begin at 100 a second and end at --most-rate
(with --overload at four times what it could do), each for a minute at most; the first
failure ends it. The address has to be on the command line, not in a variable or a file.
Prompts are tokens of the model that --model names: those of --prompts, a prompt a line,
or made-up ones, which nobody holds and which so cost it less. There is no bare echo,
what the server uses is null, and the depths are not known to be right.`,
		example: `  kvindex bench query
  kvindex bench query --blocks 3750 --workers 1000 --transports grpc,stream
  kvindex bench query --transports grpc --overload 20s
  taskset -c 0 kvindex bench query --server-prefix taskset,-c,1 --tokens
  kvindex bench query --query-address index-0:7400 --http-address index-0:7401 --model llama \
      --prompts prompts.txt --most-rate 2000 --tls --ca-file ca.pem --token-file token`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringSliceVar(&c.Transports, "transports", c.Transports, "ask over these `transports`: "+strings.Join(bench.QueryTransports(), ", ")+" (default: all; for a stage, those whose address is given)")
			fs.IntSliceVar(&c.Blocks, "blocks", c.Blocks, "lengths of the prompts, in `blocks`")
			fs.IntSliceVar(&c.Workers, "workers", c.Workers, "`workers` that each hold a part of the prompts; each number gets a server of its own")
			fs.BoolVar(&c.Tokens, "tokens", c.Tokens, "send tokens, not local hashes")
			fs.Float64Var(&c.BlocksPerSecond, "blocks-per-second", c.BlocksPerSecond, "store and remove blocks meanwhile at this `rate` a second")
			fs.DurationVar(&c.Step, "step", c.Step, "`time` for each step")
			fs.DurationVar(&c.For, "for", c.For, "`time` for each measurement")
			fs.IntVar(&c.Connections, "connections", c.Connections, "gRPC `connections`")
			fs.DurationVar(&c.Overload, "overload", c.Overload, "then offer four times what it can do, for this `time`; 0: don't")
			fs.Int64Var(&c.Held, "held", c.Held, "`blocks` that the workers hold besides the prompts")
			fs.StringSliceVar(&prefix, "server-prefix", nil, "run the server with this `command,argument,...` in front, such as taskset,-c,1")
			fs.Float64Var(&c.MostRate, "most-rate", c.MostRate, "end the search for saturation at this `rate` of requests a second; 0: 10,000 for a stage, else a million")
			stage.flags(fs)
			address := fs.Lookup("query-address")
			address.Usage, address.DefValue, stage.address = "ask the stage at this gRPC `host:port`, instead of a server that is started", "", ""
			fs.StringVar(&named.HTTP, "http-address", "", "the stage's HTTP `host:port`, for json")
			fs.StringVar(&named.Model, "model", "", "`name` of the stage's model")
			fs.IntVar(&named.BlockSize, "block-size", 0, "`tokens` a block of the stage's model; may be 0 if it has only one block size")
			fs.StringVar(&prompts, "prompts", "", "ask about the prompts in this `file`, one line of tokens each")
			fs.BoolVar(&short, "short", short, "measure next to nothing, only to see whether it works")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			if short {
				c.Held, c.Slowest = min(c.Held, 10000), time.Minute
				if c.MostRate == 0 || c.MostRate > 2000 {
					c.MostRate = 2000
				}
				c.Step, c.For, c.Overload = 50*time.Millisecond, 100*time.Millisecond, min(c.Overload, 200*time.Millisecond)
			}
			named.GRPC, named.Security = stage.address, stage.security
			if err := benchOf(&c, named, prompts, con.settings); err != nil {
				return usageError{err}
			}
			p := &benchProgress{con: con}
			defer p.end()
			return bench.RunQuery(ctx, c, benchServerStarter(prefix), con.out, con.err, p)
		},
	}
}

// benchOf settles what is asked: the stage, if one is named, or a server of our own.
func benchOf(c *bench.QueryConfig, named bench.Stage, prompts string, settings []setting) error {
	for _, s := range settings {
		switch s.name {
		case "query-address":
			if s.value != "" && s.from != "flag" {
				return fmt.Errorf("query-address is from %s: to put a load on a stage give --query-address, and else --query-address=", s.from)
			}
		case "http-address", "model", "block-size", "prompts", "tls", "ca-file", "cert-file", "key-file", "token-file":
			if named.GRPC == "" && s.from == "flag" {
				return fmt.Errorf("--%s is of a stage: give --query-address", s.name)
			}
		case "workers", "held", "blocks-per-second", "server-prefix", "tokens":
			if named.GRPC != "" && s.from == "flag" {
				return fmt.Errorf("--%s is of a server that is started: it does not go with --query-address", s.name)
			}
		}
	}
	if named.GRPC == "" {
		if len(c.Transports) == 0 {
			c.Transports = bench.QueryTransports()
		}
		if c.MostRate == 0 {
			c.MostRate = bench.DefaultQueryConfig().MostRate
		}
		return c.Validate()
	}
	if err := named.Security.Validate(); err != nil {
		return err
	}
	if prompts != "" {
		var err error
		if named.Prompts, err = readPrompts(prompts); err != nil {
			return err
		}
	}
	c.OfStage(named)
	return c.Validate()
}

// mostPromptsFile is the most that a file of prompts may have.
const mostPromptsFile = 64 << 20

// readPrompts reads a file of tokens, a prompt a line.
func readPrompts(file string) (all [][]uint32, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostPromptsFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > mostPromptsFile {
		return nil, fmt.Errorf("%s: more than %d bytes", file, mostPromptsFile)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		tokens, err := numbers(strings.NewReader(line), 32, func(v uint64) uint32 { return uint32(v) })
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, n, err)
		}
		if len(tokens) > 0 {
			all = append(all, tokens)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no prompt in it", file)
	}
	return all, nil
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
