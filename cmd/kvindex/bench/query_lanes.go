// This file sends requests, as cheaply as possible, since the measuring process shares its
// processors with the server that it measures. Requests are encoded beforehand, and only a few
// answers are decoded: those are compared with the truth.

package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

// How many requests may be under way: more than a stage works on and lets wait, so that it
// refuses some.
const (
	unaryLanes  = 2048
	streamLanes = 16 // each with up to pipelined requests at a time
	pipelined   = 64
	jsonLanes   = 512 // connections
	checkEvery  = 32  // one in this many answers is checked
)

// prompt is a request, encoded.
type prompt struct {
	body  []byte
	check func(*pb.MatchResponse) error
}

// prompts encodes the requests of a case as its transport has them.
func (c *queryCase) prompts() []prompt {
	if c.Stage != nil {
		requests, blocks := c.Stage.requests(c.blocks)
		all := make([]prompt, len(requests))
		for i, req := range requests {
			all[i] = prompt{encodedFor(c.transport, i, req), func(resp *pb.MatchResponse) error { return checkWhole(resp, blocks[i]) }}
		}
		return all
	}
	all := make([]prompt, differing)
	for number := range all {
		req := &pb.MatchRequest{Model: promptModel}
		tokens := promptTokens(c.blocks, number)
		if c.Tokens {
			req.Tokens = tokens
		} else {
			for _, h := range promptLocals(tokens) {
				req.LocalHashes = append(req.LocalHashes, uint64(h))
			}
		}
		p := &all[number]
		p.body = encodedFor(c.transport, number, req)
		p.check = func(resp *pb.MatchResponse) error { return checkAnswer(resp, c.workers, c.blocks, number) }
	}
	return all
}

// encodedFor is a request as a transport has it.
func encodedFor(transport string, number int, req *pb.MatchRequest) (body []byte) {
	var err error
	switch transport {
	case "json":
		body, err = protojson.MarshalOptions{UseProtoNames: true}.Marshal(req)
	case "stream":
		body, err = proto.Marshal(&pb.MatchStreamRequest{Id: uint64(number), Request: req})
	default:
		body, err = proto.Marshal(req)
	}
	if err != nil {
		panic("BUG: a request that cannot be encoded: " + err.Error())
	}
	return body
}

// unchecked takes any answer for right.
func unchecked(of []prompt) []prompt {
	for i := range of {
		of[i].check = func(*pb.MatchResponse) error { return nil }
	}
	return of
}

// checkAnswer compares an answer with the truth.
func checkAnswer(resp *pb.MatchResponse, workers, blocks, number int) error {
	if int(resp.GetBlocks()) != blocks || len(resp.GetMatches()) != workers {
		return fmt.Errorf("a wrong answer: %d workers hold something of a prompt of %d blocks, not %d of %d", len(resp.GetMatches()), resp.GetBlocks(), workers, blocks)
	}
	seen := make([]bool, workers)
	for _, m := range resp.Matches {
		i, err := strconv.Atoi(strings.TrimPrefix(m.Worker, "worker-"))
		if err != nil || i < 0 || i >= workers || seen[i] || int(m.DepthBlocks) != promptDepth(i, workers, blocks, number) {
			return fmt.Errorf("a wrong answer: %q is said to hold %d blocks of prompt %d", m.Worker, m.DepthBlocks, number)
		}
		seen[i] = true
	}
	return nil
}

