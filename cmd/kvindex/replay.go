// This file is the command replay.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	"kvindex/pipeline/query"
)

// replayConfig is what the command is told.
type replayConfig struct {
	kafka     kafkaAccess
	topic     string
	trace     string
	synthetic int
	write     string
	limit     int
	duration  time.Duration
	stay      bool
	output    string
	sim       simConfig
}

func replayCommand() command {
	c := replayConfig{sim: defaultSim()}
	return command{
		use:   "replay",
		short: "Send the events of a simulated fleet that serves a trace",
		long: `Replay serves the requests of a trace with a simulated fleet of workers, each with a prefix
cache of the same size. What happens in the caches is written to the events topic, as real
engines would do. Each request goes where the index says that most of its prompt is cached,
less load; a second fleet, in memory only, gets the same requests at random. The summary
compares the two.

A trace has one JSON object a line, with timestamp (ms), input_length and output_length
(tokens), and hash_ids, one for each 512 tokens of the prompt (Mooncake's format).
--synthetic makes up a trace instead, of conversations with shared system prompts.

If the stage does not answer, requests are routed by load alone, and counted. Ctrl-C ends
the replay early; the summary is still printed.`,
		example: `  kvindex replay --synthetic 5000
  kvindex replay --trace conversation_trace.jsonl --speed 10 --duration 2m
  kvindex replay --trace - --route random --limit 1000 --output json < trace.jsonl
  kvindex replay --synthetic 12000 --seed 7 --write-trace trace.jsonl`,
		flags: func(fs *pflag.FlagSet) {
			c.kafka.flags(fs)
			topicFlag(fs, &c.topic)
			c.sim.stage.flags(fs)
			fs.DurationVar(&c.sim.queryTimeout, "query-timeout", c.sim.queryTimeout, "route without an answer after this `time`")
			fs.StringVar(&c.trace, "trace", "", "serve the requests of this `file`; - is standard input")
			fs.IntVar(&c.synthetic, "synthetic", 0, "make up `N` requests instead")
			fs.Uint64Var(&c.sim.seed, "seed", c.sim.seed, "seed of everything random")
			fs.StringVar(&c.write, "write-trace", "", "only write the synthetic trace to this `file`")
			fs.IntVar(&c.limit, "limit", 0, "stop after `N` requests (0: all)")
			fs.DurationVar(&c.duration, "duration", 0, "stop after this `time` (0: when the trace ends)")
			fs.Float64Var(&c.sim.speed, "speed", c.sim.speed, "`times` the trace's own speed; 0: as fast as possible")
			fs.Var(&choice{&c.sim.route, []string{routeIndex, routeRandom}}, "route", "send requests this `way`: by the index, or random")
			fs.IntVar(&c.sim.workers, "workers", c.sim.workers, "workers in the fleet")
			fs.StringVar(&c.sim.prefix, "worker-prefix", c.sim.prefix, "`prefix` of the workers' names; two replays at once need different ones")
			fs.IntVar(&c.sim.capacity, "capacity", c.sim.capacity, "`blocks` that a worker's cache holds")
			fs.IntVar(&c.sim.blockSize, "block-size", c.sim.blockSize, "`tokens` a block; must divide 512")
			fs.StringVar(&c.sim.model, "model", c.sim.model, "`name` of the model that is served")
			fs.Var(&choice{&c.sim.hasher, []string{index.Flash.String(), index.Dynamo.String()}}, "hasher", "`scheme` of the block hashes: flash or dynamo")
			fs.DurationVar(&c.sim.heartbeat, "heartbeat", c.sim.heartbeat, "send a heartbeat for a worker without events after this `time`")
			fs.BoolVar(&c.stay, "stay", false, "after the last request, keep the workers alive until interrupted")
			outputFlag(fs, &c.output)
		},
		run: func(ctx context.Context, con *console, _ []string) error { return c.run(ctx, con) },
	}
}

// requests opens the trace that the configuration names.
func (c *replayConfig) requests() (fleet.Requests, io.Closer, error) {
	switch {
	case (c.trace == "") == (c.synthetic == 0):
		return nil, nil, usagef("give either --trace or --synthetic")
	case c.synthetic < 0:
		return nil, nil, usagef("--synthetic %d is negative", c.synthetic)
	case c.synthetic > 0:
		return fleet.NewSynthetic(c.synthetic, c.sim.seed), io.NopCloser(nil), nil
	}
	f, err := fleet.OpenTrace(c.trace)
	if err != nil {
		return nil, nil, usageError{err}
	}
	return f, f, nil
}

