// This file is the command verify.

package main

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/verify"
)

// verifyConfig is what the command is told.
type verifyConfig struct {
	kafka   kafkaAccess
	asked   stageAccess
	queries int
	seed    uint64
	grace   time.Duration
	timeout time.Duration
	follow  bool
	output  string
}

func verifyCommand() command {
	var c verifyConfig
	return command{
		use:   "verify",
		short: "Prove that a stage is exact: compare its answers with the events topic",
		long: `Verify reads the events topic from its start with an independent, slow and simple
implementation, waits until the stage has applied exactly the same offsets, and then
compares what the stage knows of every worker, and its answers to random queries. It prints
every difference; the exit code is 3 if there is any.

Answers can only be compared while no new records arrive; occasional records, such as
heartbeats, do no harm. The log must be complete: what was trimmed cannot be checked. With
--follow the command keeps running, remembers what it has read, and compares again for each
line on standard input, so that the log can be trimmed in between.`,
		example: `  kvindex verify
  kvindex verify --queries 10000 --seed 2 --output json
  (echo; sleep 60; echo) | kvindex verify --follow`,
		flags: func(fs *pflag.FlagSet) {
			c.kafka.flags(fs)
			c.asked.flags(fs)
			fs.IntVar(&c.queries, "queries", 1000, "compare the answers to `N` queries")
			fs.Uint64Var(&c.seed, "seed", 1, "seed of the queries")
			fs.DurationVar(&c.grace, "worker-grace", time.Hour, "the stage's --worker-grace, a `time`")
			timeoutFlag(fs, &c.timeout, time.Minute, "give up if the stage has not got there after this `time`")
			fs.BoolVar(&c.follow, "follow", false, "compare again for each line on standard input, until it ends")
			outputFlag(fs, &c.output)
		},
		run: func(ctx context.Context, con *console, _ []string) error { return c.run(ctx, con) },
	}
}

// verification is the result of one comparison.
type verification struct {
	Queries     int      `json:"queries"`
	Workers     int      `json:"workers"` // worker-ranks whose state was compared
	Records     int64    `json:"records"` // offsets read so far
	Seconds     float64  `json:"seconds"`
	Differences []string `json:"differences"`
}

func (c *verifyConfig) run(ctx context.Context, con *console) error {
	if c.queries < 0 {
		return usagef("--queries %d is negative", c.queries)
	}
	v, err := newVerifier(ctx, &c.kafka, &c.asked, c.grace, c.seed)
	if err != nil {
		return err
	}
	defer v.close()
	different := 0
	lines := bufio.NewScanner(con.in)
	for {
		bounded, cancel := context.WithTimeout(ctx, c.timeout)
		quiet := v.tell(con)
		res, err := v.verify(bounded, c.queries)
		quiet()
		cancel()
		if err != nil {
			return err
		}
		if len(res.Differences) > 0 {
			different++
		}
		if err := c.report(con, res); err != nil {
			return err
		}
		if !c.follow || !lines.Scan() {
			break
		}
	}
	if different > 0 {
		return checkf("the stage differs from its topic")
	}
	return lines.Err()
}

func (c *verifyConfig) report(con *console, res verification) error {
	if c.output == "json" {
		return con.printJSON(res)
	}
	for _, d := range res.Differences {
		fmt.Fprintln(con.out, con.outStyle.red("differs: ")+d)
	}
	verdict := con.outStyle.green("exact")
	if n := len(res.Differences); n > 0 {
		verdict = con.outStyle.red(fmt.Sprintf("%d differences", n))
	}
	_, err := fmt.Fprintf(con.out, "%s: %d queries and the state of %d worker-ranks, after %d records (%.1f s)\n",
		verdict, res.Queries, res.Workers, res.Records, res.Seconds)
	return err
}

// verifier compares one stage with its topic.
type verifier struct {
	opts    []kgo.Opt // to reach the brokers
	cl      *kgo.Client
	adm     *kadm.Client
	address string
	stage   *client.Client
	oracle  *verify.Oracle
	read    map[int32]int64 // the oracle's offsets; nil before it has read anything
	rng     *rand.Rand
	does    atomic.Value // string: what it does right now
}

func newVerifier(ctx context.Context, kafka *kafkaAccess, stage *stageAccess, grace time.Duration, seed uint64) (*verifier, error) {
	opts, err := kafka.options()
	if err != nil {
		return nil, err
	}
	v := &verifier{
		opts:    opts,
		address: stage.address,
		oracle:  verify.New(grace),
		rng:     rand.New(rand.NewPCG(seed, 0x766572696679)),
	}
	v.does.Store("starting")
	if v.cl, err = kafkaClient(kafka.brokers, opts...); err != nil {
		return nil, err
	}
	if err = ping(ctx, v.cl, kafka.brokers); err != nil {
		v.cl.Close()
		return nil, err
	}
	v.adm = kadm.NewClient(v.cl)
	if v.stage, err = stage.dial(0); err != nil {
		v.cl.Close()
		return nil, err
	}
	return v, nil
}

