// This file kills engines, the relay and Kafka under load, and holds the stage's
// answers to what the engines say that they hold.

package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/relay"
	"kvindex/pipeline/verify"
	"kvindex/testcontainers"
)

// plan is what happens to whom, round after round and from the start again.
// Words in one round happen at once. Only gap and garbage may lose anything.
var plan = []string{
	"relay", "kafka", "engine", "cut", "gap", "overtake",
	"engine relay", "clear", "relay kafka", "garbage", "engine kafka", "hang-kafka", "engine relay kafka", "cut relay", "hang-engine", "engine engine", "hang-relay", "engine stage",
}

// setting returns what the environment says, or else what CI has time for.
func setting(t *testing.T, name string, byDefault int) int {
	text := os.Getenv(name)
	if text == "" {
		return byDefault
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a number above 0", name, text)
	}
	return n
}

// TestRelayKills: whatever is killed under load, once all runs again the stage
// knows exactly what the engines hold; only if events were lost for good it may
// know less, and then says so.
func TestRelayKills(t *testing.T) {
	h := newRelayHarness(t)
	h.startAll()
	h.check("start", nil)
	rounds := setting(t, "KVINDEX_ROUNDS", 6)
	for i := range rounds {
		what := plan[i%len(plan)]
		h.resume()
		pause(t, time.Duration(500+h.rng.IntN(2000))*time.Millisecond)
		before := h.epochs()
		hit := h.hit(strings.Fields(what))
		pause(t, time.Duration(h.rng.IntN(1500))*time.Millisecond)
		began := time.Now()
		news := h.check(fmt.Sprintf("round %d: %s", i+1, what), before)
		t.Logf("round %d: %s %v: checked within %v: %s", i+1, what, hit, time.Since(began).Round(100*time.Millisecond), news)
	}
	t.Logf("%d worker-ranks equal, %d incomplete and less, in %d rounds; %d depths compared, %d above 0", h.equal, h.less, rounds, h.compared, h.hits)
}

// relayHarness is a stage, a relay, engines and Kafka.
type relayHarness struct {
	*harness
	kafka        *testcontainers.Native
	rng          *rand.Rand
	rate, down   int    // requests a second of an engine; milliseconds that something is down at most
	http         string // the relay's
	file, state  string // the relay's
	relay, stage *process
	engines      []*engine
	client       *client.Client

	equal, less    int // worker-ranks
	compared, hits int // depths
}

// engine is one in a process of its own.
type engine struct {
	h               *relayHarness
	worker          string
	kind            relay.Kind
	ranks           int
	events, replay  string
	control         string
	args            []string
	lines           []*proxy // that can be cut; none: the relay is connected directly
	seed            int
	process         *process
	killed, clipped bool // in this round; events were lost since it was last empty
}

const (
	killModel = "served"
	blockSize = 64
)

func newRelayHarness(t *testing.T) *relayHarness {
	kafka := testcontainers.NewNative(t, testcontainers.NativeConfig{})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	h := &relayHarness{
		harness: newHarness(t, kafka), kafka: kafka, rng: rand.New(rand.NewPCG(seed, 5)),
		rate: setting(t, "KVINDEX_RATE", 30), down: setting(t, "KVINDEX_DOWN", 2500),
		http: testcontainers.FreeAddress(t, 1), file: filepath.Join(t.TempDir(), "engines.yaml"), state: t.TempDir(),
	}
	h.command("topics", "create", "--partitions", "4", "--replication-factor", "1")
	h.newEngine("cut", relay.VLLM, 1, true, "--shape", "map", "--lora", "0.3", "--salt", "0.3", "--host-capacity", "300")
	h.newEngine("bytes", relay.VLLM, 1, false, "--shape", "array", "--hashes", "bytes", "--lora", "0.3")
	h.newEngine("ranks", relay.SGLang, 2, false, "--lora", "0.2", "--salt", "0.3", "--host-capacity", "300")
	return h
}

