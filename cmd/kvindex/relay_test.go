// This file tests the relay command: its settings, and that it runs and stops.

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

const goodEngines = `engines:
  - worker: llama-0
    kind: vllm
    events: tcp://10.0.0.1:5557
    replay: tcp://10.0.0.1:5657
    model: meta-llama/Llama-3.3-70B
    block-size: 16
    ranks: 2
    media: [LMC=host, FAR=external]
  - worker: 007
    kind: trtllm
    events: http://10.0.0.2:8000/kv_cache_events
    model: qwen3
    block-size: 32
    hasher: dynamo
    first-rank: 3
`

func writeEngines(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "engines.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestRelaySettings(t *testing.T) {
	file := writeEngines(t, goodEngines)
	t.Setenv("KVINDEX_CHECK_CONFIG", "true")
	for _, c := range []struct {
		name string
		env  string // worker
		args []string
		code int
		want []string // in what is printed
	}{
		{"one by flags", "", []string{"--worker", "w", "--model", "m", "--block-size", "16"}, 0,
			[]string{"engine 1: vllm of worker w, ranks 0 to 0, model m, blocks of 16 tokens, hasher flash, events tcp://127.0.0.1:5557, replay none"}},
		{"worker from the environment", "pod-7", []string{"--kind", "trtllm", "--model", "m", "--block-size", "16"}, 0,
			[]string{"trtllm of worker pod-7", "KVINDEX_WORKER", "events http://127.0.0.1:8000/kv_cache_events"}},
		{"several", "", []string{"--engines", file}, 0,
			[]string{"engine 1: vllm of worker llama-0, ranks 0 to 1, ", "engine 2: trtllm of worker 007, ranks 3 to 3, model qwen3, blocks of 32 tokens, hasher dynamo"}},
		{"both", "pod-7", []string{"--engines", file}, 2, []string{"worker (from KVINDEX_WORKER) is of one engine"}},
		{"none", "", nil, 2, []string{`worker: ""`, `model: ""`, "block-size: 0"}},
		{"no such kind", "", []string{"--kind", "llama.cpp"}, 2, []string{`"llama.cpp" is not one of`}},
		{"no such file", "", []string{"--engines", file + ".not"}, 2, []string{"no such file"}},
		{"no port for the rank", "", []string{"--worker", "w", "--model", "m", "--block-size", "16", "--events", "tcp://h:65535", "--ranks", "2"}, 2,
			[]string{"rank 1 would have port 65536"}},
		{"ipc has one rank", "", []string{"--worker", "w", "--model", "m", "--block-size", "16", "--events", "ipc:///tmp/x", "--ranks", "2"}, 2,
			[]string{"rank 1 takes an endpoint tcp://host:port"}},
		{"a publisher binds, a relay connects", "", []string{"--worker", "w", "--model", "m", "--block-size", "16", "--events", "tcp://*:5557"}, 2,
			[]string{"to connect takes a host and a port"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.env != "" {
				t.Setenv("KVINDEX_WORKER", c.env)
			}
			got := execute(t, append([]string{"relay"}, c.args...)...)
			if got.code != c.code {
				t.Errorf("code %d, want %d: %s", got.code, c.code, got.err)
			}
			for _, want := range c.want {
				if !strings.Contains(got.out+got.err, want) {
					t.Errorf("lacks %q:\n%s%s", want, got.out, got.err)
				}
			}
		})
	}
}

