// This file replays requests: it routes each, serves it, and sends the events.

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.opentelemetry.io/otel/trace"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
)

// The ways to route requests.
const (
	routeIndex  = "index"
	routeRandom = "random"
)

// simConfig is a fleet and how it is replayed.
type simConfig struct {
	workers   int
	prefix    string // of the workers' names
	capacity  int    // blocks a worker
	blockSize int    // tokens
	model     string
	hasher    string
	seed      uint64
	speed     float64 // of the trace's clock; 0: do not wait
	heartbeat time.Duration

	route        string
	stage        stageAccess
	queryTimeout time.Duration
}

func defaultSim() simConfig {
	return simConfig{
		workers:      64,
		prefix:       "worker-",
		capacity:     16384,
		blockSize:    defaultBlockSize,
		model:        defaultModel,
		hasher:       index.Flash.String(),
		seed:         1,
		speed:        0,
		heartbeat:    5 * time.Second,
		route:        routeIndex,
		stage:        stageAccess{address: defaultQueryAddress},
		queryTimeout: 500 * time.Millisecond,
	}
}

// sim serves requests with two fleets at once: own, whose events go to Kafka,
// and beside, which serves the same requests routed the other way. Beside own
// at random, that other way is an index that is never late, in memory.
type sim struct {
	cfg      simConfig
	blocks   *fleet.Blocks
	own      *fleet.Fleet
	beside   *fleet.Fleet
	router   *fleet.Router
	rng      *rand.Rand
	producer *fleet.Producer
	asker    *asker       // nil unless the index routes
	tracer   trace.Tracer // nil: requests have no spans
	depth    []int

	epoch   int64
	started time.Time
	ended   time.Time
	events  int
}

// newSim prepares a fleet whose records go to topic. It does not wait for the
// stage: until that answers, load alone routes.
func newSim(cl *kgo.Client, topic string, cfg simConfig) (*sim, error) {
	hasher, err := index.ParseHasher(cfg.hasher)
	switch {
	case err != nil:
		return nil, usageError{err}
	case cfg.workers < 1 || cfg.capacity < 1:
		return nil, usagef("%d workers with %d blocks each: want at least 1", cfg.workers, cfg.capacity)
	case !(cfg.speed >= 0) || math.IsInf(cfg.speed, 1):
		return nil, usagef("speed %v: want 0 or more", cfg.speed)
	case cfg.heartbeat < 10*time.Millisecond:
		return nil, usagef("heartbeat every %v: want at least 10ms", cfg.heartbeat)
	case cfg.model == "":
		return nil, usagef("the model needs a name")
	}
	blocks, err := fleet.NewBlocks(cfg.blockSize, hasher)
	if err != nil {
		return nil, usageError{err}
	}
	now := time.Now()
	pc := fleet.ProducerConfig{
		Topic:     topic,
		Model:     cfg.model,
		BlockSize: cfg.blockSize,
		Hasher:    hasher,
		Epoch:     now.UnixMilli(),
	}
	for w := range cfg.workers {
		pc.Workers = append(pc.Workers, fmt.Sprintf("%s%0*d", cfg.prefix, len(fmt.Sprint(cfg.workers-1)), w))
	}
	s := &sim{
		cfg:      cfg,
		blocks:   blocks,
		own:      fleet.New(cfg.workers, cfg.capacity),
		beside:   fleet.New(cfg.workers, cfg.capacity),
		router:   fleet.NewRouter(cfg.workers, cfg.seed),
		rng:      rand.New(rand.NewPCG(cfg.seed, 0x72616e646f6d)),
		producer: fleet.NewProducer(cl, pc),
		epoch:    pc.Epoch,
		started:  now,
	}
	if cfg.route == routeIndex {
		stage, err := cfg.stage.dial(0)
		if err != nil {
			return nil, err
		}
		s.asker = newAsker(stage, pc, cfg.queryTimeout)
	}
	return s, nil
}

func (s *sim) close() {
	if s.asker != nil {
		s.asker.stage.Close()
	}
}

// serve serves up to limit requests (0: all). served, if not nil, is called after
// each. The trace's clock starts at the first request.
func (s *sim) serve(ctx context.Context, trace fleet.Requests, limit int, served func()) error {
	defer func() { s.ended = time.Now() }()
	var start time.Time
	var first int64
	for n := 0; limit == 0 || n < limit; n++ {
		r, err := trace.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if n == 0 {
			start, first = time.Now(), r.Timestamp
		}
		if s.cfg.speed > 0 {
			at := start.Add(time.Duration(float64(r.Timestamp-first) / s.cfg.speed * float64(time.Millisecond)))
			if err := sleepUntil(ctx, at); err != nil {
				return err
			}
		}
		if err := s.request(ctx, r); err != nil {
			return err
		}
		if served != nil {
			served()
		}
	}
	return nil
}

// sleepUntil waits until the clock reaches t or ctx ends.
func sleepUntil(ctx context.Context, t time.Time) error {
	if d := time.Until(t); d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	return ctx.Err()
}

// request serves one request by both fleets.
func (s *sim) request(ctx context.Context, r *fleet.Request) error {
	if s.tracer != nil {
		var span trace.Span
		ctx, span = s.tracer.Start(ctx, "kvindex.replay.request")
		defer span.End()
	}
	p := s.blocks.Of(r)
	random := s.rng.IntN(s.cfg.workers)
	depths := s.depths(ctx, p)
	if err := ctx.Err(); err != nil {
		return err // nothing of this request was done yet
	}
	byIndex := s.router.Pick(len(p.Seqs), depths)
	own, beside := byIndex, random
	if s.cfg.route == routeRandom {
		own, beside = random, byIndex
	}
	s.beside.Serve(beside, p)
	events, err := s.producer.Send(ctx, own, s.own.Serve(own, p))
	s.events += events
	return err
}

// depths asks for what each worker holds of a prompt: the stage, or the fleet
// itself if that is routed at random. nil: no answer.
func (s *sim) depths(ctx context.Context, p fleet.Prompt) []int {
	if s.asker == nil {
		s.depth = s.beside.Depths(s.depth[:0], p)
		return s.depth
	}
	depths := s.asker.depths(ctx, s.depth[:0], p)
	if depths != nil {
		s.depth = depths
	}
	return depths
}