func (h *relayHarness) newEngine(worker string, kind relay.Kind, ranks int, lines bool, args ...string) {
	t := h.t
	e := &engine{
		h: h, worker: worker, kind: kind, ranks: ranks, args: args, seed: 1,
		events: testcontainers.FreeAddress(t, ranks), replay: testcontainers.FreeAddress(t, ranks), control: testcontainers.FreeAddress(t, 1),
	}
	events, replay := e.events, e.replay
	if lines {
		e.lines = []*proxy{newProxy(t, events), newProxy(t, replay)}
		events, replay = e.lines[0].Addr().String(), e.lines[1].Addr().String()
	}
	h.engines = append(h.engines, e)
	f, err := os.OpenFile(h.file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if len(h.engines) == 1 {
		fmt.Fprintln(f, "engines:")
	}
	fmt.Fprintf(f, "  - {worker: %s, kind: %s, events: 'tcp://%s', replay: 'tcp://%s', model: %s, block-size: %d, ranks: %d}\n",
		worker, kind, events, replay, killModel, blockSize, ranks)
}

// start starts an engine that holds nothing.
func (e *engine) start() {
	e.process = e.h.start(append([]string{
		"fake-engine", "--kind", string(e.kind), "--listen", e.events, "--replay-listen", e.replay, "--control-listen", e.control,
		"--ranks", strconv.Itoa(e.ranks), "--block-size", strconv.Itoa(blockSize), "--capacity", "600", "--buffer-steps", "2000",
		"--synthetic", "1000000", "--rate", strconv.Itoa(e.h.rate), "--seed", strconv.Itoa(e.seed),
	}, e.args...)...)
	testcontainers.Eventually(e.h.t, patience, func() error {
		e.process.alive()
		_, err := e.ask("POST", "/resume")
		return err
	})
}

func (h *relayHarness) startRelay() {
	h.relay = h.start("relay", "--engines", h.file, "--state-dir", h.state, "--checkpoint-every", "1s",
		"--buffer-bytes", "8388608", "--http-listen", h.http)
}

func (h *relayHarness) startAll() {
	h.stage = h.serve()
	for _, e := range h.engines {
		e.start()
	}
	h.startRelay()
	h.stage.ready()
	var err error
	if h.client, err = client.Dial(h.grpc, patience); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { h.client.Close() })
}

// ask asks an engine's control, and returns its state if that is what it answers.
func (e *engine) ask(method, path string) (held fakeengine.Held, err error) {
	return held, getJSON(method, e.control, path, &held)
}

func (e *engine) must(method, path string) fakeengine.Held {
	e.h.t.Helper()
	held, err := e.ask(method, path)
	if err != nil {
		e.h.t.Fatal(err)
	}
	return held
}

func getJSON(method, address, path string, into any) error {
	req, err := http.NewRequest(method, "http://"+address+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %s %w", path, resp.Status, body, err)
	}
	return json.Unmarshal(body, into)
}

func (h *relayHarness) resume() {
	for _, e := range h.engines {
		e.must("POST", "/resume")
	}
}

// hit does to the system what the words say, all at once, and has everything run
// again some time later. It returns the engines that were hit.
func (h *relayHarness) hit(words []string) (names []string) {
	t := h.t
	var again []func()
	order := h.rng.Perm(len(h.engines))
	for _, word := range words {
		e := h.engines[order[0]]
		switch word {
		case "cut":
			e = h.engines[0]
		case "relay", "kafka", "stage", "hang-relay", "hang-kafka":
			e = nil
		default:
			order = order[1:]
		}
		if e != nil {
			names = append(names, e.worker)
		}
		switch word {
		case "relay":
			h.relay.alive()
			h.relay.kill()
			again = append(again, h.startRelay)
		case "kafka":
			if err := h.kafka.Kill(0); err != nil {
				t.Fatal(err)
			}
			again = append(again, func() {
				if err := h.kafka.Start(0); err != nil {
					t.Fatal(err)
				}
			})
		case "stage":
			h.stage.alive()
			h.stage.kill()
			again = append(again, func() { h.stage = h.serve() })
		case "engine":
			e.process.alive()
			e.process.kill()
			e.killed, e.clipped = true, false
			if len(words) == 1 && e.lines == nil {
				e.gone()
			}
			e.seed += h.rng.IntN(2) // or the same requests again, as with vLLM's hashes that have a fixed seed
			again = append(again, e.start)
		case "hang-relay":
			h.relay.signal(syscall.SIGSTOP)
			again = append(again, func() { h.relay.signal(syscall.SIGCONT) })
		case "hang-engine":
			e.process.signal(syscall.SIGSTOP)
			again = append(again, func() { e.process.signal(syscall.SIGCONT) })
		case "hang-kafka":
			if err := h.kafka.Pause(0); err != nil {
				t.Fatal(err)
			}
			again = append(again, func() {
				if err := h.kafka.Resume(0); err != nil {
					t.Fatal(err)
				}
			})
		case "overtake":
			e.overtake()
			again = append(again, h.startRelay)
		case "cut":
			for _, l := range e.lines {
				l.cut()
			}
		case "clear":
			e.must("POST", "/clear")
			e.clipped = false
		case "gap", "garbage":
			e.must("POST", "/"+word)
			e.clipped = true
		default:
			t.Fatalf("BUG: plan has %q", word)
		}
		if word == "gap" || word == "garbage" || word == "clear" {
			e.goOn()
		}
	}
	pause(t, time.Duration(h.rng.IntN(h.down))*time.Millisecond)
	h.rng.Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
	for _, f := range again {
		f()
		pause(t, time.Duration(h.rng.IntN(500))*time.Millisecond)
	}
	return names
}