func (c *replayConfig) run(ctx context.Context, con *console) error {
	trace, closer, err := c.requests()
	if err != nil {
		return err
	}
	defer closer.Close()
	if c.write != "" {
		return c.writeTrace(con, interruptible{ctx, trace})
	}
	if c.limit < 0 {
		return usagef("--limit %d is negative", c.limit)
	}
	cl, err := c.kafka.client(ctx, fleet.ProducerOptions()...)
	if err != nil {
		return err
	}
	defer cl.Close()
	s, err := newSim(cl, c.topic, c.sim)
	if err != nil {
		return err
	}
	defer s.close()
	tracer, flushSpans, err := query.SetupTracing(ctx, query.Identity{Service: "kvindex-replay", Version: buildVersion(), Instance: fmt.Sprintf("replay-%d", s.epoch)})
	if err != nil {
		return usageError{err}
	}
	s.tracer = tracer
	defer func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := flushSpans(within); err != nil {
			slog.Warn("last spans were not sent", "error", err)
		}
	}()

	live, stop := context.WithCancel(ctx)
	defer stop()
	beating := make(chan struct{})
	go func() {
		defer close(beating)
		s.producer.Heartbeats(live, c.sim.heartbeat)
	}()

	bounded := ctx
	if c.duration > 0 {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, c.duration)
		defer cancel()
	}
	total := c.synthetic // requests; 0 if not known
	if c.limit > 0 && (total == 0 || c.limit < total) {
		total = c.limit
	}
	p := newProgress(con, s, total)
	runErr := s.serve(bounded, trace, c.limit, p.step)
	p.end()
	if bounded.Err() != nil && errors.Is(runErr, bounded.Err()) {
		runErr = nil // the time is up, or the user's patience: not a failure
	}
	if c.stay && runErr == nil && ctx.Err() == nil {
		slog.Info("the workers stay alive until interrupted", "workers", c.sim.workers)
		<-ctx.Done()
	}
	stop()
	<-beating
	// What is on its way should arrive even after Ctrl-C.
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	flushErr := s.producer.Flush(flush)

	sum := s.summary()
	if c.output == "json" {
		err = con.printJSON(sum)
	} else {
		err = sum.print(con)
	}
	for _, e := range []error{runErr, s.producer.Err(), flushErr} {
		if e != nil {
			return e
		}
	}
	return err
}

func (c *replayConfig) writeTrace(con *console, trace fleet.Requests) error {
	if c.synthetic == 0 {
		return usagef("--write-trace needs --synthetic")
	}
	f, err := os.Create(c.write)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := fleet.WriteTrace(f, trace)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		_ = os.Remove(c.write) // half a trace is another trace
		return err
	}
	_, err = fmt.Fprintf(con.out, "%d requests in %s\n", n, c.write)
	return err
}

// progress shows how far a replay is: a bar on a terminal, else a log line every
// few seconds.
type progress struct {
	sim  *sim
	bar  *progressbar.ProgressBar
	done int
	last time.Time
}

const progressEvery = 5 * time.Second

// newProgress shows progress to total requests, 0 if that is not known.
func newProgress(con *console, s *sim, total int) *progress {
	p := &progress{sim: s, last: time.Now()}
	if con.errStyle.terminal {
		if total == 0 {
			total = -1
		}
		p.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(con.err),
			progressbar.OptionSetDescription("replay"),
			progressbar.OptionShowCount(),
			progressbar.OptionShowIts(),
			progressbar.OptionSetItsString("requests"),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish(),
			progressbar.OptionEnableColorCodes(con.errStyle.colour))
	}
	return p
}

// step is called after each request.
func (p *progress) step() {
	p.done++
	if p.bar != nil {
		_ = p.bar.Add(1) // a terminal that is gone is no reason to stop
		return
	}
	if time.Since(p.last) >= progressEvery {
		p.last = time.Now()
		args := []any{"requests", p.done, "hit_share", round3(p.sim.own.Stats().HitShare())}
		if a := p.sim.asker; a != nil {
			args = append(args, "unanswered_queries", a.failed)
			if a.lastErr != nil {
				args = append(args, "last_query", a.lastErr)
			}
		}
		slog.Info("replaying", args...)
	}
}

func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}
