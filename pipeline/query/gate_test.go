package query

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// measured is a server's metrics, for a test.
func measured(t testing.TB) Config {
	t.Helper()
	meters, metrics, err := SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	return Config{Meters: meters, Metrics: metrics}
}

// metricOf reads one from a server's /metrics, by its name and labels.
func metricOf(t testing.TB, s *Server, name string) string {
	t.Helper()
	_, text := get(t, s, "/metrics")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("no metric %s in\n%s", name, text)
	return ""
}

func refusedMetric(transport, reason string) string {
	return fmt.Sprintf(`kvindex_query_refused_total{reason=%q,transport=%q}`, reason, transport)
}

// With its slots and its queue full a server refuses before it has read more
// than headers, answers everything else that is asked of it, and works on.
func TestQueueFull(t *testing.T) {
	f := fleet(t)
	goOn := make(chan struct{})
	f.onModel = func() { <-goOn }
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 2, MaxQueue: 3, QueueTimeout: time.Minute, Deadline: time.Minute}
	s := serve(t, f, cfg)
	asking := askers(t, s)
	answers := make(chan error, 5)
	for i := range 5 {
		go func() {
			_, err := asking[i%2].ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
			answers <- err
		}()
	}
	eventually(t, "two work and three wait", func() bool {
		return metricOf(t, s, "kvindex_query_working") == "2" && metricOf(t, s, "kvindex_query_queued") == "3"
	})

	for _, a := range asking {
		if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.ResourceExhausted ||
			!strings.Contains(err.Error(), "busy: all places for 2 queries at work and 3 waiting are taken") {
			t.Errorf("%s: got %v, want that it is busy", a.name, err)
		}
	}
	// Neither request is ever sent whole.
	stream, err := connect(t, s).NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, pb.KVIndex_Match_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(new(pb.MatchResponse)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("gRPC headers alone: %v", err)
	}
	conn, err := net.Dial("tcp", s.HTTPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" {
		t.Errorf("HTTP headers alone: %v, %v", resp, err)
	}

	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/v1/status": 200, "/v1/workers": 200} {
		if code, _ := get(t, s, path); code != want {
			t.Errorf("%s: %d", path, code)
		}
	}
	if _, err := healthpb.NewHealthClient(connect(t, s)).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := dial(t, s).Status(t.Context()); err != nil {
		t.Error(err)
	}
	for _, transport := range []string{"grpc", "http"} {
		if n := metricOf(t, s, refusedMetric(transport, "queue_full")); n != "2" {
			t.Errorf("%s refusals of %s", n, transport)
		}
		if n := metricOf(t, s, fmt.Sprintf(`kvindex_query_requests_total{code="RESOURCE_EXHAUSTED",method="match",transport=%q}`, transport)); n != "2" {
			t.Errorf("%s requests of %s counted as refused", n, transport)
		}
	}

	close(goOn)
	for range 5 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	if metricOf(t, s, "kvindex_query_working") != "0" || metricOf(t, s, "kvindex_query_queued") != "0" {
		t.Error("slots are kept")
	}
}

// What is refused leaves nothing behind, however patient its caller.
func TestRefusalsLeaveNothingBehind(t *testing.T) {
	f := fleet(t)
	goOn := make(chan struct{})
	f.onModel = func() { <-goOn }
	full := serve(t, f, Config{Limits: Limits{MaxConcurrent: 1, MaxQueue: 1, QueueTimeout: time.Minute, Deadline: time.Minute}})
	for range 2 {
		go dial(t, full).Match(context.Background(), &pb.MatchRequest{Model: "m", Tokens: prompt})
	}
	defer close(goOn)
	eventually(t, "it is full", func() bool { return full.gate.waiting.Load() == 1 })
	cfg := Config{TokenFile: tokenFile(t)}
	for want, s := range map[codes.Code]*Server{codes.ResourceExhausted: full, codes.Unauthenticated: serve(t, fleet(t), cfg)} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		api := pb.NewKVIndexClient(connect(t, s))
		ask := func(n int) {
			for range n {
				if _, err := api.Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != want {
					t.Fatalf("got %v, want %v", err, want)
				}
			}
		}
		ask(100)
		before := heap()
		const n = 3000
		ask(n)
		if each := (heap() - before) / n; each > 200 {
			t.Errorf("%v: each keeps %d bytes", want, each)
		}
	}
}

// What has waited for too long is refused, and a caller who leaves leaves the queue.
func TestQueueTimeout(t *testing.T) {
	f := fleet(t)
	goOn := make(chan struct{})
	f.onModel = func() { <-goOn }
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 1, MaxQueue: 100, QueueTimeout: 50 * time.Millisecond, Deadline: time.Minute}
	s := serve(t, f, cfg)
	first := make(chan error, 1)
	go func() {
		_, err := dial(t, s).Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt})
		first <- err
	}()
	eventually(t, "the slot is taken", func() bool { return metricOf(t, s, "kvindex_query_working") == "1" })
	for _, a := range askers(t, s) {
		if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.ResourceExhausted ||
			!strings.Contains(err.Error(), "busy: the query has waited for 50ms") {
			t.Errorf("%s: %v", a.name, err)
		}
		if n := metricOf(t, s, refusedMetric(a.name, "queue_timeout")); n != "1" {
			t.Errorf("%s refusals of %s", n, a.name)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := dial(t, s).Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a caller in a hurry: %v", err)
	}
	eventually(t, "nobody waits", func() bool { return metricOf(t, s, "kvindex_query_queued") == "0" })
	close(goOn)
	if err := <-first; err != nil {
		t.Error(err)
	}
}

