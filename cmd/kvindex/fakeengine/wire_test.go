// This file tests what goes over the sockets, and the control.

package fakeengine

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
	"kvindex/testcontainers"
)

const patience = 2 * time.Minute

// client is a subscriber to a rank that asks for replays too.
type client struct {
	sub    *zmtp.Sub
	dealer *zmtp.Dealer
}

func newClient(t *testing.T, e *Engine, rank int) *client {
	t.Helper()
	state := e.State().Ranks[rank]
	config := func(endpoint string) zmtp.Config {
		cfg := zmtp.DefaultConfig(endpoint)
		cfg.MinBackoff, cfg.MaxBackoff = 10*time.Millisecond, 50*time.Millisecond
		return cfg
	}
	sub, err := zmtp.NewSub(config(state.Events))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sub.Close() })
	cfg := config(state.Replay)
	cfg.Topics = nil
	dealer, err := zmtp.NewDealer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dealer.Close() })
	c := &client{sub, dealer}
	c.await(t, zmtp.Connected)
	subscribed(t, e, rank)
	return c
}

func subscribed(t *testing.T, e *Engine, rank int) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		if e.State().Ranks[rank].Subscribers == 0 {
			return errors.New("no subscriber")
		}
		return nil
	})
}

// await waits for an event of that kind. Failed attempts are passed over.
func (c *client) await(t *testing.T, kind zmtp.Kind) zmtp.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		ev, err := c.sub.Next(ctx)
		if err != nil {
			t.Fatalf("waiting for %v: %v", kind, err)
		}
		if ev.Kind == kind {
			return ev
		}
		if ev.Kind != zmtp.Failed {
			t.Fatalf("%v, %v; want %v", ev.Kind, ev.Err, kind)
		}
	}
}

// live returns the next message's sequence number and payload.
func (c *client) live(t *testing.T, topic string) (uint64, []byte) {
	t.Helper()
	f := c.await(t, zmtp.Message).Frames
	if len(f) != 3 || string(f[0]) != topic || len(f[1]) != 8 {
		t.Fatalf("message %q", f)
	}
	return binary.BigEndian.Uint64(f[1]), bytes.Clone(f[2])
}

// replay returns the replies, without the end marker.
func (c *client) replay(t *testing.T, start uint64) (replies [][][]byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, bad := range [][][]byte{{[]byte("x")}, {nil, []byte("short")}, {nil, endMark, nil}} { // no answers
		if err := c.dealer.Send(ctx, bad...); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.dealer.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, start)); err != nil {
		t.Fatal(err)
	}
	for {
		frames, err := c.dealer.Recv(ctx)
		if err != nil {
			t.Fatal(err)
		}
		reply := [][]byte{}
		for _, f := range frames {
			reply = append(reply, bytes.Clone(f))
		}
		if n := len(reply); n >= 3 && bytes.Equal(reply[n-2], endMark) {
			if len(reply[n-1]) > 0 || len(bytes.Join(reply[:n-2], nil)) > 0 {
				t.Errorf("end marker %q", reply)
			}
			return replies
		}
		replies = append(replies, reply)
	}
}

// serve serves so many requests, each of which makes a batch.
func serve(t *testing.T, e *Engine, from fleet.Requests, n int) {
	t.Helper()
	for range n {
		q, err := from.Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Serve(q); err != nil {
			t.Fatal(err)
		}
	}
}

// distinct are requests that share nothing, of one block of a trace each.
type distinct uint64

func (d *distinct) Next() (*fleet.Request, error) {
	*d++
	return &fleet.Request{InputLength: fleet.TraceBlock, HashIDs: []uint64{uint64(*d)}}, nil
}

