package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestMain lets the test binary be what the demo and bench start as their children.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Contains([]string{stageCommandName, relayCommandName, publisherCommandName, benchServerName}, os.Args[1]) {
		main()
	}
	os.Exit(m.Run())
}

// TestDemo runs a short demo and holds it to what it is there to show.
func TestDemo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	got := execute(t, "demo", "--requests", "1200", "--workers", "16", "--output", "json")
	if got.code != 0 {
		t.Fatalf("exit code %d: %s", got.code, got.err)
	}
	var sum demoSummary
	if err := json.Unmarshal([]byte(got.out), &sum); err != nil {
		t.Fatal(err)
	}
	if sum.Requests != 1200 || sum.Queries.Answered != 1200 || sum.Produced.Failed != 0 {
		t.Errorf("%d requests, %+v, %+v", sum.Requests, *sum.Queries, sum.Produced)
	}
	if sum.Index.HitShare < 1.3*sum.Random.HitShare || sum.Index.MaxOverMean > 1.25 {
		t.Errorf("by the index %+v, at random %+v", sum.Index, sum.Random)
	}
	if sum.Probes != demoProbes || sum.ProbesChanged != 0 || sum.ProbesWrong != 0 {
		t.Errorf("of %d answers %d changed and %d were wrong", sum.Probes, sum.ProbesChanged, sum.ProbesWrong)
	}
	if sum.RecordsAtKill == 0 || sum.RecordsReread >= sum.RecordsAtKill {
		t.Errorf("%d of %d records read again", sum.RecordsReread, sum.RecordsAtKill)
	}
	if int(sum.IndexBlocks) != sum.BlocksStored-sum.BlocksRemoved {
		t.Errorf("%d blocks in the index, %d stored less %d removed", sum.IndexBlocks, sum.BlocksStored, sum.BlocksRemoved)
	}
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestDemoRelay runs a short demo with engines and a relay.
func TestDemoRelay(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	got := execute(t, "demo", "--relay", "--requests", "1000", "--output", "json")
	if got.code != 0 {
		t.Fatalf("exit code %d: %s", got.code, got.err)
	}
	var sum relaySummary
	if err := json.Unmarshal([]byte(got.out), &sum); err != nil {
		t.Fatal(err)
	}
	if sum.Requests != 1000 || sum.Engines != demoEngines || sum.Missed == 0 || sum.Blocks == 0 {
		t.Errorf("%+v", sum)
	}
	if sum.Answers < demoProbes || sum.Wrong != 0 {
		t.Errorf("of %d answers %d were wrong", sum.Answers, sum.Wrong)
	}
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestChild: a stage that ends by itself is said to have, with its own last
// words; and it ends when whoever started it is gone.
func TestChild(t *testing.T) {
	start := func(args ...string) *child {
		t.Helper()
		c, err := startChild(filepath.Join(t.TempDir(), "log"), append([]string{stageCommandName}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.kill)
		return c
	}
	t.Setenv("KVINDEX_WORKER_TTL", "never") // must not reach it
	ctx, stop := start("--ready-lag", "never").during(t.Context())
	defer stop()
	<-ctx.Done()
	if err := context.Cause(ctx); !strings.Contains(err.Error(), "the stage ended by itself") || !strings.Contains(err.Error(), "--ready-lag") {
		t.Errorf("cause %v", err)
	}

	broker := newTopics(t)
	c := start("--brokers", broker.Brokers()[0], "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--drain-timeout", "1s")
	c.stdin.Close() // as the system does for a process that is killed
	<-c.ended
}
