package main

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"
)

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 7: "7", 999: "999", 1000: "1,000", -1234567: "-1,234,567", 100000: "100,000"} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %s, want %s", n, got, want)
		}
	}
}

// TestScreen: on a terminal the status is cut to its width and gives way to a
// line; elsewhere there are only lines.
func TestScreen(t *testing.T) { synctest.Test(t, testScreen) } // in which no time passes

func testScreen(t *testing.T) {
	var out bytes.Buffer
	s := screen{w: &out, style: style{terminal: true, width: func() int { return 5 }}}
	s.status(func() string { return "größer" })
	s.status(func() string { t.Error("asked again at once"); return "" })
	s.line("done")
	if got, want := out.String(), "\r\x1b[Kgröß\r\x1b[Kdone\n"; got != want {
		t.Errorf("terminal: %q, want %q", got, want)
	}
	out.Reset()
	s = screen{w: &out}
	s.status(func() string { return "status" })
	s.last = time.Now().Add(-statusLines)
	s.status(func() string { return "more" })
	if got, want := out.String(), "status\nmore\n"; got != want {
		t.Errorf("no terminal: %q, want %q", got, want)
	}
}
