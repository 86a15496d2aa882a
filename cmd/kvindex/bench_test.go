package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// From made-up conversations to figures, as a user would.
func TestBench(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "w.kvw")
	got := execute(t, "bench", "workload", "--synthetic", "100", "--workers", "4", "--route", "best", "-o", file)
	var made struct {
		File     string
		Requests int
		Ops      int
		Stored   int `json:"blocks_stored"`
	}
	if err := json.Unmarshal([]byte(got.out), &made); got.code != 0 || err != nil || made.File != file || made.Requests != 100 || made.Ops < 200 || made.Stored == 0 {
		t.Fatalf("exit code %d, %q, %q: %v", got.code, got.out, got.err, err)
	}

	profile := filepath.Join(dir, "profile")
	got = execute(t, "bench", "index", "--file", file, "--mode", "seq", "--runs", "2", "--cpu-profile", profile)
	var line struct {
		Mode    string
		File    string
		Index   string
		Runs    int
		Answers struct{ Digest string }
	}
	if err := json.Unmarshal([]byte(got.out), &line); got.code != 0 || err != nil || got.err != "" {
		t.Fatalf("exit code %d, %q, %q: %v", got.code, got.out, got.err, err)
	}
	if line.Mode != "seq" || line.File != "w" || line.Index != "runs" || line.Runs != 2 || len(line.Answers.Digest) != 16 {
		t.Errorf("line is %+v", line)
	}
	if st, err := os.Stat(profile); err != nil || st.Size() == 0 {
		t.Errorf("no profile: %v", err)
	}
}

// The query side in a process of its own, which ends with the command.
func TestBenchQuery(t *testing.T) {
	got := execute(t, "bench", "query", "--short", "--workers", "3", "--blocks", "5", "--transports", "grpc,json", "--overload", "50ms")
	if got.code != 0 || !strings.Contains(got.err, "saturation") {
		t.Fatalf("exit code %d, %q", got.code, got.err)
	}
	lines := 0
	for text := range strings.Lines(got.out) {
		var line struct{ Mode string }
		if err := json.Unmarshal([]byte(text), &line); err != nil || line.Mode != "query" {
			t.Fatalf("%q: %v", text, err)
		}
		lines++
	}
	if lines < 2*6 {
		t.Errorf("%d lines", lines)
	}
}

// A variable that all commands read puts no load on the stage that it names.
func TestBenchQueryOfAVariable(t *testing.T) {
	t.Setenv("KVINDEX_QUERY_ADDRESS", "127.0.0.1:1")
	t.Setenv("KVINDEX_MODEL", "m")
	got := execute(t, "bench", "query", "--short")
	if want := "query-address is from KVINDEX_QUERY_ADDRESS"; got.code != codeUsage || got.out != "" || !strings.Contains(got.err, want) {
		t.Errorf("exit code %d, %q, %q; want %q", got.code, got.out, got.err, want)
	}
	got = execute(t, "bench", "query", "--short", "--query-address", "127.0.0.1:1")
	if want := "the stage at 127.0.0.1:1: "; got.code != codeFailed || got.out != "" || !strings.Contains(got.err, want) {
		t.Errorf("named: exit code %d, %q, %q; want %q", got.code, got.out, got.err, want)
	}
}

func TestBenchUsage(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("KVW2 and more"), 0o600); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(dir, "made.kvw")
	for args, want := range map[string]string{
		"index":                                                 "needs a workload file",
		"index --file " + other:                                 `other: at byte 0: not a workload file`,
		"index --file none.kvw":                                 "none.kvw",
		"index --mode fast":                                     `"fast" is not one of seq, pool, mixed, mem, dump, scale`,
		"index --mode scale --file " + other:                    "takes no workload file",
		"relay --mode fast":                                     `"fast" is not one of throughput, memory, visible`,
		"relay --batches 1":                                     "1 batches",
		"relay --brokers 127.0.0.1:1":                           "take a topic",
		"relay --mode visible --rate 0":                         "0 batches a second",
		"query --transports udp":                                `no transport "udp"`,
		"query --blocks 0":                                      "prompts of 0 blocks",
		"query --model m":                                       "--model is of a stage: give --query-address",
		"query --tls":                                           "--tls is of a stage",
		"query --query-address a:1":                             "which model",
		"query --query-address a:1 --held 5":                    "--held is of a server that is started",
		"query --query-address a:1 --ca-file none":              "ca-file: given without tls",
		"query --query-address a:1 --prompts none":              "none: no such file",
		"query --query-address a:1 --prompts " + other:          "other:1: number 1",
		"query --query-address a:1 --model m --transports json": "JSON needs the stage's HTTP address",
		"workload -o " + made:                                   "give either --trace or --synthetic",
		"workload --synthetic 5 --block 60 -o " + made:          "block size 60",
		"workload --trace none.jsonl -o " + made:                "none.jsonl",
		"workload --trace " + other + " -o " + made:             "other:1",
	} {
		got := execute(t, append([]string{"bench"}, strings.Fields(args)...)...)
		if got.code == 0 || got.out != "" || !strings.Contains(got.err, want) {
			t.Errorf("%s: exit code %d, %q, %q; want %q", args, got.code, got.out, got.err, want)
		}
		if usage := !strings.Contains(args, "--trace "+other); usage != (got.code == codeUsage) {
			t.Errorf("%s: exit code %d", args, got.code)
		}
	}
	if _, err := os.Stat(made); !os.IsNotExist(err) {
		t.Errorf("a file is left of a workload that failed: %v", err)
	}
}

// The publisher, the relay and the stage are processes of their own.
func TestBenchRelay(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	got := execute(t, "bench", "relay", "--mode", "memory", "--batches", "1000")
	var memory []struct{ Flat bool }
	for line := range strings.Lines(got.out) {
		memory = append(memory, struct{ Flat bool }{})
		if err := json.Unmarshal([]byte(line), &memory[len(memory)-1]); err != nil {
			t.Fatal(err)
		}
	}
	if got.code != 0 || len(memory) != 2 || !memory[0].Flat || !memory[1].Flat {
		t.Errorf("exit code %d, %q, %q", got.code, got.out, got.err)
	}

	got = execute(t, "bench", "relay", "--mode", "visible", "--seconds", "1", "--rate", "50")
	var line visibleLine
	if err := json.Unmarshal([]byte(got.out), &line); got.code != 0 || err != nil {
		t.Fatalf("exit code %d, %q, %q: %v", got.code, got.out, got.err, err)
	}
	if line.Batches != 50 || line.Samples != 25 || line.Asked < line.Samples || !(line.Query.P50 > 0 && line.Query.P50 < line.Visible.P50 && line.Visible.P50 <= line.Visible.P99) {
		t.Errorf("%+v", line)
	}
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
