// This file is the demo with engines and a relay in the place of a fleet that
// writes its events itself.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/relay"
)

const (
	demoEngines  = 8
	demoHost     = 512 // blocks of an engine's CPU cache, where it has one
	demoBuffer   = 500 // batches that an engine can replay
	demoMoments  = 100 // requests whose way from engine to answer is timed
	demoEpilogue = 10  // while the relay is down, one in this many of a part's requests is served
)

// demoForms are the engines' kinds, in turn.
var demoForms = []struct {
	name         string
	kind         relay.Kind
	shape        string
	hashes       string
	ranks, onCPU int
}{
	{"vLLM 0.33", relay.VLLM, fakeengine.Map, fakeengine.Int, 1, demoHost},
	{"SGLang 0.5.23", relay.SGLang, fakeengine.Map, fakeengine.Int, 1, demoHost},
	{"vLLM 0.23", relay.VLLM, fakeengine.Array, fakeengine.Bytes, 2, 0},
	{"SGLang 0.5.19", relay.SGLang, fakeengine.Array, fakeengine.Int, 1, 0},
}

// relayDemo is a demo with engines and a relay.
type relayDemo struct {
	*demo
	hasher  index.BlockHasher
	engines []*fakeengine.Engine
	places  map[place]int // of the ranks, in the order that the router has
	of      []place       // the other way round
	relay   *child
	at      string // the relay's HTTP address
	router  *fleet.Router

	asked      []time.Duration
	hit, total int // blocks of the prompts routed so far, and those cached where they went
	answers    int // compared
	wrong      int
}

// place is an engine's rank, and depths how many leading blocks it holds: in the
// device, and in the device and the host together.
type (
	place  struct{ engine, rank int }
	depths struct{ device, host int }
)

// relaySummary is what the demo with a relay shows at its end.
type relaySummary struct {
	Requests int     `json:"requests"`
	Engines  int     `json:"engines"`
	Ranks    int     `json:"ranks"`
	HitShare float64 `json:"hit_share"` // of all prompts' blocks, cached where the index sent them
	Batches  uint64  `json:"batches"`   // published by the engines that run at the end
	Blocks   int64   `json:"blocks"`    // (block, rank, tier) triples in the index at the end
	Queries  struct {
		P50Ms float64 `json:"p50_ms"`
		P99Ms float64 `json:"p99_ms"`
	} `json:"queries"`
	Visible struct { // from the engine's publishing to an answer that shows it
		P50Ms float64 `json:"p50_ms"`
		P99Ms float64 `json:"p99_ms"`
	} `json:"visible"`
	Missed       uint64  `json:"missed"`        // batches published while there was no relay
	ReadySeconds float64 `json:"ready_seconds"` // from the new relay's start until it had caught up
	Answers      int     `json:"answers"`       // compared with what the engines hold
	Wrong        int     `json:"wrong"`         // of them
}

// relayStory is the demo with a relay, from its beginning to the summary.
func (d *demo) relayStory(ctx context.Context) (sum relaySummary, err error) {
	bold := d.show.style.bold
	r := &relayDemo{demo: d, places: map[place]int{}, hasher: index.BlockHasher{BlockSize: d.cfg.sim.blockSize, Scheme: index.Flash}}
	if err := d.begin(ctx, " "); err != nil {
		return sum, err
	}
	if err := r.startEngines(); err != nil {
		return sum, err
	}
	names := []string{}
	for _, f := range demoForms {
		names = append(names, f.name)
	}
	d.show.line("%s  %d with %d ranks, in this process: events over ZeroMQ as of %s", bold("engines"), len(r.engines), len(r.of), strings.Join(names, ", "))
	took, err := r.startRelay(ctx)
	if err != nil {
		return sum, err
	}
	d.show.line("%s    process %d, ready after %.1f s: the engines know nothing of it, nor of Kafka", bold("relay"), r.relay.cmd.Process.Pid, took.Seconds())

	part := d.cfg.requests * 3 / 10
	if err := r.traffic(ctx, part); err != nil {
		return sum, err
	}
	if err := r.compare(ctx, "pause  "); err != nil {
		return sum, err
	}

	before, pid := r.published(), r.relay.cmd.Process.Pid
	r.relay.kill()
	d.show.line("%s  %s", bold("kill -9"), d.show.style.red(fmt.Sprintf("the relay, process %d, is gone; the engines go on", pid)))
	if err := r.traffic(ctx, part/demoEpilogue); err != nil {
		return sum, err
	}
	sum.Missed = r.published() - before
	if took, err = r.startRelay(ctx); err != nil {
		return sum, err
	}
	sum.ReadySeconds = round3(took.Seconds())
	d.show.line("%s    process %d, ready after %.1f s; it had missed %s batches", bold("relay"), r.relay.cmd.Process.Pid, took.Seconds(), thousands(int(sum.Missed)))
	if err := r.compare(ctx, "again  "); err != nil {
		return sum, err
	}

	if err := r.traffic(ctx, part); err != nil {
		return sum, err
	}
	if err := r.engines[0].Restart(0); err != nil {
		return sum, err
	}
	d.show.line("%s  %s", bold("restart"), d.show.style.red(fmt.Sprintf("%s is another process now, its cache is empty", engineName(0))))
	if err := r.compare(ctx, "at once"); err != nil {
		return sum, err
	}
	if err := r.traffic(ctx, len(d.trace.requests)-d.trace.next-demoMoments); err != nil {
		return sum, err
	}
	visible, err := r.moments(ctx, demoMoments)
	if err != nil {
		return sum, err
	}
	if err := r.compare(ctx, "the end"); err != nil {
		return sum, err
	}
	status, _, err := d.settle(ctx)
	if err != nil {
		return sum, err
	}
	for _, m := range status.Models {
		sum.Blocks += m.Blocks
	}
	sum.Requests, sum.Engines, sum.Ranks = d.trace.next, len(r.engines), len(r.of)
	sum.HitShare = float64(r.hit) / float64(max(1, r.total))
	sum.Batches, sum.Answers, sum.Wrong = r.published(), r.answers, r.wrong
	sum.Queries.P50Ms, sum.Queries.P99Ms = millis(quantile(r.asked, 0.5)), millis(quantile(r.asked, 0.99))
	sum.Visible.P50Ms, sum.Visible.P99Ms = millis(quantile(visible, 0.5)), millis(quantile(visible, 0.99))
	return sum, nil
}

