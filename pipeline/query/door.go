// This file is what a request or a connection passes before anything of it is
// read: how many there may be, and who may ask.

package query

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	pb "kvindex/pipeline/query/kvindexpb"
)

var healthPrefix = "/" + healthpb.Health_ServiceDesc.ServiceName + "/"

// unary are our methods with one request and one answer.
var unary = func() map[string]bool {
	m := map[string]bool{}
	for _, d := range pb.KVIndex_ServiceDesc.Methods {
		m["/"+pb.KVIndex_ServiceDesc.ServiceName+"/"+d.MethodName] = true
	}
	return m
}()

// tapGRPC runs as soon as a request's headers are there. It must not block.
func (s *Server) tapGRPC(ctx context.Context, info *tap.Info) (context.Context, error) {
	if strings.HasPrefix(info.FullMethodName, healthPrefix) {
		return ctx, nil
	}
	if s.tokens != nil {
		var header string
		if v := info.Header.Get("authorization"); len(v) > 0 {
			header = v[0]
		}
		if err := s.tokens.Check(header); err != nil {
			s.refuse(overGRPC, tokenRefusal(err), peerOf(ctx), err)
			return ctx, status.Error(codes.Unauthenticated, err.Error())
		}
	}
	if !unary[info.FullMethodName] {
		return ctx, nil
	}
	m, _ := methodOf(info.FullMethodName)
	return s.arriving(ctx, m)
}

// arrival is a request whose headers are there and whose message is not yet.
type arrival struct {
	place *place      // nil: it needs none
	stop  func() bool // of what happens if the message does not arrive
}

type arrivalKey struct{}

// arriving bounds the wait for a request's message, and lets in no more queries
// than there are places for. The stream's own context ends with the stream, and
// what is made here with it.
func (s *Server) arriving(stream context.Context, m method) (context.Context, error) {
	ctx, cancel := context.WithTimeout(stream, s.limits.RequestTimeout)
	_ = cancel // else the end of the stream does it
	a := new(arrival)
	if m.matches() {
		var err error
		if a.place, err = s.gate.admit(func() {
			s.refuse(overGRPC, slowSender, peerOf(stream), s.gate.slow)
			cancel()
		}); err != nil {
			cancel()
			s.refusedBusy(overGRPC, err)
			s.in.requests.Add(context.Background(), 1, s.in.counted[overGRPC][m][codes.ResourceExhausted]...)
			return stream, err
		}
	}
	a.stop = context.AfterFunc(ctx, func() {
		if a.place != nil {
			a.place.end()
		}
		if ctx.Err() == context.DeadlineExceeded && stream.Err() != context.DeadlineExceeded { // else the caller has gone, or its own time is up
			s.refuse(overGRPC, slowSender, peerOf(stream), errors.New("the request's message did not arrive"))
		}
	})
	return context.WithValue(ctx, arrivalKey{}, a), nil
}

// arrived returns the place of a request whose message is there, nil if it has
// none or has lost it.
func arrived(ctx context.Context) *place {
	if a, ok := ctx.Value(arrivalKey{}).(*arrival); ok && a.stop() {
		return a.place
	}
	return nil
}

func peerOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}

// letIn is the same for HTTP: everybody may see whether the process is up and
// ready, and whatever else only those who may.
func (s *Server) letIn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case pathAlive, pathReady:
		case pathMetrics:
			if s.cfg.OpenMetrics {
				break
			}
			fallthrough
		default:
			if why, err := s.mayAsk(r); err != nil {
				s.refuse(overHTTP, why, r.RemoteAddr, err)
				writeError(w, err)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) mayAsk(r *http.Request) (refusal, error) {
	if s.cfg.TLS.ClientCAFile != "" && len(r.TLS.PeerCertificates) == 0 {
		return noCertificate, &httpError{http.StatusForbidden, codeName(codes.PermissionDenied), "no client certificate was shown"}
	}
	if s.tokens != nil {
		if err := s.tokens.Check(r.Header.Get("Authorization")); err != nil {
			return tokenRefusal(err), status.Error(codes.Unauthenticated, err.Error())
		}
	}
	return 0, nil
}

// tellingTLS is gRPC's TLS that tells of handshakes that fail.
type tellingTLS struct {
	credentials.TransportCredentials
	s *Server
}

func (c tellingTLS) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := c.TransportCredentials.ServerHandshake(conn)
	if err != nil && !errors.Is(err, io.EOF) { // a probe of the port says nothing and leaves
		c.s.refuse(overGRPC, noHandshake, conn.RemoteAddr().String(), err)
	}
	return secured, info, err
}

func (c tellingTLS) Clone() credentials.TransportCredentials {
	return tellingTLS{c.TransportCredentials.Clone(), c.s}
}

// httpLog takes what net/http has to say: of connections that break, at debug
// level, and of handshakes that fail, which it tells nobody else.
func (s *Server) httpLog(line string) {
	if why, ok := strings.CutPrefix(line, "http: TLS handshake error from "); ok && !strings.HasSuffix(why, ": EOF") {
		from, why, _ := strings.Cut(why, ": ")
		s.refuse(overHTTP, noHandshake, from, errors.New(why))
		return
	}
	s.log.Debug(line)
}

// logWriter gives each line to a function.
type logWriter func(line string)

func (w logWriter) Write(b []byte) (int, error) {
	w(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

// doorListener accepts a number of connections at a time and closes what comes
// beyond, so that it is known at once.
type doorListener struct {
	net.Listener
	most   int64
	open   atomic.Int64
	refuse func(why refusal, from net.Addr, err error)
	// writeTimeout bounds each write; 0: whoever uses the connections does.
	writeTimeout time.Duration
}

// listen opens a port.
func (s *Server) listen(ctx context.Context, t transport, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	d := &doorListener{Listener: l, most: int64(s.limits.MaxConnections)}
	d.refuse = func(why refusal, from net.Addr, err error) { s.refuse(t, why, from.String(), err) }
	if t == overGRPC {
		d.writeTimeout = s.limits.RequestTimeout
	}
	if tcp, ok := l.Addr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() && !s.cfg.TLS.On() {
		s.log.Warn("listening beyond the loopback without TLS: whoever is on the way can read, and change, queries, answers and tokens",
			"transport", transportNames[t], "address", l.Addr(), "tokens", s.tokens != nil)
	}
	return d, nil
}

// Accept waits for the next connection that there is room for.
func (d *doorListener) Accept() (net.Conn, error) {
	for {
		c, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if d.open.Add(1) <= d.most {
			return &doorConn{Conn: c, door: d}, nil
		}
		d.open.Add(-1)
		c.Close()
		d.refuse(tooManyConnections, c.RemoteAddr(), fmt.Errorf("more than %d connections", d.most))
	}
}

// doorConn tells its listener when it has ended.
type doorConn struct {
	net.Conn
	door *doorListener
	once sync.Once
}

func (c *doorConn) Close() error {
	c.once.Do(func() { c.door.open.Add(-1) })
	return c.Conn.Close()
}

func (c *doorConn) Write(b []byte) (int, error) {
	if d := c.door.writeTimeout; d > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(d)); err != nil {
			return 0, err
		}
	}
	n, err := c.Conn.Write(b)
	if c.door.writeTimeout > 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		// gRPC's writer ends on an error, its reader only when it fails to read.
		c.Close()
		c.door.refuse(slowReader, c.RemoteAddr(), errors.New("the client does not read what it is sent"))
	}
	return n, err
}

// CloseWrite lets net/http say no to a client that is still sending.
func (c *doorConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
