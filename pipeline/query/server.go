// This file is the life of the two listeners.

package query

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"kvindex/pipeline/secure"
)

// Config is what a Server can be told. The zero value serves nothing.
type Config struct {
	GRPCAddr string // host:port to serve gRPC on; port 0 takes a free one; empty: none
	HTTPAddr string // the same for HTTP
	Limits   Limits

	TLS         secure.Server // of both ports
	TokenFile   string        // bearer tokens that callers must show, as secure.Tokens reads them; "": everybody may ask
	OpenMetrics bool          // GET /metrics needs neither token nor certificate

	Tracer  trace.Tracer         // nil: no tracing, at no cost; see SetupTracing
	Meters  metric.MeterProvider // nil: no metrics; see SetupMetrics
	Metrics http.Handler         // what GET /metrics shows; nil: nothing is there
	Logger  *slog.Logger         // nil: slog.Default()
}

// Server answers queries over gRPC and HTTP. Start it once, shut it down once.
type Server struct {
	cfg     Config
	limits  Limits
	src     Source
	service *Service
	in      *instruments
	gate    *gate
	unread  *unread
	tokens  *secure.Tokens // nil: everybody may ask
	recheck time.Duration  // how long a stream may go on after its token has expired
	log     *slog.Logger
	dumping sync.Mutex // held by the one dump that may be under way

	scraping sync.Mutex // held while the metrics are made

	matchStreams, otherStreams atomic.Int64 // open
	senders                    senders

	drainOnce sync.Once
	draining  chan struct{} // closed when shutdown begins

	grpc           *grpc.Server
	http           *http.Server
	grpcAt, httpAt net.Listener
	serving        sync.WaitGroup
	failed         chan error
}

// NewServer returns a Server that is not listening yet.
func NewServer(src Source, cfg Config) (*Server, error) {
	if err := cfg.Limits.Validate(); err != nil {
		return nil, err
	}
	if cfg.Meters == nil {
		cfg.Meters = noop.NewMeterProvider()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := cfg.TLS.Validate(); err != nil {
		return nil, err
	}
	limits := cfg.Limits.withDefaults()
	gate, unread := newGate(limits), newUnread(limits)
	in, err := newInstruments(cfg.Meters.Meter("kvindex/pipeline/query"), gate, unread)
	if err != nil {
		return nil, fmt.Errorf("query metrics: %w", err)
	}
	s := &Server{
		cfg:      cfg,
		limits:   limits,
		gate:     gate,
		unread:   unread,
		src:      src,
		service:  NewService(src, cfg.Limits),
		in:       in,
		log:      cfg.Logger,
		draining: make(chan struct{}),
		failed:   make(chan error, 2),
		recheck:  5 * time.Second,
		senders:  senders{most: limits.MaxStreams},
	}
	if cfg.TokenFile != "" {
		if s.tokens, err = secure.NewTokens(cfg.TokenFile, s.notReloaded); err != nil {
			return nil, fmt.Errorf("auth-token-file: %w", err)
		}
	}
	s.service.traced = cfg.Tracer != nil
	s.grpc = s.newGRPC()
	s.http = s.newHTTP()
	return s, nil
}

// Start listens and serves until Shutdown; it returns as soon as the listeners
// are open. The context bounds only that.
func (s *Server) Start(ctx context.Context) error {
	var err error
	if s.cfg.GRPCAddr != "" {
		if s.grpcAt, err = s.listen(ctx, overGRPC, s.cfg.GRPCAddr); err != nil {
			return fmt.Errorf("query: gRPC: %w", err)
		}
	}
	if s.cfg.HTTPAddr != "" {
		if s.httpAt, err = s.listen(ctx, overHTTP, s.cfg.HTTPAddr); err != nil {
			if s.grpcAt != nil {
				s.grpcAt.Close()
			}
			return fmt.Errorf("query: HTTP: %w", err)
		}
	}
	if s.grpcAt != nil {
		s.serving.Go(func() {
			if err := s.grpc.Serve(s.grpcAt); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				s.failed <- fmt.Errorf("query: gRPC: %w", err)
			}
		})
	}
	if s.httpAt != nil {
		s.serving.Go(func() {
			lis := s.httpAt
			if s.cfg.TLS.On() {
				lis = tls.NewListener(lis, s.cfg.TLS.Config(false, s.notReloaded))
			}
			if err := s.http.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
				s.failed <- fmt.Errorf("query: HTTP: %w", err)
			}
		})
	}
	return nil
}

// Failed yields an error if a listener dies while it should serve.
func (s *Server) Failed() <-chan error { return s.failed }

// GRPCAddr returns where gRPC is served, with the port that was really taken;
// nil before Start or if it is not.
func (s *Server) GRPCAddr() net.Addr { return addrOf(s.grpcAt) }

// HTTPAddr is GRPCAddr for HTTP.
func (s *Server) HTTPAddr() net.Addr { return addrOf(s.httpAt) }

func addrOf(l net.Listener) net.Addr {
	if l == nil {
		return nil
	}
	return l.Addr()
}

// Drain makes health and readiness say no, so that callers go elsewhere, while
// queries are still answered. Shutdown begins with it; call it earlier to give
// them time.
func (s *Server) Drain() { s.drainOnce.Do(func() { close(s.draining) }) }

// Shutdown drains, closes the listeners and waits for requests that are being
// answered, until the context ends: then it cuts them off and says so.
func (s *Server) Shutdown(ctx context.Context) error {
	s.Drain()
	var httpErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		if httpErr = s.http.Shutdown(ctx); httpErr != nil {
			s.http.Close()
		}
	})
	cut := context.AfterFunc(ctx, s.grpc.Stop) // makes GracefulStop return
	s.grpc.GracefulStop()
	wg.Wait()
	s.serving.Wait()
	if !cut() || httpErr != nil {
		return fmt.Errorf("query: requests were cut off: %w", ctx.Err())
	}
	return nil
}

// notReloaded tells of a file that has changed and cannot be used.
func (s *Server) notReloaded(err error) {
	s.in.reloads.Add(context.Background(), 1)
	s.log.Error("a changed file cannot be used, its former content stays in use", "error", err)
}

// readiness is the source's, or that we are going.
func (s *Server) readiness() Readiness {
	select {
	case <-s.draining:
		return Readiness{Missing: []string{"draining: this instance is shutting down"}}
	default:
		return s.src.Readiness()
	}
}
