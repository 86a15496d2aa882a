// This file serves streams of requests.

package query

import (
	"context"
	"errors"
	"io"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// grpcAPI is the service with what only gRPC has.
type grpcAPI struct {
	*Service
	server *Server
}

// matchStream is one stream.
type matchStream struct {
	grpc.BidiStreamingServer[pb.MatchStreamRequest, pb.MatchStreamResponse]
	s *Server
	// turn is held while a request is answered, so that a stream that is ended
	// from outside ends between two answers.
	turn chan struct{}
}

// MatchStream answers a stream's requests one after the other. This goroutine
// watches over the one that does so, which may be in a Send to a caller who does not
// read.
func (a *grpcAPI) MatchStream(in grpc.BidiStreamingServer[pb.MatchStreamRequest, pb.MatchStreamResponse]) error {
	s := a.server
	m := &matchStream{in, s, make(chan struct{}, 1)}
	ended := make(chan error, 1)
	go func() { ended <- m.serve() }()

	draining, turn := s.draining, chan struct{}(nil)
	var look <-chan time.Time
	if s.tokens != nil {
		tick := time.NewTicker(s.recheck)
		defer tick.Stop()
		look = tick.C
	}
	for {
		select {
		case err := <-ended:
			return err
		case <-draining:
			draining, turn = nil, m.turn
		case turn <- struct{}{}:
			return status.Error(codes.Unavailable, "the server is draining: ask another instance")
		case <-look:
			if err := s.mayAskGRPC(in.Context()); err != nil {
				return err
			}
		}
	}
}

func incoming(ctx context.Context) metadata.MD {
	md, _ := metadata.FromIncomingContext(ctx)
	return md
}

// serve answers until the caller ends the stream.
func (m *matchStream) serve() (err error) {
	defer func() {
		if p := recover(); p != nil { // of gRPC's own
			err = m.s.panicked(pb.KVIndex_MatchStream_FullMethodName, p)
		}
	}()
	ctx := m.Context()
	var out pb.MatchStreamResponse // Send keeps nothing of it
	for {
		in, err := m.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case m.turn <- struct{}{}:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
		out.Id, out.Error = in.Id, nil
		if out.Answer, err = m.answer(ctx, in); err != nil {
			out.Answer, out.Error = nil, errorMessage(err)
		}
		err = m.send(ctx, &out)
		<-m.turn
		if err != nil {
			return err
		}
	}
}

// send sends an answer, or that there is no room for it.
func (m *matchStream) send(ctx context.Context, out *pb.MatchStreamResponse) error {
	u := m.s.unread
	if out.Error == nil {
		e, err := u.encode(ctx, out, u.most)
		if err == nil {
			return m.SendMsg(e)
		}
		m.s.refusedBusy(overGRPC, err)
		out.Answer, out.Error = nil, errorMessage(err)
	}
	e, err := u.encode(ctx, out, u.refusals)
	if err != nil {
		return err
	}
	return m.SendMsg(e)
}

// answer is one request, with all that the others have: a place in the gate, a
// span, a measure, an answer to a panic.
func (m *matchStream) answer(ctx context.Context, in *pb.MatchStreamRequest) (resp *pb.MatchResponse, err error) {
	start := time.Now()
	s := m.s
	s.in.begin(overGRPC)
	defer func() {
		if p := recover(); p != nil {
			resp, err = nil, s.panicked(pb.KVIndex_MatchStream_FullMethodName, p)
		}
		s.refusedBusy(overGRPC, err)
		s.in.end(ctx, overGRPC, matchStreamMethod, status.Code(err), start)
	}()
	if s.cfg.Tracer != nil {
		var span trace.Span
		ctx, span = m.span(ctx, in)
		defer func() {
			span.SetAttributes(attribute.Int("rpc.grpc.status_code", int(status.Code(err))))
			endSpan(span, err)
			span.End()
		}()
	}
	if in.Request == nil {
		return nil, invalid("request is not set")
	}
	place, err := s.admit(int(s.matchStreams.Load()), nil) // each may have one that waits to be read
	if err != nil {
		return nil, err
	}
	defer place.end()
	if err := place.work(ctx); err != nil {
		return nil, err
	}
	return s.service.Match(context.WithValue(ctx, placeKey{}, place), in.Request)
}

// span starts a request's span, under its own parent or the stream's.
func (m *matchStream) span(ctx context.Context, in *pb.MatchStreamRequest) (context.Context, trace.Span) {
	var parent propagation.TextMapCarrier = mdCarrier(incoming(ctx))
	if in.Traceparent != "" {
		parent = propagation.MapCarrier{"traceparent": in.Traceparent, "tracestate": in.Tracestate}
	}
	return m.s.cfg.Tracer.Start(propagator.Extract(ctx, parent), spanName,
		trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(
			attribute.String("rpc.system", "grpc"),
			attribute.String("rpc.service", pb.KVIndex_ServiceDesc.ServiceName),
			attribute.String("rpc.method", "MatchStream")))
}
