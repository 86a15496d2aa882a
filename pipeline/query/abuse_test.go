// This file is what no well-behaved client sends, over both transports: each gets
// a clear error, and none of it costs memory beyond its limit.

package query

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

// endless yields n bytes, a piece again and again, and counts what was taken.
type endless struct {
	head  []byte
	piece []byte
	left  int64
	taken atomic.Int64
}

func (e *endless) Read(b []byte) (int, error) {
	if len(e.head) > 0 {
		n := copy(b, e.head)
		e.head = e.head[n:]
		e.taken.Add(int64(n))
		return n, nil
	}
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := 0
	for n < len(b) && e.left > 0 {
		m := copy(b[n:], e.piece[:min(int64(len(e.piece)), e.left)])
		n += m
		e.left -= int64(m)
	}
	e.taken.Add(int64(n))
	return n, nil
}

// framed is a gRPC message of n bytes as HTTP/2 carries it.
func framed(n int64, piece []byte) *endless {
	return &endless{head: binary.BigEndian.AppendUint32([]byte{0}, uint32(n)), piece: piece, left: n}
}

func framedBytes(message []byte) *endless { return framed(int64(len(message)), message) }

// answer is what a client makes of one, over either transport.
type answer struct{ code, message string }

// rawGRPC posts a body as gRPC does, without its client's help.
func rawGRPC(t *testing.T, s *Server, contentType, authorization string, body io.Reader) answer {
	t.Helper()
	return rawGRPCTo(t, s, pb.KVIndex_Match_FullMethodName, contentType, authorization, body)
}

// rawGRPCTo is rawGRPC of any method.
func rawGRPCTo(t *testing.T, s *Server, method, contentType, authorization string, body io.Reader) answer {
	t.Helper()
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: h2c}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+s.GRPCAddr().String()+method, io.NopCloser(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	req.Header.Set("Te", "trailers")
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	at := resp.Trailer
	if at.Get("Grpc-Status") == "" {
		at = resp.Header
	}
	var code uint32
	if _, err := fmt.Sscan(at.Get("Grpc-Status"), &code); err != nil {
		return answer{resp.Status, at.Get("Grpc-Message")}
	}
	message, err := url.PathUnescape(at.Get("Grpc-Message"))
	if err != nil {
		t.Fatal(err)
	}
	return answer{codeName(codes.Code(code)), message}
}

// rawHTTP posts a body; length below 0: it is sent in chunks.
func rawHTTP(t *testing.T, s *Server, contentType, authorization string, body io.Reader, length int64) answer {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+s.HTTPAddr().String()+pathMatch, io.NopCloser(body))
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = length
	req.Header.Set("Content-Type", contentType)
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	code, message := errorOf(t, string(text))
	return answer{fmt.Sprintf("%d %s", resp.StatusCode, code), message}
}

