// This file serves JSON over HTTP, and what operators and probes ask for.

package query

import (
	"bytes"
	"cmp"
	"context"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

const (
	pathMatch     = "/v1/match"
	pathMatchMany = "/v1/match_many"
	pathWorkers   = "/v1/workers"
	pathStatus    = "/v1/status"
	pathAlive     = "/healthz"
	pathReady     = "/readyz"
	pathMetrics   = "/metrics"
)

// httpAnswer works a request out and leaves its answer's JSON, or MessagePack if the
// request is in it, in s.out.
type httpAnswer func(w http.ResponseWriter, r *http.Request, s *httpScratch) error

// httpScratch is the memory of one request, kept for the next.
type httpScratch struct {
	in   bytes.Buffer
	out  []byte
	more []byte          // a part of out that is written beside it
	code int             // status of an answer other than 200, else 0
	ctx  context.Context // with the request's span, if there is one; only while it is answered

	packed bool // the request is in MessagePack, and so is its answer
}

var httpScratches = sync.Pool{New: func() any { return new(httpScratch) }}

// keptBytes is the most that each half of an httpScratch may hold to be kept: a rare
// huge request shall not stay in memory.
const keptBytes = 256 << 10

// trim drops what only the making of an answer has needed, if it is huge.
func (s *httpScratch) trim() {
	if s.in.Cap() > keptBytes {
		s.in = bytes.Buffer{}
	}
	if cap(s.more) > keptBytes {
		s.more = nil
	}
}

// size is how many bytes it holds.
func (s *httpScratch) size() int { return s.in.Cap() + cap(s.out) + cap(s.more) }

// connKey is under which a connection's context has its *doorConn.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c.RemoteAddr().(doorAddr).conn)
}

func (s *Server) newHTTP() *http.Server {
	mux := http.NewServeMux()
	mux.Handle(pathMatch, s.endpoint(matchMethod, http.MethodPost, s.gated(s.matchHTTP)))
	mux.Handle(pathMatchMany, s.endpoint(matchManyMethod, http.MethodPost, s.gated(s.matchManyHTTP)))
	mux.Handle(pathWorkers, s.endpoint(workersMethod, http.MethodGet, s.workersHTTP))
	mux.Handle(pathStatus, s.endpoint(statusMethod, http.MethodGet, s.statusHTTP))
	s.mountMooncake(mux)
	s.mountDynamo(mux)
	mux.HandleFunc("GET "+pathAlive, func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, []byte(`{"alive":true}`))
	})
	mux.HandleFunc("GET "+pathReady, s.readyz)
	if s.cfg.Metrics != nil {
		mux.Handle("GET "+pathMetrics, s.scraped(s.cfg.Metrics))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &httpError{http.StatusNotFound, "NOT_FOUND", "nothing is at " + r.URL.Path})
	})
	return &http.Server{
		Handler:           s.letIn(mux),
		ReadHeaderTimeout: s.limits.HeaderTimeout,
		ReadTimeout:       s.limits.RequestTimeout,
		WriteTimeout:      s.limits.RequestTimeout + time.Second, // so that one that is too slow is told so
		IdleTimeout:       s.limits.IdleTimeout,
		MaxHeaderBytes:    max(1, s.limits.MaxHeaderBytes-4<<10), // net/http adds 4 KiB
		ConnContext:       withConn,
		ErrorLog:          log.New(logWriter(s.httpLog), "", 0),
	}
}

