// This file tests the sockets with peers that behave: connecting again, what is
// written, contexts, Close.

package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func newSub(t *testing.T, cfg Config) *Sub {
	t.Helper()
	s, err := NewSub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// next returns the next event, described.
func next(t *testing.T, s *Sub) string {
	t.Helper()
	e, err := s.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return describe(e)
}

// What a socket writes, byte by byte, at each connection.
func TestWritten(t *testing.T) {
	ours := "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL" + strings.Repeat("\x00", 16+32) +
		"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
	for _, c := range []struct {
		minor byte
		want  string
	}{
		{1, ours + "\x04\x0b\x09SUBSCRIBEa" + "\x04\x0a\x09SUBSCRIBE" + "\x04\x08\x04PONGctx"},
		{0, ours + "\x00\x02\x01a" + "\x00\x01\x01" + "\x04\x08\x04PONGctx"},
	} {
		synctest.Test(t, func(t *testing.T) {
			found := make(chan bool, 2)
			s := func(p *fake) {
				p.Write(hello(c.minor))
				p.Write(command("PING", "\x00\x09ctx"))
				p.Write(message("a"))
				found <- p.await([]byte(c.want))
			}
			cfg := testConfig(s, s)
			cfg.Topics = []string{"a", ""}
			want := []string{"connected", `"a"`, "disconnected", "connected", `"a"`, "disconnected"}
			if events, _, _ := trace(t, cfg, 10); !slices.Equal(events, want) {
				t.Errorf("events %v", events)
			}
			for range 2 {
				if !<-found {
					t.Errorf("version 3.%d: not written as wanted", c.minor)
				}
			}
		})
	}
}

// A peer of the wrong type is told so.
func TestWrongSocketTypeIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		found := make(chan bool, 1)
		trace(t, testConfig(func(p *fake) {
			p.Write(append(greeting(1), ready("PULL")...))
			found <- p.await(command("ERROR", "\x13invalid socket type"))
		}), 10)
		if !<-found {
			t.Error("no ERROR")
		}
	})
}

// The pause before an attempt doubles from the least to the longest, less a
// random half at most, and starts anew after a connection that was of use.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		useless, useful := send(hello(1)), send(hello(1), message("a"))
		none := func(*fake) {}
		refuses := stall(send(greeting(1), command("ERROR", "\x00")))
		cfg := testConfig(none, none, none, useless, useless, none, none, none, useful, none, refuses)
		cfg.MinBackoff, cfg.MaxBackoff = 100*time.Millisecond, time.Second
		s := newSub(t, cfg)
		defer s.Close()
		var pauses []time.Duration
		for _, want := range []struct {
			kind  Kind
			pause time.Duration // at most
		}{
			{Failed, 100 * time.Millisecond}, {Failed, 200 * time.Millisecond}, {Failed, 400 * time.Millisecond},
			{Connected, 0}, {Disconnected, 800 * time.Millisecond}, {Connected, 0}, {Disconnected, time.Second},
			{Failed, time.Second}, {Failed, time.Second}, {Failed, time.Second},
			{Connected, 0}, {Message, 0}, {Disconnected, 100 * time.Millisecond},
			{Failed, 200 * time.Millisecond}, {Failed, time.Second}, {Failed, time.Second},
		} {
			e, err := s.Next(t.Context())
			if err != nil || e.Kind != want.kind {
				t.Fatalf("%s, %v, %v; want %v", describe(e), e.Err, err, want.kind)
			}
			if want.pause == 0 {
				continue
			}
			pause := time.Until(e.Retry)
			pauses = append(pauses, pause)
			if pause < want.pause/2 || pause > want.pause {
				t.Errorf("%v: pause of %v, want %v to %v", want.kind, pause, want.pause/2, want.pause)
			}
		}
		slices.Sort(pauses)
		if len(slices.Compact(pauses)) < 8 {
			t.Errorf("pauses %v are hardly random", pauses)
		}
	})
}