func millis(d time.Duration) float64 { return round3(float64(d) / float64(time.Millisecond)) }

func engineName(i int) string { return fmt.Sprintf("engine-%d", i) }

// startEngines starts the engines and writes the file that tells the relay of
// them.
func (r *relayDemo) startEngines() error {
	var list strings.Builder
	list.WriteString("engines:\n")
	for i := range demoEngines {
		form := demoForms[i%len(demoForms)]
		cfg := fakeengine.DefaultConfig()
		cfg.Kind, cfg.Shape, cfg.Hashes = string(form.kind), form.shape, form.hashes
		cfg.BlockSize, cfg.Capacity, cfg.HostCapacity = r.cfg.sim.blockSize, r.cfg.sim.capacity, form.onCPU
		cfg.Ranks, cfg.BufferSteps, cfg.Seed = form.ranks, demoBuffer, r.cfg.sim.seed+uint64(i)
		for rank := range form.ranks {
			r.places[place{i, rank}] = len(r.of)
			r.of = append(r.of, place{i, rank})
		}
		// The ports of ranks follow each other.
		var err error
		if cfg.Listen, err = claim(&r.undo, form.ranks); err != nil {
			return err
		}
		if cfg.ReplayListen, err = claim(&r.undo, form.ranks); err != nil {
			return err
		}
		e, err := fakeengine.New(cfg)
		if err != nil {
			return fmt.Errorf("start %s: %w", engineName(i), err)
		}
		r.undo = append(r.undo, e.Close)
		r.engines = append(r.engines, e)
		first := e.State().Ranks[0]
		fmt.Fprintf(&list, "  - {worker: %s, kind: %s, events: %q, replay: %q, model: %s, block-size: %d, ranks: %d}\n",
			engineName(i), form.kind, first.Events, first.Replay, r.cfg.sim.model, cfg.BlockSize, form.ranks)
	}
	r.router = fleet.NewRouter(len(r.of), r.cfg.sim.seed)
	r.makeTrace()
	return os.WriteFile(r.file("engines.yaml"), []byte(list.String()), 0o600)
}

func (r *relayDemo) file(name string) string { return filepath.Join(r.dir, name) }

// startRelay starts a relay as a child process and returns, once it has caught
// up with the engines, how long it took until then.
func (r *relayDemo) startRelay(ctx context.Context) (time.Duration, error) {
	if r.at == "" {
		var err error
		if r.at, err = claim(&r.undo, 1); err != nil {
			return 0, err
		}
		r.undo = append(r.undo, func() {
			if r.relay != nil {
				r.relay.stop()
			}
		})
	}
	start := time.Now()
	child, err := startChild(r.file("relay.log"), relayCommandName,
		"--brokers", strings.Join(r.brokers, ","), "--topic", defaultTopic, "--engines", r.file("engines.yaml"), "--state-dir", r.file("relay"),
		"--checkpoint-every", "1s", "--http-listen", r.at, "--drain-timeout", demoDrainTimeout.String(), "--log-level", "warn")
	if err != nil {
		return 0, fmt.Errorf("start the relay: %w", err)
	}
	r.relay = child
	if err := r.followed(ctx); err != nil {
		return 0, err
	}
	took := time.Since(start)
	_, _, err = r.settle(ctx) // the stage knows the model once it has read a record of it
	return took, err
}

