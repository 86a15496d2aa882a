package kafkalog

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// TestThinnedOut: brokers that are away for a minute are two hundred warnings of
// the client, and a line every ten seconds and broker here.
func TestThinnedOut(t *testing.T) {
	var out bytes.Buffer
	l := New(slog.New(slog.NewTextHandler(&out, nil)), "events")
	clock := time.Unix(1, 0)
	l.now = func() time.Time { return clock }
	for range 100 {
		for _, broker := range []string{"b1:9092", "b2:9092"} {
			l.Log(kgo.LogLevelWarn, "unable to open connection", "addr", broker)
		}
		clock = clock.Add(600 * time.Millisecond)
	}
	l.Log(kgo.LogLevelError, "something else", "err", "x")
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2*6+1 {
		t.Errorf("%d lines:\n%s", len(lines), out.String())
	}
	for _, want := range []string{"client=events", "addr=b1:9092", "addr=b2:9092", "times_since=16", "level=ERROR msg=\"something else\""} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
}

// TestAllAtDebugLevel: nothing is left out there, and what the client tells of
// itself is there too.
func TestAllAtDebugLevel(t *testing.T) {
	var out bytes.Buffer
	l := New(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})), "events")
	if l.Level() != kgo.LogLevelInfo {
		t.Errorf("level %v", l.Level())
	}
	for range 3 {
		l.Log(kgo.LogLevelInfo, "same")
		l.Log(kgo.LogLevelWarn, "same")
	}
	if strings.Count(out.String(), "level=DEBUG") != 3 || strings.Count(out.String(), "level=WARN") != 3 {
		t.Error(out.String())
	}
}

// TestTextsKeptAreBounded: a client that never says the same twice costs no memory.
func TestTextsKeptAreBounded(t *testing.T) {
	l := New(slog.New(slog.DiscardHandler), "events")
	for i := range 10 * most {
		l.Log(kgo.LogLevelWarn, fmt.Sprint(i))
	}
	if len(l.said) > most {
		t.Errorf("%d texts", len(l.said))
	}
}