// A panic gives its slot back.
func TestPanicGivesItsSlotBack(t *testing.T) {
	f := fleet(t)
	f.onModel = func() { panic("BUG: a test's") }
	s := serve(t, f, Config{Limits: Limits{MaxConcurrent: 1}})
	for range 3 {
		for _, a := range askers(t, s) {
			if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.Internal {
				t.Errorf("%s: %v", a.name, err)
			}
		}
	}
	if n := len(s.gate.slots); n != 0 {
		t.Errorf("%d slots are taken", n)
	}
}

// TestOverload offers four times what a server can do, by a clock that does not
// wait for it. A query's work
// is 50 ms of a slot, so that slots are what is short, not the test's processors.
func TestOverload(t *testing.T) {
	const (
		limit    = 4
		work     = 50 * time.Millisecond
		offered  = 4 * int(time.Second/work) * limit // a second
		lasts    = 1500                              // milliseconds
		queueing = 16
	)
	f := fleet(t)
	var now, most, worked atomic.Int64
	f.onModel = func() {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		began := time.Now()
		<-time.After(work)
		worked.Add(int64(time.Since(began)))
	}
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: limit, MaxQueue: queueing, QueueTimeout: 500 * time.Millisecond, Deadline: time.Minute}
	s := serve(t, f, cfg)
	asking := []asker{overHTTPAsker(t, s), askers(t, s)[0]}
	client := dial(t, s)
	asking[1].ask = func(req *pb.MatchRequest) (*pb.MatchResponse, error) { return client.Match(t.Context(), req) }

	var answered, busy [2]atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	sent := 0
	for ms := int64(0); ms < lasts; ms = time.Since(start).Milliseconds() {
		<-tick.C
		for due := int(time.Since(start).Milliseconds()) * offered / 1000; sent < due; sent++ {
			i := min(1, sent%8) // gRPC mostly: the client of HTTP is the slower one
			all.Go(func() {
				_, err := asking[i].ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
				switch {
				case err == nil:
					answered[i].Add(1)
				case status.Code(err) == codes.ResourceExhausted:
					busy[i].Add(1)
				default:
					t.Errorf("%s: %v", asking[i].name, err)
				}
			})
		}
		if ms%8 == 0 {
			if code, _ := get(t, s, "/readyz"); code != http.StatusOK {
				t.Errorf("not ready under load: %d", code)
			}
		}
	}
	took, busyFor := time.Since(start), time.Duration(worked.Load())
	all.Wait()
	yes, no := answered[0].Load()+answered[1].Load(), busy[0].Load()+busy[1].Load()
	t.Logf("%d offered in %v: %d answered, %d refused; HTTP %d of %d", sent, took, yes, no, answered[0].Load(), busy[0].Load()+answered[0].Load())
	if yes+no != int64(sent) {
		t.Errorf("%d answered and %d refused of %d", yes, no, sent)
	}
	if most.Load() > limit {
		t.Errorf("%d at work at once, want at most %d", most.Load(), limit)
	}
	t.Logf("the slots were at work for %.2f of the time", busyFor.Seconds()/(limit*took.Seconds())) // bench query tells how much is answered
	if yes < limit || no == 0 {
		t.Errorf("%d answered and %d refused, want some of both", yes, no)
	}
	for i := range 2 * limit {
		if _, err := asking[i%2].ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	}
	if metricOf(t, s, "kvindex_query_working") != "0" || metricOf(t, s, "kvindex_query_queued") != "0" {
		t.Error("slots are kept")
	}
}

// overHTTPAsker is askers' for HTTP with connections that are kept.
func overHTTPAsker(t testing.TB, s *Server) asker {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
	t.Cleanup(client.CloseIdleConnections)
	body := `{"model":"m","tokens":[1,2,3,4]}`
	return asker{"http", func(*pb.MatchRequest) (*pb.MatchResponse, error) {
		resp, err := client.Post("http://"+s.HTTPAddr().String()+"/v1/match", "application/json", strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		switch resp.StatusCode {
		case http.StatusOK:
			return nil, nil
		case http.StatusTooManyRequests:
			return nil, status.Error(codes.ResourceExhausted, "")
		}
		return nil, fmt.Errorf("HTTP %s", resp.Status)
	}}
}

// What is not a query has a body too.
func TestRegistrationsNeedRoom(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxConcurrent: 1, MaxQueue: 1, Deadline: time.Minute}})
	for _, path := range []string{"/mooncake/register", "/mooncake/register", "/dynamo/unregister", "/dynamo/unregister"} {
		conn, err := net.Dial("tcp", s.HTTPAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{", path)
	}
	eventually(t, "all arrive", func() bool { return s.gate.arrivals() == 4 })
	if code, text := do(t, s, http.MethodPost, "/mooncake/register", "application/json", strings.NewReader(`{"instance_id":"x"}`)); code != http.StatusTooManyRequests {
		t.Errorf("a fifth: %d %s", code, text)
	}
}