// tell shows what the verifier does, once that takes a while, until quiet is called.
func (v *verifier) tell(con *console) (quiet func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		shown := screen{w: con.err, style: con.errStyle}
		defer shown.clear()
		start, tick := time.Now(), time.NewTicker(tellAfter)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				shown.status(func() string {
					return fmt.Sprintf("%s (%s)", v.does.Load(), time.Since(start).Round(time.Second))
				})
			}
		}
	}()
	return func() { close(done); <-ended }
}

// tellAfter is how long a command may be silent.
const tellAfter = 2 * time.Second

func (v *verifier) close() {
	v.stage.Close()
	v.cl.Close()
}

// verify compares worker states and n queries. ctx bounds it.
func (v *verifier) verify(ctx context.Context, n int) (verification, error) {
	start := time.Now()
	res := verification{Differences: []string{}}
	// Small batches find a quiet moment even between heartbeats.
	for batch, first := 64, true; first || res.Queries < n; {
		status, err := v.catchUp(ctx)
		if err != nil {
			return res, err
		}
		v.does.Store(fmt.Sprintf("%d of %d queries compared", res.Queries, n))
		queries := v.queries(status, min(batch, n-res.Queries))
		before, err := v.stage.Workers(ctx, "")
		if err != nil {
			return res, fmt.Errorf("ask for the workers: %w", err)
		}
		answers := make([]*pb.MatchResponse, len(queries))
		for i, q := range queries {
			req := &pb.MatchRequest{Model: q.Model, BlockSize: uint32(q.BlockSize)}
			for _, l := range q.Locals {
				req.LocalHashes = append(req.LocalHashes, uint64(l))
			}
			if answers[i], err = v.stage.Match(ctx, req); err != nil {
				return res, fmt.Errorf("query of %d blocks of model %s: %w", len(q.Locals), q.Model, err)
			}
		}
		after, err := v.stage.Workers(ctx, "")
		if err != nil {
			return res, fmt.Errorf("ask for the workers: %w", err)
		}
		quiet, err := v.quiet(ctx, status.Events.GetName())
		if err != nil {
			return res, err
		}
		if !quiet {
			batch = max(1, batch/2)
			continue
		}
		known := byName(before.Workers, after.Workers)
		if first {
			first = false
			res.Workers, res.Differences = v.compareWorkers(known)
		}
		for i, q := range queries {
			res.Differences = append(res.Differences, v.compareAnswer(q, answers[i], known)...)
		}
		res.Queries += len(queries)
		if len(queries) == 0 {
			break // the topic holds nothing to ask about
		}
	}
	for _, at := range v.read {
		res.Records += at
	}
	res.Seconds = round3(time.Since(start).Seconds())
	return res, nil
}

// catchUp returns once the stage is ready and has applied all there is, and the
// oracle too.
func (v *verifier) catchUp(ctx context.Context) (*pb.StatusResponse, error) {
	waiting := "waiting for the stage at " + v.address + " to have applied all of its topic"
	v.does.Store(waiting)
	status, ends, err := stageAtEnd(ctx, v.address, v.stage, v.adm, func(why string) { v.does.Store(waiting + ": " + why) })
	if err != nil {
		return nil, err
	}
	topic := status.Events.GetName()
	if v.read == nil {
		starts, err := v.adm.ListStartOffsets(ctx, topic)
		if err == nil {
			err = starts.Error()
		}
		if err != nil {
			return nil, fmt.Errorf("topic %s: %w", topic, err)
		}
		for p := range ends {
			if s, _ := starts.Lookup(topic, p); s.Offset > 0 {
				return nil, fmt.Errorf("topic %s partition %d: the log begins at %d: what was before cannot be checked", topic, p, s.Offset)
			}
		}
	}
	if !maps.Equal(v.read, ends) {
		v.does.Store("reading topic " + topic)
		if err := v.oracle.Read(ctx, v.opts, topic, v.read, ends); err != nil {
			return nil, err
		}
		v.read = ends
	}
	return status, nil
}

// quiet reports whether nothing has arrived since the oracle last read. Then
// whatever the stage answered meanwhile was of these offsets.
func (v *verifier) quiet(ctx context.Context, topic string) (bool, error) {
	ends, err := topicEnds(ctx, v.adm, topic)
	return maps.Equal(ends, v.read), err
}

