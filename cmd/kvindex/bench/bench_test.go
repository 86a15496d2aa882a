package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvindex/cmd/kvindex/bench"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
	"kvindex/index/indextest"
)

// progress counts what it is told.
type progress struct{ done int64 }

func (p *progress) Start(string, int64) {}
func (p *progress) Add(n int64)         { p.done += n }

// workload makes a small workload file with removals and shared prompts.
func workload(t *testing.T) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "small.kvw"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := kvw.Config{Workers: 4, Replicas: 2, BlockSize: 32, Capacity: 700, Route: kvw.Best}
	if _, err := kvw.Generate(f, fleet.NewSynthetic(400, 3), c, nil); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// measure runs a measurement and returns its lines.
func measure(t *testing.T, c bench.Config) []map[string]any {
	t.Helper()
	var out bytes.Buffer
	if err := bench.Run(t.Context(), c, &out, new(progress)); err != nil {
		t.Fatal(err)
	}
	var lines []map[string]any
	for line := range strings.Lines(out.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, m)
	}
	return lines
}

// digest is the digest of the oracle's answers.
func digest(t *testing.T, file string, whole bool) string {
	t.Helper()
	w, err := kvw.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	oracle := indextest.NewOracle()
	var m index.SlotMatches
	var sum uint64
	ask := func(query int, locals []index.LocalHash) {
		oracle.Find(locals, index.FindOptions{}, &m)
		for _, a := range m.Matches {
			x := uint64(query)*0x9e3779b97f4a7c15 ^ uint64(a.Slot)*0xc2b2ae3d27d4eb4f ^ uint64(a.Depth)*0x165667b19e3779f9
			x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
			x = (x ^ x>>27) * 0x94d049bb133111eb
			sum += x ^ x>>31
		}
	}
	query := 0
	for i := range w.Ops {
		switch op := &w.Ops[i]; op.Kind {
		case kvw.Store:
			if _, err := oracle.Store(op.Worker, op.Stored); err != nil {
				t.Fatal(err)
			}
		case kvw.Remove:
			oracle.Remove(op.Worker, op.Hashes)
		case kvw.Query:
			if !whole {
				ask(query, op.Query)
			}
			query++
		}
	}
	if whole {
		for i, q := range w.Queries {
			ask(i, q)
		}
	}
	return fmt.Sprintf("%016x", sum)
}

// Keys that others print of a mode too, with the same meaning. A comparison reads
// them by name.
var keys = map[string]string{
	"seq": "runs total_ms best_ms spread_percent cpu_share store_ms remove_ms query_ms ns_per_stored_block " +
		"ns_per_removed_block ns_per_query ns_per_queried_block rejected_events answers",
	"pool": "event_workers barrier runs wall_ms best_ms spread_percent issue_ms logical_ops_per_s block_ops_per_s " +
		"query_mean_us query_p50_us query_p99_us answers",
	"mixed": "readers event_workers seconds cores_used blocks_per_s_offered queries_per_s queried_blocks_per_s events_per_s " +
		"event_blocks_per_s logical_ops_per_s block_ops_per_s query_mean_us query_p50_us query_p99_us query_p999_us " +
		"rejected_events live_pairs_at_end",
	"mem": "live_pairs distinct_blocks heap_mib resident_mib heap_bytes_per_pair heap_bytes_per_distinct_block " +
		"resident_bytes_per_pair resident_bytes_per_distinct_block",
	"dump": "runs events blocks dump_ms dump_blocks_per_s restore_ms restore_blocks_per_s " +
		"queries_answered_differently_after answers",
	"scale": "workers live_pairs heap_bytes_per_pair longest_gc_pause_ms query_p99_us",
}

// Each mode of each structure gives the oracle's answers, where it gives any, and
// all its keys.
func TestModes(t *testing.T) {
	file := workload(t)
	inOrder, atEnd := digest(t, file, false), digest(t, file, true)
	for _, structure := range bench.Structures() {
		for _, positions := range []bool{false, true} {
			for _, mode := range bench.Modes() {
				t.Run(fmt.Sprintf("%s/%s/positions=%v", structure, mode, positions), func(t *testing.T) {
					c := bench.DefaultConfig()
					c.Mode, c.Structure, c.File, c.Positions = mode, structure, file, positions
					c.Runs, c.EventWorkers, c.Readers, c.Barrier = 2, 2, 2, true
					c.WarmUp, c.Seconds, c.Blocks, c.Workers, c.Queries = 0.01, 0.05, 30_000, 12, 500
					if mode == "scale" {
						c.File = ""
					}
					if err := c.Validate(); err != nil && strings.Contains(err.Error(), "is for one goroutine") {
						return
					}
					lines := measure(t, c)
					// On a busy machine not everybody has had a turn by then.
					for mode == "mixed" && c.Seconds < 10 && (lines[0]["queries_per_s"] == 0.0 || lines[0]["event_blocks_per_s"] == 0.0) {
						c.Seconds *= 4
						lines = measure(t, c)
					}
					if len(lines) != 1 {
						t.Fatalf("%d lines: %v", len(lines), lines)
					}
					line := lines[0]
					for _, k := range append(strings.Fields(keys[mode]), "impl", "mode", "index") {
						if _, ok := line[k]; !ok {
							t.Errorf("no key %s", k)
						}
					}
					if line["impl"] != "kvindex" || line["mode"] != mode || line["index"] != structure || mode != "scale" && line["file"] != "small" {
						t.Errorf("heading is wrong: %v", line)
					}
					if n, ok := line["rejected_events"]; ok && n != 0.0 {
						t.Errorf("%v events were rejected", n)
					}
					switch mode {
					case "seq", "pool", "dump":
						want := inOrder
						if mode == "dump" {
							want = atEnd
						}
						if got := line["answers"].(map[string]any)["digest"]; got != want {
							t.Errorf("digest is %v, want %v", got, want)
						}
						if n := line["queries_answered_differently_after"]; mode == "dump" && n != 0.0 {
							t.Errorf("%v queries are answered differently after", n)
						}
					case "mixed":
						for _, k := range []string{"queries_per_s", "event_blocks_per_s", "query_p999_us", "live_pairs_at_end"} {
							if line[k].(float64) <= 0 {
								t.Errorf("%s is %v", k, line[k])
							}
						}
					case "mem":
						if line["heap_bytes_per_pair"].(float64) <= 0 {
							t.Errorf("heap bytes a pair are %v", line["heap_bytes_per_pair"])
						}
					case "scale":
						if n := line["live_pairs"].(float64); n < 30_000 || n > 31_000 || line["blocks_per_query"] != 512.0 {
							t.Errorf("%v pairs, %v blocks a query, want 30,000 or a round more, and 512", n, line["blocks_per_query"])
						}
					}
				})
			}
		}
	}
}