// Next can be left at any time and called again.
func TestContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := message("first", "second")
		cfg := testConfig(func(p *fake) {
			p.Write(hello(1))
			for _, b := range m { // a byte every 100 ms
				<-time.After(100 * time.Millisecond)
				p.Write([]byte{b})
			}
		})
		s := newSub(t, cfg)
		defer s.Close()
		if e := next(t, s); e != "connected" {
			t.Fatal(e)
		}
		gone := errors.New("gone")
		ended := 0
		for {
			ctx, cancel := context.WithTimeoutCause(t.Context(), 70*time.Millisecond, gone)
			e, err := s.Next(ctx)
			cancel()
			if err == nil {
				if d := describe(e); d != `"first|second"` {
					t.Error(d)
				}
				break
			}
			if err != gone {
				t.Fatal(err)
			}
			ended++
		}
		if want := len(m) * 100 / 70; ended != want {
			t.Errorf("%d contexts ended, want %d", ended, want)
		}
		if e := next(t, s); e != "disconnected" {
			t.Error(e)
		}
		ctx, cancel := context.WithCancelCause(t.Context()) // in the pause
		cancel(gone)
		if _, err := s.Next(ctx); err != gone {
			t.Error(err)
		}
	})
}

// A caller that uses many short contexts has heartbeats all the same, and one
// that does not call for long loses no connection by it.
func TestHeartbeatsCountWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pinged := make(chan time.Time, 10)
		cfg := testConfig(stall(func(p *fake) {
			p.Write(hello(1))
			for p.await(command("PING", "\x00\x00")) {
				pinged <- time.Now()
				if len(pinged) == 3 {
					return
				}
				p.Write(command("PONG", ""))
			}
		}))
		s := newSub(t, cfg)
		defer s.Close()
		if e := next(t, s); e != "connected" {
			t.Fatal(e)
		}
		<-time.After(time.Hour) // the caller is busy
		began := time.Now()
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			e, err := s.Next(ctx)
			cancel()
			if err == nil {
				if e.Kind != Disconnected || !errors.Is(e.Err, ErrSilent) {
					t.Errorf("%s, %v", describe(e), e.Err)
				}
				break
			}
		}
		for i := range 3 {
			// Each is found due when the context before has ended.
			if after := (<-pinged).Sub(began); after < time.Duration(i+1)*5*time.Second || after > time.Duration(i+1)*5400*time.Millisecond {
				t.Errorf("PING %d after %v", i, after)
			}
		}
		if took := time.Since(began); took < 25*time.Second || took > 27*time.Second {
			t.Errorf("silent after %v", took)
		}
	})
}

// A peer that is there and does not read is given up.
func TestPeerDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		cfg := DefaultConfig("tcp://fake:1")
		cfg.dial = func(context.Context, string, string) (net.Conn, error) { return ours, nil }
		s := newSub(t, cfg)
		defer s.Close()
		began := time.Now()
		e, err := s.Next(t.Context())
		if err != nil || e.Kind != Failed || !errors.Is(e.Err, os.ErrDeadlineExceeded) || time.Since(began) != 5*time.Second {
			t.Errorf("after %v: %s, %v, %v", time.Since(began), describe(e), e.Err, err)
		}
	})
}

// Close ends whatever Next does, and later calls.
func TestClose(t *testing.T) {
	hang := func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){
		"connecting":              hang,
		"in the handshake":        dialScripts(stall(send())),
		"waiting for a message":   dialScripts(stall(send(hello(1)))),
		"within a message":        dialScripts(stall(send(hello(1), []byte{flagMore}))),
		"in the pause after fail": dialScripts(),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := testConfig()
				cfg.dial = dial
				cfg.MinBackoff, cfg.MaxBackoff = time.Hour, time.Hour
				s := newSub(t, cfg)
				done := make(chan error)
				go func() {
					for {
						if _, err := s.Next(context.Background()); err != nil {
							done <- err
							return
						}
					}
				}()
				synctest.Wait()
				began := time.Now()
				closed := make(chan error)
				go func() { closed <- s.Close() }()
				if err := <-done; err != ErrClosed {
					t.Errorf("Next: %v", err)
				}
				if err := <-closed; err != nil {
					t.Errorf("Close: %v", err)
				}
				if time.Since(began) != 0 {
					t.Errorf("took %v", time.Since(began))
				}
				if _, err := s.Next(t.Context()); err != ErrClosed {
					t.Errorf("Next after Close: %v", err)
				}
				s.Close()
			})
		})
	}
}

