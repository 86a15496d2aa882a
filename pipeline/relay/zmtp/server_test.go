// This file tests Pub and Router, with our own Sub and Dealer, with libzmq's,
// and with peers that do not behave.

package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"kvindex/testcontainers"
)

const anyAddress = "127.0.0.1:0"

func listenPub(t *testing.T, cfg ListenConfig) *Pub {
	t.Helper()
	p, err := ListenPub(anyAddress, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func listenRouter(t *testing.T, cfg ListenConfig) *Router {
	t.Helper()
	r, err := ListenRouter(anyAddress, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// subscribed waits until so many peers have a subscription.
func subscribed(t *testing.T, p *Pub, n int) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		if got := p.Subscribers(); got != n {
			return fmt.Errorf("%d subscribers, want %d", got, n)
		}
		return nil
	})
}

// numbered is a message as peer.py's are.
func numbered(n, size int) [][]byte {
	seq := binary.BigEndian.AppendUint64(nil, uint64(n))
	return [][]byte{nil, seq, bytes.Repeat(seq, size/8)}
}

func TestPubToSubs(t *testing.T) {
	address := testcontainers.FreeAddress(t, 1)
	p, err := ListenPub(address, ListenConfig{HWM: 10_000, HandshakeTimeout: patience, MaxPeers: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := connectTo(t, p.Endpoint())
	until(t, s, Connected)
	subscribed(t, p, 1)
	for n := range 3000 {
		p.Send(numbered(n, 104)...)
	}
	expect(t, s, 0, 3000)
	for n := range 2 {
		p.Send(numbered(n, 8<<20)...)
	}
	expect(t, s, 0, 2)
	heartbeatsGoOn(t, s)
	p.Close()
	until(t, s, Disconnected)
	again, err := ListenPub(address, ListenConfig{HWM: 10_000, HandshakeTimeout: patience, MaxPeers: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	until(t, s, Connected)
	subscribed(t, again, 1)
	again.Send(numbered(7, 8)...)
	expect(t, s, 7, 8)
	s.Close()
	subscribed(t, again, 0)
}

func TestRouterToDealers(t *testing.T) {
	r := listenRouter(t, DefaultListenConfig())
	const peers = 5
	var dealers [peers]*Dealer
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for i := range dealers {
		cfg := DefaultConfig(r.Endpoint())
		cfg.Topics = nil
		d, err := NewDealer(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		dealers[i] = d
		if err := d.Send(ctx, nil, []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	var last uint64
	for range dealers {
		q, err := r.Recv(ctx)
		if err != nil || len(q.Frames) != 2 || len(q.Frames[0]) != 0 {
			t.Fatalf("%v, %v", q, err)
		}
		for n := range 3 {
			if !r.Send(q.From, nil, q.Frames[1], []byte{byte(n)}) {
				t.Error("not sent")
			}
		}
		last = q.From
	}
	for i, d := range dealers {
		for n := range 3 {
			frames, err := d.Recv(ctx)
			if err != nil || len(frames) != 3 || frames[1][0] != byte(i) || frames[2][0] != byte(n) {
				t.Fatalf("dealer %d: %q, %v", i, frames, err)
			}
		}
		d.Disconnect()
	}
	testcontainers.Eventually(t, patience, func() error {
		if r.Send(last, []byte("x")) {
			return errors.New("the peer that is gone is still sent to")
		}
		return nil
	})
	r.Close()
	if _, err := r.Recv(ctx); err != ErrClosed {
		t.Errorf("after Close: %v", err)
	}
}

// libzmq's SUB subscribes, is sent what matches, takes back, and is killed.
func TestLibzmqSubscribes(t *testing.T) {
	p := listenPub(t, DefaultListenConfig())
	c := startScript(t, "testdata/client.py", "sub", p.Endpoint(), "HEARTBEAT_IVL=100", "HEARTBEAT_TIMEOUT=3000")
	c.said(t, "ready")
	fmt.Fprintln(c.in, "subscribe b")
	subscribed(t, p, 1)
	for _, topic := range []string{"a", "", "b1", "bb"} {
		p.Send([]byte(topic), []byte("x"), nil)
	}
	for _, want := range []string{"got 6231 78 -", "got 6262 78 -"} {
		if got := c.said(t, "got"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	// Silence, longer than the client's heartbeats suffer without answers, leaves
	// it connected.
	quiet := time.After(5 * time.Second)
	for waiting := true; waiting; {
		select {
		case <-quiet:
			waiting = false
		case <-time.After(20 * time.Millisecond):
			if p.Subscribers() != 1 {
				t.Fatal("the client went away")
			}
		}
	}
	fmt.Fprintln(c.in, "unsubscribe b")
	subscribed(t, p, 0)
	fmt.Fprintln(c.in, "subscribe")
	subscribed(t, p, 1)
	p.Send(bytes.Repeat([]byte{1}, 300), []byte{2}) // a long frame
	if got := c.said(t, "got"); got != "got "+strings.Repeat("01", 300)+" 02" {
		t.Errorf("%.40q", got)
	}
	c.kill()
	subscribed(t, p, 0)
}

func TestLibzmqAsks(t *testing.T) {
	r := listenRouter(t, DefaultListenConfig())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, kind := range []string{"dealer", "req"} {
		c := startScript(t, "testdata/client.py", kind, r.Endpoint())
		c.said(t, "ready")
		request := "- 0000000000000005"
		if kind == "req" {
			request = "0000000000000005" // which puts the empty frame before it itself
		}
		fmt.Fprintln(c.in, "send", request)
		q, err := r.Recv(ctx)
		if err != nil || len(q.Frames) != 2 || len(q.Frames[0]) != 0 || hex.EncodeToString(q.Frames[1]) != "0000000000000005" {
			t.Fatalf("%s: %q, %v", kind, q.Frames, err)
		}
		r.Send(q.From, nil, []byte("topic"), q.Frames[1], []byte("payload"))
		want := "got - 746f706963 0000000000000005 7061796c6f6164"
		if kind == "req" {
			want = "got 746f706963 0000000000000005 7061796c6f6164"
		}
		if got := c.said(t, "got"); got != want {
			t.Errorf("%s: %q", kind, got)
		}
		c.kill()
	}
}

// raw connects and sends; the connection is closed with the test.
func raw(t *testing.T, endpoint string, parts ...[]byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write(bytes.Join(parts, nil)); err != nil {
		t.Fatal(err)
	}
	return c
}

// A peer that does not read loses messages once the kernel has no room for more
// and HWM of them wait, and never costs the publisher time or another peer a
// message; those that it gets are whole and in order.
func TestSlowPeer(t *testing.T) {
	const hwm, n, size = 50, 5000, 8 << 10
	p := listenPub(t, ListenConfig{HWM: hwm, HandshakeTimeout: patience, MaxPeers: 10})
	slow, quick := connectTo(t, p.Endpoint()), connectTo(t, p.Endpoint())
	for i, s := range []*Sub{slow, quick} {
		until(t, s, Connected)
		subscribed(t, p, i+1)
	}
	for i := range n {
		p.Send(numbered(i, size)...)
		expect(t, quick, i, i+1)
	}
	dropped := int(p.Dropped())
	if dropped == 0 || dropped > n-hwm {
		t.Errorf("%d dropped", dropped)
	}
	last := -1
	for range n - dropped {
		got := sequence(t, until(t, slow, Message).Frames)
		if got <= last {
			t.Fatalf("message %d after %d", got, last)
		}
		last = got
	}
	nothing(t, slow, 100*time.Millisecond)
}

// Peers that are none are hung up on, within the handshake's time at most, and
// the socket serves others.
func TestGarbagePeers(t *testing.T) {
	cfg := ListenConfig{HWM: 10, HandshakeTimeout: 3 * time.Second, MaxPeers: 100}
	p, r := listenPub(t, cfg), listenRouter(t, cfg)
	many := []byte(nil)
	for i := range maxSubscriptions + 1 {
		many = append(many, command("SUBSCRIBE", fmt.Sprint(i))...)
	}
	peers := map[string]net.Conn{}
	for _, c := range []struct {
		name, endpoint string
		sent           []byte
	}{
		{"nothing", p.Endpoint(), nil},
		{"HTTP", p.Endpoint(), []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")},
		{"half a greeting", p.Endpoint(), greeting(1)[:40]},
		{"no READY", r.Endpoint(), greeting(1)},
		{"another type", p.Endpoint(), append(greeting(1), ready("DEALER")...)},
		{"another type for a ROUTER", r.Endpoint(), append(greeting(1), ready("SUB")...)},
		{"a PLAIN client", r.Endpoint(), bytes.Replace(greeting(1), []byte("NULL"), []byte("PLAI"), 1)},
		{"reserved flags", p.Endpoint(), append(append(greeting(1), ready("SUB")...), 0xf0, 1, 1)},
		{"a huge frame", r.Endpoint(), append(append(greeting(1), ready("DEALER")...), 2, 0x7f, 0, 0, 0, 0, 0, 0, 0)},
		{"many subscriptions", p.Endpoint(), append(append(greeting(1), ready("SUB")...), many...)},
	} {
		peers[c.name] = raw(t, c.endpoint, c.sent)
	}
	for name, nc := range peers {
		nc.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
	}
	subscribed(t, p, 0)
	s := connectTo(t, p.Endpoint())
	until(t, s, Connected)
	subscribed(t, p, 1)
	p.Send(numbered(0, 8)...)
	expect(t, s, 0, 1)
}

// PINGs are answered in order, with their context, and a flood of them by a peer
// that reads nothing holds nothing up.
func TestPingsAreAnswered(t *testing.T) {
	p := listenPub(t, DefaultListenConfig())
	nc := raw(t, p.Endpoint(), greeting(1), ready("SUB"), command("PING", "\x00\x00abc"))
	want := append(appendGreeting(nil), appendCommand(nil, "READY", appendMetadata(nil, "Socket-Type", "PUB"))...)
	want = append(want, command("PONG", "abc")...)
	got := make([]byte, len(want))
	nc.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(nc, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	flood := bytes.Repeat(command("PING", "\x00\x000123456789abcdef"), 1000)
	for range 500 {
		if _, err := nc.Write(flood); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := nc.Write(command("SUBSCRIBE", "")); err != nil {
		t.Fatal(err)
	}
	subscribed(t, p, 1)
}

// With a peer of ZMTP 3.0 subscriptions are messages; whatever the form, each
// must be taken back as often as it was made, and one that there is not is no harm.
func TestSubscriptionsOfBothForms(t *testing.T) {
	p := listenPub(t, DefaultListenConfig())
	nc := raw(t, p.Endpoint(), greeting(0), ready("XSUB"), message("\x00a"), message("\x01a"), message("\x02a"), message("\x01a", "b"),
		command("SUBSCRIBE", "a"), command("CANCEL", "b"), command("CANCEL", "a"), message("\x01other"), message("\x00other"), message(""),
		command("PING", "\x00\x00z"))
	receives := func(want []byte) {
		t.Helper()
		got := make([]byte, len(want))
		nc.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(nc, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	receives(appendGreeting(nil))
	receives(appendCommand(nil, "READY", appendMetadata(nil, "Socket-Type", "PUB")))
	receives(command("PONG", "z")) // all was read
	p.Send([]byte("other"), nil)
	p.Send([]byte("ab"), []byte("x"))
	receives(message("ab", "x"))
	if _, err := nc.Write(message("\x00a")); err != nil {
		t.Fatal(err)
	}
	subscribed(t, p, 0)
}

func TestPeersAreBounded(t *testing.T) {
	cfg := DefaultListenConfig()
	cfg.MaxPeers = 1
	p := listenPub(t, cfg)
	s := connectTo(t, p.Endpoint())
	until(t, s, Connected)
	subscribed(t, p, 1)
	if _, err := io.Copy(io.Discard, raw(t, p.Endpoint())); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
	for _, bad := range []ListenConfig{{}, {HWM: 1 << 21, HandshakeTimeout: 1, MaxPeers: 1}} {
		if _, err := ListenPub(anyAddress, bad); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}
