// This file tests whole relays: engines on libzmq that publish as vLLM does, a
// broker, and everything between.

package relay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// patience is how long anything that should happen may take. A feed that Kafka
// refused pauses for half a minute by itself.
const patience = 2 * time.Minute

// python is an engine in a process of its own, testdata/vllm.py.
type python struct {
	events, replay string
	cmd            *exec.Cmd
	in             io.Writer
	out            *bufio.Scanner
	stderr         *bytes.Buffer
}

// startEngine starts an engine at endpoints of its own.
func startEngine(t *testing.T, replay bool) *python {
	t.Helper()
	p := &python{events: "tcp://" + testcontainers.FreeAddress(t, 1), replay: "-"}
	if replay {
		p.replay = "tcp://" + testcontainers.FreeAddress(t, 1)
	}
	p.start(t, 0)
	t.Cleanup(func() {
		if p.kill(); p.stderr.Len() > 0 {
			t.Errorf("vllm.py: %s", p.stderr)
		}
	})
	return p
}

// start starts a process, which has published so many batches before anybody
// could connect.
func (p *python) start(t *testing.T, before int) {
	t.Helper()
	interpreter := testcontainers.Python(t, "pyzmq", "msgpack")
	p.cmd = exec.Command(interpreter, "testdata/vllm.py", p.events, p.replay, "50", strconv.Itoa(before))
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stderr = &bytes.Buffer{}
	p.cmd.Stderr = p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewScanner(out)
	p.said(t, "bound")
}

// kill is kill -9.
func (p *python) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

func (p *python) said(t *testing.T, begin string) {
	t.Helper()
	if !p.out.Scan() || !strings.HasPrefix(p.out.Text(), begin) {
		t.Fatalf("vllm.py says %q, want %q", p.out.Text(), begin)
	}
}

// do has the engine do what the command says.
func (p *python) do(t *testing.T, format string, args ...any) {
	t.Helper()
	fmt.Fprintf(p.in, format+"\n", args...)
	p.said(t, "at ")
}

func (p *python) engine(worker string) Engine {
	e := Engine{Worker: worker, Kind: VLLM, Events: p.events, Model: "m", BlockSize: 4, Ranks: 1}
	if p.replay != "-" {
		e.Replay = p.replay
	}
	return e
}

// chain is what is held of n blocks of vllm.py.
func chain(n int) map[index.SeqHash]bool {
	h := index.BlockHasher{BlockSize: 4}
	tokens := make([]uint32, 4*n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	out := map[index.SeqHash]bool{}
	for _, seq := range index.Chain(nil, h.Append(nil, tokens, index.Extra{})) {
		out[seq] = true
	}
	return out
}

// running is a relay that runs.
type running struct {
	*Relay
	url  string
	stop func() error
}

// startRelay runs a relay, until the test ends at the latest.
func startRelay(t *testing.T, b testcontainers.Broker, cfg Config) *running {
	t.Helper()
	cfg.Brokers = b.Brokers()
	cfg.HTTPListen = "127.0.0.1:0"
	cfg.Instance = "test"
	cfg.Logger = silent
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	run := &running{Relay: r}
	run.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return fmt.Errorf("the relay does not end")
		}
	})
	t.Cleanup(func() {
		if err := run.stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case addr := <-r.addr:
		run.url = "http://" + addr.String()
	case <-time.After(patience):
		t.Fatalf("the relay does not listen: %v", run.stop())
	}
	return run
}

// get returns what the relay answers.
func (r *running) get(path string) (int, string, error) {
	resp, err := http.Get(r.url + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// ready waits until the relay is ready.
func (r *running) ready(t *testing.T) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		code, body, err := r.get("/readyz")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%d: %s", code, body)
		}
		return err
	})
}

// topicReader knows what the records of a topic mean, by worker and rank.
type topicReader struct {
	client *kgo.Client
	ranks  map[string]*reader
	epochs map[string][]int64
}

func readTopic(t *testing.T, b testcontainers.Broker, topic string) *topicReader {
	return &topicReader{
		client: testcontainers.Client(t, b, kgo.ConsumeTopics(topic), kgo.FetchMaxWait(100*time.Millisecond)),
		ranks:  map[string]*reader{}, epochs: map[string][]int64{},
	}
}

// take takes in one record.
func (r *topicReader) take(t *testing.T, rec *kgo.Record) {
	t.Helper()
	var batch schemas.Batch
	if err := batch.Decode(rec.Value); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("%s/%d", batch.Worker, batch.Rank)
	if string(rec.Key) != string(batch.Worker) {
		t.Errorf("key %q, worker %q", rec.Key, batch.Worker)
	}
	one := r.ranks[name]
	if one == nil {
		one = &reader{grace: testGrace, held: newHeld()}
		r.ranks[name] = one
	}
	if batch.Epoch > one.epoch {
		r.epochs[name] = append(r.epochs[name], batch.Epoch)
	}
	one.read(t, written{rec.Timestamp, rec.Value})
}

