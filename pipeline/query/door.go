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

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	pb "kvindex/pipeline/query/kvindexpb"
)

var healthPrefix = "/" + healthpb.Health_ServiceDesc.ServiceName + "/"

// arriving is the context of a request whose message is on its way: it can be ended
// as if the caller's time were over, which is the code that he then gets.
type arriving struct {
	context.Context
	end   context.CancelFunc
	ended atomic.Bool
}

func (c *arriving) cut() {
	c.ended.Store(true)
	c.end()
}

// Err implements context.Context.
func (c *arriving) Err() error {
	err := c.Context.Err()
	if err != nil && c.ended.Load() {
		return context.DeadlineExceeded
	}
	return err
}

type arrivingKey struct{}

// Value implements context.Context.
func (c *arriving) Value(key any) any {
	if key == (arrivingKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// tapGRPC runs as soon as a request's headers are there. It makes the context one
// that can be cut, and refuses nothing: gRPC keeps what it has made for a request
// that is refused here until the caller's own deadline, however far that is.
func (s *Server) tapGRPC(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, end := context.WithCancel(ctx) // the end of the stream ends it too
	return &arriving{Context: ctx, end: end}, nil
}

// placeKey is under which a query's context has its *place.
type placeKey struct{}

// atTheDoor has a method's requests pass the door before their messages are read.
func (s *Server) atTheDoor(d grpc.MethodDesc) grpc.MethodDesc {
	m, _ := methodOf("/" + pb.KVIndex_ServiceDesc.ServiceName + "/" + d.MethodName)
	among := &s.senders
	if m.matches() {
		among = nil // the gate counts them
	}
	next := s.arrives(d, among).Handler
	d.Handler = func(srv any, ctx context.Context, read func(any) error, with grpc.UnaryServerInterceptor) (any, error) {
		if err := s.mayAskGRPC(ctx); err != nil {
			return nil, err
		}
		if m.matches() {
			arriving := ctx.Value(arrivingKey{}).(*arriving)
			place, err := s.admit(0, func() {
				s.refuse(overGRPC, slowSender, peerOf(arriving), s.gate.slow)
				arriving.cut()
			})
			if err != nil {
				s.refusedBusy(overGRPC, err)
				s.in.requests.Add(context.Background(), 1, s.in.counted[overGRPC][m][codes.ResourceExhausted]...)
				return nil, err
			}
			defer place.end()
			ctx = context.WithValue(ctx, placeKey{}, place)
		}
		return next(srv, ctx, read, with)
	}
	return d
}

// admit is the gate's, if there is room for an answer.
func (s *Server) admit(unseen int, cut func()) (*place, error) {
	if err := s.unread.room(); err != nil {
		return nil, err
	}
	return s.gate.admit(unseen, cut)
}

// mayAskGRPC checks a request's token.
func (s *Server) mayAskGRPC(ctx context.Context) error {
	if s.tokens == nil {
		return nil
	}
	err := s.tokens.Check(mdCarrier(incoming(ctx)).Get("authorization"))
	if err == nil {
		return nil
	}
	s.refuse(overGRPC, tokenRefusal(err), peerOf(ctx), err)
	return status.Error(codes.Unauthenticated, err.Error())
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
	unread *unread
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
	d := &doorListener{Listener: l, most: int64(s.limits.MaxConnections), unread: s.unread}
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
			conn := &doorConn{Conn: c, door: d, unread: map[*unreadAnswer]struct{}{}}
			conn.from = doorAddr{c.RemoteAddr(), conn}
			return conn, nil
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
	from doorAddr
	once sync.Once

	unread map[*unreadAnswer]struct{} // guarded by door.unread.mu, as left is
	left   bool
}

// RemoteAddr implements net.Conn.
func (c *doorConn) RemoteAddr() net.Addr { return c.from }

func (c *doorConn) Close() error {
	c.once.Do(func() {
		c.door.open.Add(-1)
		c.door.unread.mu.Lock()
		defer c.door.unread.mu.Unlock()
		c.leave()
	})
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
