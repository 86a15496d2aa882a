package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	"kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/query/tracetest"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// newTopics returns a broker with the topics on it.
func newTopics(t *testing.T) testcontainers.Broker {
	t.Helper()
	broker := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	if got := execute(t, "topics", "create", "--brokers", broker.Brokers()[0], "--partitions", "4"); got.code != 0 {
		t.Fatal(got.err)
	}
	return broker
}

// A traced replay has a span a request, and one a record, which carries it.
func TestReplayIsTraced(t *testing.T) {
	c := tracetest.New(t, "grpc")
	broker := newTopics(t)
	got := execute(t, "replay", "--brokers", broker.Brokers()[0], "--synthetic", "20", "--workers", "2", "--route", "random", "--heartbeat", "1h")
	if got.code != 0 {
		t.Fatalf("exit code %d: %s", got.code, got.err)
	}
	spans := map[string]tracetest.Span{} // by the traceparent that a record should carry
	for _, s := range c.Find("kvindex.replay.produce", "") {
		spans["00-"+s.Trace+"-"+s.ID+"-01"] = s
		if len(c.Find("kvindex.replay.request", s.Trace)) != 1 {
			t.Errorf("no request has the record of %+v", s)
		}
	}
	if len(spans) == 0 {
		t.Error("no record was traced")
	}
	for _, part := range testcontainers.ReadCommitted(t, broker, defaultTopic) {
		for _, r := range part {
			for _, h := range r.Headers {
				s, ok := spans[string(h.Value)]
				if h.Key != "traceparent" || !ok {
					t.Fatalf("header %s: %s", h.Key, h.Value)
				}
				s.Has(t, map[string]string{
					"service.name": "kvindex-replay", "messaging.kafka.message.key": string(r.Key),
					"messaging.kafka.offset": fmt.Sprint(r.Offset), "messaging.destination.partition.id": fmt.Sprint(r.Partition),
				})
				delete(spans, string(h.Value))
			}
		}
	}
	if len(spans) > 0 {
		t.Errorf("no record has the spans %v", spans)
	}
}

// TestReplayRecords reads back what a replay wrote: every worker's records are
// on one partition, numbered without a gap, and their events give what the
// summary says.
func TestReplayRecords(t *testing.T) {
	broker := newTopics(t)
	const requests, workers, capacity = 600, 7, 200
	got := execute(t, "replay", "--brokers", broker.Brokers()[0], "--synthetic", "600", "--workers", "7", "--capacity", "200",
		"--route", "random", "--speed", "300", "--heartbeat", "50ms", "--duration", "10m", "--output", "json")
	if got.code != 0 {
		t.Fatalf("exit code %d: %s", got.code, got.err)
	}
	var sum replaySummary
	if err := json.Unmarshal([]byte(got.out), &sum); err != nil {
		t.Fatal(err)
	}
	type state struct {
		partition int32
		seq       int64
		held      map[index.SeqHash]bool
	}
	states := map[string]*state{}
	var records, heartbeats int64
	var events, stored, removed int
	for _, part := range testcontainers.ReadCommitted(t, broker, defaultTopic) {
		for _, r := range part {
			var b schemas.Batch
			if err := b.Decode(r.Value); err != nil {
				t.Fatal(err)
			}
			w := states[string(r.Key)]
			if w == nil {
				w = &state{r.Partition, -1, map[index.SeqHash]bool{}}
				states[string(r.Key)] = w
			}
			if string(b.Worker) != string(r.Key) || r.Partition != w.partition {
				t.Fatalf("a record of worker %s with key %s on partition %d, its others on %d", b.Worker, r.Key, r.Partition, w.partition)
			}
			if b.Epoch != sum.Epoch || string(b.Model) != sum.Model || int(b.BlockSize) != sum.BlockSize {
				t.Fatalf("record of epoch %d, model %s, block size %d", b.Epoch, b.Model, b.BlockSize)
			}
			if len(b.Events) == 0 {
				heartbeats++
			} else {
				records++
				w.seq++
			}
			if b.Seq != w.seq {
				t.Fatalf("worker %s: seq %d with %d events, want %d", b.Worker, b.Seq, len(b.Events), w.seq)
			}
			for _, e := range b.Events {
				events++
				for _, h := range e.Removed {
					removed++
					if !w.held[h] {
						t.Fatalf("worker %s removes what it does not hold", b.Worker)
					}
					delete(w.held, h)
				}
				prev, has := e.Stored.Parent, e.Stored.HasParent
				if has && !w.held[prev] {
					t.Fatalf("worker %s stores under a parent that it does not hold", b.Worker)
				}
				for _, l := range e.Stored.Locals {
					h := index.SeqHash(l)
					if has {
						h = index.Next(prev, l)
					}
					stored++
					w.held[h], prev, has = true, h, true
				}
			}
			if len(w.held) > capacity {
				t.Fatalf("worker %s holds %d blocks of at most %d", b.Worker, len(w.held), capacity)
			}
		}
	}
	if len(states) != workers {
		t.Errorf("%d workers, want %d", len(states), workers)
	}
	want := replaySummary{Requests: requests, Events: events, BlocksStored: stored, BlocksRemoved: removed,
		Produced: fleet.Produced{Records: records, Heartbeats: heartbeats}}
	have := replaySummary{Requests: sum.Requests, Events: sum.Events, BlocksStored: sum.BlocksStored, BlocksRemoved: sum.BlocksRemoved, Produced: sum.Produced}
	if have != want {
		t.Errorf("summary %+v, topic %+v", have, want)
	}
	if removed == 0 || heartbeats < workers {
		t.Errorf("%d blocks removed and %d heartbeats: the test shows nothing", removed, heartbeats)
	}
	if sum.Index.HitShare <= sum.Random.HitShare {
		t.Errorf("hit share %.3f by the index, %.3f at random", sum.Index.HitShare, sum.Random.HitShare)
	}
}

