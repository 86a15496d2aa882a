// This file has the peer that the unit tests talk to: what it sends is written
// out, and what it is sent is kept.

package zmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// script is what a peer does with one connection; the connection is closed when it returns.
type script func(p *fake)

// fake is a peer's end of one connection.
type fake struct {
	net.Conn
	mu   sync.Mutex
	got  []byte
	more chan struct{} // closed and replaced as got grows; at its end only closed
}

// errNoPeer is what connecting fails with after the last script.
var errNoPeer = errors.New("no peer")

// dialScripts returns a dialer that connects to one script after the other.
// Each peer reads all that it is sent, at once.
func dialScripts(scripts ...script) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		if len(scripts) == 0 {
			return nil, errNoPeer
		}
		s := scripts[0]
		scripts = scripts[1:]
		ours, theirs := net.Pipe()
		p := &fake{Conn: theirs, more: make(chan struct{})}
		go p.read()
		go func() {
			defer theirs.Close()
			s(p)
		}()
		return ours, nil
	}
}

func (p *fake) read() {
	b := make([]byte, 4096)
	for {
		n, err := p.Conn.Read(b)
		p.mu.Lock()
		p.got = append(p.got, b[:n]...)
		close(p.more)
		if err != nil {
			p.mu.Unlock()
			return
		}
		p.more = make(chan struct{})
		p.mu.Unlock()
	}
}

// await waits until the peer has been sent want, after all it has awaited before.
// It says whether that has come.
func (p *fake) await(want []byte) bool {
	for {
		p.mu.Lock()
		i, more := bytes.Index(p.got, want), p.more
		if i >= 0 {
			p.got = p.got[i+len(want):]
		}
		p.mu.Unlock()
		if i >= 0 {
			return true
		}
		<-more
		p.mu.Lock()
		ended := p.more == more
		p.mu.Unlock()
		if ended {
			return false
		}
	}
}

// send sends what the parts say, one after the other.
func send(parts ...[]byte) script {
	return func(p *fake) { p.Write(slices.Concat(parts...)) }
}

// stall is a script, and then nothing until the other end hangs up.
func stall(s script) script {
	return func(p *fake) {
		s(p)
		p.await([]byte("\x00never\x00"))
	}
}

// greeting is a peer's, of version 3.minor.
func greeting(minor byte) []byte {
	g := appendGreeting(nil)
	g[11] = minor
	return g
}

// ready is a peer's READY command.
func ready(socketType string) []byte {
	return appendCommand(nil, "READY", appendMetadata(appendMetadata(nil, "Identity", ""), "socket-TYPE", socketType))
}

// hello is a publisher's whole handshake.
func hello(minor byte) []byte { return append(greeting(minor), ready("PUB")...) }

// message is one message of the frames.
func message(frames ...string) (b []byte) {
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = append(appendHeader(b, flags, len(f)), f...)
	}
	return b
}

// command is one command.
func command(name, data string) []byte { return appendCommand(nil, name, []byte(data)) }

// testConfig connects to the scripts.
func testConfig(scripts ...script) Config {
	cfg := DefaultConfig("tcp://fake:1")
	cfg.dial = dialScripts(scripts...)
	return cfg
}

// trace runs a socket until there is no peer any more, or for at most limit
// events, and returns what happened; messages in full, the rest by name. The
// last error is the last that was not errNoPeer.
func trace(t *testing.T, cfg Config, limit int) (events []string, took time.Duration, last error) {
	t.Helper()
	s, err := NewSub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	began := time.Now()
	for range limit {
		e, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if errors.Is(e.Err, errNoPeer) {
			break
		}
		if e.Err != nil {
			last, took = e.Err, time.Since(began)
		}
		events = append(events, describe(e))
	}
	return events, took, last
}

func describe(e Event) string {
	if e.Kind != Message {
		return e.Kind.String()
	}
	var frames []string
	for _, f := range e.Frames {
		frames = append(frames, string(f))
	}
	return fmt.Sprintf("%q", strings.Join(frames, "|"))
}

// cutOff says whether the error is that of a connection that just ended.
func cutOff(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
