// This file is the command demo.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/pipeline/ports"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

const (
	demoPartitions   = 16
	demoProbes       = 1000             // queries compared before and after the kill
	demoPace         = 150              // requests a second, at least
	demoTraffic      = 15 * time.Second // the whole trace, at most
	demoWait         = time.Minute      // for any one thing that should take a second
	demoSnapshotAge  = time.Second
	demoDrainTimeout = 2 * time.Second // the broker may be gone already
)

// demoConfig is what the command is told.
type demoConfig struct {
	requests int
	relay    bool
	keep     bool
	output   string
	sim      simConfig
}

func demoCommand() command {
	c := demoConfig{sim: defaultSim()}
	c.sim.capacity = 1024
	c.sim.queryTimeout = demoWait // the demo shows the index, not how busy the machine is
	return command{
		use:   "demo",
		short: "Show everything at once, with nothing to set up",
		long: `Demo needs no services and leaves nothing behind. It starts a small broker in its own
process (on disk, in a temporary folder) and a stage as a child process, and lets a
simulated fleet serve a made-up trace of conversations: each request goes where the index
says that most of its prompt is cached. Half-way through it kills the stage (kill -9) and
starts a new one, which restores itself from the snapshots; a thousand answers from before
and after, at equal offsets, are compared with each other and with the caches themselves.

With --relay there are simulated engines instead, which publish over ZeroMQ as vLLM and
SGLang do and know nothing of Kafka, and a relay process. The relay is killed, an engine
restarts, and the answers are compared with what the engines hold.

It takes well under a minute. The broker is franz-go's kfake, made for tests: for real use,
see "kvindex serve --help".`,
		example: `  kvindex demo
  kvindex demo --requests 20000 --seed 7
  kvindex demo --relay
  kvindex demo --keep`,
		flags: func(fs *pflag.FlagSet) {
			fs.IntVar(&c.requests, "requests", 6000, "serve `N` requests")
			fs.Uint64Var(&c.sim.seed, "seed", c.sim.seed, "seed of everything random")
			fs.IntVar(&c.sim.workers, "workers", c.sim.workers, "workers in the fleet")
			fs.IntVar(&c.sim.capacity, "capacity", c.sim.capacity, "`blocks` of 64 tokens that a worker's cache holds")
			fs.BoolVar(&c.relay, "relay", false, "use a relay, and engines that publish over ZeroMQ, instead of the fleet")
			fs.BoolVar(&c.keep, "keep", false, "leave everything running until interrupted")
			outputFlag(fs, &c.output)
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			switch {
			case c.requests < 10:
				return usagef("--requests %d: want at least 10", c.requests)
			case c.relay && c.requests < 10*demoMoments:
				return usagef("--requests %d: with --relay want at least %d", c.requests, 10*demoMoments)
			case c.sim.workers < 1 || c.sim.capacity < 1:
				return usagef("--workers %d, --capacity %d: want at least 1 of each", c.sim.workers, c.sim.capacity)
			case c.relay && c.keep:
				return usagef("--keep does not go with --relay: its engines serve what the demo gives them")
			}
			return c.run(ctx, con)
		},
	}
}

// demoSummary is what the demo shows at its end.
type demoSummary struct {
	replaySummary
	IndexBlocks    int64   `json:"index_blocks"`    // (block, worker) pairs held at the end
	Probes         int     `json:"probes"`          // queries asked before and after the kill
	ProbesChanged  int     `json:"probes_changed"`  // of them, answered differently after it
	ProbesWrong    int     `json:"probes_wrong"`    // of them, answered differently from what the caches hold
	ReadySeconds   float64 `json:"ready_seconds"`   // from the new process's start until it was ready
	RestoreSeconds float64 `json:"restore_seconds"` // of which the slowest partition's restore
	RecordsAtKill  int64   `json:"records_at_kill"` // in the events topic
	RecordsReread  int64   `json:"records_reread"`  // of them, read again by the new process
}

// demo is one run of it. It is built up step by step; close takes it down again
// in the opposite order.
type demo struct {
	cfg  demoConfig
	show *screen
	undo []func()
	dir  string

	brokers    []string
	grpc, http string // the stage's addresses
	adm        *kadm.Client
	stage      *client.Client
	child      *child
	sim        *sim
	trace      *madeTrace
}

// madeTrace is a trace in memory.
type madeTrace struct {
	requests []fleet.Request
	next     int
}

func (t *madeTrace) Next() (*fleet.Request, error) {
	if t.next == len(t.requests) {
		return nil, io.EOF
	}
	t.next++
	return &t.requests[t.next-1], nil
}

func (d *demo) close() {
	d.show.clear()
	for _, undo := range slices.Backward(d.undo) {
		undo()
	}
}