// A context that lives longer than the socket keeps nothing of it: what was
// registered is taken back.
func TestContextIsLetGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cfg := testConfig(send(hello(1), message("a")))
		s := newSub(t, cfg)
		for range 2 {
			if _, err := s.Next(ctx); err != nil {
				t.Fatal(err)
			}
		}
		c := s.conn
		s.Close()
		cancel()
		synctest.Wait()
		if c.watched != nil {
			t.Error("still watching the context")
		}
	})
}

// Disconnect drops what was not read, and the next connection comes after a pause.
func TestSubDisconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hungUp := make(chan bool, 1)
		first := func(p *fake) {
			p.Write(hello(1))
			p.Write(message("a"))
			p.Write(message("b"))
			p.await([]byte("\x00never\x00"))
			hungUp <- true
		}
		s := newSub(t, testConfig(first, stall(send(hello(1), message("c")))))
		defer s.Close()
		s.Disconnect() // without a connection it does nothing
		var got []string
		got = append(got, next(t, s), next(t, s))
		s.Disconnect()
		if !<-hungUp {
			t.Error("the peer is not hung up on")
		}
		began := time.Now()
		got = append(got, next(t, s), next(t, s))
		if want := []string{"connected", `"a"`, "connected", `"c"`}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		if pause := time.Since(began); pause < s.cfg.MinBackoff/2 || pause > s.cfg.MinBackoff {
			t.Errorf("connected again after %v", pause)
		}
		if s.Heard().IsZero() {
			t.Error("not heard")
		}
	})
}

func TestHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig(func(p *fake) {
			<-time.After(time.Second)
			p.Write(hello(1))
			<-time.After(time.Second)
			p.Write(message("a"))
			<-time.After(time.Second)
			p.Write([]byte{flagMore}) // not a whole frame
			<-time.After(time.Second)
		})
		s := newSub(t, cfg)
		defer s.Close()
		if !s.Heard().IsZero() {
			t.Error("heard before connecting")
		}
		began := time.Now()
		for _, want := range []time.Duration{1, 2, 2, 2} { // connected, a message, disconnected, failed
			next(t, s)
			if got := s.Heard().Sub(began); got != want*time.Second {
				t.Errorf("heard after %v, want %v", got, want*time.Second)
			}
		}
	})
}

func TestDealer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		request := message("", "\x00\x00\x00\x00\x00\x00\x00\x07")
		router := slices.Concat(greeting(1), ready("ROUTER"))
		answers := func(p *fake) {
			p.Write(router)
			if p.await(request) {
				p.Write(slices.Concat(message("", "7"), message("", "8")))
			}
		}
		cfg := testConfig(send(router), answers, send(hello(1)), send(greeting(1), ready("DEALER")), stall(answers))
		cfg.Topics = nil
		d, err := NewDealer(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ask := func() error { return d.Send(t.Context(), nil, binary.BigEndian.AppendUint64(nil, 7)) }
		recv := func(want string, wantErr error) {
			t.Helper()
			frames, err := d.Recv(t.Context())
			if got := string(bytes.Join(frames, []byte("|"))); got != want || !errors.Is(err, wantErr) {
				t.Errorf("%q, %v; want %q, %v", got, err, want, wantErr)
			}
		}
		recv("", ErrNotConnected)
		if err := ask(); err == nil { // a peer that hangs up is noticed at once or when reading
			recv("", io.EOF)
		}
		recv("", ErrNotConnected)
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		recv("|7", nil)
		recv("|8", nil)
		recv("", io.EOF)
		recv("", ErrNotConnected)
		for _, other := range []string{"PUB", "DEALER"} {
			if err := ask(); !errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), other) {
				t.Errorf("a DEALER to a %s: %v", other, err)
			}
		}
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		recv("|7", nil)
		d.Disconnect()
		recv("", ErrNotConnected)
		if err := ask(); !errors.Is(err, errNoPeer) {
			t.Error(err)
		}
		d.Close()
		recv("", ErrClosed)
		if err := ask(); err != ErrClosed {
			t.Error(err)
		}
	})
}

