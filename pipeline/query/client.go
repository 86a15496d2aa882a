// This file is the client that the command line uses.

package query

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	pb "kvindex/pipeline/query/kvindexpb"
)

// Client asks one instance over gRPC. It may be used by many goroutines. Errors
// are gRPC statuses.
type Client struct {
	conn    *grpc.ClientConn
	api     pb.KVIndexClient
	timeout time.Duration
}

// Dial returns a Client of the instance at addr (host:port), in plaintext unless
// opts have other credentials (see secure.Client). It does not connect before the
// first call. While the instance is away calls fail at
// once; within a second or so of its return they succeed again. timeout is for calls whose context has no
// deadline; 0 means 5 s.
func Dial(addr string, timeout time.Duration, opts ...grpc.DialOption) (*Client, error) {
	setDefault(&timeout, 5*time.Second)
	opts = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(sendContext),
		// gRPC's own waits up to two minutes between attempts: too long for a
		// router whose index has just restarted.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		// A listing of 100,000 worker-ranks is longer than gRPC's 4 MiB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
	}, opts...)
	conn, err := grpc.NewClient(addr, opts...)
	if err != nil {
		return nil, fmt.Errorf("query client of %s: %w", addr, err)
	}
	return &Client{conn: conn, api: pb.NewKVIndexClient(conn), timeout: timeout}, nil
}

// Close ends the connection and whatever calls are under way.
func (c *Client) Close() error { return c.conn.Close() }

// Match asks which workers hold how much of a prompt. A span in the context is
// the parent of the instance's.
func (c *Client) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	ctx, cancel := c.deadline(ctx)
	defer cancel()
	return c.api.Match(ctx, req)
}

// Workers lists the worker-ranks, of all models if model is empty.
func (c *Client) Workers(ctx context.Context, model string) (*pb.WorkersResponse, error) {
	ctx, cancel := c.deadline(ctx)
	defer cancel()
	return c.api.Workers(ctx, &pb.WorkersRequest{Model: model})
}

// Status describes the instance.
func (c *Client) Status(ctx context.Context) (*pb.StatusResponse, error) {
	ctx, cancel := c.deadline(ctx)
	defer cancel()
	return c.api.Status(ctx, &pb.StatusRequest{})
}

func (c *Client) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}
