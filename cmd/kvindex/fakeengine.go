// This file is the command fake-engine.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/index"
)

// fakeEngineConfig is what the command is told.
type fakeEngineConfig struct {
	engine  fakeengine.Config
	hasher  string
	from    replayConfig // where the requests come from
	control string
	paused  bool
	output  string
}

func fakeEngineCommand() command {
	c := fakeEngineConfig{engine: fakeengine.DefaultConfig(), hasher: index.Flash.String()}
	e := &c.engine
	return command{
		use:   "fake-engine",
		short: "Publish KV events as a vLLM or SGLang engine that serves a trace would",
		long: `Fake-engine behaves like an inference engine as far as KV events go: it publishes over
ZeroMQ what a trace's requests do to its prefix caches, with the bytes and in the order of
vLLM or SGLang, with a replay socket, block hashes of its own, and faults on request. Use it
to try out and test whatever reads such events, without a GPU.

Each rank has a cache of --capacity blocks, and with --host-capacity another in the CPU's
memory, which takes what the first evicts. A request goes to the rank that holds most of
its prompt, less load. A step computes up to 8,192 tokens and is published as one batch,
evictions first. --shape chooses the versions to imitate:
             --shape map                        --shape array
  vllm       0.33 (LoRA, salt in extra_keys)    0.23 (likewise; replies without topic)
  sglang     0.5.23 (LoRA, salt)                0.5.19 (salt only; replies without topic)
After the trace it keeps running, as an engine does, until it is interrupted.

Faults. A gap is a batch that uses up its sequence number but is neither sent nor kept for
replay. Garbage is alternately a payload that is not msgpack, and one with a removal that
cannot be read. Replays longer than libzmq's default queue of 1,000 lose batches, as with
the engines; the exception is vLLM 0.33, whose queue is long enough.

Control. With --control-listen, on a loopback address:
  POST /pause /resume    stop and go on serving requests
  POST /gap /garbage     make the next batch of each rank one
  POST /clear            empty the caches; SGLang publishes that at once, vLLM with its
                         next step that has a request (until then clear_unsaid is true)
  POST /restart?down=2s  become another process, in effect: cut connections, open the same
                         ports after that time, caches empty, sequence numbers from 0
  GET  /held             what each rank really holds, in kvindex's hashes by --hasher
  GET  /prompts?n=16     the last prompts, to ask about`,
		example: `  kvindex fake-engine --synthetic 100000
  kvindex fake-engine --kind sglang --ranks 4 --host-capacity 8192 --salt 0.3 --trace trace.jsonl
  kvindex fake-engine --synthetic 1000000 --rate 50 --gap-every 500 --control-listen 127.0.0.1:7500
  curl -s -X POST 127.0.0.1:7500/pause; curl -s 127.0.0.1:7500/held`,
		flags: func(fs *pflag.FlagSet) {
			fs.Var(&choice{&e.Kind, []string{fakeengine.VLLM, fakeengine.SGLang}}, "kind", "which `engine`: vllm or sglang")
			fs.Var(&choice{&e.Shape, []string{fakeengine.Map, fakeengine.Array}}, "shape", "`form` of events: map as newer versions have it, or array as older ones")
			fs.Var(&choice{&e.Hashes, []string{fakeengine.Int, fakeengine.Bytes}}, "hashes", "`form` of vLLM's block hashes: int or bytes")
			fs.StringVar(&e.Listen, "listen", e.Listen, "publish on this `host:port`; rank N adds N to the port; port 0 is any free one")
			fs.StringVar(&e.ReplayListen, "replay-listen", e.ReplayListen, "answer replay requests on this `host:port`, likewise; empty: none")
			fs.StringVar(&c.control, "control-listen", "", "serve the control interface over HTTP on this loopback `host:port`; empty: none")
			fs.StringVar(&e.Topic, "zmq-topic", "", "first frame of every message, a `text`")
			fs.IntVar(&e.Ranks, "ranks", e.Ranks, "data parallel ranks")
			fs.IntVar(&e.BufferSteps, "buffer-steps", e.BufferSteps, "`batches` of each rank that can be replayed; engines have 10000")
			fs.StringVar(&c.from.trace, "trace", "", "serve the requests of this `file`; - is standard input")
			fs.IntVar(&c.from.synthetic, "synthetic", 0, "make up `N` requests instead")
			fs.Uint64Var(&e.Seed, "seed", e.Seed, "seed of everything random")
			fs.Float64Var(&e.Rate, "rate", e.Rate, "`requests` a second; 0: as fast as possible")
			fs.IntVar(&e.BlockSize, "block-size", e.BlockSize, "`tokens` a block; must divide 512")
			fs.IntVar(&e.Capacity, "capacity", e.Capacity, "`blocks` that a rank's GPU cache holds")
			fs.IntVar(&e.HostCapacity, "host-capacity", e.HostCapacity, "`blocks` that a rank's CPU cache holds; 0: none")
			fs.Float64Var(&e.LoRA, "lora", 0, "`share` of requests with a LoRA adapter, 0 to 1")
			fs.Float64Var(&e.Salt, "salt", 0, "`share` of requests with a cache salt, 0 to 1")
			fs.IntVar(&e.GapEach, "gap-every", 0, "lose every `N`th batch of a rank for good (0: none)")
			fs.IntVar(&e.BadEach, "garbage-every", 0, "make every `N`th batch of a rank unreadable (0: none)")
			fs.Var(&choice{&c.hasher, []string{index.Flash.String(), index.Dynamo.String()}}, "hasher", "`scheme` of the hashes in /held: flash or dynamo")
			fs.BoolVar(&c.paused, "paused", false, "serve no requests until POST /resume")
			outputFlag(fs, &c.output)
		},
		run: func(ctx context.Context, con *console, _ []string) error { return c.run(ctx, con) },
	}
}

