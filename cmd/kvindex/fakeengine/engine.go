// This file is the engine: its ranks, the requests that they get, and what can
// be done to it.

package fakeengine

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
)

// Engine is a fake engine. Its methods may be called by any goroutine, but Run,
// Serve and ServeAt by one at a time.
type Engine struct {
	cfg    Config
	hasher index.BlockHasher

	mu          sync.Mutex // guards the next; before a rank's
	ranks       []*rank
	broken      error // it could not listen again
	router      *fleet.Router
	rng         *rand.Rand
	seed        uint64 // of the hashes
	incarnation int
	resumed     chan struct{} // closed by Resume; nil: not paused
	requests    int
	recent      []recent // the last of them, from oldest on and round
	oldest      int
	prompt      prompt // scratch
	depths      []int  // scratch
}

// recent is a request that was served.
type recent struct {
	request fleet.Request
	class   class
	rank    int
}

const (
	// maxRecent is how many prompts can be asked for.
	maxRecent = 256
	// classes is how many LoRA adapters there are, and salts.
	classes = 3
	// restartWithin is how long a port may be in use by something else when an
	// engine restarts, as by a client that happens to have it as its own.
	restartWithin = 5 * time.Second
)

// New returns an engine that listens and holds nothing. Its errors are those of
// [Config.Validate] and of listening.
func New(cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg:         cfg,
		hasher:      index.BlockHasher{BlockSize: cfg.BlockSize, Scheme: cfg.Hasher},
		router:      fleet.NewRouter(cfg.Ranks, cfg.Seed),
		rng:         rand.New(rand.NewPCG(cfg.Seed, 0x656e67)),
		incarnation: 1,
	}
	e.reseed()
	for i := range cfg.Ranks {
		r := &rank{
			cfg: &e.cfg, number: i,
			format: format{kind: cfg.Kind, shape: cfg.Shape, hashes: cfg.Hashes},
		}
		r.listen, _ = address(cfg.Listen, i) // validated, like the next
		if cfg.ReplayListen != "" {
			r.listenAgain, _ = address(cfg.ReplayListen, i)
		}
		if err := r.start(0); err != nil {
			e.Close()
			return nil, err
		}
		e.ranks = append(e.ranks, r)
	}
	return e, nil
}

// reseed draws the seed of the hashes. SGLang's have none: they stay the same.
func (e *Engine) reseed() {
	if e.cfg.Kind == VLLM {
		e.seed = e.rng.Uint64()
	}
}

// Close closes the sockets.
func (e *Engine) Close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.ranks {
		r.stop()
	}
}

