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

func TestBenchUsage(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("KVW2 and more"), 0o600); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(dir, "made.kvw")
	for args, want := range map[string]string{
		"index":                                        "needs a workload file",
		"index --file " + other:                        `other: at byte 0: not a workload file`,
		"index --file none.kvw":                        "none.kvw",
		"index --mode fast":                            `"fast" is not one of seq, pool, mixed, mem, dump, scale`,
		"index --mode scale --file " + other:           "takes no workload file",
		"workload -o " + made:                          "give either --trace or --synthetic",
		"workload --synthetic 5 --block 60 -o " + made: "block size 60",
		"workload --trace none.jsonl -o " + made:       "none.jsonl",
		"workload --trace " + other + " -o " + made:    "other:1",
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