func TestAbuse(t *testing.T) {
	const (
		gigabyte   = 1 << 30
		tenMillion = 10_000_000
	)
	s := serve(t, fleet(t), Config{TokenFile: tokenFile(t)})
	good, expired := "Bearer "+goodToken, "Bearer "+oldToken
	zeros := make([]byte, 64<<10)
	message := func(m *pb.MatchRequest) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	// ten million hashes by the message's field, one gigabyte of zeros, tokens as doubles
	hashField := protowire.AppendVarint(protowire.AppendTag(message(&pb.MatchRequest{Model: "m"}), 4, protowire.BytesType), 8*tenMillion)
	manyHashes := func() *endless {
		e := framed(int64(len(hashField))+8*tenMillion, zeros)
		e.head, e.left = append(e.head, hashField...), 8*tenMillion
		return e
	}
	floats := protowire.AppendFixed64(protowire.AppendTag(message(&pb.MatchRequest{Model: "m"}), 3, protowire.Fixed64Type), 0x3ff0000000000000)
	jsonHashes := func(n int64) *endless {
		return &endless{head: []byte(`{"model":"m","local_hashes":[1`), piece: []byte(`,18446744073709551615`), left: 21 * n}
	}
	shortHashes := `{"model":"m","local_hashes":[1` + strings.Repeat(",1", 2_000_000) + `]}`

	for _, c := range []struct {
		name, contentType, authorization string
		body                             func() io.Reader
		length                           int64 // of an HTTP body; 0: in chunks
		want                             answer
	}{
		{"malformed body, HTTP", "application/json", good, func() io.Reader { return strings.NewReader(`{"model"=`) }, 0, answer{"400 INVALID_ARGUMENT", "not JSON: "}},
		{"malformed body, gRPC", "application/grpc", good, func() io.Reader { return framedBytes([]byte{0xff, 0xff, 0xff}) }, 0, answer{"INTERNAL", "unmarshal"}},
		{"1 GB body, HTTP", "application/json", good, func() io.Reader { return &endless{piece: zeros, left: gigabyte} }, 0, answer{"413 RESOURCE_EXHAUSTED", "the body is above the limit of 4194304 bytes"}},
		{"1 GB body of known length, HTTP", "application/json", good, func() io.Reader { return &endless{piece: zeros, left: gigabyte} }, gigabyte, answer{"413 RESOURCE_EXHAUSTED", "the body is above the limit of 4194304 bytes"}},
		{"1 GB body, gRPC", "application/grpc", good, func() io.Reader { return framed(gigabyte, zeros) }, 0, answer{"RESOURCE_EXHAUSTED", "received message larger than max (1073741824 vs. 4194304)"}},
		{"10 million hashes, HTTP", "application/json", good, func() io.Reader { return jsonHashes(tenMillion) }, 0, answer{"413 RESOURCE_EXHAUSTED", "the body is above the limit of 4194304 bytes"}},
		{"10 million hashes, gRPC", "application/grpc", good, func() io.Reader { return manyHashes() }, 0, answer{"RESOURCE_EXHAUSTED", "received message larger than max (80000008 vs. 4194304)"}},
		{"2 million hashes in 4 MB, HTTP", "application/json", good, func() io.Reader { return strings.NewReader(shortHashes) }, 0, answer{"400 INVALID_ARGUMENT", "local_hashes: 2000001 blocks are above the limit of 65536"}},
		{"half a million hashes in 4 MB, gRPC", "application/grpc", good, func() io.Reader {
			return framedBytes(message(&pb.MatchRequest{Model: "m", LocalHashes: make([]uint64, 500_000)}))
		}, 0, answer{"INVALID_ARGUMENT", "local_hashes: 500000 blocks are above the limit of 65536"}},
		{"wrong content type, HTTP", "text/plain", good, func() io.Reader { return strings.NewReader(`{}`) }, 0, answer{"415 UNSUPPORTED_MEDIA_TYPE", `Content-Type is "text/plain": want application/json`}},
		{"wrong content type, gRPC", "application/json", good, func() io.Reader { return strings.NewReader(`{}`) }, 0, answer{"INVALID_ARGUMENT", `invalid gRPC request content-type "application/json"`}},
		{"expired token, HTTP", "application/json", expired, func() io.Reader { return &endless{piece: zeros, left: gigabyte} }, 0, answer{"401 UNAUTHENTICATED", "the bearer token expired at 2020-01-31T00:00:00Z"}},
		{"expired token, gRPC", "application/grpc", expired, func() io.Reader { return framed(gigabyte, zeros) }, 0, answer{"UNAUTHENTICATED", "the bearer token expired at 2020-01-31T00:00:00Z"}},
		{"unknown model, HTTP", "application/json", good, func() io.Reader { return strings.NewReader(`{"model":"x","tokens":[1]}`) }, 0, answer{"404 NOT_FOUND", `unknown model "x"`}},
		{"unknown model, gRPC", "application/grpc", good, func() io.Reader {
			return framedBytes(message(&pb.MatchRequest{Model: "x", Tokens: []uint32{1}}))
		}, 0, answer{"NOT_FOUND", `unknown model "x"`}},
		{"numbers as floats, HTTP", "application/json", good, func() io.Reader { return strings.NewReader(`{"model":"m","tokens":[1.0]}`) }, 0, answer{"400 INVALID_ARGUMENT", "tokens[0]: 1.0 is not a whole number"}},
		{"numbers as floats, gRPC", "application/grpc", good, func() io.Reader { return framedBytes(floats) }, 0, answer{"INVALID_ARGUMENT", "give either tokens or local_hashes"}},
		{"compressed, HTTP", "application/json", good, nil, 0, answer{"415 UNSUPPORTED_MEDIA_TYPE", `Content-Encoding is "gzip"`}},
		{"headers without end, HTTP", "application/json", good, nil, 0, answer{"431", ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var got answer
			var body io.Reader
			if c.body != nil {
				body = c.body()
			}
			switch {
			case c.name == "compressed, HTTP":
				got = compressed(t, s, good)
			case c.name == "headers without end, HTTP":
				got = hugeHeaders(t, s)
			case strings.HasSuffix(c.name, "gRPC"):
				got = rawGRPC(t, s, c.contentType, c.authorization, body)
			case c.length > 0:
				got = rawHTTP(t, s, c.contentType, c.authorization, body, c.length)
			default:
				got = rawHTTP(t, s, c.contentType, c.authorization, body, -1)
			}
			runtime.ReadMemStats(&after)
			if !strings.HasPrefix(got.code, c.want.code) || !strings.Contains(got.message, c.want.message) {
				t.Errorf("got %s %s, want %s %s", got.code, got.message, c.want.code, c.want.message)
			}
			// The buffer of a body doubles up to its limit; lists take 8 bytes a
			// number; the client has buffers too.
			if used := after.TotalAlloc - before.TotalAlloc; used > 64<<20 {
				t.Errorf("%d MiB were allocated", used>>20)
			}
			if e, ok := body.(*endless); ok && e.taken.Load() > 32<<20 {
				t.Errorf("%d bytes of it were taken", e.taken.Load())
			}
		})
	}
	if _, err := shown(t, s, good)["grpc"], shown(t, s, good)["http"]; err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func compressed(t *testing.T, s *Server, authorization string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+s.HTTPAddr().String()+pathMatch, strings.NewReader("\x1f\x8b"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Encoding", "gzip")
	req.Header.Set("Authorization", authorization)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	code, message := errorOf(t, string(text))
	return answer{fmt.Sprintf("%d %s", resp.StatusCode, code), message}
}

func hugeHeaders(t *testing.T, s *Server) answer {
	t.Helper()
	conn, err := net.Dial("tcp", s.HTTPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		fmt.Fprintf(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n")
		io.Copy(conn, &endless{piece: []byte("X-More: and more\r\n"), left: 1 << 30})
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.Status, ""}
}

// slow is a server whose patience ends soon.
func slow(t *testing.T) *Server {
	cfg := measured(t)
	cfg.Limits = Limits{HeaderTimeout: 2 * time.Second, RequestTimeout: 4 * time.Second}
	return serve(t, fleet(t), cfg)
}

// drip sends a piece every 10 ms until it cannot.
func drip(conn net.Conn, piece string) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if _, err := io.WriteString(conn, piece); err != nil {
			return
		}
	}
}

// One that sends its headers or its body a byte at a time is given up.
func TestSlowSenders(t *testing.T) {
	s := slow(t)
	open := func() net.Conn {
		conn, err := net.Dial("tcp", s.HTTPAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	headers := open()
	fmt.Fprint(headers, "POST /v1/match HTTP/1.1\r\nHost: x\r\n")
	go drip(headers, "X-More: 1\r\n")
	var bodies []net.Conn
	for range 8 {
		b := open()
		fmt.Fprint(b, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
		go drip(b, " ")
		bodies = append(bodies, b)
	}
	var streams []grpc.ClientStream
	conn := connect(t, s)
	for range 8 { // their messages never come
		st, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, pb.KVIndex_Match_FullMethodName)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, st)
	}
	for _, a := range askers(t, s) {
		if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Errorf("%s beside slow ones: %v", a.name, err)
		}
	}

	if n, err := headers.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("slow headers: %d bytes, %v, want that the connection is closed", n, err)
	}
	for _, b := range bodies {
		resp, err := http.ReadResponse(bufio.NewReader(b), nil)
		if err != nil {
			t.Errorf("slow body: %v", err)
			continue
		}
		var text bytes.Buffer
		text.ReadFrom(resp.Body)
		if code, message := errorOf(t, text.String()); resp.StatusCode != http.StatusRequestTimeout || code != "REQUEST_TIMEOUT" || !strings.Contains(message, "did not arrive in time") {
			t.Errorf("slow body: %s %s", resp.Status, text.String())
		}
	}
	for _, st := range streams {
		if err := st.RecvMsg(new(pb.MatchResponse)); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("no message: %v, want DeadlineExceeded", err)
		}
	}
	for _, transport := range []string{"grpc", "http"} {
		eventually(t, "each is counted", func() bool { return metricOf(t, s, refusedMetric(transport, "slow_sender")) == "8" })
	}
}