// Run serves requests at Rate, none while paused, until their end (nil), an
// error of theirs or of listening again, or ctx's end (its error).
func (e *Engine) Run(ctx context.Context, from fleet.Requests) error {
	due := time.Now()
	for {
		q, err := from.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if e.cfg.Rate > 0 {
			due = due.Add(time.Duration(float64(time.Second) / e.cfg.Rate))
			if late := time.Since(due); late > time.Second {
				due = due.Add(late) // after a pause it does not catch up
			}
			if !wait(ctx, time.After(time.Until(due))) {
				return ctx.Err()
			}
		}
		for {
			resumed, err := e.Serve(q)
			if err != nil {
				return err
			}
			if resumed == nil {
				break
			}
			if !wait(ctx, resumed) {
				return ctx.Err()
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// wait waits for c, and reports whether it came before ctx's end.
func wait[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
		return true
	}
}

// Serve serves one request, by the rank that holds most of its prompt, less
// load. When it has returned, all the batches were published. If the engine is
// paused it does nothing but return a channel that is closed when it is no more.
func (e *Engine) Serve(q *fleet.Request) (paused <-chan struct{}, err error) {
	return e.ServeAt(anyRank, q)
}

// anyRank leaves the choice to the engine.
const anyRank = -1

// ServeAt is Serve by one rank, from 0, which a router has chosen.
func (e *Engine) ServeAt(rank int, q *fleet.Request) (paused <-chan struct{}, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil || e.resumed != nil {
		return e.resumed, e.broken
	}
	p := &e.prompt
	p.class = e.class()
	e.fill(p, q)
	if rank == anyRank {
		e.depths = e.depths[:0]
		for _, r := range e.ranks {
			e.depths = append(e.depths, r.cache.depth(p.seqs))
		}
		rank = e.router.Pick(len(p.seqs), e.depths)
	}
	e.ranks[rank].serve(p)
	e.requests++
	e.remember(q, rank)
	return nil, nil
}

// class draws what besides tokens is in a request's hashes.
func (e *Engine) class() (c class) {
	if e.rng.Float64() < e.cfg.LoRA {
		c.id = 1 + e.rng.IntN(classes)
		c.lora = fmt.Sprintf("adapter-%d", c.id)
	}
	if e.rng.Float64() < e.cfg.Salt {
		c.salt = fmt.Sprintf("tenant-%d", 1+e.rng.IntN(classes))
	}
	return c
}

// fill makes a request's prompt.
func (e *Engine) fill(p *prompt, q *fleet.Request) {
	p.tokens = fleet.AppendTokens(p.tokens[:0], q)
	p.locals = e.hasher.Append(p.locals[:0], p.tokens, index.Extra{LoRA: p.class.lora, Salt: p.class.salt})
	p.seqs = index.Chain(p.seqs[:0], p.locals)
	p.root = root(e.seed, p.class)
}

func (e *Engine) remember(q *fleet.Request, to int) {
	r := recent{request: *q, class: e.prompt.class, rank: to}
	r.request.HashIDs = slices.Clone(q.HashIDs)
	if len(e.recent) < maxRecent {
		e.recent = append(e.recent, r)
		return
	}
	e.recent[e.oldest] = r
	e.oldest = (e.oldest + 1) % maxRecent
}

// Pause stops serving requests until Resume. When it has returned, nothing is
// published any more but what Clear does.
func (e *Engine) Pause() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.resumed == nil {
		e.resumed = make(chan struct{})
	}
}

// Resume ends a pause.
func (e *Engine) Resume() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.resumed != nil {
		close(e.resumed)
		e.resumed = nil
	}
}

// Gap makes the next batch of each rank one that uses up a sequence number and
// is never sent, nor kept for replay, as when an engine's sending fails. Nobody
// can know of it before the batch after it.
func (e *Engine) Gap() { e.each(func(r *rank) { r.gapDue = true }) }

// Garbage makes the next batch of each rank one that cannot be read: in turn one
// that is no msgpack and one whose removals are not to be made out.
func (e *Engine) Garbage() { e.each(func(r *rank) { r.badDue = true }) }

func (e *Engine) each(f func(*rank)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.ranks {
		r.mu.Lock()
		f(r)
		r.mu.Unlock()
	}
}

// Clear empties the caches, both tiers: see AllBlocksCleared. SGLang says so at
// once, vLLM not before its next step with a request.
func (e *Engine) Clear() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.ranks {
		r.clear()
	}
}

// Restart makes it a new process as far as anyone can tell: the sockets are
// closed, and after down opened again on the same ports, the caches are empty,
// sequence numbers begin at 0, vLLM's hashes have another seed. Everything waits
// meanwhile.
func (e *Engine) Restart(down time.Duration) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil {
		return e.broken
	}
	for _, r := range e.ranks {
		r.stop()
	}
	<-time.After(down)
	e.incarnation++
	e.reseed()
	for _, r := range e.ranks {
		if err := r.start(restartWithin); err != nil {
			e.broken = fmt.Errorf("restart: %w", err)
			if e.resumed != nil {
				close(e.resumed) // Run is to learn of it
				e.resumed = nil
			}
			return e.broken
		}
	}
	return nil
}