func TestOverTheWire(t *testing.T) {
	for _, f := range forms {
		t.Run(fmt.Sprint(f.kind, f.shape, f.hashes), func(t *testing.T) {
			cfg := testConfig(f.kind, f.shape, f.hashes)
			cfg.Topic, cfg.BufferSteps = "kv-events", 5
			e := newEngine(t, cfg)
			c := newClient(t, e, 0)
			requests := new(distinct)
			serve(t, e, requests, 8)
			payloads := map[uint64][]byte{}
			for n := range uint64(8) {
				seq, p := c.live(t, "kv-events")
				if seq != n {
					t.Fatalf("batch %d, want %d", seq, n)
				}
				payloads[seq] = p
			}
			for start, want := range map[uint64][]uint64{0: {3, 4, 5, 6, 7}, 5: {5, 6, 7}, 8: nil, 999: nil, 1<<64 - 1: nil} {
				var got []uint64
				for _, reply := range c.replay(t, start) {
					n := len(reply)
					seq := binary.BigEndian.Uint64(reply[n-2])
					got = append(got, seq)
					if !bytes.Equal(reply[n-1], payloads[seq]) {
						t.Errorf("batch %d is replayed with another payload", seq)
					}
					front := [][]byte{{}}
					if f.shape == Map {
						front = append(front, []byte("kv-events"))
					}
					if !slices.EqualFunc(reply[:n-2], front, bytes.Equal) {
						t.Errorf("a reply begins %q", reply[:n-2])
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("replay from %d: %v, want %v", start, got, want)
				}
			}
		})
	}
}

func TestFaults(t *testing.T) {
	cfg := testConfig(VLLM, Map, Int)
	cfg.Capacity = 12 // so that there are removals
	e := newEngine(t, cfg)
	c := newClient(t, e, 0)
	requests := new(distinct)
	serve(t, e, requests, 2)
	e.Gap()
	serve(t, e, requests, 2) // of which the first is lost
	for _, want := range []uint64{0, 1, 3} {
		if seq, _ := c.live(t, ""); seq != want {
			t.Fatalf("batch %d, want %d", seq, want)
		}
	}
	if got := c.replay(t, 2); len(got) != 1 || binary.BigEndian.Uint64(got[0][2]) != 3 {
		t.Errorf("the lost batch is replayed: %x", got)
	}
	for round := range 2 {
		e.Garbage()
		serve(t, e, requests, 2)
		seq, p := c.live(t, "")
		var b engine.Batch
		err := b.Decode(p, engine.Limits{})
		if round == 0 && err == nil || round == 1 && (err != nil || b.LostRemovals == 0) || seq != uint64(4+2*round) {
			t.Errorf("batch %d: %v, %d lost removals", seq, err, b.LostRemovals)
		}
		if again := c.replay(t, seq); len(again) != 2 || !bytes.Equal(again[0][3], p) {
			t.Errorf("replayed %x", again)
		}
		_, p = c.live(t, "")
		if err := b.Decode(p, engine.Limits{}); err != nil || b.LostRemovals > 0 {
			t.Errorf("the batch after garbage: %v", err)
		}
	}
	if got := e.State().Ranks[0].Counts; got.Gaps != 1 || got.Garbage != 2 || got.Batches != 8 {
		t.Errorf("%+v", got)
	}
}

// A garbage batch without removals gets one that can't be read.
func TestGarbageAlwaysLosesARemoval(t *testing.T) {
	for _, f := range forms {
		cfg := testConfig(f.kind, f.shape, f.hashes)
		cfg.BadEach = 1
		e := newEngine(t, cfg)
		serve(t, e, new(distinct), 2)
		var b engine.Batch
		if err := b.Decode(e.ranks[0].buffer[1].payload, engine.Limits{}); err != nil || b.LostRemovals != 1 || len(b.Events) != 1 {
			t.Errorf("%v: %v, %d lost removals, %d events", f, err, b.LostRemovals, len(b.Events))
		}
	}
}

func TestFaultsByCount(t *testing.T) {
	cfg := testConfig(SGLang, Map, Int)
	cfg.GapEach, cfg.BadEach = 5, 4
	e := newEngine(t, cfg)
	serve(t, e, new(distinct), 20)
	if got := e.State().Ranks[0].Counts; got.Gaps != 4 || got.Garbage != 4 { // at 20 both are due
		t.Errorf("%+v", got)
	}
	if got := len(e.ranks[0].buffer); got != 16 {
		t.Errorf("%d batches are kept", got)
	}
}

func TestRestartOverTheWire(t *testing.T) {
	cfg := testConfig(VLLM, Map, Int)
	cfg.Ranks = 2
	cfg.Listen, cfg.ReplayListen = testcontainers.FreeAddress(t, 2), testcontainers.FreeAddress(t, 2)
	e := newEngine(t, cfg)
	c := newClient(t, e, 1)
	requests := new(distinct)
	serve(t, e, requests, 6)
	before := e.State()
	if err := e.Restart(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	after := e.Held()
	for i, r := range after.Ranks {
		if r.Events != before.Ranks[i].Events || r.Replay != before.Ranks[i].Replay || r.NextSeq != 0 || r.Tiers.Device.Blocks != 0 {
			t.Errorf("after the restart: %+v", r)
		}
	}
	if after.Incarnation != 2 || after.Requests != 6 {
		t.Errorf("%+v", after)
	}
	for {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		ev, err := c.sub.Next(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if ev.Kind == zmtp.Connected {
			break
		}
	}
	subscribed(t, e, 1)
	serve(t, e, requests, 2) // one for each rank
	if seq, _ := c.live(t, ""); seq != 0 {
		t.Errorf("batch %d", seq)
	}
	c.dealer.Disconnect()
	if got := c.replay(t, 0); len(got) != 1 {
		t.Errorf("%d batches", len(got))
	}
}

// control asks the control and returns the answer, decoded into v.
func control(t *testing.T, s *httptest.Server, method, path string, v any) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.Client().Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	body, err := io.ReadAll(a.Body)
	if err != nil || a.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %d, %s, %v", method, path, a.StatusCode, body, err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
}

func TestControl(t *testing.T) {
	cfg := testConfig(SGLang, Map, Int)
	cfg.Rate, cfg.HostCapacity = 500, 100
	e := newEngine(t, cfg)
	s := httptest.NewServer(e.Handler())
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ran := make(chan error)
	go func() { ran <- e.Run(ctx, fleet.NewSynthetic(1_000_000, 1)) }()
	served := func(least int) {
		t.Helper()
		testcontainers.Eventually(t, patience, func() error {
			var h Held
			if control(t, s, "GET", "/held", &h); h.Requests < least {
				return fmt.Errorf("%d requests", h.Requests)
			}
			return nil
		})
	}
	served(20)
	var a, b, again Held
	control(t, s, "POST", "/pause", &a)
	if !a.Paused || a.Ranks[0].Tiers != nil {
		t.Errorf("%+v", a)
	}
	control(t, s, "GET", "/held", &b)
	<-time.After(20 * time.Millisecond)
	control(t, s, "GET", "/held", &again)
	if b.Requests != a.Requests || again.Requests != a.Requests || again.Ranks[0].NextSeq != b.Ranks[0].NextSeq || b.Ranks[0].Tiers.Device.Blocks == 0 {
		t.Errorf("paused: %d requests, then %d, then %d", a.Requests, b.Requests, again.Requests)
	}
	l := newListener(t, &cfg)
	l.read(t, e.ranks[0])
	compare(t, l, &b.Ranks[0]) // hashes come through JSON whole

	var prompts []Prompt
	control(t, s, "GET", "/prompts?n=3", &prompts)
	if len(prompts) != 3 || len(prompts[0].Tokens) == 0 {
		t.Errorf("%d prompts", len(prompts))
	}
	control(t, s, "POST", "/gap", &a)
	control(t, s, "POST", "/garbage", &a)
	control(t, s, "POST", "/clear", &a)
	if a.Ranks[0].Gaps != 1 { // SGLang's clear was the next batch
		t.Errorf("%+v", a.Ranks[0])
	}
	control(t, s, "POST", "/restart?down=1ms", &a)
	if a.Incarnation != 2 || !a.Paused {
		t.Errorf("%+v", a)
	}
	control(t, s, "POST", "/resume", &a)
	served(a.Requests + 20)
	cancel()
	if err := <-ran; !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
	for _, bad := range []string{"POST /restart?down=x", "POST /restart?down=2h", "GET /prompts?n=-1", "GET /prompts?n=257", "GET /pause", "POST /held", "GET /"} {
		var method, path string
		fmt.Sscan(bad, &method, &path)
		w := httptest.NewRecorder()
		e.Handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code < 400 || w.Code >= 500 {
			t.Errorf("%s: %d", bad, w.Code)
		}
	}
}
