package query

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
)

// Headers longer than 16 KiB are refused over either transport, and all that a caller
// needs to send is far below that: the longest token, a trace, a certificate.
func TestHeadersAreLimited(t *testing.T) {
	ca := securetest.NewCA(t)
	pair, own := ca.Issue(t, "server"), ca.Issue(t, "client")
	dir := t.TempDir()
	token := strings.Repeat("t", 4096)
	path := filepath.Join(dir, "tokens")
	securetest.WriteFile(t, path, token+"\n")
	s := serve(t, fleet(t), Config{TokenFile: path, TLS: secure.Server{CertFile: pair.Cert, KeyFile: pair.Key, ClientCAFile: ca.File}})
	as := secure.Client{TLS: true, CAFile: ca.File, CertFile: own.Cert, KeyFile: own.Key, TokenFile: path}
	cl, err := client.Dial(s.GRPCAddr().String(), patience, as.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	web := httpsClient(t, ca, &own)
	trace := map[string]string{"traceparent": "00-" + callerTrace + "-00000000000000a1-01", "tracestate": strings.Repeat("k=v,", 127) + "k=v"}
	for _, c := range []struct {
		name     string
		more     int // bytes
		http     string
		grpcSays string
	}{
		{"all that there may be", 4 << 10, "200 OK", ""},
		{"too long", 14 << 10, "431 Request Header Fields Too Large", "header list size to send violates the maximum size (16384 bytes) set by server"},
	} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "x-more", strings.Repeat("x", c.more))
		req, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+s.HTTPAddr().String()+"/v1/status", nil)
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range trace {
			ctx = metadata.AppendToOutgoingContext(ctx, name, value)
			req.Header.Set(name, value)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		req.Header.Set("X-More", strings.Repeat("x", c.more))
		if _, err := cl.Status(ctx); c.grpcSays == "" && err != nil || c.grpcSays != "" && (err == nil || !strings.Contains(err.Error(), c.grpcSays)) {
			t.Errorf("%s, gRPC: %v, want %q", c.name, err, c.grpcSays)
		}
		resp, err := web.Do(req)
		if err != nil {
			t.Errorf("%s, HTTP: %v", c.name, err)
			continue
		}
		resp.Body.Close()
		if resp.Status != c.http {
			t.Errorf("%s, HTTP: %s, want %s", c.name, resp.Status, c.http)
		}
	}
}

// Who sends them although he was told has his stream reset, and no other.
func TestHeadersThatAreSentInSpite(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	d := newDeaf(t, s)
	message := mustMarshal(t, &pb.MatchRequest{Model: "m", Tokens: prompt})
	d.more = 14
	if err := d.ask(pb.KVIndex_Match_FullMethodName, true, message); err != nil {
		t.Fatal(err)
	}
	d.more = 16 // and the others
	if err := d.ask(pb.KVIndex_Match_FullMethodName, true, message); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-d.resets:
		if f.StreamID != 3 || f.ErrCode != http2.ErrCodeFrameSize {
			t.Errorf("stream %d was reset with %v, want 3 with FRAME_SIZE_ERROR", f.StreamID, f.ErrCode)
		}
	case <-d.closed:
		t.Fatal("the connection is closed")
	}
	eventually(t, "the other is answered", func() bool { return s.unread.held() > 0 })
	if d.isClosed() {
		t.Error("the connection is closed")
	}
}

// Requests that need no place are held for ever by nobody: their messages arrive in
// time, and if there are too many that do not, the oldest makes room.
func TestOtherSlowSenders(t *testing.T) {
	methods := []string{pb.KVIndex_Workers_FullMethodName, pb.KVIndex_Status_FullMethodName, healthpb.Health_Check_FullMethodName, healthpb.Health_List_FullMethodName}
	open := func(s *Server) (all []grpc.ClientStream) {
		conn := connect(t, s)
		for i, method := range methods {
			st, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, method)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, st)
			eventually(t, "it arrives", func() bool { return s.senders.number() == min(i+1, s.limits.MaxStreams) })
		}
		return all
	}
	ends := func(s *Server, streams []grpc.ClientStream, counted int) {
		for i, st := range streams {
			if err := st.RecvMsg(new(pb.StatusResponse)); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("%s: %v, want DeadlineExceeded", methods[i], err)
			}
		}
		eventually(t, "each is counted", func() bool { return metricOf(t, s, refusedMetric("grpc", "slow_sender")) == fmt.Sprint(counted) })
	}
	cfg := measured(t)
	cfg.Limits.RequestTimeout = time.Second
	timed := serve(t, fleet(t), cfg)
	ends(timed, open(timed), len(methods))
	if n := timed.senders.number(); n != 0 {
		t.Errorf("%d are still open", n)
	}

	cfg = measured(t)
	cfg.Limits = Limits{MaxStreams: 3, RequestTimeout: time.Minute}
	s := serve(t, fleet(t), cfg)
	streams := open(s)
	ends(s, streams[:1], 1)
	for range 2 { // their messages are there at once
		if _, err := healthpb.NewHealthClient(connect(t, s)).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
			t.Error(err)
		}
	}
	ends(s, streams[1:2], 2) // who made room for both
	for _, st := range streams[2:] {
		if err := st.SendMsg(&healthpb.HealthCheckRequest{}); err != nil {
			t.Error(err)
		}
		if err := st.CloseSend(); err != nil {
			t.Error(err)
		}
		if err := st.RecvMsg(new(pb.StatusResponse)); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "nobody is left", func() bool { return s.senders.number() == 0 })
}

// number is how many are sending.
func (s *senders) number() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open.Len()
}