// queries makes up to n queries about the models that the stage serves.
func (v *verifier) queries(status *pb.StatusResponse, n int) []verify.Query {
	if n <= 0 {
		return nil
	}
	return slices.DeleteFunc(v.oracle.Queries(v.rng, n), func(q verify.Query) bool {
		return !slices.ContainsFunc(status.Models, func(m *pb.ModelStatus) bool {
			return m.Model == q.Model && m.BlockSize == uint32(q.BlockSize)
		})
	})
}

// workerState is a worker-rank as the stage listed it before and after the
// queries. What time alone changed in between cannot be compared.
type workerState struct {
	before, after *pb.WorkerStatus
}

func (s workerState) hidden() (is, sure bool) {
	if s.before == nil || s.after == nil {
		return false, false
	}
	is = s.after.Silent || s.after.Retired
	return is, is == (s.before.Silent || s.before.Retired)
}

func byName(before, after []*pb.WorkerStatus) map[verify.WorkerRank]workerState {
	known := map[verify.WorkerRank]workerState{}
	for _, w := range before {
		known[verify.WorkerRank{Worker: w.Worker, Rank: w.DpRank}] = workerState{before: w}
	}
	for _, w := range after {
		id := verify.WorkerRank{Worker: w.Worker, Rank: w.DpRank}
		known[id] = workerState{known[id].before, w}
	}
	return known
}

// compareWorkers compares what the stage lists of each worker-rank, and returns
// how many it compared. Retired ones hold nothing, and when they are forgotten
// is the stage's clock's to say: they are left out.
func (v *verifier) compareWorkers(known map[verify.WorkerRank]workerState) (int, []string) {
	n, diffs := 0, []string{}
	seen := map[verify.WorkerRank]bool{}
	for _, want := range v.oracle.Workers() {
		seen[want.WorkerRank] = true
		got := known[want.WorkerRank].after
		if want.Retired || got.GetRetired() {
			continue
		}
		n++
		if got == nil {
			diffs = append(diffs, fmt.Sprintf("worker %s rank %d is not known", want.Worker, want.Rank))
			continue
		}
		b := got.Blocks
		have := fmt.Sprintf("partition %d, model %s of %d (%s), epoch %d, seq %d, incomplete %v, blocks %v", got.Partition, got.Model, got.BlockSize,
			got.Hasher, got.Epoch, got.Seq, got.Incomplete, []int64{b.GetDevice(), b.GetHost(), b.GetDisk(), b.GetExternal()})
		should := fmt.Sprintf("partition %d, model %s of %d (%s), epoch %d, seq %d, incomplete %v, blocks %v", want.Partition, want.Model, want.BlockSize,
			want.Hasher, want.Epoch, want.Seq, want.Incomplete, want.Blocks)
		if have != should {
			diffs = append(diffs, fmt.Sprintf("worker %s rank %d: the stage has %s; the topic says %s", want.Worker, want.Rank, have, should))
		}
	}
	for id, s := range known {
		if !seen[id] && !s.after.GetRetired() {
			diffs = append(diffs, fmt.Sprintf("worker %s rank %d: the topic knows no such worker", id.Worker, id.Rank))
		}
	}
	slices.Sort(diffs)
	return n, diffs
}

// compareAnswer compares one answer with the oracle's.
func (v *verifier) compareAnswer(q verify.Query, answer *pb.MatchResponse, known map[verify.WorkerRank]workerState) []string {
	got := map[verify.WorkerRank]index.Depths{}
	var diffs []string
	differs := func(id verify.WorkerRank, stage, topic index.Depths) {
		diffs = append(diffs, fmt.Sprintf("query of %d blocks of model %s, first %d: worker %s rank %d: the stage answers %v, the topic says %v (device, with host, disk, external)",
			len(q.Locals), q.Model, q.Locals[0], id.Worker, id.Rank, stage, topic))
	}
	for _, m := range answer.Matches {
		id := verify.WorkerRank{Worker: m.Worker, Rank: m.DpRank}
		depths := cumulative(m)
		if _, twice := got[id]; twice {
			differs(id, depths, got[id])
		}
		got[id] = depths
	}
	want := v.oracle.Depths(q.Model, q.BlockSize, q.Locals)
	for id := range known {
		if hidden, sure := known[id].hidden(); !sure {
			delete(got, id)
			delete(want, id)
		} else if hidden {
			delete(want, id)
		}
	}
	for id, depth := range want {
		if got[id] != depth {
			differs(id, got[id], depth)
		}
	}
	for id, depth := range got {
		if _, ok := want[id]; !ok {
			differs(id, depth, index.Depths{})
		}
	}
	slices.Sort(diffs)
	return diffs
}