// lanes opens what asks for the prompts; without any it asks for nothing, of the same
// server: a health check, a request on a stream that has none in it, a probe.
func (c *queryCase) lanes(at addresses, of []prompt) (*lanes, error) {
	var l lanes
	var asked atomic.Uint64
	if c.transport == "json" {
		dial, header := dialPlain, ""
		if c.Stage != nil {
			var err error
			if dial, header, err = c.Stage.dialHTTP(); err != nil {
				return nil, err
			}
		}
		text := make([][]byte, max(1, len(of)))
		for i := range text {
			if of == nil {
				text[i] = fmt.Appendf(nil, "GET /healthz HTTP/1.1\r\nHost: %s\r\n%s\r\n", at.HTTP, header)
				continue
			}
			text[i] = fmt.Appendf(nil, "POST /v1/match HTTP/1.1\r\nHost: %s\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
				at.HTTP, header, len(of[i].body), of[i].body)
		}
		for range jsonLanes {
			l.of = append(l.of, &jsonLane{addr: at.HTTP, dial: dial, text: text, prompts: of, asked: &asked})
		}
		l.close = func() {
			for _, one := range l.of {
				one.(*jsonLane).close()
			}
		}
		return &l, nil
	}
	var conns []*grpc.ClientConn
	l.close = func() {
		for _, conn := range conns {
			conn.Close()
		}
	}
	opts := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(64<<20))}
	if c.Stage != nil {
		opts = append(opts, c.Stage.Security.DialOptions()...)
	}
	for range c.Connections {
		conn, err := grpc.NewClient(at.GRPC, opts...)
		if err != nil {
			l.close()
			return nil, err
		}
		conns = append(conns, conn)
	}
	if c.transport == "stream" {
		for i := range streamLanes {
			l.of = append(l.of, &streamLane{conn: conns[i%len(conns)], prompts: of, asked: &asked})
		}
		return &l, nil
	}
	for i := range unaryLanes {
		one := &unaryLane{conn: conns[i%len(conns)], method: pb.KVIndex_Match_FullMethodName, prompts: of, asked: &asked}
		if of == nil {
			one.method = healthpb.Health_Check_FullMethodName
		}
		l.of = append(l.of, one)
	}
	return &l, nil
}

// next returns the next prompt, and whether its answer shall be checked.
func next(of []prompt, asked *atomic.Uint64) (n int, check bool) {
	i := asked.Add(1) - 1
	if len(of) == 0 {
		return 0, false
	}
	return int(i % uint64(len(of))), i/uint64(len(of))%checkEvery == 0
}

// body is what is sent for prompt n.
func body(of []prompt, n int) []byte {
	if of == nil {
		return nil
	}
	return of[n].body
}

// rawCodec sends what is encoded already and leaves answers so, in a *[]byte if they
// are wanted.
type rawCodec struct{}

// Marshal implements encoding.CodecV2.
func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

// Unmarshal implements encoding.CodecV2.
func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if to, _ := v.(*[]byte); to != nil {
		*to = data.Materialize()
	}
	return nil
}

// Name implements encoding.CodecV2.
func (rawCodec) Name() string { return "proto" }

// unaryLane makes one gRPC call at a time.
type unaryLane struct {
	conn    *grpc.ClientConn
	method  string
	prompts []prompt
	asked   *atomic.Uint64
}

func (l *unaryLane) run(ctx context.Context, due <-chan time.Time, t *tally) {
	for at := range due {
		sent := time.Now()
		n, check := next(l.prompts, l.asked)
		var answer []byte
		to := &answer
		if !check {
			to = nil
		}
		err := l.conn.Invoke(ctx, l.method, body(l.prompts, n), to)
		r := resultOf(ctx, err)
		if err == nil && check {
			if err = checkBytes(answer, &l.prompts[n]); err != nil {
				r = hasFailed
			}
		}
		t.count(at, sent, r, check, err)
	}
}

func resultOf(ctx context.Context, err error) result {
	switch code := status.Code(err); {
	case err == nil:
		return wasAnswered
	case code == codes.ResourceExhausted, code == codes.DeadlineExceeded && ctx.Err() == nil: // the second: it took too long to arrive
		return wasRefused
	}
	return hasFailed
}

func checkBytes(answer []byte, p *prompt) error {
	resp := new(pb.MatchResponse)
	if err := proto.Unmarshal(answer, resp); err != nil {
		return err
	}
	return p.check(resp)
}

// streamLane is a stream.
type streamLane struct {
	conn    *grpc.ClientConn
	prompts []prompt
	asked   *atomic.Uint64
}

// sentOne is a request on a stream whose answer is awaited.
type sentOne struct {
	at, sent time.Time
	n        int
	check    bool
}