func (c *demoConfig) run(ctx context.Context, con *console) error {
	d := &demo{cfg: *c, show: &screen{w: con.out, style: con.outStyle}}
	if c.output == "json" {
		d.show = &screen{w: con.err, style: con.errStyle}
	}
	defer d.close()
	if c.relay {
		return c.runRelay(ctx, con, d)
	}
	sum, err := d.story(ctx)
	if err != nil {
		return err
	}
	if err = d.tell(con, sum); err == nil && sum.ProbesChanged+sum.ProbesWrong > 0 {
		err = fmt.Errorf("%d answers changed over the kill and %d were wrong", sum.ProbesChanged, sum.ProbesWrong)
	}
	if err != nil || !c.keep {
		return err
	}
	d.show.line(`
It stays up until Ctrl-C. Try, elsewhere:
  kvindex status --query-address %s
  kvindex verify --query-address %s --brokers %s
  curl http://%s/v1/workers`, d.grpc, d.grpc, d.brokers[0], d.http)
	ctx, stop := d.child.during(ctx)
	defer stop()
	d.sim.producer.Heartbeats(ctx, c.sim.heartbeat)
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// tell shows the summary of what happened.
func (d *demo) tell(con *console, sum interface{ print(*console) error }) error {
	d.show.clear()
	if d.cfg.output == "json" {
		return con.printJSON(sum)
	}
	return sum.print(con)
}

// story is the demo from its beginning to the summary.
func (d *demo) story(ctx context.Context) (sum demoSummary, err error) {
	bold := d.show.style.bold
	if err := d.begin(ctx, ""); err != nil {
		return sum, err
	}
	if err := d.startFleet(); err != nil {
		return sum, err
	}
	d.show.line("%s   %d workers, each caching %s blocks of %d tokens; %s requests of conversations to come",
		bold("fleet"), d.cfg.sim.workers, thousands(d.cfg.sim.capacity), d.cfg.sim.blockSize, thousands(d.cfg.requests))

	if err := d.traffic(ctx, d.cfg.requests*6/10); err != nil {
		return sum, err
	}
	probes := d.probes()
	_, ends, err := d.settle(ctx)
	if err != nil {
		return sum, err
	}
	before, err := d.ask(ctx, probes)
	if err != nil {
		return sum, err
	}
	for _, end := range ends {
		sum.RecordsAtKill += end
	}
	d.show.line("%s   at %s records the traffic pauses; %s prompts asked about, answers kept", bold("pause"), thousands(sum.RecordsAtKill), thousands(len(probes)))
	pid := d.child.cmd.Process.Pid
	d.child.kill()
	d.show.line("%s %s", bold("kill -9"), d.show.style.red(fmt.Sprintf("process %d is gone, and its index with it", pid)))
	took, status, err := d.startStage(ctx)
	if err != nil {
		return sum, err
	}
	sum.ReadySeconds = round3(took.Seconds())
	for _, p := range status.Partitions {
		sum.RecordsReread += p.Reread
		sum.RestoreSeconds = max(sum.RestoreSeconds, round3(p.RestoreSeconds))
	}
	after, err := d.ask(ctx, probes)
	if err != nil {
		return sum, err
	}
	_, again, err := d.settle(ctx)
	if err != nil {
		return sum, err
	}
	if !maps.Equal(ends, again) {
		return sum, errors.New("BUG: records arrived while the traffic paused")
	}
	sum.Probes = len(probes)
	for i, p := range probes {
		if !maps.Equal(before[i], after[i]) {
			sum.ProbesChanged++
		}
		if truth := d.held(p); !maps.Equal(before[i], truth) || !maps.Equal(after[i], truth) {
			sum.ProbesWrong++
		}
	}
	d.show.line("%s   process %d, ready after %.1f s, %s of %s records read again; %d of %d answers as before", bold("stage"), d.child.cmd.Process.Pid,
		took.Seconds(), thousands(sum.RecordsReread), thousands(sum.RecordsAtKill), sum.Probes-sum.ProbesChanged, sum.Probes)

	if err := d.traffic(ctx, 0); err != nil {
		return sum, err
	}
	status, _, err = d.settle(ctx)
	if err != nil {
		return sum, err
	}
	for _, m := range status.Models {
		sum.IndexBlocks += m.Blocks
	}
	sum.replaySummary = d.sim.summary()
	return sum, nil
}

// begin starts the broker and the first stage. pad is what makes their names as wide as
// those that follow.
func (d *demo) begin(ctx context.Context, pad string) error {
	bold := d.show.style.bold
	if err := d.startBroker(ctx); err != nil {
		return err
	}
	d.show.line("%s%s  in this process, %s, on disk in %s", bold("broker"), pad, d.brokers[0], d.dir)
	took, _, err := d.startStage(ctx)
	if err != nil {
		return err
	}
	d.show.line("%s%s   process %d, ready after %.1f s", bold("stage"), pad, d.child.cmd.Process.Pid, took.Seconds())
	return nil
}

func (d *demo) startBroker(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "kvindex-demo-")
	if err != nil {
		return err
	}
	d.dir = dir
	d.undo = append(d.undo, func() {
		if err := os.RemoveAll(dir); err != nil {
			slog.Warn("the demo's folder stays", "error", err)
		}
	})
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.DataDir(filepath.Join(dir, "broker")))
	if err != nil {
		return fmt.Errorf("start the broker: %w", err)
	}
	d.undo = append(d.undo, cluster.Close)
	d.brokers = cluster.ListenAddrs()
	cl, err := kafkaClient(d.brokers)
	if err != nil {
		return err
	}
	d.undo = append(d.undo, cl.Close)
	d.adm = kadm.NewClient(cl)
	topics := topicsConfig{topic: defaultTopic, snapshotTopic: defaultSnapshotTopic, partitions: demoPartitions, replication: 1}
	return topics.create(ctx, nil, d.adm)
}

