// This file is one replica: its connections, and whether it has just failed.

package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// rest is how long a replica that is away is asked after all others.
const rest = 500 * time.Millisecond

type replica struct {
	addr       string
	conns      []*conn
	next       atomic.Uint64
	restsUntil atomic.Int64 // Unix nanoseconds
}

// conn is one connection.
type conn struct {
	grpc  *grpc.ClientConn
	api   pb.KVIndexClient
	lanes []*lane
	next  atomic.Uint64
}

func newReplica(addr string, cfg *Config) (*replica, error) {
	opts := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// gRPC's own waits up to two minutes between attempts: too long for a
		// router whose index has just restarted.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		// A host that is gone without a word is noticed; servers allow a ping every 10 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second}),
		// A listing of 100,000 worker-ranks is longer than gRPC's 4 MiB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
	}, cfg.DialOptions...)
	r := &replica{addr: addr}
	for range max(cfg.Connections, 1) {
		g, err := grpc.NewClient(addr, opts...)
		if err != nil {
			r.close()
			return nil, fmt.Errorf("query client of %s: %w", addr, err)
		}
		c := &conn{grpc: g, api: pb.NewKVIndexClient(g)}
		for range cfg.Streams {
			c.lanes = append(c.lanes, newLane(c.api))
		}
		r.conns = append(r.conns, c)
	}
	return r, nil
}

func (r *replica) close() error {
	var errs []error
	for _, c := range r.conns {
		for _, l := range c.lanes {
			l.close()
		}
		errs = append(errs, c.grpc.Close())
	}
	return errors.Join(errs...)
}

// conn returns the connection whose turn it is.
func (r *replica) conn() *conn { return r.conns[r.next.Add(1)%uint64(len(r.conns))] }

func (r *replica) rests(now time.Time) bool { return now.UnixNano() < r.restsUntil.Load() }

// failed notes an error and reports whether another replica may do better.
func (r *replica) failed(err error) bool {
	if !elsewhere(err) {
		return false
	}
	if status.Code(err) != codes.ResourceExhausted { // busy now, not away
		r.restsUntil.Store(time.Now().Add(rest).UnixNano())
	}
	return true
}

// match asks by a stream, if there are any.
func (c *conn) match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	if len(c.lanes) == 0 {
		return c.api.Match(withTrace(ctx), req)
	}
	return c.lanes[c.next.Add(1)%uint64(len(c.lanes))].match(ctx, req)
}