func (l *streamLane) run(ctx context.Context, due <-chan time.Time, t *tally) {
	stream, broken := l.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, pb.KVIndex_MatchStream_FullMethodName)
	waiting := make(chan sentOne, pipelined)
	var all sync.WaitGroup
	all.Go(func() {
		for s := range waiting {
			var answer []byte
			err := broken
			if err == nil {
				if err = stream.RecvMsg(&answer); err != nil {
					broken = err // this goroutine's from now on
				}
			}
			r := resultOf(ctx, err)
			if err == nil {
				r, err = l.read(answer, s)
			}
			t.count(s.at, s.sent, r, s.check, err)
		}
	})
	usable := broken == nil
	for at := range due {
		n, check := next(l.prompts, l.asked)
		waiting <- sentOne{at, time.Now(), n, check}
		if usable {
			usable = stream.SendMsg(body(l.prompts, n)) == nil // else receiving tells
		}
	}
	if usable {
		_ = stream.CloseSend()
	}
	close(waiting)
	all.Wait()
}

// read finds out what became of a request.
func (l *streamLane) read(answer []byte, s sentOne) (result, error) {
	found, isError := protowire.Number(0), protowire.Number(3)
	for rest := answer; len(rest) > 0; {
		num, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return hasFailed, protowire.ParseError(size)
		}
		found, rest = max(found, num), rest[size:]
	}
	if found != isError && !s.check {
		return wasAnswered, nil
	}
	resp := new(pb.MatchStreamResponse)
	if err := proto.Unmarshal(answer, resp); err != nil {
		return hasFailed, err
	}
	switch {
	case resp.Error == nil:
		if err := l.prompts[s.n].check(resp.Answer); err != nil {
			return hasFailed, err
		}
		return wasAnswered, nil
	case resp.Error.Code == "RESOURCE_EXHAUSTED":
		return wasRefused, nil
	case l.prompts == nil: // that there is nothing in it is the answer
		return wasAnswered, nil
	}
	return hasFailed, errors.New(resp.Error.Code + ": " + resp.Error.Message)
}

// jsonLane is an HTTP connection, opened when it is needed. It is written by hand:
// net/http's client costs more than its server.
type jsonLane struct {
	addr    string
	dial    func(ctx context.Context, addr string) (net.Conn, error)
	text    [][]byte
	prompts []prompt
	asked   *atomic.Uint64
	conn    net.Conn
	r       *bufio.Reader
}

func (l *jsonLane) close() {
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
}

func (l *jsonLane) run(ctx context.Context, due <-chan time.Time, t *tally) {
	for at := range due {
		sent := time.Now()
		n, check := next(l.prompts, l.asked)
		r, err := l.ask(ctx, n, check)
		t.count(at, sent, r, check, err)
	}
}

func (l *jsonLane) ask(ctx context.Context, n int, check bool) (result, error) {
	if l.conn == nil {
		conn, err := l.dial(ctx, l.addr)
		if err != nil {
			return hasFailed, err
		}
		l.conn, l.r = conn, bufio.NewReaderSize(conn, 16<<10)
	}
	until, _ := ctx.Deadline()
	if err := l.conn.SetDeadline(until); err != nil {
		return hasFailed, err
	}
	// What is refused is not read whole: an error of writing is told by reading.
	_, unsent := l.conn.Write(l.text[n])
	resp, err := http.ReadResponse(l.r, nil)
	if err != nil {
		l.close()
		return hasFailed, errors.Join(unsent, err)
	}
	var answer bytes.Buffer
	to := io.Discard
	if check || resp.StatusCode != http.StatusOK {
		to = &answer
	}
	_, err = io.Copy(to, resp.Body)
	if err != nil || resp.Close || unsent != nil {
		l.close()
	}
	switch {
	case resp.StatusCode == http.StatusTooManyRequests:
		return wasRefused, nil
	case err != nil:
		return hasFailed, err
	case resp.StatusCode != http.StatusOK:
		return hasFailed, fmt.Errorf("HTTP %s: %s", resp.Status, answer.Bytes())
	case check:
		m := new(pb.MatchResponse)
		if err := protojson.Unmarshal(answer.Bytes(), m); err != nil {
			return hasFailed, err
		}
		if err := l.prompts[n].check(m); err != nil {
			return hasFailed, err
		}
	}
	return wasAnswered, nil
}