// startStage starts a stage as a child process and returns, once it has applied
// all there is, how long it took until it was.
func (d *demo) startStage(ctx context.Context) (time.Duration, *pb.StatusResponse, error) {
	if d.stage == nil {
		var err error
		if d.grpc, err = claim(&d.undo, 1); err != nil {
			return 0, nil, err
		}
		if d.http, err = claim(&d.undo, 1); err != nil {
			return 0, nil, err
		}
		if d.stage, err = client.Dial(d.grpc, 0); err != nil {
			return 0, nil, err
		}
		d.undo = append(d.undo, func() { d.stage.Close() }, func() {
			if d.child != nil {
				d.child.stop()
			}
		})
	}
	start := time.Now()
	child, err := startChild(filepath.Join(d.dir, "stage.log"), stageCommandName,
		"--brokers", strings.Join(d.brokers, ","), "--topic", defaultTopic, "--snapshot-topic", defaultSnapshotTopic,
		"--group", defaultGroup, "--grpc-listen", d.grpc, "--http-listen", d.http,
		"--snapshot-max-age", demoSnapshotAge.String(), "--drain-timeout", demoDrainTimeout.String(), "--log-level", "warn", "--max-runnable", childRunnable)
	if err != nil {
		return 0, nil, fmt.Errorf("start the stage: %w", err)
	}
	d.child = child
	status, _, err := d.settle(ctx)
	return time.Since(start), status, err
}

// claim returns the address of the first of n ports in a row on loopback that are
// free, and stay so until undo while what is to listen there is down.
func claim(undo *[]func(), n int) (string, error) {
	row, err := ports.Claim(n)
	if err != nil {
		return "", err
	}
	*undo = append(*undo, row.Release)
	return row.Address(), nil
}

// makeTrace makes up the requests.
func (d *demo) makeTrace() {
	made := fleet.NewSynthetic(d.cfg.requests, d.cfg.sim.seed)
	d.trace = &madeTrace{}
	for r, err := made.Next(); err == nil; r, err = made.Next() {
		c := *r
		c.HashIDs = slices.Clone(r.HashIDs)
		d.trace.requests = append(d.trace.requests, c)
	}
}

func (d *demo) startFleet() error {
	d.makeTrace()
	last := d.trace.requests[len(d.trace.requests)-1].Timestamp
	traffic := min(demoTraffic, time.Duration(d.cfg.requests)*time.Second/demoPace)
	d.cfg.sim.speed = float64(last) / float64(traffic.Milliseconds())
	d.cfg.sim.stage.address = d.grpc
	cl, err := kafkaClient(d.brokers, fleet.ProducerOptions()...)
	if err != nil {
		return err
	}
	d.undo = append(d.undo, cl.Close)
	if d.sim, err = newSim(cl, defaultTopic, d.cfg.sim); err != nil {
		return err
	}
	d.undo = append(d.undo, d.sim.close)
	return nil
}

// traffic serves the next requests, all that are left if n is 0, and returns
// once their events are in the topic.
func (d *demo) traffic(ctx context.Context, n int) error {
	ctx, stop := d.child.during(ctx)
	defer stop()
	live, quiet := context.WithCancel(ctx)
	var beating sync.WaitGroup
	beating.Go(func() { d.sim.producer.Heartbeats(live, d.cfg.sim.heartbeat) })
	err := d.sim.serve(ctx, d.trace, n, func() { d.show.status(d.now) })
	quiet()
	beating.Wait() // from here on no record is sent
	if err == nil {
		err = d.sim.producer.Flush(ctx)
	}
	if err == nil {
		err = d.sim.producer.Err()
	}
	return because(ctx, err)
}