// overtake has a new process of the engine publish more than the one did that the
// relay, which is killed meanwhile, knows of.
func (e *engine) overtake() {
	h := e.h
	h.t.Helper()
	again := func() {
		e.process.alive()
		e.process.kill()
		e.killed, e.clipped = true, false
		e.seed++ // the same requests would have the same blocks
		e.start()
	}
	again()
	e.goOn()
	pause(h.t, 2*time.Second) // until there is a checkpoint
	h.relay.alive()
	h.relay.kill()
	before := e.must("POST", "/resume")
	again()
	testcontainers.Eventually(h.t, patience, func() error {
		for i, r := range e.must("POST", "/resume").Ranks {
			if r.NextSeq < before.Ranks[i].NextSeq+5 {
				return errors.New("not enough batches")
			}
		}
		return nil
	})
}

// gone waits until the stage knows that the engine, whose process has ended and
// whose port refuses connections, holds nothing.
func (e *engine) gone() {
	e.h.t.Helper()
	testcontainers.Eventually(e.h.t, patience, func() error {
		workers, err := e.h.client.Workers(e.h.t.Context(), killModel)
		if err != nil {
			return err
		}
		for _, w := range workers.Workers {
			if w.Worker == e.worker && (w.Blocks.Device > 0 || w.Blocks.Host > 0 || w.Incomplete) {
				return fmt.Errorf("the stage says of an engine that is gone: %v", w)
			}
		}
		return nil
	})
}

// goOn waits until each rank has published some batches more: of a gap nobody can
// know before the batch after it, nor of vLLM's clearing.
func (e *engine) goOn() {
	e.h.t.Helper()
	before := e.must("POST", "/resume")
	testcontainers.Eventually(e.h.t, patience, func() error {
		for i, r := range e.must("POST", "/resume").Ranks {
			if r.Batches < before.Ranks[i].Batches+2 {
				return errors.New("not enough batches")
			}
		}
		return nil
	})
}

// status returns what the relay says of each worker-rank.
func (h *relayHarness) status() (map[verify.WorkerRank]relay.RankStatus, error) {
	var st relay.Status
	if err := getJSON("GET", h.http, "/v1/status", &st); err != nil {
		return nil, err
	}
	out := map[verify.WorkerRank]relay.RankStatus{}
	for _, r := range st.Ranks {
		out[verify.WorkerRank{Worker: r.Worker, Rank: int32(r.Rank)}] = r
	}
	return out, nil
}

// epochs returns the epoch of each worker-rank, and begins a round.
func (h *relayHarness) epochs() map[verify.WorkerRank]int64 {
	h.t.Helper()
	for _, e := range h.engines {
		e.killed = false
	}
	st, err := h.status()
	if err != nil {
		h.t.Fatal(err)
	}
	out := map[verify.WorkerRank]int64{}
	for wr, r := range st {
		out[wr] = r.Epoch
	}
	return out
}

