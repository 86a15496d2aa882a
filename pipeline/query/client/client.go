// This file is the client: its settings, its calls, and which replica each goes to.

package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// Config is what a Client can be told.
type Config struct {
	Replicas []string      // host:port of each; they know the same and are asked in turn
	Timeout  time.Duration // for calls whose context has no deadline; default 5 s
	Attempts int           // replicas that a call asks at most; default all

	Connections int // to each replica; default 1
	// Streams is how many streams of each connection carry the Match calls, which costs
	// both ends less than a call for each; 0: none. A stream answers in order and on one
	// processor, so a call that waits for min_offsets holds up those behind it. The
	// server does not learn of a caller's deadline on it.
	Streams int

	// DialOptions are for every connection, such as credentials (see secure.Client);
	// without any it is in plaintext.
	DialOptions []grpc.DialOption
}

// Client asks the replicas. It may be used by many goroutines. Errors are gRPC
// statuses, wrapped if several replicas were asked.
type Client struct {
	cfg      Config
	replicas []*replica
	next     atomic.Uint64
}

// New returns a Client. It does not connect before the first call.
func New(cfg Config) (*Client, error) {
	if len(cfg.Replicas) == 0 {
		return nil, errors.New("query client: no replicas")
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.Attempts <= 0 || cfg.Attempts > len(cfg.Replicas) {
		cfg.Attempts = len(cfg.Replicas)
	}
	c := &Client{cfg: cfg}
	for _, addr := range cfg.Replicas {
		r, err := newReplica(addr, &cfg)
		if err != nil {
			c.Close()
			return nil, err
		}
		c.replicas = append(c.replicas, r)
	}
	c.next.Store(uint64(time.Now().UnixNano())) // clients that start together begin at different ones
	return c, nil
}

// Dial is New of one replica.
func Dial(addr string, timeout time.Duration, opts ...grpc.DialOption) (*Client, error) {
	return New(Config{Replicas: []string{addr}, Timeout: timeout, DialOptions: opts})
}

// Close ends the connections and whatever calls are under way.
func (c *Client) Close() error {
	var errs []error
	for _, r := range c.replicas {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

// Match asks which workers hold how much of a prompt. With an error the answer is empty,
// partial, and has the error in missing.
func (c *Client) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	var resp *pb.MatchResponse
	err := c.ask(ctx, len(req.MinOffsets) > 0, func(ctx context.Context, conn *conn) (err error) {
		resp, err = conn.match(ctx, req)
		return err
	})
	if err != nil {
		return unanswered(err), err
	}
	return resp, nil
}

// MatchMany asks about several prompts at once. Each has an answer or an error of its
// own; with an error of the call each has what Match gives with an error.
func (c *Client) MatchMany(ctx context.Context, req *pb.MatchManyRequest) (*pb.MatchManyResponse, error) {
	var resp *pb.MatchManyResponse
	err := c.ask(ctx, len(req.MinOffsets) > 0, func(ctx context.Context, conn *conn) (err error) {
		resp, err = conn.api.MatchMany(withTrace(ctx), req)
		return err
	})
	if err != nil {
		resp = &pb.MatchManyResponse{}
		for range req.Requests {
			resp.Results = append(resp.Results, &pb.MatchResult{Answer: unanswered(err)})
		}
	}
	return resp, err
}

// Workers lists the worker-ranks that one replica knows, of all models if model is
// empty.
func (c *Client) Workers(ctx context.Context, model string) (resp *pb.WorkersResponse, err error) {
	err = c.ask(ctx, false, func(ctx context.Context, conn *conn) (err error) {
		resp, err = conn.api.Workers(ctx, &pb.WorkersRequest{Model: model})
		return err
	})
	return resp, err
}

// Status describes one replica.
func (c *Client) Status(ctx context.Context) (resp *pb.StatusResponse, err error) {
	err = c.ask(ctx, false, func(ctx context.Context, conn *conn) (err error) {
		resp, err = conn.api.Status(ctx, &pb.StatusRequest{})
		return err
	})
	return resp, err
}

// unanswered is the answer that there is none.
func unanswered(err error) *pb.MatchResponse {
	return &pb.MatchResponse{Partial: true, Missing: []string{"no answer: " + err.Error()}}
}

// ask calls f with one replica after the other until one answers. Each but the last has
// its part of the time only, so that one that hangs does not use up all of it; unless
// the call is one that waits.
func (c *Client) ask(ctx context.Context, waits bool, f func(context.Context, *conn) error) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		var cancel context.CancelFunc
		deadline = time.Now().Add(c.cfg.Timeout)
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	var err error
	for i, r := range c.order() {
		err = askOne(ctx, deadline, c.cfg.Attempts-i, waits, r, f)
		if err == nil {
			return nil
		}
		if len(c.replicas) > 1 {
			err = fmt.Errorf("replica %s: %w", r.addr, err)
		}
		if ctx.Err() != nil || !r.failed(err) {
			return err
		}
	}
	return err
}

func askOne(ctx context.Context, deadline time.Time, left int, waits bool, r *replica, f func(context.Context, *conn) error) error {
	if left > 1 && !waits {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		defer cancel()
	}
	return f(ctx, r.conn())
}

// order returns the replicas to ask: in turn, but those that have just failed last.
func (c *Client) order() []*replica {
	n := len(c.replicas)
	if n == 1 {
		return c.replicas
	}
	start := int(c.next.Add(1) % uint64(n))
	order := make([]*replica, 0, n)
	var resting []*replica
	now := time.Now()
	for i := range n {
		if r := c.replicas[(start+i)%n]; r.rests(now) {
			resting = append(resting, r)
		} else {
			order = append(order, r)
		}
	}
	return append(order, resting...)[:c.cfg.Attempts]
}

// traceContext is traceparent and tracestate as W3C Trace Context writes them.
var traceContext = propagation.TraceContext{}

// withTrace has a call carry the caller's span, if there is one.
func withTrace(ctx context.Context) context.Context {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	carrier := propagation.MapCarrier{}
	traceContext.Inject(ctx, carrier)
	for k, v := range carrier {
		ctx = metadata.AppendToOutgoingContext(ctx, k, v)
	}
	return ctx
}

// elsewhere reports whether another replica may answer what one has failed with.
func elsewhere(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
		return true
	}
	return false
}
