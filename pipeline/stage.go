// This file is the stage: it starts all parts and stops them in order.

package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/trace"

	"kvindex/consumer"
	"kvindex/pipeline/query"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// Stage is the whole of it: partitions to goroutines to indexes to answers.
// Make it with New and Run it once; doc.go says what runs and how it stops.
type Stage struct {
	cfg      Config
	log      *slog.Logger
	started  time.Time
	registry *schemas.Registry
	models   *models
	owners   *owners
	policy   snapshot.Policy
	budget   *snapshot.Budget

	events   *kgo.Client // consumes the events topic
	aux      *kgo.Client // everything else: requests, reading snapshots, committing the floor
	consumer *consumer.Consumer
	server   *query.Server
	tracer   trace.Tracer // nil: no spans
	measures *measures

	mu     sync.Mutex
	parts  []*partition    // by number; made by the consumer
	savers sync.WaitGroup  // their goroutines
	duties map[int32]bool  // last told by the group; kept for partitions that come later
	saving context.Context // ends the savers

	noDuty  atomic.Pointer[string]         // why this instance is not in the duty's group
	place   atomic.Pointer[consumer.Topic] // the snapshot topic when last looked at; nil: not seen, or not there
	noPlace atomic.Pointer[string]         // what the snapshot topic lacks to hold every partition's snapshots

	// For tests.
	beforeRecord func(partition int32, offset int64)
	hook         func(partition int32, step snapshot.Step) error
	chunkBytes   int           // the most that the chains of a snapshot's chunk take; 0: what snapshot.Packed says
	saveRetry    time.Duration // pause before a duty is taken up again
	topicPause   time.Duration // pause before a missing snapshot topic is asked for again
}

// roundBytes and roundCount bound one snapshot transaction, so that it stays
// well under a broker's transaction time-out and a round's copy in memory.
const (
	roundBytes = 8 << 20
	roundCount = 256
	// minSnapshotBytes of events make a worker-rank due at the earliest.
	minSnapshotBytes = 64 << 10
)

// New makes a stage of valid settings. It connects to nothing.
func New(cfg Config) (*Stage, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Stage{
		cfg:      cfg,
		log:      cfg.Logger,
		started:  time.Now(),
		registry: schemas.NewRegistry(schemas.DefaultLimits),
		models:   newModels(&cfg),
		owners:   newOwners(),
		policy: snapshot.Policy{
			MaxAge:     cfg.SnapshotMaxAge,
			MinBytes:   minSnapshotBytes,
			RoundBytes: roundBytes,
			RoundCount: roundCount,
		},
		budget:     snapshot.NewBudget(cfg.SnapshotBudget, max(cfg.SnapshotBudget, 2*roundBytes)),
		measures:   noMeasures,
		duties:     map[int32]bool{},
		saveRetry:  time.Second,
		topicPause: 250 * time.Millisecond,
	}
	return s, nil
}

// Run serves until the context ends, then drains and returns nil. It returns
// an error if a port cannot be had or a server fails; trouble with brokers is
// waited out, said in the log, the status and by not being ready.
func (s *Stage) Run(ctx context.Context) error {
	var err error
	if s.aux, err = kgo.NewClient(s.cfg.kafka("aux")...); err != nil {
		return fmt.Errorf("kafka client: %w", err)
	}
	defer s.aux.Close()
	if s.events, err = kgo.NewClient(s.cfg.kafka("events", consumer.ClientOptions()...)...); err != nil {
		return fmt.Errorf("kafka client: %w", err)
	}
	defer s.events.Close()

	var flush func(context.Context) error
	s.tracer, flush, err = query.SetupTracing(ctx, query.Identity{Version: s.cfg.Version, Instance: s.cfg.Instance})
	if err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	defer func() {
		flushCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := flush(flushCtx); err != nil {
			s.log.Warn("last spans were not sent", "error", err)
		}
	}()
	meters, scrape, err := query.SetupMetrics()
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}

	if s.measures, err = newMeasures(meters); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}

	s.consumer = consumer.New(consumer.Config{
		Client:   s.events,
		Topic:    s.cfg.Topic,
		Handler:  s.newHandler,
		Logger:   s.log,
		Buffer:   s.cfg.Buffer,
		ReadyLag: s.cfg.ReadyLag,
		Tick:     s.cfg.Tick,
		Watch:    s.cfg.Watch,
	})
	if err := s.observe(meters); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	s.server, err = query.NewServer(s, query.Config{
		GRPCAddr: s.cfg.GRPCListen,
		HTTPAddr: s.cfg.HTTPListen,
		Limits:   s.cfg.Limits,

		TLS:         s.cfg.TLS,
		TokenFile:   s.cfg.AuthTokenFile,
		OpenMetrics: s.cfg.OpenMetrics,

		Tracer:  s.tracer,
		Meters:  meters,
		Metrics: scrape,
		Logger:  s.log,
	})
	if err != nil {
		return err
	}
	return s.run(ctx)
}