// Those that are slow to arrive make room for others, oldest first, and for no more
// of them than there are.
func TestSlowSendersMakeRoom(t *testing.T) {
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 1, MaxQueue: 1, Deadline: 2 * time.Second, RequestTimeout: time.Minute} // 4 may arrive
	s := serve(t, fleet(t), cfg)
	httpConn, err := net.Dial("tcp", s.HTTPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer httpConn.Close()
	fmt.Fprint(httpConn, "POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
	eventually(t, "it arrives", func() bool { return s.gate.arrivals() == 1 })
	conn := connect(t, s)
	var streams []grpc.ClientStream
	for i := range 3 {
		st, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, pb.KVIndex_Match_FullMethodName)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, st)
		eventually(t, "it arrives", func() bool { return s.gate.arrivals() == int64(i+2) })
		if i < 2 { // there are more than places by now, and they have none
			for _, a := range askers(t, s) {
				if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
					t.Errorf("%s beside %d slow ones: %v", a.name, i+2, err)
				}
			}
		}
	}
	for _, a := range askers(t, s) {
		eventually(t, "a slow one was cut off", func() bool {
			_, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
			if err != nil && status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%s: %v", a.name, err)
			}
			return err == nil
		})
		// There is room again: nobody else has to go.
		for range 3 {
			if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
				t.Errorf("%s: %v", a.name, err)
			}
		}
	}
	resp, err := http.ReadResponse(bufio.NewReader(httpConn), nil)
	if err != nil || resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("the oldest: %v, %v", resp, err)
	}
	if n := s.gate.arrivals(); n != 3 {
		t.Errorf("%d are still arriving, want the three that came later", n)
	}
	for _, st := range streams {
		if err := st.SendMsg(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Error(err)
		}
		if err := st.CloseSend(); err != nil {
			t.Error(err)
		}
		if err := st.RecvMsg(new(pb.MatchResponse)); err != nil {
			t.Errorf("one that is late, and in time: %v", err)
		}
	}
	eventually(t, "all places are free", func() bool {
		s.gate.mu.Lock()
		defer s.gate.mu.Unlock()
		return s.gate.free == 2 && s.gate.arriving.Len() == 0
	})
}

