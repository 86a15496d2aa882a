package client

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/testcontainers"
)

// fake is a replica that answers with its name and the prompt's length.
type fake struct {
	pb.UnimplementedKVIndexServer
	name  string
	asked atomic.Int64

	mu     sync.Mutex
	err    error // what it fails with
	hang   bool  // until the caller has gone
	traces []string
	grpc   *grpc.Server
	addr   string
}

func (f *fake) set(err error, hang bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err, f.hang = err, hang
}

func (f *fake) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	return f.answer(ctx, req, strings.Join(md.Get("traceparent"), ","))
}

func (f *fake) answer(ctx context.Context, req *pb.MatchRequest, traceparent string) (*pb.MatchResponse, error) {
	f.asked.Add(1)
	f.mu.Lock()
	err, hang := f.err, f.hang
	f.traces = append(f.traces, traceparent)
	f.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		return nil, err
	}
	return &pb.MatchResponse{Blocks: uint32(len(req.Tokens)), Matches: []*pb.WorkerMatch{{Worker: f.name}}}, nil
}

func (f *fake) MatchMany(ctx context.Context, req *pb.MatchManyRequest) (*pb.MatchManyResponse, error) {
	resp := &pb.MatchManyResponse{}
	for _, r := range req.Requests {
		a, err := f.answer(ctx, r, "")
		if err != nil {
			return nil, err
		}
		resp.Results = append(resp.Results, &pb.MatchResult{Answer: a})
	}
	return resp, nil
}

