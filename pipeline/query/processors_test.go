package query

import (
	"context"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// Only a line that was too long at each look for 5 ms says that the processors are
// behind, and what nobody looked at for long says nothing.
func TestProcessorsBehind(t *testing.T) {
	type look struct {
		at   time.Duration
		line int
		want bool
	}
	const ms = time.Millisecond
	for name, looks := range map[string][]look{
		"short":            {{0, 10, false}, {5 * ms, 10, false}, {10 * ms, 0, false}},
		"a burst":          {{0, 11, false}, {4 * ms, 99, false}, {5 * ms, 10, false}, {6 * ms, 11, false}, {10 * ms, 11, false}},
		"overload":         {{0, 11, false}, {4999 * time.Microsecond, 11, false}, {5 * ms, 11, true}, {50 * ms, 11, true}, {51 * ms, 10, false}, {52 * ms, 11, false}},
		"looked at seldom": {{0, 11, false}, {51 * ms, 11, false}, {55 * ms, 11, false}, {56 * ms, 11, true}, {106 * ms, 11, true}, {157 * ms, 11, false}},
		"two looks":        {{0, 11, false}, {50 * ms, 11, true}},
	} {
		line := 0
		p := processors{waiting: func() int { return line }, most: 10}
		start := time.Now()
		for _, l := range looks {
			line = l.line
			if got := p.behind(start.Add(l.at), true, true); got != l.want {
				t.Errorf("%s: behind after %v with %d waiting: %t", name, l.at, l.line, got)
			}
		}
	}
}

// While they are behind and there are not enough yet, as many are let in as the line
// should be of what it is, and one each 5 ms however long it is.
func TestProcessorsLetIn(t *testing.T) {
	for _, c := range []struct {
		line  int
		every time.Duration
		want  int // of 1,000
	}{
		{20, 10 * time.Microsecond, 500},
		{40, 10 * time.Microsecond, 250},
		{11, 10 * time.Microsecond, 909},
		{10_000, 10 * time.Microsecond, 3}, // 10 ms
		{10_000, time.Millisecond, 200},
		{10_000, 5 * time.Millisecond, 1000},
	} {
		p := processors{waiting: func() int { return c.line }, most: 10}
		now := time.Now()
		p.behind(now, false, true)
		now = now.Add(behindFor)
		let := 0
		for range 1000 {
			if !p.behind(now, false, true) {
				let++
			}
			if !p.behind(now, true, true) {
				t.Errorf("%d waiting: let in though there are enough", c.line)
			}
			now = now.Add(c.every)
		}
		if let < c.want-2 || let > c.want+2 {
			t.Errorf("%d waiting, one asking every %v: %d of 1,000 let in, want %d", c.line, c.every, let, c.want)
		}
	}
}

// However long the line is, no query is refused for it when there are only few: a line
// that the stage's other work made, or that a machine without time for the stage did.
func TestProcessorsFewQueries(t *testing.T) {
	p := processors{waiting: func() int { return 10_000 }, most: 10}
	now := time.Now()
	refused := func(many bool) (n int) {
		for range 1000 {
			if p.behind(now, false, many) {
				n++
			}
			now = now.Add(100 * time.Microsecond)
		}
		return n
	}
	if n := refused(false); n > 0 {
		t.Errorf("%d of 1,000 refused though there were few", n)
	}
	if n := refused(true); n < 900 {
		t.Errorf("%d of 1,000 refused of many", n)
	}
	if n := refused(false); n == 0 || n > 500 {
		t.Errorf("%d of 1,000 refused after many, want those of 50 ms", n)
	}
}

// The count of goroutines that wait for a processor is the runtime's.
func TestRunnableGoroutines(t *testing.T) {
	const n = 100
	waiting := runnableGoroutines()
	stop := make(chan struct{})
	defer close(stop)
	for range n + runtime.GOMAXPROCS(0) {
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
					runtime.Gosched()
				}
			}
		}()
	}
	eventually(t, "they wait", func() bool { return waiting() >= n/2 })
}

// While the processors are behind, as many queries are let in as can be worked on at
// once, over whatever transport; the others are refused until the line is short again.
func TestOverloadedProcessors(t *testing.T) {
	f := fleet(t)
	goOn := make(chan struct{})
	f.onModel = func() { <-goOn }
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 2, QueueTimeout: time.Minute, Deadline: time.Minute}
	s := serve(t, f, cfg)
	var behind atomic.Bool
	behind.Store(true)
	s.gate.mu.Lock()
	s.gate.busy = func(_ time.Time, enough, _ bool) bool { return enough && behind.Load() }
	s.gate.mu.Unlock()
	asking := askers(t, s)
	answers := make(chan error, 3)
	ask := func(i int) {
		_, err := asking[i%2].ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
		answers <- err
	}
	for i := range 2 {
		go ask(i)
	}
	eventually(t, "two work", func() bool { return metricOf(t, s, "kvindex_query_working") == "2" })

	for _, a := range asking {
		if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.ResourceExhausted ||
			!strings.Contains(err.Error(), "busy: the processors are behind") {
			t.Errorf("%s: got %v, want that the processors are behind", a.name, err)
		}
	}
	stream, err := pb.NewKVIndexClient(connect(t, s)).MatchStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.MatchStreamRequest{Id: 7, Request: &pb.MatchRequest{Model: "m", Tokens: prompt}}); err != nil {
		t.Fatal(err)
	}
	if resp, err := stream.Recv(); err != nil || resp.GetId() != 7 || resp.GetError().GetCode() != "RESOURCE_EXHAUSTED" {
		t.Errorf("on a stream: %v, %v", resp, err)
	}
	for transport, want := range map[string]string{"grpc": "2", "http": "1"} {
		if n := metricOf(t, s, refusedMetric(transport, "processors")); n != want {
			t.Errorf("%s refusals of %s", n, transport)
		}
	}

	behind.Store(false)
	go ask(0)
	eventually(t, "the third waits", func() bool { return metricOf(t, s, "kvindex_query_queued") == "1" })
	close(goOn)
	for range 3 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := dial(t, s).Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
		t.Error(err)
	}
}