// TestReplayOfFile replays a written trace, its errors included.
func TestReplayOfFile(t *testing.T) {
	broker := newTopics(t)
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if got := execute(t, "replay", "--synthetic", "50", "--write-trace", file); got.code != 0 {
		t.Fatal(got.err)
	}
	args := []string{"replay", "--brokers", broker.Brokers()[0], "--trace", file, "--workers", "3", "--route", "random"}
	if got := execute(t, append(args, "--limit", "20")...); got.code != 0 || !strings.Contains(got.out, "20 requests to 3 workers") {
		t.Errorf("exit code %d, %s%s", got.code, got.out, got.err)
	}
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(good, "oops\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := execute(t, args...); got.code != codeFailed || !strings.Contains(got.err, "trace.jsonl:51: ") || !strings.Contains(got.out, "50 requests") {
		t.Errorf("exit code %d, %s%s", got.code, got.out, got.err)
	}
	for _, bad := range []string{
		"", "--synthetic 5 --trace x", "--trace /nowhere", "--synthetic 5 --workers 0", "--synthetic 5 --capacity 0", "--synthetic -1",
		"--synthetic 5 --block-size 100", "--synthetic 5 --speed -1", "--synthetic 5 --speed NaN", "--synthetic 5 --route best",
		"--synthetic 5 --heartbeat 1us", "--synthetic 5 --hasher opaque", "--trace x --write-trace y", "--synthetic 5 --limit -1",
	} {
		if got := execute(t, append([]string{"replay", "--brokers", broker.Brokers()[0]}, strings.Fields(bad)...)...); got.code != codeUsage {
			t.Errorf("replay %s: exit code %d, %s", bad, got.code, got.err)
		}
	}
}

// fakeStage holds nothing. It can be away and it can be not ready.
type fakeStage struct {
	kvindexpb.UnimplementedKVIndexServer
	net.Listener
	notReady atomic.Bool

	mu    sync.Mutex
	away  bool
	conns []net.Conn
}

func (s *fakeStage) Match(context.Context, *kvindexpb.MatchRequest) (*kvindexpb.MatchResponse, error) {
	if s.notReady.Load() {
		return nil, status.Error(codes.Unavailable, "kv-events/0: restoring")
	}
	return &kvindexpb.MatchResponse{Matches: []*kvindexpb.WorkerMatch{{Worker: "of another fleet", DepthBlocks: 9}}}, nil
}

// Accept hangs up at once while the stage is away.
func (s *fakeStage) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conns = append(s.conns, c); s.away {
			c.Close()
		}
	}
	return c, err
}

func (s *fakeStage) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away = away; away {
		for _, c := range s.conns {
			c.Close()
		}
	}
}

// TestReplayFailsOpen: while the stage does not answer, or answers that it is
// not ready, requests are served all the same and counted; when it is back,
// its answers count again.
func TestReplayFailsOpen(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stage := &fakeStage{Listener: lis}
	srv := grpc.NewServer()
	kvindexpb.RegisterKVIndexServer(srv, stage)
	go srv.Serve(stage)
	defer srv.Stop()

	cfg := defaultSim()
	cfg.workers, cfg.stage.address = 4, lis.Addr().String()
	s, err := newSim(testcontainers.Client(t, newTopics(t), fleet.ProducerOptions()...), defaultTopic, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	trace := fleet.NewSynthetic(1_000_000, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	until := func(what string, happened func() bool) {
		t.Helper()
		for !happened() {
			served := 0
			if err := s.serve(ctx, trace, 1, func() { served++ }); served != 1 || err != nil {
				t.Fatalf("%s: served %d: %v", what, served, err)
			}
		}
	}
	answered := func() func() bool {
		before := len(s.asker.took)
		return func() bool { return len(s.asker.took) > before }
	}
	failed := func() func() bool {
		before := s.asker.failed
		return func() bool { return s.asker.failed > before }
	}
	until("answered", answered())
	stage.setAway(true)
	until("away", failed())
	stage.notReady.Store(true)
	stage.setAway(false)
	until("back, not ready", func() bool {
		return strings.Contains(fmt.Sprint(s.asker.lastErr), "kv-events/0: restoring")
	})
	stage.notReady.Store(false)
	until("ready", answered())
	if err := s.producer.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	sum := s.summary()
	if q := sum.Queries; q.Answered+q.Failed != sum.Requests || q.P50Ms <= 0 || q.P99Ms < q.P50Ms {
		t.Errorf("%d requests, queries %+v", sum.Requests, *q)
	}
	if sum.Produced.Failed != 0 || sum.Produced.Records == 0 {
		t.Errorf("produced %+v", sum.Produced)
	}
}
