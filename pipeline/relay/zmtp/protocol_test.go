// This file tests what a peer may do wrong, and what it may do though it is rare.

package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestProtocolErrors(t *testing.T) {
	long := func(flags byte, size uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size)
	}
	greet := func(at int, b string) []byte {
		g := greeting(1)
		copy(g[at:], b)
		return g
	}
	v1 := []byte{1, 0}
	v2 := []byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 1}
	failed, lost := []string{"failed"}, []string{"connected", "disconnected"}
	for _, c := range []struct {
		name   string
		sends  []byte
		stalls bool // afterwards, instead of hanging up
		events []string
		err    error
		text   string
		took   time.Duration // by the clock of the bubble; 0: at once
	}{
		// The greeting.
		{"accepts and says nothing", nil, true, failed, ErrHandshake, "within 5s", 5 * time.Second},
		{"accepts and hangs up", nil, false, failed, io.EOF, "fake:1", 0},
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n"), true, failed, ErrProtocol, "no ZMTP", 0},
		{"bad end of the signature", greet(9, "\x7e"), true, failed, ErrProtocol, "no ZMTP", 0},
		{"ZMTP 1", v1, true, failed, ErrProtocol, "no ZMTP", 0},
		{"ZMTP 2", v2, true, failed, ErrProtocol, "before 3.0 (revision 1)", 0},
		{"PLAIN", greet(12, "PLAIN"), true, failed, ErrProtocol, `mechanism "PLAIN"`, 0},
		{"CURVE", greet(12, "CURVE"), true, failed, ErrProtocol, `mechanism "CURVE"`, 0},
		{"longer than NULL", greet(12, "NULLX"), true, failed, ErrProtocol, `mechanism "NULLX"`, 0},
		{"stalls in the greeting", greeting(1)[:40], true, failed, ErrHandshake, "within 5s", 5 * time.Second},
		// READY.
		{"stalls after the greeting", greeting(1), true, failed, ErrHandshake, "within 5s", 5 * time.Second},
		{"stalls in READY", hello(1)[:80], true, failed, ErrHandshake, "within 5s", 5 * time.Second},
		{"wrong socket type", append(greeting(1), ready("PULL")...), true, failed, ErrProtocol, `"PULL" socket`, 0},
		{"ERROR", append(greeting(1), command("ERROR", "\x05go on")...), true, failed, ErrRefused, `"go on"`, 0},
		{"ERROR without a reason", append(greeting(1), command("ERROR", "")...), true, failed, ErrRefused, `""`, 0},
		{"other command", append(greeting(1), command("HELLO", "x")...), true, failed, ErrProtocol, `"HELLO"`, 0},
		{"message in the handshake", append(greeting(1), message("a")...), true, failed, ErrProtocol, "message in the handshake", 0},
		{"command without a body", append(greeting(1), flagCommand, 0), true, failed, ErrProtocol, "whole name", 0},
		{"command without a name", append(greeting(1), flagCommand, 1, 0), true, failed, ErrProtocol, "whole name", 0},
		{"command's name cut off", append(greeting(1), flagCommand, 3, 5, 'R', 'E'), true, failed, ErrProtocol, "whole name", 0},
		{"READY's property has no name", append(greeting(1), command("READY", "\x00\x00\x00\x00\x00")...), true, failed, ErrProtocol, "cut off", 0},
		{"READY's property cut off", append(greeting(1), command("READY", "\x05abc")...), true, failed, ErrProtocol, "cut off", 0},
		{"READY's huge value", append(greeting(1), command("READY", "\x01a\xff\xff\xff\xffabc")...), true, failed, ErrProtocol, "cut off", 0},
		{"READY and MORE", append(greeting(1), flagCommand|flagMore, 6, 5, 'R', 'E', 'A', 'D', 'Y'), true, failed, ErrProtocol, "several frames", 0},
		{"huge READY", append(greeting(1), long(flagCommand, 1<<62)...), true, failed, ErrTooLarge, "command of 4611686018427387904 bytes", 0},
		// Traffic.
		{"reserved flag", append(hello(1), 8, 0), true, lost, ErrProtocol, "reserved flags 0x8", 0},
		{"command and MORE", append(hello(1), flagCommand|flagMore, 0), true, lost, ErrProtocol, "several frames", 0},
		{"command without a name, later", append(hello(1), flagCommand, 0), true, lost, ErrProtocol, "whole name", 0},
		{"huge command", append(hello(1), long(flagCommand, maxCommand+1)...), true, lost, ErrTooLarge, "command of 8193 bytes", 0},
		{"ERROR, later", append(hello(1), command("ERROR", "\x03bye")...), true, lost, ErrRefused, `"bye"`, 0},
		{"PING without a time to live", append(hello(1), command("PING", "\x00")...), true, lost, ErrProtocol, "PING of 1 bytes", 0},
		{"PING's context too long", append(hello(1), command("PING", strings.Repeat("x", 19))...), true, lost, ErrProtocol, "PING of 19 bytes", 0},
		{"short frame too large", append(hello(1), 0, 201), true, lost, ErrTooLarge, "frame of 201 bytes is over the limit of 200", 0},
		{"long frame too large", append(hello(1), long(0, 201)...), true, lost, ErrTooLarge, "frame of 201 bytes", 0},
		{"huge frame", append(hello(1), long(0, 1<<40)...), true, lost, ErrTooLarge, "frame of 1099511627776 bytes", 0},
		{"largest size there is", append(hello(1), long(flagMore, 1<<64-1)...), true, lost, ErrTooLarge, "frame of 18446744073709551615 bytes", 0},
		{"message too large", slices.Concat(hello(1), message(strings.Repeat("x", 200), strings.Repeat("y", 101))), true, lost, ErrTooLarge, "message of 301 bytes is over the limit of 300", 0},
		{"too many frames", slices.Concat(hello(1), message("1", "2", "3", "4", "5")), true, lost, ErrTooLarge, "more than 4 frames", 0},
		{"frames without end", append(hello(1), bytes.Repeat([]byte{flagMore, 0}, 100)...), true, lost, ErrTooLarge, "more than 4 frames", 0},
		{"silent, 3.1", hello(1), true, lost, ErrSilent, "for 15s", 15 * time.Second},
		{"stalls within a frame, 3.1", append(hello(1), 0, 10, 'x'), true, lost, ErrSilent, "for 15s", 15 * time.Second},
		{"stalls within a frame, 3.0", append(hello(0), 0, 10, 'x'), true, lost, ErrSilent, "for 15s", 15 * time.Second},
		{"stalls within a header, 3.0", append(hello(0), 0), true, lost, ErrSilent, "for 15s", 15 * time.Second},
		{"stalls between frames, 3.0", append(hello(0), flagMore, 0), true, lost, ErrSilent, "for 15s", 15 * time.Second},
		{"silent after a PING, 3.0", slices.Concat(hello(0), command("PING", "\x00\x00")), true, lost, ErrSilent, "for 15s", 15 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := send(c.sends)
				if c.stalls {
					s = stall(s)
				}
				cfg := testConfig(s)
				cfg.MaxFrame, cfg.MaxMessage, cfg.MaxFrames = 200, 300, 4
				events, took, err := trace(t, cfg, 10)
				if !slices.Equal(events, c.events) {
					t.Errorf("events %v, want %v", events, c.events)
				}
				if !errors.Is(err, c.err) || !strings.Contains(fmt.Sprint(err), c.text) {
					t.Errorf("error %v, want %v with %q", err, c.err, c.text)
				}
				if took != c.took {
					t.Errorf("took %v, want %v", took, c.took)
				}
			})
		})
	}
}