// run starts what doc.go lists and stops it in the reverse order of need.
func (s *Stage) run(ctx context.Context) error {
	var stopSaving context.CancelFunc
	s.saving, stopSaving = context.WithCancel(context.WithoutCancel(ctx))
	defer stopSaving()
	drain, cancelDrain := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelDrain()

	if err := s.server.Start(ctx); err != nil {
		return err
	}
	s.log.Info("serving", "grpc", s.server.GRPCAddr(), "http", s.server.HTTPAddr(), "instance", s.cfg.Instance,
		"brokers", s.cfg.Brokers, "topic", s.cfg.Topic, "snapshot_topic", s.cfg.SnapshotTopic, "group", s.cfg.Group)

	reading, stopReading := context.WithCancel(ctx)
	defer stopReading()
	consumed := make(chan error, 1)
	go func() { consumed <- s.consumer.Run(reading, drain) }()

	dutyDone := make(chan struct{})
	go func() {
		defer close(dutyDone)
		if s.cfg.SnapshotTopic != "" {
			s.followDuty(s.saving) // the last rounds are written under it
		}
	}()

	var failure error
	select {
	case <-ctx.Done():
		s.log.Info("stopping", "within", s.cfg.DrainTimeout)
	case failure = <-s.server.Failed():
	}
	deadline := time.AfterFunc(s.cfg.DrainTimeout, cancelDrain)
	defer deadline.Stop()
	s.server.Drain()
	shut := s.server.Shutdown(drain)
	stopReading()
	err := <-consumed
	stopSaving()
	s.awaitSavers(drain)
	<-dutyDone
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		err = nil
	}
	if shut != nil {
		s.log.Warn("queries were cut off", "error", shut)
	}
	s.log.Info("stopped")
	return errors.Join(failure, err)
}

// awaitSavers waits for the savers, but not for one that waits for a broker that
// is away: the transaction it left open is aborted by its successor.
func (s *Stage) awaitSavers(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		s.savers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.log.Warn("a snapshot was given up while it was being written")
	}
}

// newHandler makes a partition as the consumer finds it.
func (s *Stage) newHandler(n int32) consumer.Handler {
	p := newPartition(s, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts = append(s.parts, p)
	if p.saver != nil {
		s.savers.Go(func() { p.saver.run(s.saving) })
		if s.duties[n] {
			p.saver.assign(true)
		}
	}
	return p
}

// partitions returns those made so far, by number.
func (s *Stage) partitions() []*partition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.parts[:len(s.parts):len(s.parts)]
}

// live reports whether a partition is.
func (s *Stage) live(n int32) bool {
	parts := s.consumer.Partitions()
	return int(n) < len(parts) && parts[n].State() == consumer.Live
}

// followDuty is the goroutine that learns, from a consumer group over the
// snapshot topic, which partitions' snapshots this instance writes.
func (s *Stage) followDuty(ctx context.Context) {
	duty, err := snapshot.NewDuty(snapshot.DutyConfig{
		Group: s.cfg.Group,
		Topic: s.cfg.SnapshotTopic,
		Opts:  s.cfg.kafka("duty"),
		// The least that brokers allow by default: when an instance dies and
		// does not come back under its name, nobody writes its snapshots for as
		// long. Two that both believe to have the duty do no harm, since one of
		// them is fenced.
		Instance:       s.cfg.Instance,
		SessionTimeout: 6 * time.Second,
		Logger:         s.log,
	})
	if err != nil {
		s.log.Error("snapshots are not written by this instance", "error", err)
		return
	}
	looked := time.Now() // at what transactions hold
	look := time.NewTicker(s.cfg.Watch)
	defer look.Stop()
	for {
		select {
		case <-look.C:
			s.lookForPlace(ctx)
			if now := time.Now(); now.Sub(looked) >= heldPause {
				looked = now
				s.lookForHeld(ctx, now)
			}
		case <-ctx.Done():
			duty.Close()
			return
		case e, ok := <-duty.Events():
			if !ok {
				return
			}
			if e.Err != nil || e.Assigned {
				s.outside(e.Err)
			}
			s.mu.Lock()
			for _, n := range e.Partitions {
				s.duties[n] = e.Assigned
				if int(n) < len(s.parts) && s.parts[n].saver != nil {
					s.parts[n].saver.assign(e.Assigned)
				}
			}
			s.mu.Unlock()
		}
	}
}

// outside notes why this instance is not in the duty's group; nil: it is.
func (s *Stage) outside(err error) {
	if err == nil {
		s.noDuty.Store(nil)
		return
	}
	text := err.Error()
	if old := s.noDuty.Swap(&text); old == nil || *old != text {
		s.log.Warn("not in the group that deals who writes snapshots, trying again", "error", err)
	}
}

// lookForPlace sees whether the snapshot topic has all partitions. The group
// deals only those that exist, so nobody else would miss the others.
func (s *Stage) lookForPlace(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	want := s.consumer.Topic().Partitions
	t, err := consumer.DescribeTopic(ctx, s.aux, s.cfg.SnapshotTopic)
	if err != nil && !errors.Is(err, consumer.ErrNoTopic) {
		return // brokers are away: whoever writes says so
	}
	if err != nil {
		s.place.Store(nil)
	} else if s.place.Store(&t); t.Partitions < want {
		err = fmt.Errorf("topic %s has %d partitions of the %d that %s has", t.Name, t.Partitions, want, s.cfg.Topic)
	}
	if err == nil {
		s.noPlace.Store(nil)
		return
	}
	text := err.Error()
	if old := s.noPlace.Swap(&text); old == nil || *old != text {
		s.log.Warn("snapshots have no place", "reason", text)
	}
}

// assigned reports whether the group deals a partition's snapshots to this instance.
func (s *Stage) assigned(n int32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.duties[n]
}

// snapshotHook is nil but in tests.
func (s *Stage) snapshotHook(n int32) func(snapshot.Step) error {
	if s.hook == nil {
		return nil
	}
	return func(step snapshot.Step) error { return s.hook(n, step) }
}

// GRPCAddr and HTTPAddr return where the stage listens, once it runs.
func (s *Stage) GRPCAddr() net.Addr { return s.server.GRPCAddr() }

// HTTPAddr is GRPCAddr's twin.
func (s *Stage) HTTPAddr() net.Addr { return s.server.HTTPAddr() }
