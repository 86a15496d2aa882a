package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

type noProgress struct{}

func (noProgress) Start(string, int64) {}
func (noProgress) Add(int64)           {}

// measureRelay returns the lines of a measurement, each as a T.
func measureRelay[T any](t *testing.T, c RelayConfig) (lines []T) {
	t.Helper()
	var out bytes.Buffer
	if err := RunRelay(t.Context(), c, &out, noProgress{}); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	for line := range strings.Lines(out.String()) {
		var m T
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, m)
	}
	return lines
}

// TestRelayMemoryIsFlat decides whether a whole relay's memory is that of what is
// held, with Kafka taking everything and with Kafka stalled half of the time.
func TestRelayMemoryIsFlat(t *testing.T) {
	c := DefaultRelayConfig()
	c.Mode, c.Batches = "memory", 200_000
	lines := measureRelay[RelayMemory](t, c)
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	for i, l := range lines {
		if l.Batches != c.Batches || l.LiveBlocks != memoryLive*memoryBlocks || len(l.Marks) != len(memoryMarks) || l.Anew != (i == 1) {
			t.Errorf("%+v", l)
		}
		for _, m := range l.Marks {
			if stalled := i == 1 && m.Percent > stallFrom && m.Percent <= stallTo; stalled != (m.InFlight > memoryBuffer/8) || m.InFlight > memoryBuffer/4 {
				t.Errorf("%s: %+v", l.Kafka, m)
			}
		}
	}
}

// What grows by a few bytes a batch is noticed.
func TestFlat(t *testing.T) {
	const batches = 200_000
	for _, c := range []struct {
		name   string
		stalls bool
		heap   func(percent int) int64 // on top of 3 MiB
		want   bool
	}{
		{"flat", false, func(int) int64 { return 0 }, true},
		{"less", false, func(p int) int64 { return int64(-p) }, true},
		{"4 bytes a batch", false, func(p int) int64 { return 4 * batches * int64(p) / 100 }, false},
		{"a stall's records", true, func(p int) int64 {
			if p > stallFrom && p <= stallTo {
				return 2*memoryBuffer/4 + 1000
			}
			return 0
		}, true},
		{"12 bytes a batch, of a Kafka that stalls", true, func(p int) int64 { return 12 * batches * int64(max(0, p-stallFrom)) / 50 }, false},
		{"records that stay", true, func(p int) int64 {
			if p > stallFrom {
				return 2 * memoryBuffer / 4
			}
			return 0
		}, false},
	} {
		var marks []MemoryMark
		for _, p := range memoryMarks {
			m := MemoryMark{Percent: p, HeapBytes: 3<<20 + c.heap(p)}
			if c.stalls && p > stallFrom && p <= stallTo {
				m.InFlight = memoryBuffer / 4
			}
			marks = append(marks, m)
		}
		if got := flat(marks, c.stalls); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestRelayThroughput(t *testing.T) {
	c := DefaultRelayConfig()
	c.Batches, c.Runs = minRelayBatches, 1
	lines := measureRelay[RelayThroughput](t, c)
	if len(lines) != 2 || lines[0].Series != "prefill" || lines[1].Series != "single" {
		t.Fatalf("%+v", lines)
	}
	for _, l := range lines {
		if l.Batches < c.Batches || l.Runs != 1 || len(l.Ways) != 3 || l.BytesPerBatch < 200 {
			t.Errorf("%+v", l)
		}
		for i, w := range l.Ways {
			if w.Way != relayWays[i].name || !(w.BatchesPerSecond > 0 && w.BlocksPerSecond > w.BatchesPerSecond && w.MBPerSecond > 0 && w.CPUPerBlockNs > 0) {
				t.Errorf("%+v", w)
			}
			if (i == 0) != (w.TimesSocket == 1) {
				t.Errorf("%s: %v times the socket's", w.Way, w.TimesSocket)
			}
		}
	}
	if n := lines[1].BlocksPerBatch; n != 2 {
		t.Errorf("single: %v blocks a batch", n)
	}
	if n := lines[0].BlocksPerBatch; n < 50 {
		t.Errorf("prefill: %v blocks a batch", n)
	}
}

func TestRelayConfig(t *testing.T) {
	for want, change := range map[string]func(*RelayConfig){
		`no mode "fast"`: func(c *RelayConfig) { c.Mode = "fast" },
		"10 batches":     func(c *RelayConfig) { c.Batches = 10 },
		"0 runs":         func(c *RelayConfig) { c.Runs = 0 },
		"take a topic":   func(c *RelayConfig) { c.Brokers = []string{"127.0.0.1:1"} },
	} {
		c := DefaultRelayConfig()
		change(&c)
		if err := RunRelay(t.Context(), c, nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}

// A publisher's faults are told, and end the measurement.
func TestPublisherFaults(t *testing.T) {
	to, err := publishHere()
	if err != nil {
		t.Fatal(err)
	}
	l := newPublisherLink(to)
	if _, err := l.open(series{Kind: "rumours"}); err == nil || !strings.Contains(err.Error(), "no series") {
		t.Error(err)
	}
	if o, err := l.open(series{Kind: chains, Blocks: 3, Live: 5, Circle: 10}); err != nil || o.Batches != 10 || o.Stored != 30 || o.Removed != 30 {
		t.Errorf("%+v, %v", o, err)
	}
	// It ends, even though it waits for a subscriber.
	if err := errors.Join(l.publish(5), to.Close()); err != nil {
		t.Error(err)
	}
	var out bytes.Buffer
	if err := ServePublisher(t.Context(), strings.NewReader(`{"to":5}`), &out); err == nil {
		t.Error("published to no socket")
	}
	if err := ServePublisher(t.Context(), strings.NewReader(`{"to":`), &out); err == nil {
		t.Error("half an order is none")
	}
}