func TestEnginesFileIsChecked(t *testing.T) {
	for _, c := range []struct {
		name, old, new string // what is replaced in a good file
		want           []string
	}{
		{"unknown key", "replay:", "reply:", []string{"engine 1", "llama-0", "line 5", `unknown key "reply"`}},
		{"unknown key beside engines", "engines:", "more: 1\nengines:", []string{"the one key engines", "more"}},
		{"no list", goodEngines, "engines: 5", []string{"the one key engines"}},
		{"empty", goodEngines, "", []string{"the one key engines"}},
		{"two documents", "engines:", "engines: [{}]\n---\nengines:", []string{"more than one document"}},
		{"an entry that is no mapping", goodEngines, "engines: [w0]", []string{"engine 1", "want keys and values"}},
		{"no number", "block-size: 32", "block-size: many", []string{"engine 2", "line 14", "block-size", "many"}},
		{"out of range", "block-size: 32", "block-size: -1", []string{"engine 2", "block-size: -1"}},
		{"a map where a word should be", "model: qwen3", "model: {a: b}", []string{"engine 2", "model: want one value or a list"}},
		{"twice", "ranks: 2", "ranks: 2\n    worker: x", []string{"engine 1", "worker"}},
		{"ranks of one worker in two entries", "worker: 007", "worker: llama-0\n    ranks: 1", nil},
		{"the same worker-rank", "first-rank: 3", "first-rank: 1\n  - {worker: llama-0, model: m, block-size: 1}", []string{"engine 3", "rank 0", "engine 1"}},
		{"the same endpoint", "first-rank: 3", "first-rank: 3\n  - {worker: x, model: m, block-size: 1, events: 'tcp://10.0.0.1:5558'}", []string{"engine 3", "tcp://10.0.0.1:5558", "engine 1"}},
		{"no such tier", "LMC=host", "LMC=attic", []string{"engine 1", "media", "LMC=attic"}},
		{"no YAML", "engines:", "engines: [", []string{"yaml"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := writeEngines(t, strings.Replace(goodEngines, c.old, c.new, 1))
			got := execute(t, "relay", "--check-config", "--engines", file)
			code := 2
			if c.want == nil {
				code = 0
			}
			if got.code != code {
				t.Errorf("code %d, want %d: %s", got.code, code, got.err)
			}
			for _, want := range append(c.want, filepath.Base(file)) {
				if code != 0 && !strings.Contains(got.err, want) && !strings.HasPrefix(c.name, "the same") {
					t.Errorf("lacks %q: %s", want, got.err)
				}
			}
		})
	}
}

// The command forwards until it is told to stop.
func TestRelayRuns(t *testing.T) {
	broker := newTopics(t)
	cfg := fakeengine.DefaultConfig()
	cfg.Listen, cfg.ReplayListen, cfg.Ranks = "127.0.0.1:0", "127.0.0.1:0", 1
	engine, err := fakeengine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	requests := fleet.NewSynthetic(20, 1)
	for q, err := requests.Next(); err == nil; q, err = requests.Next() {
		if _, err := engine.Serve(q); err != nil {
			t.Fatal(err)
		}
	}
	at := engine.State().Ranks[0]
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan executed, 1)
	go func() {
		ended <- executeOf(ctx, commands(), strings.NewReader(""), "relay", "--brokers", strings.Join(broker.Brokers(), ","),
			"--worker", "w", "--model", "m", "--block-size", "64", "--events", at.Events, "--replay", at.Replay,
			"--http-listen", "127.0.0.1:0", "--state-dir", t.TempDir())
	}()
	stored := 0
	testcontainers.Eventually(t, patience, func() error {
		stored = 0
		var b schemas.Batch
		for _, part := range testcontainers.ReadCommitted(t, broker, defaultTopic) {
			for _, rec := range part {
				if err := b.Decode(rec.Value); err != nil {
					t.Fatal(err)
				}
				if string(b.Worker) != "w" || string(rec.Key) != "w" {
					t.Fatalf("a record of %q, key %q", b.Worker, rec.Key)
				}
				for _, e := range b.Events {
					stored += len(e.Stored.Locals)
				}
			}
		}
		if stored < engine.Held().Ranks[0].Tiers.Device.Blocks {
			return errors.New("not all blocks are told of")
		}
		return nil
	})
	stop()
	select {
	case got := <-ended:
		if got.code != 0 {
			t.Errorf("exit code %d: %s", got.code, got.err)
		}
	case <-time.After(patience):
		t.Fatal("the relay does not end")
	}
}
