package query

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
)

type streamClient = grpc.BidiStreamingClient[pb.MatchStreamRequest, pb.MatchStreamResponse]

func openStream(t testing.TB, ctx context.Context, s *Server) streamClient {
	t.Helper()
	stream, err := pb.NewKVIndexClient(connect(t, s)).MatchStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func sendOn(t testing.TB, stream streamClient, id uint64, req *pb.MatchRequest) {
	t.Helper()
	if err := stream.Send(&pb.MatchStreamRequest{Id: id, Request: req}); err != nil {
		t.Fatal(err)
	}
}

// showAnswer is showResult of a stream's answer, with its id.
func showAnswer(r *pb.MatchStreamResponse) string {
	return fmt.Sprintf("%d: %s", r.Id, showResult(&pb.MatchResult{Answer: r.Answer, Error: r.Error}))
}

func TestMatchStream(t *testing.T) {
	f := fleet(t)
	cfg := measured(t)
	cfg.Limits.MaxConcurrent = 1
	s := serve(t, f, cfg)
	stream := openStream(t, t.Context(), s)
	for id, req := range []*pb.MatchRequest{
		{Model: "m", Tokens: prompt},
		{Model: "x", Tokens: prompt},
		nil,
		{Model: "m", Tokens: prompt, TopK: 1},
		{Model: "m", Tokens: prompt, TopK: 1, MinOffsets: map[int32]int64{0: 10}, TimeoutMs: 1},
		{Model: "m", Tokens: prompt, TopK: 1, MinOffsets: map[int32]int64{0: 10}, TimeoutMs: 1, FailOpen: true},
	} {
		sendOn(t, stream, uint64(id), req)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0: deep/0:3 deep/1:2 lossy/0:1!", "1: NOT_FOUND", "2: INVALID_ARGUMENT", "3: deep/0:3", "4: DEADLINE_EXCEEDED", "5: deep/0:3"} {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := showAnswer(resp); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("the end is %v", err)
	}
	for code, want := range map[string]string{"OK": "3", "NOT_FOUND": "1", "INVALID_ARGUMENT": "1", "DEADLINE_EXCEEDED": "1"} {
		name := fmt.Sprintf(`kvindex_query_requests_total{code=%q,method="match_stream",transport="grpc"}`, code)
		if got := metricOf(t, s, name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestStreamOfManyRequests(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	stream := openStream(t, t.Context(), s)
	const n = 10_000
	sent := make(chan error, 1)
	go func() {
		for id := range uint64(n) {
			req := &pb.MatchRequest{Model: "m", Tokens: prompt[:4*(1+id%3)], TopK: 1}
			if err := stream.Send(&pb.MatchStreamRequest{Id: id, Request: req}); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	for id := range uint64(n) {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatalf("answer %d: %v", id, err)
		}
		if resp.Id != id || resp.Answer.GetBlocks() != uint32(1+id%3) || resp.Answer.Matches[0].DepthBlocks != uint32(1+id%3) {
			t.Fatalf("answer %d is %v", id, resp)
		}
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("the end is %v", err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// A caller who does not read is cut off, and in nobody's way.
func TestStreamOfASlowReader(t *testing.T) {
	f := newFake()
	for i := range 1000 {
		f.holds(t, fmt.Sprintf("worker-%04d", i), 0, locals, WorkerState{})
	}
	cfg := measured(t)
	cfg.Limits.RequestTimeout = 2 * time.Second
	cfg.Limits.MaxConcurrent = 1
	s := serve(t, f, cfg)
	stream := openStream(t, t.Context(), s)
	go func() {
		for stream.Send(&pb.MatchStreamRequest{Request: &pb.MatchRequest{Model: "m", Tokens: prompt}}) == nil {
		}
	}()
	eventually(t, "the reader is given up", func() bool {
		return metricOf(t, s, refusedMetric("grpc", "slow_reader")) == "1"
	})
	if _, err := dial(t, s).Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
		t.Errorf("another query: %v", err)
	}
	for {
		if _, err := stream.Recv(); err != nil {
			if status.Code(err) != codes.Unavailable {
				t.Errorf("the end is %v, want Unavailable", err)
			}
			return
		}
	}
}

func TestStreamIsCancelled(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{Limits: Limits{Deadline: time.Minute}})
	ctx, cancel := context.WithCancel(t.Context())
	stream := openStream(t, ctx, s)
	sendOn(t, stream, 1, wants(10))
	eventually(t, "the query waits", func() bool { return s.service.waiting.Load() == 1 })
	cancel()
	if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("the end is %v", err)
	}
	eventually(t, "the query has ended", func() bool {
		return s.service.waiting.Load() == 0 && s.gate.empty(s.limits.MaxConcurrent+s.limits.MaxQueue)
	})
}

// A request on a stream that has waited for its record takes a slot again, when one is
// free, and gives it back; if none is in time it is told so, and the next is answered.
func TestStreamTakesASlotAfterItsWait(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{Limits: Limits{MaxConcurrent: 1, QueueTimeout: time.Minute, Deadline: time.Minute}})
	empty := func() bool { return s.gate.empty(s.limits.MaxConcurrent + s.limits.MaxQueue) }
	working := make(chan int, 1)
	f.onModel = func() { working <- len(s.gate.slots) }
	stream := openStream(t, t.Context(), s)
	for id, c := range []struct {
		timeoutMs uint32
		freed     bool // while the query waits for a slot
		want      string
	}{
		{0, true, "0: deep/0:3"},
		{3000, false, "1: DEADLINE_EXCEEDED"},
		{0, true, "2: deep/0:3"},
	} {
		req := wants(int64(10 + id))
		req.TimeoutMs = c.timeoutMs
		sendOn(t, stream, uint64(id), req)
		eventually(t, "it waits, and has neither slot nor place", func() bool { return s.service.waiting.Load() == 1 && empty() })
		s.gate.slots <- struct{}{} // another's
		f.apply(1)
		eventually(t, "it waits for a slot", func() bool { return s.gate.waiting.Load() == 1 })
		if c.freed {
			<-s.gate.slots
			if n := <-working; n != 1 {
				t.Errorf("request %d is worked on with %d slots taken", id, n)
			}
		}
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := showAnswer(resp); got != c.want || !c.freed && resp.Error.Message != errNoTurn.Error() {
			t.Errorf("got %s, %v, want %s", got, resp.Error, c.want)
		}
		if !c.freed {
			<-s.gate.slots
		}
		eventually(t, "it has given back what it took", empty)
	}
}

// A server that goes answers what it is at, tells every stream, and does not wait
// for their callers.
func TestDrainEndsStreams(t *testing.T) {
	f := fleet(t)
	arrived, goOn := make(chan struct{}), make(chan struct{})
	s := serve(t, f, Config{})
	idle, busy := openStream(t, t.Context(), s), openStream(t, t.Context(), s)
	for _, stream := range []streamClient{idle, busy} {
		sendOn(t, stream, 1, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
		if resp, err := stream.Recv(); err != nil || showAnswer(resp) != "1: deep/0:3" {
			t.Fatal(resp, err)
		}
	}
	f.onModel = func() {
		arrived <- struct{}{}
		<-goOn
	}
	for id := range uint64(100) {
		sendOn(t, busy, id, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
	}
	<-arrived
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(context.Background()) }()
	if _, err := idle.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the idle stream ended with %v, want Unavailable", err)
	}
	go func() {
		for {
			select {
			case <-arrived:
			case <-t.Context().Done():
				return
			}
		}
	}()
	close(goOn)
	for id := uint64(0); ; id++ {
		resp, err := busy.Recv()
		if err != nil {
			if status.Code(err) != codes.Unavailable || id == 0 {
				t.Errorf("the busy stream ended after %d answers with %v, want Unavailable after one or more", id, err)
			}
			break
		}
		if want := fmt.Sprintf("%d: deep/0:3", id); showAnswer(resp) != want {
			t.Errorf("got %s, want %s", showAnswer(resp), want)
		}
	}
	if err := <-down; err != nil {
		t.Errorf("shutdown: %v", err)
	}
}

func TestPanicOnAStreamIsAnswered(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{})
	stream := openStream(t, t.Context(), s)
	panics := true
	f.onModel = func() {
		if panics {
			panics = false
			panic("BUG: secret")
		}
	}
	for _, want := range []string{"7: INTERNAL", "7: deep/0:3"} {
		sendOn(t, stream, 7, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
		if resp, err := stream.Recv(); err != nil || showAnswer(resp) != want {
			t.Fatalf("got %v, %v, want %s", resp, err, want)
		}
	}
	if !s.gate.empty(s.limits.MaxConcurrent + s.limits.MaxQueue) {
		t.Error("places or slots are taken")
	}
}

// The gate is passed by each request, not by the stream.
func TestStreamPassesTheGate(t *testing.T) {
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 1, QueueTimeout: time.Millisecond}
	s := serve(t, fleet(t), cfg)
	stream := openStream(t, t.Context(), s)
	ask := func(want string) {
		t.Helper()
		sendOn(t, stream, 1, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
		if resp, err := stream.Recv(); err != nil || showAnswer(resp) != want {
			t.Fatalf("got %v, %v, want %s", resp, err, want)
		}
	}
	ask("1: deep/0:3")
	s.gate.slots <- struct{}{}
	ask("1: RESOURCE_EXHAUSTED")
	<-s.gate.slots
	ask("1: deep/0:3")
	if n := metricOf(t, s, refusedMetric("grpc", "queue_timeout")); n != "1" {
		t.Errorf("%s refusals are counted", n)
	}
}

func TestStreamEndsWithItsToken(t *testing.T) {
	const token = "0123456789abcdef-token"
	file := filepath.Join(t.TempDir(), "tokens")
	expires := func(in time.Duration) {
		securetest.WriteFile(t, file, fmt.Sprintf("%s %s\n", token, time.Now().Add(in).Format(time.RFC3339)))
	}
	expires(time.Hour)
	s := serve(t, fleet(t), Config{TokenFile: file})
	s.recheck = 10 * time.Millisecond
	if _, err := openStream(t, t.Context(), s).Recv(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("without a token: %v", err)
	}
	stream := openStream(t, metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token), s)
	sendOn(t, stream, 1, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
	if resp, err := stream.Recv(); err != nil || showAnswer(resp) != "1: deep/0:3" {
		t.Fatal(resp, err)
	}
	expires(4 * time.Second)
	if _, err := stream.Recv(); status.Code(err) != codes.Unauthenticated || errors.Is(err, io.EOF) {
		t.Errorf("after it has expired: %v", err)
	}
}

// Each request of a stream has a span of its own, under its own parent or the stream's.
func TestStreamSpans(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
	s := serve(t, fleet(t), Config{Tracer: tracer})
	stream := openStream(t, metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+callerTrace+"-00000000000000a1-01"), s)
	for i, parent := range []string{"", "00-" + callerTrace + "-00000000000000b2-01"} {
		req := &pb.MatchStreamRequest{Id: uint64(i), Request: &pb.MatchRequest{Model: "m", Tokens: prompt}, Traceparent: parent}
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	ended := spans.Ended()
	if len(ended) != 2 {
		t.Fatalf("%d spans", len(ended))
	}
	for i, want := range []string{"00000000000000a1", "00000000000000b2"} {
		p := ended[i].Parent()
		if p.TraceID().String() != callerTrace || p.SpanID().String() != want || ended[i].Name() != spanName || len(ended[i].Attributes()) < 8 {
			t.Errorf("span %d: %s under %s with %v, want one under %s", i, ended[i].Name(), p.SpanID(), ended[i].Attributes(), want)
		}
	}
}

// There are so many streams on all connections, and others keep no query out.
func TestTooManyStreams(t *testing.T) {
	cfg := measured(t)
	cfg.Limits.MaxStreams = 2
	s := serve(t, fleet(t), cfg)
	watch := func() error {
		stream, err := healthpb.NewHealthClient(connect(t, s)).Watch(t.Context(), &healthpb.HealthCheckRequest{})
		if err != nil {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	var open []streamClient
	match := func() error {
		stream := openStream(t, t.Context(), s)
		sendOn(t, stream, 1, &pb.MatchRequest{Model: "m", Tokens: prompt})
		_, err := stream.Recv()
		open = append(open, stream)
		return err
	}
	for name, ask := range map[string]func() error{"watch": watch, "match": match} {
		for i := range 3 {
			err := ask()
			if i < 2 && err != nil || i == 2 && (status.Code(err) != codes.ResourceExhausted || status.Convert(err).Message() != "busy: 2 streams are open: ask another instance, or again later") {
				t.Errorf("%s %d: %v", name, i, err)
			}
		}
	}
	if got := metricOf(t, s, refusedMetric("grpc", "streams")); got != "2" {
		t.Errorf("%s were counted", got)
	}
	if err := open[0].CloseSend(); err != nil {
		t.Error(err)
	}
	eventually(t, "there is room for another", func() bool { return match() == nil })
}

// A client whose token has been exchanged in time does not notice that its stream ends
// with the old one.
func TestClientOutlivesItsToken(t *testing.T) {
	const before, after = "the-token-of-before", "the-token-of-after"
	dir := t.TempDir()
	known, mine := filepath.Join(dir, "known"), filepath.Join(dir, "mine")
	securetest.WriteFile(t, known, before+"\n"+after+"\n")
	securetest.WriteFile(t, mine, before+"\n")
	f := fleet(t)
	cfg := measured(t)
	cfg.TokenFile, cfg.OpenMetrics, cfg.Limits.Deadline = known, true, time.Minute
	s := serve(t, f, cfg)
	s.recheck = 10 * time.Millisecond
	c, err := client.New(client.Config{Replicas: []string{s.GRPCAddr().String()}, Streams: 1, DialOptions: (&secure.Client{TokenFile: mine}).DialOptions()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Match(t.Context(), wants(9)); err != nil {
		t.Fatal(err)
	}
	securetest.WriteFile(t, mine, after+"\n")
	asked := make(chan error, 1)
	go func() { // on the stream of before
		_, err := c.Match(t.Context(), wants(10))
		asked <- err
	}()
	eventually(t, "the query waits", func() bool { return s.service.waiting.Load() == 1 })
	written := time.Now()
	eventually(t, "the client looks at its file again", func() bool { return time.Since(written) > 1200*time.Millisecond })
	securetest.WriteFile(t, known, after+"\n")
	eventually(t, "the old token is not known any more", func() bool { return s.tokens.Check("Bearer "+before) != nil })
	eventually(t, "the old stream has ended", func() bool { return metricOf(t, s, refusedMetric("grpc", "unauthenticated")) == "1" })
	eventually(t, "the query waits on another", func() bool { return s.matchStreams.Load() == 1 && s.service.waiting.Load() == 1 })
	f.apply(1)
	if err := <-asked; err != nil {
		t.Error(err)
	}
}
