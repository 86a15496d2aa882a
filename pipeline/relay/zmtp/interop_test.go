// This file tests against libzmq, through pyzmq.

package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvindex/testcontainers"
)

// patience is how long anything that should happen may take.
const patience = 2 * time.Minute

// python is a process that runs a script of testdata.
type python struct {
	endpoint string
	cmd      *exec.Cmd
	in       io.Writer
	lines    chan string
}

// startPython binds a socket of libzmq; see peer.py.
func startPython(t *testing.T, kind, endpoint string, options ...string) *python {
	t.Helper()
	p := startScript(t, "testdata/peer.py", append([]string{kind, endpoint}, options...)...)
	p.endpoint = strings.TrimPrefix(p.said(t, "bound "), "bound ")
	return p
}

// startScript runs a script until the test ends.
func startScript(t *testing.T, script string, args ...string) *python {
	t.Helper()
	interpreter := testcontainers.Python(t, "pyzmq")
	cmd := exec.Command(interpreter, append([]string{script}, args...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &python{cmd: cmd, in: in, lines: make(chan string, 1000)}
	var reading sync.WaitGroup
	reading.Go(func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
	})
	t.Cleanup(func() {
		p.kill()
		reading.Wait()
		if cmd.Wait(); stderr.Len() > 0 {
			t.Errorf("%s: %s", script, stderr.Bytes())
		}
	})
	return p
}

// kill is kill -9.
func (p *python) kill() { p.cmd.Process.Kill() }

// said waits until the process prints a line that begins so.
func (p *python) said(t *testing.T, begin string) string {
	t.Helper()
	late := time.After(patience)
	for {
		select {
		case line, open := <-p.lines:
			if !open {
				t.Fatalf("%s ended before it said %q", p.cmd.Args[1], begin)
			}
			if strings.HasPrefix(line, begin) {
				return line
			}
		case <-late:
			t.Fatalf("%s does not say %q", p.cmd.Args[1], begin)
		}
	}
}

// send publishes n messages with payloads of size bytes, all at once.
func (p *python) send(t *testing.T, n, size int) {
	t.Helper()
	fmt.Fprintf(p.in, "send %d %d\n", n, size)
	p.said(t, "sent ")
}

// connectTo returns a socket whose heartbeats are quick, closed with the test.
func connectTo(t *testing.T, endpoint string) *Sub {
	t.Helper()
	cfg := DefaultConfig(endpoint)
	cfg.MinBackoff, cfg.MaxBackoff = 10*time.Millisecond, 100*time.Millisecond
	cfg.HeartbeatInterval, cfg.HeartbeatTimeout, cfg.HandshakeTimeout = 200*time.Millisecond, 10*time.Second, patience
	s, err := NewSub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// until reads until an event of the kind comes. Failed attempts are passed over.
func until(t *testing.T, s *Sub, kind Kind) Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		e, err := s.Next(ctx)
		if err != nil {
			t.Fatalf("waiting for %v: %v", kind, err)
		}
		if e.Kind == kind {
			return e
		}
		if e.Kind != Failed {
			t.Fatalf("%s, %v; want %v", describe(e), e.Err, kind)
		}
	}
}

// sequence checks that the frames are a message of peer.py's and returns its number.
func sequence(t *testing.T, frames [][]byte) int {
	t.Helper()
	if len(frames) != 3 || len(frames[0]) != 0 || len(frames[1]) != 8 || !bytes.Equal(frames[2], bytes.Repeat(frames[1], len(frames[2])/8)) {
		t.Fatalf("not a message that was sent: %.100q", frames)
	}
	return int(binary.BigEndian.Uint64(frames[1]))
}

// expect reads the messages from first to before end, no other.
func expect(t *testing.T, s *Sub, first, end int) {
	t.Helper()
	for n := first; n < end; n++ {
		if got := sequence(t, until(t, s, Message).Frames); got != n {
			t.Fatalf("message %d, want %d", got, n)
		}
	}
}

// nothing checks that nothing happens for a while.
func nothing(t *testing.T, s *Sub, during time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), during)
	defer cancel()
	if e, err := s.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%s, %v, %v; want nothing", describe(e), e.Err, err)
	}
}

