// This file puts a relay together and runs it.

package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/trace"

	"kvindex/pipeline/kafkalog"
	"kvindex/pipeline/query"
	"kvindex/pipeline/relay/zmtp"
)

// Relay forwards what engines say of their caches to the events topic.
type Relay struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	addr    chan net.Addr // of HTTP, once it listens

	made  atomic.Bool // what follows
	out   *outlet
	ranks []*rank // in the order of the configuration
}

// rank is one worker-rank: its feed, and what is known of its source.
type rank struct {
	engine *Engine
	feed   *feed
	counts *streamCounts
	status *streamStatus
}

// New returns a relay of a configuration that it checks.
func New(cfg Config) (*Relay, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Relay{cfg: cfg, log: cfg.Logger, started: time.Now(), addr: make(chan net.Addr, 1)}, nil
}

// Run forwards until the context ends, then writes what is left, within
// Config.DrainTimeout and some seconds, and returns nil. It returns an error if
// the HTTP port cannot be had; trouble with engines and brokers is waited out and
// said in the log, the status and by not being ready. Errors: ErrStateDir, when
// nothing was done yet, among others.
func (r *Relay) Run(ctx context.Context) error {
	if dir := r.cfg.StateDir; dir != "" {
		lock, err := r.takeState(dir)
		if err != nil {
			return err
		}
		defer lock.Close() // that of no file does nothing
	}
	to := r.cfg.Producer
	if to == nil {
		client, err := kgo.NewClient(r.kafka()...)
		if err != nil {
			return fmt.Errorf("kafka client: %w", err)
		}
		defer client.Close()
		to = client
	}
	var err error
	name := fmt.Sprintf("relay-%s-%d", r.cfg.Instance, r.started.UnixMilli())
	if r.out, err = newOutlet(to, r.cfg.Topic, name, r.cfg.BufferBytes); err != nil {
		return err
	}
	tracer, flush, err := query.SetupTracing(ctx, query.Identity{Service: "kvindex-relay", Version: r.cfg.Version, Instance: r.cfg.Instance})
	if err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	defer func() {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := flush(within); err != nil {
			r.log.Warn("last spans were not sent", "error", err)
		}
	}()
	meters, scrape, err := query.SetupMetrics()
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	sources, err := r.sources(ctx, tracer)
	if err != nil {
		return err
	}
	r.made.Store(true)
	if err := r.observe(meters); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	listener, err := net.Listen("tcp", r.cfg.HTTPListen)
	if err != nil {
		return fmt.Errorf("http-listen: %w", err)
	}
	r.addr <- listener.Addr()
	server := r.server(scrape)
	var running sync.WaitGroup
	running.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			stop(fmt.Errorf("http: %w", err))
		}
	})
	r.log.Info("relay starts", "instance", r.cfg.Instance, "http", listener.Addr(), "engines", len(r.cfg.Engines), "ranks", len(r.ranks))
	if r.cfg.StateDir == "" {
		r.log.Warn("no state directory: after a restart of the relay all that engines hold has to be asked for, and what they cannot say again is lost")
	}

	// Each engine has a goroutine a source, and no other waits for it.
	var reading sync.WaitGroup
	for _, s := range sources {
		reading.Go(func() { s.run(ctx) })
	}
	<-ctx.Done()
	r.log.Info("relay stops")
	reading.Wait()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.DrainTimeout)
	defer cancel()
	var closing sync.WaitGroup
	for _, k := range r.ranks {
		closing.Go(func() { k.feed.close(end) })
	}
	closing.Wait()
	server.Close()
	running.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// ErrStateDir says that the state directory cannot be used and never will be as it is,
// so that each restart would begin anew. A full disk is not meant: that passes.
var ErrStateDir = errors.New("state-dir cannot be used")

