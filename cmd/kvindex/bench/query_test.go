package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"kvindex/cmd/kvindex/bench"
)

// inProcess starts the server as a goroutine.
func inProcess(ctx context.Context, c bench.ServerConfig) (io.WriteCloser, io.Reader, func() error, error) {
	in, toIn := io.Pipe()
	fromOut, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := bench.ServeQueries(ctx, c, in, out)
		out.CloseWithError(err)
		ended <- err
	}()
	return toIn, fromOut, func() error { return <-ended }, nil
}

// shortly measures next to nothing.
func shortly() bench.QueryConfig {
	c := bench.DefaultQueryConfig()
	c.Blocks, c.Workers = []int{12, 96}, []int{7}
	c.Held, c.BlocksPerSecond, c.MostRate, c.Slowest = 2000, 1e5, 2000, time.Minute
	c.Step, c.For, c.Overload = 20*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
	return c
}

// All that was due is accounted for, nothing fails, and answers are right: RunQuery
// fails on one that is not.
func TestQuery(t *testing.T) {
	for _, tokens := range []bool{false, true} {
		c := shortly()
		if c.Tokens = tokens; tokens {
			c.Blocks = c.Blocks[:1]
		}
		var out, table bytes.Buffer
		if err := bench.RunQuery(t.Context(), c, inProcess, &out, &table, new(progress)); err != nil {
			t.Fatal(err)
		}
		seen, checked := map[string]int{}, map[string]int64{}
		for text := range strings.Lines(out.String()) {
			var l struct {
				What, Transport, By                                 string
				Requests, Answers, Refused, Failed, Unsent, Checked int64
				P50                                                 *float64 `json:"p50_us"`
				Offered                                             float64  `json:"offered_per_s"`
				Written                                             *float64 `json:"written_blocks_per_s"`
				Recovery                                            *float64 `json:"recovery_ms"`
			}
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				t.Fatal(err)
			}
			seen[l.Transport+" "+l.What]++
			checked[l.Transport] += l.Checked
			if l.Requests == 0 || l.Requests != l.Answers+l.Refused+l.Failed+l.Unsent || l.Failed != 0 {
				t.Errorf("the numbers do not add up: %s", text)
			}
			if l.Answers > 0 && (l.P50 == nil || *l.P50 <= 0) || l.Offered <= 0 || l.Written == nil {
				t.Errorf("something was not measured: %s", text)
			}
			if by := map[bool]string{false: "hashes", true: "tokens"}[tokens]; l.By != by {
				t.Errorf("asked by %s, not %s", l.By, by)
			}
			if (l.What == "after") != (l.Recovery != nil) {
				t.Errorf("recovery is told of %s: %s", l.What, text)
			}
		}
		for _, transport := range bench.QueryTransports() {
			for _, what := range strings.Fields("saturation half empty bare overload after") {
				want := len(c.Blocks)
				if transport == "json" && what == "bare" {
					want = 0
				}
				if n := seen[transport+" "+what]; n != want {
					t.Errorf("%d lines of %s over %s, want %d", n, what, transport, want)
				}
			}
			if seen[transport+" step"] == 0 || checked[transport] == 0 {
				t.Errorf("%s: %d steps, %d answers checked", transport, seen[transport+" step"], checked[transport])
			}
		}
		if n := strings.Count(table.String(), "\n"); n != 1+len(c.Blocks)*(6+6+5) {
			t.Errorf("the table has %d lines:\n%s", n, &table)
		}
	}
}

func TestQueryStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := shortly()
	c.For = time.Hour
	done := make(chan error, 1)
	go func() { done <- bench.RunQuery(ctx, c, inProcess, io.Discard, io.Discard, new(progress)) }()
	time.AfterFunc(300*time.Millisecond, cancel)
	select {
	case err := <-done:
		if err == nil {
			t.Error("it was done")
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("it goes on")
	}
}

func TestQueryConfig(t *testing.T) {
	for want, change := range map[string]func(*bench.QueryConfig){
		`no transport "udp"`:      func(c *bench.QueryConfig) { c.Transports = []string{"grpc", "udp"} },
		"at least one transport":  func(c *bench.QueryConfig) { c.Blocks = nil },
		"prompts of 0 blocks":     func(c *bench.QueryConfig) { c.Blocks = []int{0} },
		"20000 workers":           func(c *bench.QueryConfig) { c.Workers = []int{20000} },
		"blocks a second":         func(c *bench.QueryConfig) { c.BlocksPerSecond = -1 },
		"more than 0, and an hou": func(c *bench.QueryConfig) { c.Step = 0 },
		"at most 0.5 requests":    func(c *bench.QueryConfig) { c.MostRate = 0.5 },
		"0 connections":           func(c *bench.QueryConfig) { c.Connections = 0 },
		"-1 blocks held":          func(c *bench.QueryConfig) { c.Held = -1 },
	} {
		c := bench.DefaultQueryConfig()
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	c := bench.DefaultQueryConfig()
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}