// endpoint measures the requests of one method, turns a panic into an answer,
// and writes what answer leaves.
func (s *Server) endpoint(m method, verb string, answer httpAnswer) http.Handler {
	call := func(w http.ResponseWriter, r *http.Request, scratch *httpScratch) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = s.panicked(r.URL.Path, p)
			}
		}()
		if r.Method != verb {
			w.Header().Set("Allow", verb)
			return &httpError{http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", r.URL.Path + " wants " + verb}
		}
		return answer(w, r, scratch)
	}
	if s.cfg.Tracer != nil && m.matches() {
		call = traceHTTP(s.cfg.Tracer, call)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		s.in.begin(overHTTP)
		scratch := httpScratches.Get().(*httpScratch)
		scratch.code, scratch.ctx, scratch.packed = 0, r.Context(), false
		err := call(w, r, scratch)
		var answer *unreadAnswer
		if err == nil {
			scratch.trim()
			answer, err = s.unread.hold(r.Context().Value(connKey{}).(*doorConn), scratch.size(), s.unread.most)
		}
		s.in.end(scratch.ctx, overHTTP, m, status.Code(err), start)
		if err != nil {
			s.refusedBusy(overHTTP, err)
			if m.isDropin() {
				err = &dropinError{err, scratch.packed}
			}
			writeError(w, err)
		} else {
			write := writeJSON
			if scratch.packed {
				write = writePacked
			}
			write(w, cmp.Or(scratch.code, http.StatusOK), scratch.out)
			answer.take()
		}
		scratch.ctx = nil
		if scratch.trim(); scratch.size() <= 2*keptBytes {
			httpScratches.Put(scratch)
		}
	})
}

// gated has a query read its body, and then work, as the gate lets it; the answer
// is made by then.
func (s *Server) gated(then httpAnswer) httpAnswer {
	return func(w http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
		// A request is read, worked on and answered without a pause: others wait to be read.
		conn := r.Context().Value(connKey{}).(*doorConn)
		place, err := s.admit(int(conn.door.open.Load()), func() { http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) })
		if err != nil {
			return err
		}
		defer func() {
			if place.end(); place.gone { // the cut may yet come: it shall find no other request here
				w.Header().Set("Connection", "close")
			}
		}()
		if err := s.readBody(w, r, scratch); err != nil {
			return err
		}
		if err := place.work(r.Context()); err != nil {
			return err
		}
		return then(w, r.WithContext(context.WithValue(r.Context(), placeKey{}, place)), scratch)
	}
}

func (s *Server) matchHTTP(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	req, err := parseMatch(scratch.in.Bytes(), s.limits)
	if err != nil {
		return err
	}
	resp, err := s.service.Match(r.Context(), req)
	if err != nil {
		return err
	}
	scratch.out = appendMatches(scratch.out[:0], resp)
	return nil
}

func (s *Server) matchManyHTTP(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	req, err := parseMatchMany(scratch.in.Bytes(), s.limits)
	if err != nil {
		return err
	}
	resp, err := s.service.MatchMany(r.Context(), req)
	if err != nil {
		return err
	}
	scratch.out = appendResults(scratch.out[:0], resp)
	return nil
}

func (s *Server) workersHTTP(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	q := r.URL.Query()
	for name := range q {
		if name != "model" {
			return invalid("unknown parameter %q: want model", name)
		}
	}
	resp, err := s.service.Workers(r.Context(), &pb.WorkersRequest{Model: q.Get("model")})
	if err != nil {
		return err
	}
	scratch.out = appendJSON(scratch.out[:0], resp.ProtoReflect())
	return nil
}

func (s *Server) statusHTTP(_ http.ResponseWriter, r *http.Request, scratch *httpScratch) error {
	resp, err := s.service.Status(r.Context(), &pb.StatusRequest{})
	if err != nil {
		return err
	}
	scratch.out = appendJSON(scratch.out[:0], resp.ProtoReflect())
	return nil
}

// readyz is 200 only while queries are answered whole.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	ready := s.readiness()
	code := http.StatusOK
	if !ready.Ready {
		code = http.StatusServiceUnavailable
	}
	body := strconv.AppendBool([]byte(`{"ready":`), ready.Ready)
	body = appendStrings(append(body, `,"missing":`...), ready.Missing)
	writeJSON(w, code, append(body, '}'))
}