func (c *fakeEngineConfig) run(ctx context.Context, con *console) error {
	c.from.sim.seed = c.engine.Seed
	trace, closer, err := c.from.requests()
	if err != nil {
		return err
	}
	defer closer.Close()
	if c.engine.Hasher, err = index.ParseHasher(c.hasher); err != nil {
		return usageError{err}
	}
	if err := c.engine.Validate(); err != nil {
		return usageError{err}
	}
	if c.paused && c.control == "" {
		return usagef("--paused needs --control-listen, by which to resume")
	}
	if err := checkLoopback(c.control); err != nil {
		return err
	}
	e, err := fakeengine.New(c.engine)
	if err != nil {
		return err
	}
	defer e.Close()
	if c.paused {
		e.Pause()
	}
	control, stop, err := serveControl(c.control, e)
	if err != nil {
		return err
	}
	defer stop()
	if err := c.say(con, e.State(), control); err != nil {
		return err
	}
	telling := make(chan struct{})
	live, end := context.WithCancel(ctx)
	go func() {
		defer close(telling)
		tellServed(live, e)
	}()
	err = e.Run(ctx, trace)
	end()
	<-telling
	logServed("requests are over", e.State())
	if err == nil {
		slog.Info("the engine stays until interrupted")
		<-ctx.Done()
	}
	if ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err())) {
		return nil // that is how engines end
	}
	return err
}

// checkLoopback checks that only this machine can reach the control: it asks
// nobody who they are.
func checkLoopback(address string) error {
	if address == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return usagef("--control-listen %q: %w", address, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return usagef("--control-listen %q: the host must be a loopback address, since everyone who reaches it is obeyed", address)
	}
	return nil
}

// serveControl serves e's control at address, if there is one, until stop is called.
func serveControl(address string, e *fakeengine.Engine) (url string, stop func(), err error) {
	if address == "" {
		return "", func() {}, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return "", nil, err
	}
	s := &http.Server{
		Handler:           e.Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			slog.Error("the control is gone", "error", err)
		}
	}()
	return "http://" + l.Addr().String(), func() {
		s.Close()
		<-done
	}, nil
}

// say prints where the engine listens.
func (c *fakeEngineConfig) say(con *console, state fakeengine.Held, control string) error {
	if c.output == "json" {
		return con.printJSON(struct {
			Control string `json:"control,omitempty"`
			fakeengine.Held
		}{control, state})
	}
	rows := [][]string{}
	for _, r := range state.Ranks {
		rows = append(rows, []string{fmt.Sprint(r.Rank), r.Events, r.Replay})
	}
	if err := table(con.out, []string{"rank", "events", "replay"}, rows); err != nil {
		return err
	}
	if control != "" {
		_, err := fmt.Fprintln(con.out, "control", control)
		return err
	}
	return nil
}

// tellServed logs how it goes until ctx ends.
func tellServed(ctx context.Context, e *fakeengine.Engine) {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			logServed("serving", e.State())
		}
	}
}

func logServed(what string, s fakeengine.Held) {
	var sum fakeengine.Counts
	subscribers, dropped := 0, uint64(0)
	for _, r := range s.Ranks {
		sum.Batches += r.Batches
		sum.Gaps += r.Gaps
		sum.Garbage += r.Garbage
		sum.Replays += r.Replays
		subscribers += r.Subscribers
		dropped += r.Dropped
	}
	args := []any{"requests", s.Requests, "batches", sum.Batches, "subscribers", subscribers, "replays", sum.Replays}
	for _, n := range []struct {
		name string
		n    int
	}{{"gaps", sum.Gaps}, {"garbage", sum.Garbage}, {"dropped", int(dropped)}, {"incarnation", s.Incarnation}} {
		if n.n > 0 && (n.name != "incarnation" || n.n > 1) {
			args = append(args, n.name, n.n)
		}
	}
	if s.Paused {
		args = append(args, "paused", true)
	}
	slog.Info(what, args...)
}
