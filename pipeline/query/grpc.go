// This file serves gRPC.

package query

import (
	"context"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

func (s *Server) newGRPC() *grpc.Server {
	var unary []grpc.UnaryServerInterceptor
	if s.cfg.Tracer != nil {
		unary = append(unary, traceGRPC(s.cfg.Tracer))
	}
	unary = append(unary, s.guardUnary)
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec(s.limits)),
		grpc.InTapHandle(s.tapGRPC),
		grpc.MaxHeaderListSize(uint32(s.limits.MaxHeaderBytes)),
		grpc.ChainUnaryInterceptor(unary...),
		grpc.StreamInterceptor(s.guardStream),
		grpc.MaxRecvMsgSize(s.limits.MaxRequestBytes),
		grpc.MaxConcurrentStreams(s.limits.MaxConcurrentStreams),
		grpc.ConnectionTimeout(2 * s.limits.HeaderTimeout),
		// A router keeps connections warm, pinging or not, so one may be idle for long;
		// its next request after that waits for a new one. One that pings more than
		// every 10 s is broken, one that answers no ping is gone.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: s.limits.IdleTimeout, Time: 30 * time.Second, Timeout: 10 * time.Second}),
	}
	if s.cfg.TLS.On() {
		opts = append(opts, grpc.Creds(tellingTLS{credentials.NewTLS(s.cfg.TLS.Config(true, s.notReloaded)), s}))
	}
	g := grpc.NewServer(opts...)
	desc := pb.KVIndex_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i, d := range desc.Methods {
		desc.Methods[i] = s.atTheDoor(d)
	}
	g.RegisterService(&desc, &grpcAPI{s.service, s})
	desc = healthpb.Health_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i, d := range desc.Methods {
		desc.Methods[i] = s.arrives(d, &s.senders)
	}
	g.RegisterService(&desc, &health{ready: s.readiness, draining: s.draining})
	reflection.Register(g)
	return g
}

// guardUnary measures a request and turns a panic into its answer.
func (s *Server) guardUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
	m, ours := methodOf(info.FullMethod)
	start := time.Now()
	if ours {
		s.in.begin(overGRPC)
	}
	defer func() {
		if p := recover(); p != nil {
			resp, err = nil, s.panicked(info.FullMethod, p)
		}
		if ours {
			s.refusedBusy(overGRPC, err)
			s.in.end(ctx, overGRPC, m, status.Code(err), start)
		}
	}()
	if ours && m.matches() {
		if err := ctx.Value(placeKey{}).(*place).work(ctx); err != nil {
			return nil, err
		}
	}
	if resp, err = next(ctx, req); err != nil {
		return nil, err
	}
	most := s.unread.most
	if !ours {
		most = math.MaxInt64 // health: a stage shall not be restarted because others do not read
	}
	return s.unread.encode(ctx, resp, most)
}

// guardStream asks who opens a stream, bounds how many are open, and turns a panic of
// one into its end. Those that know nothing of our shutting down, which is reflection's, end with it: a
// graceful stop would wait for them.
func (s *Server) guardStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	match, health := info.FullMethod == pb.KVIndex_MatchStream_FullMethodName, strings.HasPrefix(info.FullMethod, healthPrefix)
	if !health {
		if err := s.mayAskGRPC(stream.Context()); err != nil {
			return err
		}
	}
	open := &s.otherStreams // which may need no token: they shall keep no query out
	if match {
		open = &s.matchStreams
	}
	defer open.Add(-1)
	if open.Add(1) > int64(s.limits.MaxStreams) {
		err := status.Errorf(codes.ResourceExhausted, "busy: %d streams are open: ask another instance, or again later", s.limits.MaxStreams)
		s.refuse(overGRPC, tooManyStreams, peerOf(stream.Context()), err)
		return err
	}
	switch {
	case health:
		stream = countedStream{stream, s.unread, math.MaxInt64}
	case !match:
		stream = countedStream{stream, s.unread, s.unread.most}
	}
	guarded := func() (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = s.panicked(info.FullMethod, p)
			}
		}()
		return next(srv, stream)
	}
	if match || health {
		return guarded()
	}
	ended := make(chan error, 1)
	go func() { ended <- guarded() }()
	select {
	case err := <-ended:
		return err
	case <-s.draining:
		return status.Error(codes.Unavailable, "the server is draining")
	}
}

func methodOf(full string) (method, bool) {
	switch full {
	case pb.KVIndex_Match_FullMethodName:
		return matchMethod, true
	case pb.KVIndex_MatchMany_FullMethodName:
		return matchManyMethod, true
	case pb.KVIndex_Workers_FullMethodName:
		return workersMethod, true
	case pb.KVIndex_Status_FullMethodName:
		return statusMethod, true
	}
	return 0, false
}

// panicked counts and logs a panic. The caller learns only that there was one.
func (s *Server) panicked(where string, p any) error {
	s.in.panics.Add(context.Background(), 1)
	s.log.Error("panic in a query", "method", where, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return status.Error(codes.Internal, "internal error")
}