// heartbeatsGoOn checks that the peer is heard again and again though nothing
// happens.
func heartbeatsGoOn(t *testing.T, s *Sub) {
	t.Helper()
	for range 3 {
		last := s.Heard()
		testcontainers.Eventually(t, patience, func() error {
			if nothing(t, s, 100*time.Millisecond); !s.Heard().After(last) {
				return errors.New("the peer is not heard")
			}
			return nil
		})
	}
}

// anyPort is where peers bind.
const anyPort = "tcp://127.0.0.1:*"

func TestLibzmqPublisherFirst(t *testing.T) {
	for _, endpoint := range []string{anyPort, "ipc://" + filepath.Join(t.TempDir(), "engine")} {
		p := startPython(t, "xpub", endpoint, "SNDHWM=0")
		s := connectTo(t, p.endpoint)
		until(t, s, Connected)
		p.said(t, "subscribed ")
		p.send(t, 5000, 104)
		expect(t, s, 0, 5000)
		p.send(t, 3, 8<<20)
		expect(t, s, 5000, 5003)
		heartbeatsGoOn(t, s)
		p.send(t, 1, 8)
		expect(t, s, 5003, 5004)
	}
}

func TestLibzmqPublisherLater(t *testing.T) {
	endpoint := "tcp://" + testcontainers.FreeAddress(t, 1)
	s := connectTo(t, endpoint)
	for range 5 {
		if e, err := s.Next(t.Context()); err != nil || e.Kind != Failed {
			t.Fatalf("%s, %v; want failed", describe(e), err)
		}
	}
	p := startPython(t, "xpub", endpoint)
	until(t, s, Connected)
	p.said(t, "subscribed ")
	p.send(t, 100, 104)
	expect(t, s, 0, 100)
}

// arrived returns how many bytes have come that the socket has not looked at.
func arrived(t *testing.T, s *Sub) (n int) {
	t.Helper()
	raw, err := s.conn.nc.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	waiting := make([]byte, 64<<10)
	if err := raw.Control(func(fd uintptr) { n, _, _ = syscall.Recvfrom(int(fd), waiting, syscall.MSG_PEEK) }); err != nil {
		t.Fatal(err)
	}
	return max(n, 0) + s.conn.end - s.conn.next
}

// A publisher that is killed and comes back is subscribed to again; what it had
// sent before is read before the disconnect is told.
func TestLibzmqKilledAndRestarted(t *testing.T) {
	p := startPython(t, "xpub", "tcp://"+testcontainers.FreeAddress(t, 1))
	s := connectTo(t, p.endpoint)
	until(t, s, Connected)
	for range 3 {
		p.said(t, "subscribed ")
		p.send(t, 100, 104)
		expect(t, s, 0, 50)
		p.send(t, 10, 104)
		const size = 2 + 2 + 8 + 2 + 104 // with the frames' headers
		testcontainers.Eventually(t, patience, func() error {
			if n := arrived(t, s); n < 55*size { // of the 60, as heartbeats may be among them
				return fmt.Errorf("%d bytes have come", n)
			}
			return nil
		})
		p.kill()
		expect(t, s, 50, 100)
		for {
			e, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == Disconnected {
				break
			}
			sequence(t, e.Frames)
		}
		p = startPython(t, "xpub", p.endpoint)
		until(t, s, Connected)
	}
}