// await reads until the worker-rank holds what is wanted on the device.
func (r *topicReader) await(t *testing.T, at string, want map[index.SeqHash]bool, whole bool) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		r.client.PollFetches(ctx).EachRecord(func(rec *kgo.Record) {
			r.take(t, rec)
		})
		one := r.ranks[at]
		if one == nil {
			return fmt.Errorf("no records of %s", at)
		}
		wanted := newHeld()
		wanted[index.Device] = want
		if !one.held.equal(&wanted) {
			return fmt.Errorf("%s: %d blocks held, want %d", at, len(one.held[index.Device]), len(want))
		}
		if one.incomplete == whole {
			return fmt.Errorf("%s: incomplete is %t", at, one.incomplete)
		}
		return nil
	})
}

// An engine from its first batch to its second process, and a relay from its
// first start to its second.
func TestEngineToTopic(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		cfg := DefaultConfig()
		cfg.Topic = testcontainers.NewTopic(t, b, "events", 2, nil)
		cfg.StateDir = t.TempDir()
		p := startEngine(t, true)
		p.do(t, "store 10")
		cfg.Engines = []Engine{p.engine("w")}
		r := startRelay(t, b, cfg)
		topic := readTopic(t, b, cfg.Topic)
		topic.await(t, "w/0", chain(10), true)
		r.ready(t)

		p.do(t, "store 2")
		p.do(t, "lose 3")
		p.do(t, "remove")
		topic.await(t, "w/0", chain(14), true)
		if n := len(topic.epochs["w/0"]); n != 1 {
			t.Errorf("%d epochs, want 1", n)
		}

		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		p.do(t, "store 3")
		r = startRelay(t, b, cfg)
		topic.await(t, "w/0", chain(17), true)
		if n := len(topic.epochs["w/0"]); n != 1 {
			t.Errorf("%d epochs after a restart of the relay, want 1", n)
		}

		p.kill()
		p.start(t, 20) // beyond the number that was next
		topic.await(t, "w/0", chain(20), true)
		p.kill()
		topic.await(t, "w/0", map[index.SeqHash]bool{}, true)
		p.start(t, 100) // more than is kept
		p.do(t, "store 1")
		topic.await(t, "w/0", map[index.SeqHash]bool{}, false)
		if n := len(topic.epochs["w/0"]); n < 3 {
			t.Errorf("%d epochs, want at least 3", n)
		}
		checkTold(t, r)
	})
}

// checkTold checks what the relay says of itself. Its status is as of the last
// tick, and a relay that has just started may not have had one.
func checkTold(t *testing.T, r *running) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		_, body, err := r.get("/v1/status")
		var st Status
		if err == nil {
			err = json.Unmarshal([]byte(body), &st)
		}
		if err != nil || len(st.Ranks) != 1 || st.Ranks[0].Worker != "w" || st.Ranks[0].Heard == nil {
			return fmt.Errorf("status: %w, %s", err, body)
		}
		return nil
	})
	testcontainers.Eventually(t, patience, func() error {
		_, body, err := r.get("/metrics")
		if err != nil {
			return err
		}
		for _, want := range []string{
			`kvindex_relay_messages_total{rank="0",worker="w"} `,
			`kvindex_relay_epochs_total{cause="engine_restart",rank="0",worker="w"} `,
			`kvindex_relay_replays_total{outcome="complete",rank="0",worker="w"} `,
			`kvindex_relay_engine_restarts_total{rank="0",worker="w"} `,
			`kvindex_relay_buffer_used_bytes `,
			`kvindex_relay_checkpoint_age_seconds{rank="0",worker="w"} `,
		} {
			if !strings.Contains(body, want) {
				return fmt.Errorf("metrics lack %s", want)
			}
		}
		return nil
	})
	if code, _, err := r.get("/healthz"); err != nil || code != http.StatusOK {
		t.Errorf("healthz: %d, %v", code, err)
	}
}

// Engines that hang in each way they can, and one that does not.
func TestStuckEnginesDelayNobody(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	cfg := DefaultConfig()
	cfg.Topic = testcontainers.NewTopic(t, b, "events", 1, nil)
	good, mute := startEngine(t, true), startEngine(t, false)
	good.do(t, "store 5")
	stuck := mute.engine("mute") // its replay endpoint accepts and says nothing
	hangs, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hangs.Close()
	stuck.Replay = "tcp://" + hangs.Addr().String()
	dumb := stuck // and so does its publisher
	dumb.Worker, dumb.Events, dumb.Replay = "dumb", stuck.Replay, ""
	polled := Engine{Worker: "polled", Kind: TensorRTLLM, Events: "http://" + hangs.Addr().String() + "/kv_cache_events", Model: "m", BlockSize: 4, Ranks: 2}
	cfg.Engines = []Engine{stuck, dumb, polled, good.engine("w")}
	r := startRelay(t, b, cfg)
	topic := readTopic(t, b, cfg.Topic)
	topic.await(t, "w/0", chain(5), true)
	// The others hang for seconds at a time, again and again: what waits for them
	// takes minutes.
	const steps = 25
	began := time.Now()
	for n := range steps {
		good.do(t, "store 1")
		topic.await(t, "w/0", chain(6+n), true)
	}
	if took := time.Since(began); took > steps*2*time.Second {
		t.Errorf("took %v beside stuck engines", took)
	}
	if code, body, err := r.get("/readyz"); err != nil || code != http.StatusServiceUnavailable || !strings.Contains(body, "dumb/0") {
		t.Errorf("readyz: %d %s, %v", code, body, err)
	}
	began = time.Now()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 2*cfg.DrainTimeout {
		t.Errorf("took %v to end", took)
	}
}