// followed waits until all that the engines published is in the topic.
func (r *relayDemo) followed(ctx context.Context) error {
	ctx, stop := r.relay.during(ctx)
	defer stop()
	bounded, cancel := context.WithTimeout(ctx, demoWait)
	defer cancel()
	for {
		behind, err := r.behind(bounded)
		if err == nil && behind == "" {
			return nil
		}
		select {
		case <-bounded.Done():
			// An error is that the relay does not listen yet.
			return because(ctx, errors.Join(fmt.Errorf("the relay is not where the engines are: %s: %w", behind, bounded.Err()), err))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// behind says what keeps the relay from having everything in the topic.
func (r *relayDemo) behind(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.at+"/v1/status", nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var st relay.Status
	if err := json.NewDecoder(resp.Body).Decode(&st); err != nil {
		return "", err
	}
	if !st.Ready {
		return strings.Join(st.Missing, "; "), nil
	}
	for _, row := range st.Ranks {
		var i int
		if _, err := fmt.Sscanf(row.Worker, "engine-%d", &i); err != nil {
			return "", err
		}
		if next := r.engines[i].State().Ranks[row.Rank].NextSeq; row.EngineSeq != int64(next) || row.InFlight > 0 {
			return fmt.Sprintf("%s/%d: at batch %d of %d, %d bytes on their way to Kafka", row.Worker, row.Rank, row.EngineSeq, next, row.InFlight), nil
		}
	}
	return "", nil
}

// published returns how many batches the engines have published.
func (r *relayDemo) published() (n uint64) {
	for _, e := range r.engines {
		for _, rank := range e.State().Ranks {
			n += rank.NextSeq
		}
	}
	return n
}

// traffic has the next n requests served, each where the index says.
func (r *relayDemo) traffic(ctx context.Context, n int) error {
	tick := time.NewTicker(demoTraffic / time.Duration(max(len(r.trace.requests), 1)))
	defer tick.Stop()
	for range n {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.child.ended:
			return r.child.gone()
		case <-tick.C:
		}
		if _, err := r.request(ctx); err != nil {
			return err
		}
		r.show.status(func() string {
			return fmt.Sprintf("traffic  %s of %s requests; hits %.0f %% by the index; queries p50 %.2f ms", thousands(r.trace.next),
				thousands(len(r.trace.requests)), 100*float64(r.hit)/float64(max(1, r.total)), millis(quantile(r.asked, 0.5)))
		})
	}
	return nil
}

// served is a request that was.
type served struct {
	tokens    []uint32
	at        place
	held      int // leading blocks that were cached there, as answered
	published time.Time
}

// request has the next request served.
func (r *relayDemo) request(ctx context.Context) (s served, err error) {
	q, err := r.trace.Next()
	if err != nil {
		return s, err
	}
	s.tokens = fleet.AppendTokens(nil, q)
	held := make([]int, len(r.of))
	start := time.Now()
	answer, err := r.ask(ctx, s.tokens)
	if err != nil {
		return s, err
	}
	r.asked = append(r.asked, time.Since(start))
	for at, d := range answer {
		held[r.places[at]] = d.device
	}
	blocks := r.hasher.Blocks(len(s.tokens))
	to := r.router.Pick(blocks, held)
	r.hit += held[to]
	r.total += blocks
	s.at, s.held = r.of[to], held[to]
	_, err = r.engines[s.at.engine].ServeAt(s.at.rank, q)
	s.published = time.Now()
	return s, err
}

// ask asks the stage about a prompt.
func (r *relayDemo) ask(ctx context.Context, tokens []uint32) (map[place]depths, error) {
	resp, err := r.stage.Match(ctx, &pb.MatchRequest{Model: r.cfg.sim.model, BlockSize: uint32(r.cfg.sim.blockSize), Tokens: tokens})
	if err != nil {
		return nil, askError(r.grpc, err)
	}
	answer := map[place]depths{}
	for _, m := range resp.Matches {
		var at place
		if _, err := fmt.Sscanf(m.Worker, "engine-%d", &at.engine); err != nil {
			return nil, fmt.Errorf("worker %q: %w", m.Worker, err)
		}
		at.rank = int(m.DpRank)
		answer[at] = depths{int(m.DepthBlocks), int(m.DepthHostBlocks)}
	}
	return answer, nil
}

// compare asks about prompts of the requests so far, and compares the answers
// with what the engines hold.
func (r *relayDemo) compare(ctx context.Context, when string) error {
	if err := r.followed(ctx); err != nil {
		return err
	}
	if _, _, err := r.settle(ctx); err != nil {
		return err
	}
	truth, err := r.truth()
	if err != nil {
		return err
	}
	asked, wrong := 0, 0
	for q := range r.sample() {
		tokens := fleet.AppendTokens(nil, &q)
		answer, err := r.ask(ctx, tokens)
		if err != nil {
			return err
		}
		if asked++; !maps.Equal(answer, truth(tokens)) {
			wrong++
		}
	}
	r.answers += asked
	r.wrong += wrong
	verdict := r.show.style.green(fmt.Sprintf("%d of %d answers equal to what the engines hold", asked-wrong, asked))
	if wrong > 0 {
		verdict = r.show.style.red(fmt.Sprintf("%d of %d answers differ from what the engines hold", wrong, asked))
	}
	r.show.line("%s  %s batches published: %s", r.show.style.bold(when), thousands(int(r.published())), verdict)
	return nil
}

// truth returns what must be answered for a prompt: a second index is told what
// the engines say that they hold, by another way than their events.
func (r *relayDemo) truth() (func(tokens []uint32) map[place]depths, error) {
	idx := index.New(index.NewRunIndex())
	for i, e := range r.engines {
		for _, rank := range e.Held().Ranks {
			w := idx.AddWorker(engineName(i), int32(rank.Rank), place{i, rank.Rank})
			for t, tier := range []fakeengine.HeldTier{rank.Tiers.Device, rank.Tiers.Host} {
				for _, c := range tier.Chains {
					s := index.Stored{Parent: index.SeqHash(c.Parent), HasParent: c.Position > 0, Position: int32(c.Position)}
					for _, l := range c.Locals {
						s.Locals = append(s.Locals, index.LocalHash(l))
					}
					if _, err := w.Store(index.Tier(t), s); err != nil {
						return nil, err
					}
				}
			}
		}
	}
	var res index.Result
	return func(tokens []uint32) map[place]depths {
		idx.Find(&index.Query{Locals: r.hasher.Append(nil, tokens, index.Extra{})}, &res)
		out := map[place]depths{}
		for i, m := range res.Matches {
			ds := res.Depths(i)
			out[m.Worker.Tag.(place)] = depths{ds[index.Device], ds[index.Host]}
		}
		return out
	}, nil
}

// sample yields requests served so far, spread over all of them.
func (r *relayDemo) sample() func(func(fleet.Request) bool) {
	step := max(1, r.trace.next/(demoProbes/4))
	return func(yield func(fleet.Request) bool) {
		for i := r.trace.next - 1; i >= 0; i -= step {
			if !yield(r.trace.requests[i]) {
				return
			}
		}
	}
}

// moments times, for n requests, how long it takes from an engine's publishing to
// an answer that shows it. Those that bring nothing new are not counted.
func (r *relayDemo) moments(ctx context.Context, n int) ([]time.Duration, error) {
	bounded, cancel := context.WithTimeout(ctx, demoWait)
	defer cancel()
	var took []time.Duration
	for range n {
		s, err := r.request(bounded)
		if err != nil {
			return nil, err
		}
		blocks := min(r.hasher.Blocks(len(s.tokens)), r.cfg.sim.capacity)
		for s.held < blocks {
			answer, err := r.ask(bounded, s.tokens)
			if err != nil {
				return nil, because(ctx, err)
			}
			if answer[s.at].device == blocks {
				took = append(took, time.Since(s.published))
				break
			}
		}
	}
	return took, nil
}

func (s relaySummary) print(con *console) error {
	verdict := con.outStyle.green(fmt.Sprintf("%d of %d equal to what the engines hold", s.Answers-s.Wrong, s.Answers))
	if s.Wrong > 0 {
		verdict = con.outStyle.red(fmt.Sprintf("%d of %d differ from what the engines hold", s.Wrong, s.Answers))
	}
	_, err := fmt.Fprintf(con.out, `
requests  %s to %d ranks of %d engines; %.1f %% of their blocks were cached where the index sent them
events    %s batches published; %s blocks in the index at the end
queries   p50 %.2f ms, p99 %.2f ms, tokens hashed
visible   p50 %.2f ms, p99 %.2f ms after an engine published it
kill -9   a new relay had caught up after %.1f s, with %s batches that it had missed
answers   %s
`, thousands(s.Requests), s.Ranks, s.Engines, 100*s.HitShare, thousands(int(s.Batches)), thousands(s.Blocks),
		s.Queries.P50Ms, s.Queries.P99Ms, s.Visible.P50Ms, s.Visible.P99Ms, s.ReadySeconds, thousands(int(s.Missed)), verdict)
	return err
}

var errWrongAnswers = errors.New("answers differ from what the engines hold")

func (c *demoConfig) runRelay(ctx context.Context, con *console, d *demo) error {
	sum, err := d.relayStory(ctx)
	if err != nil {
		return err
	}
	if err = d.tell(con, sum); err == nil && sum.Wrong > 0 {
		err = errWrongAnswers
	}
	return err
}