// because returns why ctx ended if that is what made err.
func because(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// now describes the traffic in a line.
func (d *demo) now() string {
	own, beside := d.sim.own.Stats(), d.sim.beside.Stats()
	return fmt.Sprintf("traffic  %s of %s requests, %s blocks cached; hits %.0f %% by the index, %.0f %% at random; queries p50 %.2f ms",
		thousands(d.trace.next), thousands(len(d.trace.requests)), thousands(own.Stored-own.Removed),
		100*own.HitShare(), 100*beside.HitShare(), float64(quantile(d.sim.asker.took, 0.5))/float64(time.Millisecond))
}

// settle waits until the stage has applied all there is in the topic.
func (d *demo) settle(ctx context.Context) (*pb.StatusResponse, map[int32]int64, error) {
	ctx, stop := d.child.during(ctx)
	defer stop()
	bounded, cancel := context.WithTimeout(ctx, demoWait)
	defer cancel()
	status, ends, err := stageAtEnd(bounded, d.grpc, d.stage, d.adm, func(string) {})
	return status, ends, because(ctx, err)
}

// probes are prompts to ask about: of requests served so far, at random.
func (d *demo) probes() []fleet.Prompt {
	rng := rand.New(rand.NewPCG(d.cfg.sim.seed, 0x70726f6265))
	probes := make([]fleet.Prompt, demoProbes)
	for i := range probes {
		p := d.sim.blocks.Of(&d.trace.requests[rng.IntN(d.trace.next)])
		probes[i] = fleet.Prompt{Locals: slices.Clone(p.Locals), Seqs: slices.Clone(p.Seqs)}
	}
	return probes
}

// ask returns the stage's answers: each worker's depth.
func (d *demo) ask(ctx context.Context, probes []fleet.Prompt) ([]map[string]int, error) {
	answers := make([]map[string]int, len(probes))
	for i, p := range probes {
		req := &pb.MatchRequest{Model: d.cfg.sim.model, BlockSize: uint32(d.cfg.sim.blockSize)}
		for _, l := range p.Locals {
			req.LocalHashes = append(req.LocalHashes, uint64(l))
		}
		resp, err := d.stage.Match(ctx, req)
		if err != nil {
			return nil, askError(d.grpc, err)
		}
		answers[i] = map[string]int{}
		for _, m := range resp.Matches {
			answers[i][m.Worker] = int(m.DepthBlocks)
		}
	}
	return answers, nil
}

// held is what ask must return: what the workers' caches hold.
func (d *demo) held(p fleet.Prompt) map[string]int {
	held := map[string]int{}
	for name, w := range d.sim.asker.worker {
		if depth := d.sim.own.Depth(w, p); depth > 0 {
			held[name] = depth
		}
	}
	return held
}

func (s demoSummary) print(con *console) error {
	var b strings.Builder
	percent := func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }
	mean := func(x float64) string { return fmt.Sprintf("%.2f x mean", x) }
	b.WriteString("\n")
	if err := table(&b, []string{"", "by the index", "at random"}, [][]string{
		{"prefix hits", percent(s.Index.HitShare), percent(s.Random.HitShare)},
		{"busiest worker", mean(s.Index.MaxOverMean), mean(s.Random.MaxOverMean)},
	}); err != nil {
		return err
	}
	same := s.Probes - s.ProbesChanged
	verdict := con.outStyle.green(fmt.Sprintf("%d of %d equal before and after, and equal to the workers' caches", same, s.Probes))
	if s.ProbesChanged+s.ProbesWrong > 0 {
		verdict = con.outStyle.red(fmt.Sprintf("%d of %d equal before and after, %d differ from the workers' caches", same, s.Probes, s.ProbesWrong))
	}
	fmt.Fprintf(&b, `
requests  %s in %.0f s to %d workers, each caching %s blocks of %d tokens
events    %s in %s records: %s blocks stored, %s removed, %s in the index at the end
queries   p50 %.2f ms, p99 %.2f ms; %s answered, %s not
kill -9   a new process was ready after %.1f s; it read %s of %s records again
answers   %s
`,
		thousands(s.Requests), s.Seconds, s.Workers, thousands(s.CapacityBlocks), s.BlockSize,
		thousands(s.Events), thousands(s.Produced.Records), thousands(s.BlocksStored), thousands(s.BlocksRemoved), thousands(s.IndexBlocks),
		s.Queries.P50Ms, s.Queries.P99Ms, thousands(s.Queries.Answered), thousands(s.Queries.Failed),
		s.ReadySeconds, thousands(s.RecordsReread), thousands(s.RecordsAtKill),
		verdict)
	_, err := fmt.Fprint(con.out, b.String())
	return err
}