func (f *fake) MatchStream(stream grpc.BidiStreamingServer[pb.MatchStreamRequest, pb.MatchStreamResponse]) error {
	for {
		in, err := stream.Recv()
		if err != nil {
			return nil
		}
		out := &pb.MatchStreamResponse{Id: in.Id}
		if out.Answer, err = f.answer(stream.Context(), in.Request, in.Traceparent); err != nil {
			out.Error = &pb.Error{Code: strings.ToUpper(codeName(status.Code(err))), Message: status.Convert(err).Message()}
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// codeName is a code as gRPC's specification spells it.
func codeName(c codes.Code) string {
	return map[codes.Code]string{codes.Unavailable: "UNAVAILABLE", codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.NotFound: "NOT_FOUND"}[c]
}

// listen serves on addr.
func (f *fake) listen(t testing.TB, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	f.addr, f.grpc = l.Addr().String(), grpc.NewServer()
	pb.RegisterKVIndexServer(f.grpc, f)
	go f.grpc.Serve(l)
	t.Cleanup(f.grpc.Stop)
}

// fakes starts replicas and a client of them.
func fakes(t testing.TB, n int, cfg Config) ([]*fake, *Client) {
	t.Helper()
	var fs []*fake
	for i := range n {
		f := &fake{name: fmt.Sprint(i)}
		f.listen(t, "127.0.0.1:0")
		fs = append(fs, f)
		cfg.Replicas = append(cfg.Replicas, f.addr)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return fs, c
}

// modes are the ways a Match travels.
var modes = map[string]Config{"calls": {}, "streams": {Streams: 2, Connections: 2}}

func request(n int) *pb.MatchRequest { return &pb.MatchRequest{Model: "m", Tokens: make([]uint32, n)} }

func TestReplicasAreAskedInTurn(t *testing.T) {
	for mode, cfg := range modes {
		t.Run(mode, func(t *testing.T) {
			fs, c := fakes(t, 3, cfg)
			for i := range 30 {
				resp, err := c.Match(t.Context(), request(i))
				if err != nil || int(resp.Blocks) != i {
					t.Fatal(resp, err)
				}
			}
			for _, f := range fs {
				if n := f.asked.Load(); n != 10 {
					t.Errorf("replica %s was asked %d times of 30", f.name, n)
				}
			}
		})
	}
}

// Whatever one replica does, another answers within the time.
func TestAnotherReplicaAnswers(t *testing.T) {
	for mode, cfg := range modes {
		for name, trouble := range map[string]func(*fake){
			"not ready": func(f *fake) { f.set(status.Error(codes.Unavailable, "catching up"), false) },
			"busy":      func(f *fake) { f.set(status.Error(codes.ResourceExhausted, "busy"), false) },
			"hangs":     func(f *fake) { f.set(nil, true) },
			"is away":   func(f *fake) { f.grpc.Stop() },
		} {
			t.Run(mode+" "+name, func(t *testing.T) {
				t.Parallel() // they mostly wait
				fs, c := fakes(t, 2, cfg)
				for i := range 4 { // both are connected
					if _, err := c.Match(t.Context(), request(i)); err != nil {
						t.Fatal(err)
					}
				}
				trouble(fs[0])
				for i := range 10 {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					resp, err := c.Match(ctx, request(i))
					cancel()
					if err != nil || resp.Matches[0].Worker != "1" {
						t.Fatalf("query %d: %v, %v", i, resp, err)
					}
				}
			})
		}
	}
}

func TestWhatNobodyCanAnswerIsNotAskedAgain(t *testing.T) {
	for mode, cfg := range modes {
		fs, c := fakes(t, 2, cfg)
		for _, f := range fs {
			f.set(status.Error(codes.NotFound, "unknown model"), false)
		}
		if _, err := c.Match(t.Context(), request(1)); status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v", mode, err)
		}
		if n := fs[0].asked.Load() + fs[1].asked.Load(); n != 1 {
			t.Errorf("%s: asked %d times", mode, n)
		}
	}
}

// Without an answer there is an empty one, which says so.
func TestFailsOpen(t *testing.T) {
	for mode, cfg := range modes {
		fs, c := fakes(t, 2, cfg)
		for _, f := range fs {
			f.set(status.Error(codes.Unavailable, "catching up"), false)
		}
		resp, err := c.Match(t.Context(), request(1))
		if status.Code(err) != codes.Unavailable || resp == nil || !resp.Partial || len(resp.Matches) != 0 || !strings.Contains(resp.Missing[0], "catching up") {
			t.Errorf("%s: %v, %v", mode, resp, err)
		}
		if n := fs[0].asked.Load() + fs[1].asked.Load(); n != 2 {
			t.Errorf("%s: asked %d times", mode, n)
		}
		many, err := c.MatchMany(t.Context(), &pb.MatchManyRequest{Requests: []*pb.MatchRequest{request(1), request(2)}})
		if status.Code(err) != codes.Unavailable || len(many.Results) != 2 || !many.Results[1].Answer.Partial {
			t.Errorf("%s: %v, %v", mode, many, err)
		}
	}
}

// A replica that comes back is asked again.
func TestAReplicaComesBack(t *testing.T) {
	for mode, cfg := range modes {
		t.Run(mode, func(t *testing.T) {
			f := &fake{}
			f.listen(t, testcontainers.FreeAddress(t, 1))
			cfg.Replicas = []string{f.addr}
			c, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Match(t.Context(), request(1)); err != nil {
				t.Fatal(err)
			}
			f.grpc.Stop()
			if _, err := c.Match(t.Context(), request(1)); status.Code(err) != codes.Unavailable {
				t.Fatalf("away: %v", err)
			}
			f.listen(t, f.addr)
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for deadline := time.Now().Add(time.Minute); ; <-tick.C {
				_, err := c.Match(t.Context(), request(1))
				if err == nil {
					return
				}
				if time.Now().After(deadline) {
					t.Fatal(err)
				}
			}
		})
	}
}

// Many callers share streams, and each has its own answer.
func TestManyCallers(t *testing.T) {
	for mode, cfg := range modes {
		_, c := fakes(t, 2, cfg)
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				for k := range 50 {
					resp, err := c.Match(t.Context(), request(100*i+k))
					if err != nil || int(resp.Blocks) != 100*i+k {
						t.Errorf("%s: %v, %v", mode, resp, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}

// A stream that hangs holds up nobody for longer than his own time, and no more
// callers than have room on it.
func TestAStreamThatHangs(t *testing.T) {
	fs, c := fakes(t, 1, Config{Streams: 1})
	fs[0].set(nil, true)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // all have come by then
	defer cancel()
	counts := map[codes.Code]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range pipelined + 20 {
		wg.Go(func() {
			_, err := c.Match(ctx, request(1))
			mu.Lock()
			defer mu.Unlock()
			counts[status.Code(err)]++
		})
	}
	wg.Wait()
	if counts[codes.DeadlineExceeded] != pipelined || counts[codes.ResourceExhausted] != 20 {
		t.Errorf("ended with %v", counts)
	}
	done := make(chan struct{})
	go func() { c.Close(); close(done) }()
	<-done
	if _, err := c.Match(t.Context(), request(1)); err == nil {
		t.Error("a closed client answers")
	}
}

func TestTheCallersSpanTravels(t *testing.T) {
	for mode, cfg := range modes {
		fs, c := fakes(t, 1, cfg)
		ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: trace.TraceID{15: 1}, SpanID: trace.SpanID{7: 2}, TraceFlags: trace.FlagsSampled,
		}))
		if _, err := c.Match(ctx, request(1)); err != nil {
			t.Fatal(err)
		}
		if want := []string{"00-00000000000000000000000000000001-0000000000000002-01"}; !slices.Equal(fs[0].traces, want) {
			t.Errorf("%s: %q", mode, fs[0].traces)
		}
	}
}

// A caller without a deadline does not wait for ever for an instance that hangs, and
// one with several replicas does not spend all his time on one.
func TestTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(ctx context.Context, _ *conn) error {
			<-ctx.Done()
			return status.FromContextError(ctx.Err()).Err()
		}
		for _, c := range []struct {
			replicas int
			waits    bool
			callers  time.Duration
			want     []time.Duration // after which each attempt ends
		}{
			{1, false, 0, []time.Duration{5 * time.Second}},
			{1, false, time.Second, []time.Duration{time.Second}},
			{2, false, time.Second, []time.Duration{500 * time.Millisecond, time.Second}},
			{2, true, time.Second, []time.Duration{time.Second}},
		} {
			cl := &Client{cfg: Config{Timeout: 5 * time.Second, Attempts: c.replicas}}
			for range c.replicas {
				cl.replicas = append(cl.replicas, &replica{conns: []*conn{{}}})
			}
			ctx, cancel := t.Context(), func() {}
			if c.callers > 0 {
				ctx, cancel = context.WithTimeout(ctx, c.callers)
			}
			var got []time.Duration
			began := time.Now()
			err := cl.ask(ctx, c.waits, func(ctx context.Context, conn *conn) error {
				err := hang(ctx, conn)
				got = append(got, time.Since(began))
				return err
			})
			cancel()
			if status.Code(err) != codes.DeadlineExceeded || !slices.Equal(got, c.want) {
				t.Errorf("%+v: attempts ended after %v, %v", c, got, err)
			}
		}
	})
}

func TestNoReplicas(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("a client of nobody")
	}
}
