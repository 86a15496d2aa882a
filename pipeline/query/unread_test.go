package query

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

// deaf is a gRPC client that answers pings and takes no answers. Its errors are those
// of a connection that is closed.
type deaf struct {
	conn   net.Conn
	frames *http2.Framer
	write  sync.Mutex
	next   uint32 // stream
	closed chan struct{}

	more   int                       // KiB of headers that are sent besides
	resets chan http2.RSTStreamFrame // of streams: the first few
}

func newDeaf(t testing.TB, s *Server) *deaf {
	t.Helper()
	conn, err := net.Dial("tcp", s.GRPCAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	d := &deaf{conn: conn, frames: http2.NewFramer(conn, conn), next: 1, closed: make(chan struct{}), resets: make(chan http2.RSTStreamFrame, 4)}
	fmt.Fprint(conn, http2.ClientPreface)
	if err := d.frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(d.closed)
		for {
			f, err := d.frames.ReadFrame()
			if err != nil {
				return
			}
			switch f := f.(type) {
			case *http2.PingFrame:
				if !f.IsAck() {
					d.write.Lock()
					d.frames.WritePing(true, f.Data)
					d.write.Unlock()
				}
			case *http2.RSTStreamFrame:
				select {
				case d.resets <- *f:
				default:
				}
			}
		}
	}()
	return d
}

// ask sends a request on a stream of its own, which stays open if it is not whole.
func (d *deaf) ask(method string, whole bool, message []byte) error {
	id := d.next
	d.next += 2
	var headers bytes.Buffer
	enc := hpack.NewEncoder(&headers)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1], Sensitive: true}) // in no table: the connection's is another
	}
	for range d.more {
		enc.WriteField(hpack.HeaderField{Name: "x-more", Value: strings.Repeat("x", 1<<10), Sensitive: true})
	}
	d.write.Lock()
	defer d.write.Unlock()
	if err := d.frames.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: headers.Bytes(), EndHeaders: true}); err != nil {
		return err
	}
	return d.frames.WriteData(id, whole, append(framedBytes(message).head, message...))
}

func (d *deaf) isClosed() bool {
	select {
	case <-d.closed:
		return true
	default:
		return false
	}
}

// wide is a stage whose answers are long.
func wide(t testing.TB, workers int) *fakeSource {
	f := newFake()
	for i := range workers {
		name := fmt.Sprintf("worker-%04d", i)
		f.holds(t, name, 0, locals, WorkerState{})
		f.workers = append(f.workers, WorkerStatus{Worker: name, Model: "m"})
	}
	return f
}

// heap is how many bytes are in use after a collection.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// What is sent to clients that take nothing is bounded over all connections, whatever
// they ask, and ends with them.
func TestUnreadAnswersAreBounded(t *testing.T) {
	match := &pb.MatchRequest{Model: "m", Tokens: prompt}
	for method, message := range map[string]proto.Message{
		pb.KVIndex_Match_FullMethodName:       match,
		pb.KVIndex_MatchMany_FullMethodName:   &pb.MatchManyRequest{Requests: []*pb.MatchRequest{match}},
		pb.KVIndex_MatchStream_FullMethodName: &pb.MatchStreamRequest{Request: match},
		pb.KVIndex_Workers_FullMethodName:     &pb.WorkersRequest{},
		healthpb.Health_Check_FullMethodName:  &healthpb.HealthCheckRequest{},
		healthpb.Health_Watch_FullMethodName:  &healthpb.HealthCheckRequest{},
		reflectpb.ServerReflection_ServerReflectionInfo_FullMethodName: &reflectpb.ServerReflectionRequest{
			MessageRequest: &reflectpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "kvindex.v1.KVIndex"}},
	} {
		t.Run(method, func(t *testing.T) {
			const most = 1 << 20
			cfg := measured(t)
			cfg.Limits = Limits{MaxUnreadBytes: most, MaxQueue: 1000, QueueTimeout: time.Minute, Deadline: time.Minute, RequestTimeout: time.Minute}
			s := serve(t, wide(t, 200), cfg)
			before := heap()
			var all []*deaf
			for range 4 {
				d := newDeaf(t, s)
				all = append(all, d)
				for range 100 {
					if err := d.ask(method, method != pb.KVIndex_MatchStream_FullMethodName, mustMarshal(t, message)); err != nil {
						t.Fatal(err)
					}
				}
			}
			eventually(t, "there is no room", func() bool { return s.unread.held() > most-128<<10 })
			for _, a := range askers(t, s) {
				eventually(t, "there is room for nobody", func() bool {
					_, err := a.ask(match)
					return status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "busy: callers have yet to take 1048576 bytes of answers")
				})
			}
			bound := int64(most * 5 / 4)
			if strings.HasPrefix(method, healthPrefix) {
				bound = 410 * (leastPooled + keptBesides) // which are never refused
			} else if code, _ := get(t, s, "/readyz"); code != http.StatusOK {
				t.Errorf("HTTP health: %d", code)
			}
			if _, err := healthpb.NewHealthClient(connect(t, s)).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
				t.Errorf("gRPC health: %v", err)
			}
			if held := s.unread.held(); held > bound {
				t.Errorf("%d bytes are held", held)
			}
			if used := heap() - before; used > 32<<20 { // as much again for the streams, and their client
				t.Errorf("%d MiB are used", used>>20)
			}
			for _, d := range all {
				d.conn.Close()
			}
			eventually(t, "nothing is held", func() bool { return s.unread.held() == 0 })
			for _, a := range askers(t, s) {
				if _, err := a.ask(match); err != nil {
					t.Errorf("%s afterwards: %v", a.name, err)
				}
			}
		})
	}
}

