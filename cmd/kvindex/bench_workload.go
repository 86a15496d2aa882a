// This file is the command bench workload.

package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/cmd/kvindex/kvw"
)

// benchWorkloadConfig is what the command is told.
type benchWorkloadConfig struct {
	trace     string
	synthetic int
	out       string
	generated kvw.Config
}

func benchWorkloadCommand() command {
	c := benchWorkloadConfig{generated: kvw.DefaultConfig()}
	return command{
		use:   "workload",
		short: "Make a workload file (KVW1) from a trace or from made-up conversations",
		long: `Workload serves a trace with a simulated fleet of workers, each with a prefix cache of the
same size, and writes in order what an index would see of it: for each request a query for
its prompt, then the blocks its worker stored, then those it removed. --replicas gives each
worker copies that publish the same events, as data-parallel replicas behind one cache policy do.

A trace has one JSON object a line, as for "kvindex replay". The file is KVW1; one JSON line
tells what is in it.`,
		example: `  kvindex bench workload --trace conversation_trace.jsonl --route best -o conv-w64-best.kvw
  kvindex bench workload --trace conversation_trace.jsonl --workers 1000 --replicas 7 --capacity 4096 -o conv-w1000x7.kvw
  kvindex bench workload --synthetic 20000 --workers 256 --route best -o synthetic.kvw`,
		flags: func(fs *pflag.FlagSet) {
			g := &c.generated
			fs.StringVar(&c.trace, "trace", "", "serve the requests of this `file`; - is standard input")
			fs.IntVar(&c.synthetic, "synthetic", 0, "make up `N` requests instead")
			fs.StringVarP(&c.out, "out", "o", "workload.kvw", "write to this `file`")
			fs.IntVar(&g.Workers, "workers", g.Workers, "workers that serve requests")
			fs.IntVar(&g.Replicas, "replicas", g.Replicas, "total `copies` of each worker, with the same events")
			fs.IntVar(&g.Capacity, "capacity", g.Capacity, "`blocks` that a worker's cache holds")
			fs.IntVar(&g.BlockSize, "block", g.BlockSize, "`tokens` a block; must divide 512")
			fs.Var(&choice{(*string)(&g.Route), []string{string(kvw.Random), string(kvw.Best)}}, "route", "send requests this `way`: random, or best (longest cached prefix, less recent work)")
			fs.IntVar(&g.Limit, "limit", g.Limit, "stop after `N` requests (0: all)")
			fs.Uint64Var(&g.Seed, "seed", g.Seed, "seed of everything random")
		},
		run: func(ctx context.Context, con *console, _ []string) error { return c.run(ctx, con) },
	}
}

// interruptible is a trace that ends with an error when the context does.
type interruptible struct {
	ctx context.Context
	fleet.Requests
}

func (i interruptible) Next() (*fleet.Request, error) {
	if err := i.ctx.Err(); err != nil {
		return nil, err
	}
	return i.Requests.Next()
}

func (c *benchWorkloadConfig) run(ctx context.Context, con *console) error {
	if err := c.generated.Validate(); err != nil {
		return usageError{err}
	}
	var trace fleet.Requests
	switch {
	case (c.trace == "") == (c.synthetic == 0):
		return usagef("give either --trace or --synthetic")
	case c.synthetic < 0:
		return usagef("--synthetic %d is negative", c.synthetic)
	case c.synthetic > 0:
		trace = fleet.NewSynthetic(c.synthetic, c.generated.Seed)
	default:
		f, err := fleet.OpenTrace(c.trace)
		if err != nil {
			return usageError{err}
		}
		defer f.Close()
		trace = f
	}
	f, err := os.Create(c.out)
	if err != nil {
		return err
	}
	defer f.Close()
	p := &benchProgress{con: con}
	p.Start("requests", int64(c.synthetic))
	g, err := kvw.Generate(f, interruptible{ctx, trace}, c.generated, func() { p.Add(1) })
	p.end()
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		_ = os.Remove(c.out) // half a workload is of no use
		return err
	}
	return json.NewEncoder(con.out).Encode(struct {
		File string `json:"file"`
		kvw.Generated
	}{c.out, g})
}