// takeState locks the state directory until the returned file, which may be nil, is
// closed. Errors: errInUse, ErrStateDir.
func (r *Relay) takeState(dir string) (*os.File, error) {
	lock, err := lockState(dir)
	if errors.Is(err, errInUse) {
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	tried := (&files{dir: dir, sync: (*os.File).Sync}).check()
	switch full := errors.Is(tried, syscall.ENOSPC) || errors.Is(tried, syscall.EDQUOT); {
	case full:
		r.log.Warn("no room in the state directory: until there is, a restart will begin anew", "dir", dir, "error", tried)
	case tried != nil:
		lock.Close()
		return nil, fmt.Errorf("%w: %s: %w", ErrStateDir, dir, tried)
	case err != nil:
		r.log.Warn("state directory cannot be locked", "dir", dir, "error", err)
	}
	return lock, nil
}

// kafka returns the options of the client.
func (r *Relay) kafka() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(r.cfg.Brokers...),
		kgo.WithLogger(kafkalog.New(r.log, "relay")),
		kgo.ClientID("kvindex-relay-" + r.cfg.Instance),
		kgo.DialTimeout(5 * time.Second),
		kgo.RequestTimeoutOverhead(10 * time.Second),
		kgo.MetadataMinAge(250 * time.Millisecond),
		kgo.MetadataMaxAge(30 * time.Second),
	}
	return append(append(opts, producerOptions()...), r.cfg.KafkaOptions...)
}

// source reads one engine, or one rank of it.
type source interface{ run(context.Context) }

// sources makes the feeds and what reads for them.
func (r *Relay) sources(ctx context.Context, tracer trace.Tracer) (all []source, err error) {
	for i := range r.cfg.Engines {
		e := &r.cfg.Engines[i]
		var polled []*pollRank
		for n := range e.Ranks {
			number := e.FirstRank + n
			s, err := r.source(ctx, e, number, tracer, &polled)
			if err != nil {
				return nil, fmt.Errorf("engine %d (%q) rank %d: %w", i+1, e.Worker, number, err)
			}
			if s != nil {
				all = append(all, s)
			}
		}
		if polled != nil {
			all = append(all, newPoller(r.log.With("worker", e.Worker), e.Events, int32(e.FirstRank), polled))
		}
	}
	return all, nil
}

// source makes one rank's feed and what reads for it; ranks that are polled
// together are appended to polled.
func (r *Relay) source(ctx context.Context, e *Engine, number int, tracer trace.Tracer, polled *[]*pollRank) (source, error) {
	f, err := newFeed(feedConfig{
		worker: e.Worker, rank: int32(number), model: e.Model, engine: e.mapping(),
		source:    fmt.Sprintf("%s %s %s", e.Kind, e.Events, e.Replay),
		heartbeat: r.cfg.HeartbeatEvery, grace: r.cfg.WorkerGrace,
		stateDir: r.cfg.StateDir, saveEvery: r.cfg.CheckpointEvery,
		logger: r.log, tracer: tracer, stop: ctx.Done(),
	}, r.out)
	if err != nil {
		return nil, err
	}
	pos, ok := f.restore()
	if f.stuck != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrStateDir, r.cfg.StateDir, f.stuck)
	}
	k := &rank{engine: e, feed: f, counts: &streamCounts{}, status: newStreamStatus()}
	r.ranks = append(r.ranks, k)
	if !ok {
		pos = position{next: -1}
	}
	k.status.next(pos.next)
	if e.Kind == TensorRTLLM {
		*polled = append(*polled, newPollRank(f, pos, ok, k.counts, k.status))
		return nil, nil
	}
	log := r.log.With("worker", e.Worker, "rank", number)
	endpoint, err := endpointOf(e.Events, number)
	if err != nil {
		return nil, err
	}
	cfg := zmtp.DefaultConfig(endpoint)
	cfg.Topics = []string{e.Topic}
	sub, err := zmtp.NewSub(cfg)
	if err != nil {
		return nil, err
	}
	var dealer asker
	if e.Replay != "" {
		if endpoint, err = endpointOf(e.Replay, number); err != nil {
			return nil, err
		}
		cfg := zmtp.DefaultConfig(endpoint)
		cfg.Topics = nil
		if dealer, err = zmtp.NewDealer(cfg); err != nil {
			return nil, err
		}
	} else {
		log.Warn("no replay endpoint: whenever a message or the connection is lost, the index of this rank begins anew")
	}
	return newStream(log, f, sub, dealer, pos, k.counts, k.status), nil
}