// settle stops the load and waits until everything that engines said is in the
// stage. It returns what the relay says then.
func (h *relayHarness) settle(before map[verify.WorkerRank]int64) map[verify.WorkerRank]relay.RankStatus {
	h.t.Helper()
	next := map[verify.WorkerRank]uint64{}
	for _, e := range h.engines {
		e.process.alive()
		for _, r := range e.must("POST", "/pause").Ranks {
			next[verify.WorkerRank{Worker: e.worker, Rank: int32(r.Rank)}] = r.NextSeq
		}
	}
	var st map[verify.WorkerRank]relay.RankStatus
	last, since := "", time.Now()
	testcontainers.Eventually(h.t, patience, func() (err error) {
		h.relay.alive()
		h.stage.alive()
		if st, err = h.status(); err != nil {
			return err
		}
		text := ""
		for _, e := range h.engines {
			for rank := range e.ranks {
				wr := verify.WorkerRank{Worker: e.worker, Rank: int32(rank)}
				r := st[wr]
				if r.EngineSeq != int64(next[wr]) || r.Source != "live" || r.State != "writing" || r.InFlight != 0 || e.killed && r.Epoch <= before[wr] {
					return fmt.Errorf("the engine's next is %d, its epoch was %d; the relay says %+v", next[wr], before[wr], r)
				}
				if !r.Whole && !e.clipped { // an engine that was too slow to answer is asked again
					return fmt.Errorf("nothing was lost for good, and the relay says %+v", r)
				}
				text += fmt.Sprint(wr, r.Epoch, r.Seq, " ")
			}
		}
		ends := testcontainers.StableOffsets(h.t, h.broker, h.events)
		stage, err := h.client.Status(h.t.Context())
		if err != nil {
			return err
		}
		for _, row := range stage.Partitions {
			if row.State != "live" || row.Position != ends[row.Partition] {
				return fmt.Errorf("partition %d ends at %d, the stage is %s at %d: %s", row.Partition, ends[row.Partition], row.State, row.Position, row.Problem)
			}
		}
		if text += fmt.Sprint(ends); text != last {
			last, since = text, time.Now()
		}
		if time.Since(since) < 1500*time.Millisecond { // a relay looks for trouble once a second
			return errors.New("it has not been quiet for long")
		}
		return nil
	})
	return st
}

// truth is what one worker-rank holds, by tier.
type truth [index.Tiers]map[index.SeqHash]bool

func newTruth(held *fakeengine.HeldTiers) (tr truth) {
	for t := range tr {
		tr[t] = map[index.SeqHash]bool{}
	}
	for t, tier := range []fakeengine.HeldTier{held.Device, held.Host} {
		for _, c := range tier.Chains {
			seq := index.SeqHash(c.Parent)
			for i, l := range c.Locals {
				if seq = index.Next(seq, index.LocalHash(l)); c.Position+i == 0 {
					seq = index.SeqHash(l)
				}
				tr[t][seq] = true
			}
		}
	}
	return tr
}

// depths returns how many leading blocks are each held in a tier or one before it.
func (tr truth) depths(prompt []index.SeqHash) (d index.Depths) {
	for t := range d {
		for d[t] < len(prompt) && slices.ContainsFunc(tr[:t+1], func(held map[index.SeqHash]bool) bool { return held[prompt[d[t]]] }) {
			d[t]++
		}
	}
	return d
}