// A publisher whose process stands still is noticed, and found again.
func TestLibzmqStopped(t *testing.T) {
	p := startPython(t, "xpub", anyPort)
	s := connectTo(t, p.endpoint)
	until(t, s, Connected)
	p.said(t, "subscribed ")
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if e := until(t, s, Disconnected); !errors.Is(e.Err, ErrSilent) {
		t.Errorf("disconnected by %v", e.Err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	until(t, s, Connected)
	p.said(t, "subscribed ")
	p.send(t, 1, 8)
	expect(t, s, 0, 1)
}

// A publisher that has heartbeats itself is answered.
func TestLibzmqHeartbeats(t *testing.T) {
	p := startPython(t, "xpub", anyPort, "HEARTBEAT_IVL=100", "HEARTBEAT_TIMEOUT=3000")
	cfg := DefaultConfig(p.endpoint) // whose own heartbeats come too late
	s, err := NewSub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	until(t, s, Connected)
	p.said(t, "subscribed ")
	nothing(t, s, 5*time.Second)
	p.send(t, 1, 8)
	expect(t, s, 0, 1)
}

// A slow reader loses nothing while the publisher may queue, and at its
// high-water mark messages are missing, which their numbers show, but none is
// wrong, and the connection goes on.
func TestLibzmqSlowReader(t *testing.T) {
	const n, size = 30_000, 1000
	for _, hwm := range []int{0, 10} {
		p := startPython(t, "xpub", anyPort, fmt.Sprintf("SNDHWM=%d", hwm), "SNDBUF=65536")
		s := connectTo(t, p.endpoint)
		until(t, s, Connected)
		p.said(t, "subscribed ")
		p.send(t, n, size) // and nobody reads
		received, gaps, last := 0, 0, -1
		for last < n-1 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			e, err := s.Next(ctx)
			cancel()
			if errors.Is(err, context.DeadlineExceeded) {
				p.send(t, 1, size) // all that was kept has come: the next shows what was not
				continue
			}
			if err != nil || e.Kind != Message {
				t.Fatalf("%s, %v, %v", describe(e), e.Err, err)
			}
			seq := sequence(t, e.Frames)
			if seq <= last {
				t.Fatalf("message %d after %d", seq, last)
			}
			if seq != last+1 {
				gaps++
			}
			received, last = received+1, seq
		}
		t.Logf("high-water mark %d: %d of %d received, %d gaps", hwm, received, last+1, gaps)
		if hwm == 0 && gaps > 0 || hwm > 0 && gaps == 0 {
			t.Errorf("high-water mark %d: %d gaps", hwm, gaps)
		}
	}
}

// A DEALER asks a ROUTER as an engine's replay is asked for.
func TestLibzmqReplay(t *testing.T) {
	const replies = 20_000
	p := startPython(t, "router", anyPort, fmt.Sprintf("REPLIES=%d", replies), "SNDHWM=0")
	cfg := DefaultConfig(p.endpoint)
	cfg.Topics = nil
	d, err := NewDealer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.Recv(ctx); err != ErrNotConnected {
		t.Errorf("before Send: %v", err)
	}
	for _, start := range []int{0, replies - 1, replies, 17} {
		if err := d.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, uint64(start))); err != nil {
			t.Fatal(err)
		}
		if start == 17 { // an answer given up does not disturb the next
			d.Disconnect()
			start = replies / 2
			if err := d.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, uint64(start))); err != nil {
				t.Fatal(err)
			}
		}
		for n := start; ; n++ {
			frames, err := d.Recv(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if len(frames) != 4 || len(frames[0]) != 0 {
				t.Fatalf("reply %.100q", frames)
			}
			if string(frames[2]) == "\xff\xff\xff\xff\xff\xff\xff\xff" {
				if n != replies || len(frames[3]) != 0 {
					t.Errorf("the end after %d: %.100q", n, frames)
				}
				break
			}
			if got := sequence(t, frames[1:]); got != n {
				t.Fatalf("reply %d, want %d", got, n)
			}
		}
	}
	p.kill()
	if _, err := d.Recv(ctx); err == nil || errors.Is(err, ErrNotConnected) {
		t.Errorf("after kill: %v", err)
	}
	if _, err := d.Recv(ctx); err != ErrNotConnected {
		t.Errorf("after that: %v", err)
	}
}

// Peers of libzmq that are no publisher, or want a password.
func TestLibzmqOthers(t *testing.T) {
	for _, c := range []struct {
		kind, option, text string
	}{
		{"push", "SNDHWM=1", `"PUSH" socket`},
		{"xpub", "PLAIN=1", "as libzmq does when it wants another mechanism than NULL"},
	} {
		p := startPython(t, c.kind, anyPort, c.option)
		s := connectTo(t, p.endpoint)
		e, err := s.Next(t.Context())
		if err != nil || e.Kind != Failed || !strings.Contains(e.Err.Error(), c.text) {
			t.Errorf("%s: %s, %v, %v", c.kind, describe(e), e.Err, err)
		}
	}
}