// Send ends with its context, also when the peer does not read.
func TestSendContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		cfg := DefaultConfig("tcp://fake:1")
		cfg.Topics = nil
		cfg.dial = func(context.Context, string, string) (net.Conn, error) { return ours, nil }
		go func() {
			io.ReadFull(theirs, make([]byte, greetingLen))
			theirs.Write(append(greeting(1), ready("ROUTER")...))
			io.ReadFull(theirs, make([]byte, len(appendCommand(nil, "READY", appendMetadata(nil, "Socket-Type", "DEALER")))))
		}()
		d, err := NewDealer(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		began := time.Now()
		if err := d.Send(ctx, []byte("request")); err != gone || time.Since(began) != time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		if _, err := d.Recv(t.Context()); err != ErrNotConnected {
			t.Error(err)
		}
	})
}

// A huge size in a header sets nothing aside, and a large buffer is given back.
func TestMemory(t *testing.T) {
	cfg := DefaultConfig("tcp://fake:1")
	large := message(strings.Repeat("x", 3<<20))
	nc := &replay{in: slices.Concat(large, []byte{flagLong, 0, 0, 0, 0, 3, 0xff, 0xff, 0xff, 1}), chunk: len(large)}
	c := newConn(nc, &cfg)
	c.established = true
	if _, err := c.message(t.Context()); err != nil || len(c.buf) > 4<<20 {
		t.Fatalf("buffer of %d bytes, %v", len(c.buf), err)
	}
	if _, err := c.message(t.Context()); err != io.ErrUnexpectedEOF || len(c.buf) != bufferMin {
		t.Errorf("buffer of %d bytes, %v", len(c.buf), err)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct{ endpoint, network, address, err string }{
		{"tcp://engine:5557", "tcp", "engine:5557", ""},
		{"tcp://[::1]:5557", "tcp", "[::1]:5557", ""},
		{"ipc:///run/kv", "unix", "/run/kv", ""},
		{"ipc://@name", "unix", "@name", ""},
		{"tcp://*:5557", "", "", "a host and a port"},
		{"tcp://:5557", "", "", "a host and a port"},
		{"tcp://engine:0", "", "", "a host and a port"},
		{"tcp://engine", "", "", "missing port"},
		{"ipc://", "", "", "a path"},
		{"inproc://x", "", "", "want tcp://host:port or ipc:///path"},
		{"engine:5557", "", "", "want tcp://host:port or ipc:///path"},
	} {
		network, address, err := splitEndpoint(c.endpoint)
		if c.err == "" && (err != nil || network != c.network || address != c.address) ||
			c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s: %s, %s, %v", c.endpoint, network, address, err)
		}
	}
	cfg := DefaultConfig("tcp://engine:5557")
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	_, err := NewSub(Config{MaxFrame: 1<<30 + 1, MinBackoff: time.Second})
	for _, want := range []string{"endpoint", "HandshakeTimeout", "WriteTimeout", "HeartbeatInterval", "HeartbeatTimeout", "MaxBackoff", "MaxFrame", "MaxMessage", "MaxFrames"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := NewDealer(cfg); err == nil {
		t.Error("a DEALER with topics")
	}
}