// check compares the stage with the engines. It returns which worker-ranks have
// another epoch than before, and which are incomplete.
func (h *relayHarness) check(round string, before map[verify.WorkerRank]int64) (news string) {
	t := h.t
	t.Helper()
	st := h.settle(before)
	workers, err := h.client.Workers(t.Context(), killModel)
	if err != nil {
		t.Fatal(err)
	}
	known := map[verify.WorkerRank]*pb.WorkerStatus{}
	for _, w := range workers.Workers {
		known[verify.WorkerRank{Worker: w.Worker, Rank: w.DpRank}] = w
	}
	truths := map[verify.WorkerRank]truth{}
	var prompts []fakeengine.Prompt
	for _, e := range h.engines {
		for _, r := range e.must("GET", "/held").Ranks {
			wr := verify.WorkerRank{Worker: e.worker, Rank: int32(r.Rank)}
			truths[wr] = newTruth(r.Tiers)
			w := known[wr]
			if w == nil {
				t.Fatalf("%s: the stage does not know %v", round, wr)
			}
			if w.Epoch != st[wr].Epoch || w.Seq != st[wr].Seq {
				t.Errorf("%s: %v: the stage is at %d/%d, the relay at %d/%d", round, wr, w.Epoch, w.Seq, st[wr].Epoch, st[wr].Seq)
			}
			if before != nil && w.Epoch != before[wr] {
				news += fmt.Sprintf("%s/%d %s ", wr.Worker, wr.Rank, st[wr].Cause)
			}
			switch {
			case w.Incomplete && !e.clipped:
				t.Errorf("%s: %v is incomplete, though nothing was lost for good: %+v", round, wr, st[wr])
			case w.Incomplete:
				h.less++
				news += fmt.Sprintf("%s/%d incomplete ", wr.Worker, wr.Rank)
			case e.clipped:
				t.Errorf("%s: %v lost events and is not incomplete: %+v", round, wr, st[wr])
			default:
				h.equal++
				if w.Blocks.Device != int64(r.Tiers.Device.Blocks) || w.Blocks.Host != int64(r.Tiers.Host.Blocks) || w.Blocks.Disk+w.Blocks.External != 0 {
					t.Errorf("%s: %v holds %d blocks on the device and %d on the host; the stage says %v", round, wr, r.Tiers.Device.Blocks, r.Tiers.Host.Blocks, w.Blocks)
				}
			}
		}
		var some []fakeengine.Prompt
		if err := getJSON("GET", e.control, "/prompts?n=40", &some); err != nil {
			t.Fatal(err)
		}
		prompts = append(prompts, some...)
	}
	if len(known) != len(truths) {
		t.Errorf("%s: the stage knows %d worker-ranks, there are %d", round, len(known), len(truths))
	}
	for _, p := range prompts {
		h.ask(round, p, truths)
		h.ask(round, h.derive(p), truths)
	}
	return news
}

// derive makes another prompt of one.
func (h *relayHarness) derive(p fakeengine.Prompt) fakeengine.Prompt {
	at := 1 + h.rng.IntN(len(p.Tokens)-1) // a prompt without tokens is refused
	switch h.rng.IntN(5) {
	case 0:
		p.Tokens = p.Tokens[:at]
	case 1:
		p.Tokens = slices.Clone(p.Tokens)
		p.Tokens[at]++
	case 2:
		p.Tokens = p.Tokens[at:]
	case 3:
		p.LoRA = []string{"", "adapter-1", "adapter-2", "adapter-4"}[h.rng.IntN(4)]
	case 4:
		p.Salt = []string{"", "tenant-1", "tenant-2", "tenant-4"}[h.rng.IntN(4)]
	}
	return p
}

// ask asks the stage about a prompt, and compares.
func (h *relayHarness) ask(round string, p fakeengine.Prompt, truths map[verify.WorkerRank]truth) {
	t := h.t
	t.Helper()
	resp, err := h.client.Match(t.Context(), &pb.MatchRequest{Model: killModel, BlockSize: blockSize, Tokens: p.Tokens, Lora: p.LoRA, Salt: p.Salt})
	if err != nil {
		t.Fatalf("%s: %v", round, err)
	}
	got := map[verify.WorkerRank]*pb.WorkerMatch{}
	for _, m := range resp.Matches {
		wr := verify.WorkerRank{Worker: m.Worker, Rank: m.DpRank}
		if got[wr] = m; truths[wr][0] == nil {
			t.Fatalf("%s: the stage answers with %v, which there is not", round, m)
		}
	}
	hasher := index.BlockHasher{BlockSize: blockSize}
	seqs := index.Chain(nil, hasher.Append(nil, p.Tokens, index.Extra{LoRA: p.LoRA, Salt: p.Salt}))
	for wr, tr := range truths {
		want, is := tr.depths(seqs), index.Depths{}
		m := got[wr]
		if m != nil {
			is = index.Depths{int(m.DepthBlocks), int(m.DepthHostBlocks), int(m.DepthDiskBlocks), int(m.DepthExternalBlocks)}
		}
		h.compared++
		if is[index.Host] > 0 {
			h.hits++
		}
		if is == want {
			continue
		}
		lost := slices.ContainsFunc(h.engines, func(e *engine) bool { return e.worker == wr.Worker && e.clipped })
		for i := range is {
			if is[i] > want[i] || !lost {
				t.Fatalf("%s: prompt of %d blocks, LoRA %q, salt %q: %v holds %v, the stage says %v (%v)", round, len(seqs), p.LoRA, p.Salt, wr, want, is, m)
			}
		}
		if m != nil && !m.Incomplete {
			t.Fatalf("%s: %v holds %v, the stage says %v and not that it is incomplete", round, wr, want, is)
		}
	}
}