// A cut that comes late finds no other request on its connection.
func TestLateCut(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxConcurrent: 1, MaxQueue: 1, Deadline: time.Millisecond, RequestTimeout: time.Minute}}) // 4 may arrive
	conn, err := net.Dial("tcp", s.HTTPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	const whole = `{"model":"m","tokens":[1]}`
	head := fmt.Sprintf("POST /v1/match HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(whole))
	fmt.Fprint(conn, head)
	g := s.gate
	eventually(t, "it arrives", func() bool { return g.arrivals() == 1 })
	g.mu.Lock()
	first := g.arriving.Front().Value.(*place)
	cut, late, done := first.cut, make(chan struct{}), make(chan struct{})
	first.cut = func() {
		<-late
		cut()
		close(done)
	}
	g.mu.Unlock()
	for range 3 {
		p, err := g.admit(0, func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer p.end()
	}
	go func() {
		for {
			if p, err := g.admit(0, func() {}); err == nil { // it is old enough to be cut
				p.end()
				return
			}
		}
	}()
	eventually(t, "it is cut off", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return first.at == nil
	})
	fmt.Fprint(conn, whole)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusTooManyRequests || !resp.Close || !strings.Contains(string(text), "arrives too slowly") {
		t.Errorf("got %s, closed: %t, %s", resp.Status, resp.Close, text)
	}
	close(late)
	<-done
	fmt.Fprint(conn, head, whole)
	if resp, err := http.ReadResponse(in, nil); err == nil {
		t.Errorf("the next request on the connection: %s", resp.Status)
	}
}

// A gRPC client that sends and never reads is cut off once its connection is full.
func TestClientThatDoesNotRead(t *testing.T) {
	s := slow(t)
	conn, err := net.Dial("tcp", s.GRPCAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	settings := []byte{0, 0, 0, 4, 0, 0, 0, 0, 0} // each has to be acknowledged
	_, err = io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	for many := bytes.Repeat(settings, 1000); err == nil; {
		_, err = conn.Write(many)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after %v it is still connected", patience)
	}
	eventually(t, "it is counted", func() bool { return metricOf(t, s, refusedMetric("grpc", "slow_reader")) == "1" })
}