// Without the barrier there are no answers to compare, and readers alone may be
// measured, as may a paced feeder.
func TestOptions(t *testing.T) {
	file := workload(t)
	c := bench.DefaultConfig()
	c.Mode, c.File = "pool", file
	if a := measure(t, c)[0]["answers"]; a != nil {
		t.Errorf("pool without barrier has answers: %v", a)
	}
	c.Mode, c.WarmUp, c.Seconds, c.EventWorkers = "mixed", 0, 0.02, 0
	if n := measure(t, c)[0]["events_per_s"]; n != 0.0 {
		t.Errorf("%v events a second without event workers", n)
	}
	c.EventWorkers, c.BlocksPerSecond = 1, 1000
	if n := measure(t, c)[0]["blocks_per_s_offered"]; n != 1000.0 {
		t.Errorf("%v blocks a second were offered, want 1000", n)
	}
}

func TestScaleLines(t *testing.T) {
	c := bench.DefaultConfig()
	c.Mode, c.Blocks, c.Workers, c.Queries = "scale", 1_100_000, 500, 100
	var pairs []float64
	for _, line := range measure(t, c) {
		pairs = append(pairs, line["live_pairs"].(float64))
	}
	if len(pairs) != 2 || pairs[0] < 1e6 || pairs[0] > 1.04e6 || pairs[1] < 1.1e6 || pairs[1] > 1.14e6 {
		t.Errorf("lines at %v pairs, want a million and a tenth more", pairs)
	}
}

func TestRunStops(t *testing.T) {
	file := workload(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, mode := range bench.Modes() {
		c := bench.DefaultConfig()
		c.Mode, c.File = mode, file
		if mode == "scale" {
			c.File = ""
		}
		var out bytes.Buffer
		if err := bench.Run(ctx, c, &out, new(progress)); !errors.Is(err, context.Canceled) || out.Len() > 0 {
			t.Errorf("%s: %v, %q; want %v and no line", mode, err, &out, context.Canceled)
		}
	}
}

func TestBadFiles(t *testing.T) {
	good, err := os.ReadFile(workload(t))
	if err != nil {
		t.Fatal(err)
	}
	c := bench.DefaultConfig()
	c.File = filepath.Join(t.TempDir(), "cut.kvw")
	if err := os.WriteFile(c.File, good[:len(good)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	var format *kvw.FormatError
	if err := bench.Run(t.Context(), c, new(bytes.Buffer), new(progress)); !errors.As(err, &format) || !strings.Contains(err.Error(), "cut.kvw: at byte") {
		t.Errorf("%v, want a FormatError with the file's name and the byte", err)
	}
	c.File += ".none"
	if err := bench.Run(t.Context(), c, new(bytes.Buffer), new(progress)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v, want %v", err, os.ErrNotExist)
	}
}

func TestValidate(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*bench.Config)
		err    string
	}{
		"mode":           {func(c *bench.Config) { c.Mode = "fast" }, `no mode "fast"`},
		"structure":      {func(c *bench.Config) { c.Structure = "btree" }, `no structure "btree"`},
		"no file":        {func(c *bench.Config) { c.File = "" }, "needs a workload file"},
		"file for scale": {func(c *bench.Config) { c.Mode = "scale" }, "takes no workload file"},
		"runs":           {func(c *bench.Config) { c.Runs = 0 }, "0 runs"},
		"readers":        {func(c *bench.Config) { c.Readers = 0 }, "0 readers"},
		"event workers":  {func(c *bench.Config) { c.EventWorkers = 257 }, "257 event workers"},
		"pool of none":   {func(c *bench.Config) { c.Mode, c.EventWorkers = "pool", 0 }, "needs an event worker"},
		"seconds":        {func(c *bench.Config) { c.Seconds = 0 }, "0 seconds"},
		"blocks":         {func(c *bench.Config) { c.Mode, c.File, c.Blocks = "scale", "", 0 }, "0 blocks"},
	} {
		cfg := bench.DefaultConfig()
		cfg.File = "f.kvw"
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		c.change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
	}
	if !slices.Contains(bench.Structures(), bench.DefaultConfig().Structure) {
		t.Error("the default structure is not one of them")
	}
}