// A connection whose answer is not taken in time is closed, however much room there is.
func TestUnreadAnswersHaveAnEnd(t *testing.T) {
	cfg := measured(t)
	cfg.Limits.RequestTimeout = 300 * time.Millisecond
	s := serve(t, wide(t, 1000), cfg)
	message := mustMarshal(t, &pb.MatchRequest{Model: "m", Tokens: prompt})
	for n := range 2 { // the timer is set again
		d, other := newDeaf(t, s), newDeaf(t, s)
		if err := d.ask(pb.KVIndex_Match_FullMethodName, true, message); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is closed", d.isClosed)
		if held := s.unread.held(); held != 0 || other.isClosed() {
			t.Errorf("%d bytes are held; another is closed: %t", held, other.isClosed())
		}
		eventually(t, "it is counted", func() bool { return metricOf(t, s, refusedMetric("grpc", "slow_reader")) == fmt.Sprint(n+1) })
	}
}

// Those who take nothing make room for others, oldest first, and for no more of them
// than there are.
func TestUnreadAnswersMakeRoom(t *testing.T) {
	cfg := measured(t)
	cfg.Limits = Limits{MaxUnreadBytes: 1 << 20, Deadline: 2 * time.Second, RequestTimeout: time.Minute}
	s := serve(t, wide(t, 1000), cfg)
	message := mustMarshal(t, &pb.MatchRequest{Model: "m", Tokens: prompt})
	first, second, patient := newDeaf(t, s), newDeaf(t, s), newDeaf(t, s)
	if err := first.ask(pb.KVIndex_Match_FullMethodName, true, message); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is answered", func() bool { return s.unread.held() > 0 })
	one := s.unread.held()
	for n := int64(1); n < (1<<20)/one; n++ {
		if err := second.ask(pb.KVIndex_Match_FullMethodName, true, message); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is answered", func() bool { return s.unread.held() == (n+1)*one })
	}
	client := dial(t, s)
	eventually(t, "there is room", func() bool {
		_, err := client.Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt})
		return err == nil
	})
	eventually(t, "the oldest is closed", first.isClosed)
	if second.isClosed() || patient.isClosed() {
		t.Error("another is closed")
	}
	if n := metricOf(t, s, refusedMetric("grpc", "slow_reader")); n != "1" {
		t.Errorf("%s are counted", n)
	}
}

// The same over HTTP, where a connection has one answer.
func TestUnreadAnswersOverHTTP(t *testing.T) {
	cfg := measured(t)
	cfg.Limits = Limits{MaxUnreadBytes: 40 << 20, Deadline: 2 * time.Second, RequestTimeout: time.Minute}
	s := serve(t, wide(t, 1000), cfg)
	one := `{"model":"m","tokens":[1,2,3,4]}`
	body := `{"requests":[` + one + strings.Repeat(","+one, 49) + `]}` // more than sockets hold
	var conns []net.Conn
	for i := range 2 {
		conn, err := net.Dial("tcp", s.HTTPAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", pathMatchMany, len(body), body)
		conns = append(conns, conn)
		eventually(t, "it is answered", func() bool { return s.unread.held() > int64(i+1)*8<<20 })
	}
	whole := 0
	eventually(t, "there is room", func() bool {
		code, text := postMany(t, s, body)
		whole = len(text)
		return code == http.StatusOK
	})
	if n, err := io.Copy(io.Discard, conns[0]); n >= int64(whole) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest took %d bytes of %d: %v", n, whole, err)
	}
}