// What is allowed, though libzmq never or seldom sends it.
func TestAllowed(t *testing.T) {
	future := greeting(1)
	future[10], future[11] = 4, 0
	padded := greeting(1)
	copy(padded[1:9], "whatever")
	for _, c := range []struct {
		name   string
		sends  []byte
		events []string
	}{
		{"version 3.1", append(hello(1), message("a", "b")...), []string{`"a|b"`}},
		{"version 3.0", append(hello(0), message("a", "b")...), []string{`"a|b"`}},
		{"version 4", slices.Concat(future, ready("XPUB"), message("a")), []string{`"a"`}},
		{"padding of any kind", slices.Concat(padded, ready("PUB"), message("a")), []string{`"a"`}},
		{"READY without properties", slices.Concat(greeting(1), command("READY", ""), message("a")), []string{`"a"`}},
		{"short body, long header", slices.Concat(hello(1), []byte{flagLong, 0, 0, 0, 0, 0, 0, 0, 1, 'a'}), []string{`"a"`}},
		{"empty frames", slices.Concat(hello(1), message("", "", ""), message("")), []string{`"||"`, `""`}},
		{"unknown commands", slices.Concat(hello(1), command("NEW", "x"), message("a"), command("READY", ""), message("b")), []string{`"a"`, `"b"`}},
		{"commands within a message", slices.Concat(hello(1), []byte{flagMore, 1, 'a'}, command("PING", "\x00\x00ctx"), command("NEW", ""), message("b", "c"), message("d")),
			[]string{`"a|b|c"`, `"d"`}},
		{"a long frame", slices.Concat(hello(1), message("a", strings.Repeat("x", 200_000), "b"), message("c")),
			[]string{fmt.Sprintf("%q", "a|"+strings.Repeat("x", 200_000)+"|b"), `"c"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events, _, err := trace(t, testConfig(send(c.sends)), 10)
				if want := append(append([]string{"connected"}, c.events...), "disconnected"); !slices.Equal(events, want) {
					t.Errorf("events %v, want %v", events, want)
				}
				if !cutOff(err) {
					t.Errorf("error %v", err)
				}
			})
		})
	}
}

// A stream that ends after any byte gives the messages that were whole and then
// an error; and so does one of which each byte comes alone.
func TestCutOffAnywhere(t *testing.T) {
	start := hello(1)
	parts := [][]byte{message("a", "b"), command("PING", "\x00\x00"), message("c"), message("", strings.Repeat("x", 300))}
	stream := slices.Concat(append([][]byte{start}, parts...)...)
	for n := range len(stream) + 1 {
		synctest.Test(t, func(t *testing.T) {
			var want []string
			if n < len(start) {
				want = []string{"failed"}
			} else {
				want = []string{"connected"}
				at := len(start)
				for i, text := range []string{`"a|b"`, "", `"c"`, fmt.Sprintf("%q", "|"+strings.Repeat("x", 300))} {
					if at += len(parts[i]); n >= at && text != "" {
						want = append(want, text)
					}
				}
				want = append(want, "disconnected")
			}
			events, _, err := trace(t, testConfig(func(p *fake) {
				for _, b := range stream[:n] {
					p.Write([]byte{b})
				}
			}), 10)
			if !slices.Equal(events, want) || !cutOff(err) {
				t.Errorf("after %d bytes: %v, %v, want %v", n, events, err, want)
			}
		})
	}
}
