// This file carries many callers' requests on one stream.

package client

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

// pipelined is how many requests may be on their way to or from one stream; beyond,
// the replica counts as busy.
const pipelined = 256

// lane is a stream that is opened when it is needed, and anew after it has ended. One
// goroutine sends; one for each stream receives.
type lane struct {
	api    pb.KVIndexClient
	ctx    context.Context
	cancel context.CancelFunc
	places chan struct{} // taken by each request until it is answered
	queue  chan *call    // to be sent; it has room for all that have a place
	ids    atomic.Uint64

	mu      sync.Mutex
	stream  grpc.BidiStreamingClient[pb.MatchStreamRequest, pb.MatchStreamResponse] // nil: none is open
	pending []*call                                                                 // sent and not answered, oldest first
}

// call is one request.
type call struct {
	id   uint64
	body []byte // encoded by its caller, who may change the request once he has gone
	ctx  context.Context
	done chan struct{} // closed after resp and err are set
	resp *pb.MatchResponse
	err  error
}

func newLane(api pb.KVIndexClient) *lane {
	l := &lane{api: api, places: make(chan struct{}, pipelined), queue: make(chan *call, pipelined)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	go l.send()
	return l
}

func (l *lane) close() { l.cancel() }

// match asks and waits for the answer.
func (l *lane) match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	select {
	case l.places <- struct{}{}:
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "%d requests wait on a stream", pipelined)
	}
	in := pb.MatchStreamRequest{Id: l.ids.Add(1), Request: req}
	if trace.SpanContextFromContext(ctx).IsValid() {
		carrier := propagation.MapCarrier{}
		traceContext.Inject(ctx, carrier)
		in.Traceparent, in.Tracestate = carrier["traceparent"], carrier["tracestate"]
	}
	body, err := proto.Marshal(&in)
	if err != nil {
		<-l.places
		return nil, status.Error(codes.Internal, err.Error())
	}
	c := &call{id: in.Id, body: body, ctx: ctx, done: make(chan struct{})}
	l.queue <- c
	select {
	case <-c.done:
		return c.resp, c.err
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-l.ctx.Done():
		return nil, errClosed
	}
}

var errClosed = status.Error(codes.Canceled, "the client is closed")

// finish gives a call its end.
func (l *lane) finish(c *call, resp *pb.MatchResponse, err error) {
	c.resp, c.err = resp, err
	close(c.done)
	<-l.places
}

// send is the goroutine that sends, for as long as the lane is there.
func (l *lane) send() {
	for {
		var c *call
		select {
		case <-l.ctx.Done():
			return
		case c = <-l.queue:
		}
		if err := c.ctx.Err(); err != nil { // nobody waits for it any more
			l.finish(c, nil, status.FromContextError(err).Err())
			continue
		}
		stream, err := l.put(c)
		if err != nil {
			l.finish(c, nil, err)
			continue
		}
		// An error here is the end of the stream, which receive tells.
		_ = stream.SendMsg(c.body)
	}
}

// put adds a call to those that wait for the stream's answers.
func (l *lane) put(c *call) (grpc.ClientStream, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stream == nil {
		l.mu.Unlock()
		stream, end, err := l.open(c.ctx)
		l.mu.Lock()
		if err != nil {
			return nil, err
		}
		l.stream = stream
		go l.receive(stream, end)
	}
	l.pending = append(l.pending, c)
	return l.stream, nil
}

// open opens a stream, which ctx bounds only until it is there. end ends it.
func (l *lane) open(ctx context.Context) (_ grpc.BidiStreamingClient[pb.MatchStreamRequest, pb.MatchStreamResponse], end func(), _ error) {
	life, cancel := context.WithCancel(l.ctx)
	stop := context.AfterFunc(ctx, cancel)
	stream, err := l.api.MatchStream(life, grpc.ForceCodecV2(encoded{}))
	if !stop() && err == nil {
		err = status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		cancel()
		return nil, nil, err
	}
	return stream, cancel, nil
}

// receive hands a stream's answers to their callers until it ends.
func (l *lane) receive(stream grpc.BidiStreamingClient[pb.MatchStreamRequest, pb.MatchStreamResponse], end func()) {
	defer end()
	for answered := false; ; answered = true {
		resp, err := stream.Recv()
		l.mu.Lock()
		if err == nil && (len(l.pending) == 0 || l.pending[0].id != resp.Id) {
			err = status.Errorf(codes.Internal, "answer %d is not the next", resp.Id)
		}
		if err != nil {
			left := l.pending
			l.pending, l.stream = nil, nil
			l.mu.Unlock()
			expired := answered && status.Code(err) == codes.Unauthenticated
			for _, c := range left {
				if expired { // the token that the stream began with; the next has that of now
					l.queue <- c
				} else {
					l.finish(c, nil, lost(err))
				}
			}
			return
		}
		c := l.pending[0]
		l.pending = l.pending[1:]
		l.mu.Unlock()
		if resp.Error != nil {
			l.finish(c, nil, errorOf(resp.Error))
		} else {
			l.finish(c, resp.Answer, nil)
		}
	}
}

// lost is the error of a request whose stream has ended: another replica may answer it,
// whatever ended the stream. Only who may not ask here may ask nowhere.
func lost(err error) error {
	switch st := status.Convert(err); st.Code() {
	case codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented, codes.Canceled:
		return err
	default:
		return status.Error(codes.Unavailable, "the stream has ended: "+st.Message())
	}
}

// errorOf is a status from its message.
func errorOf(e *pb.Error) error {
	code := codes.Unknown
	if err := code.UnmarshalJSON([]byte(strconv.Quote(e.Code))); err != nil {
		return status.Error(codes.Unknown, e.Code+": "+e.Message)
	}
	return status.Error(code, e.Message)
}

// encoded is a codec that sends what is encoded already.
type encoded struct{}

// Marshal implements encoding.CodecV2.
func (encoded) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

// Unmarshal implements encoding.CodecV2.
func (encoded) Unmarshal(data mem.BufferSlice, v any) error {
	return proto.Unmarshal(data.Materialize(), v.(proto.Message))
}

// Name implements encoding.CodecV2.
func (encoded) Name() string { return "proto" }
