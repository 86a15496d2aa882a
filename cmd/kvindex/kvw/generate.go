// This file makes workloads from traces of requests.

package kvw

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/zeebo/xxh3"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
)

// Route is how requests get to workers.
type Route string

// The routes.
const (
	Random Route = "random"
	// Best takes the worker with the longest cached prefix, less a penalty for
	// what it had to compute lately; of equals one drawn at random, if it is among
	// them, else the first.
	Best Route = "best"
)

// Config is the fleet whose events a workload has.
type Config struct {
	Workers   int // that serve requests
	Replicas  int // of each, the same events from all; 1 for none besides
	BlockSize int // tokens; divides fleet.TraceBlock
	Capacity  int // blocks a worker's cache holds; a prompt beyond it is cached as far as it fits
	Route     Route
	Seed      uint64
	Limit     int // requests; 0: all
}

// DefaultConfig is 64 workers of 16,384 blocks of 64 tokens, routed at random.
func DefaultConfig() Config {
	return Config{Workers: 64, Replicas: 1, BlockSize: 64, Capacity: 16384, Route: Random, Seed: 42}
}

// Validate says what is wrong with a configuration.
func (c *Config) Validate() error {
	switch {
	case c.Workers < 1 || c.Replicas < 1 || c.Capacity < 1:
		return fmt.Errorf("%d workers of %d blocks, %d of each: want at least 1", c.Workers, c.Capacity, c.Replicas)
	case c.Workers > MaxWorkers/c.Replicas:
		return fmt.Errorf("%d workers, %d of each: at most %d are taken", c.Workers, c.Replicas, MaxWorkers)
	case c.BlockSize < 1 || fleet.TraceBlock%c.BlockSize != 0:
		return fmt.Errorf("block size %d does not divide the %d tokens of a trace's block", c.BlockSize, fleet.TraceBlock)
	case c.Route != Random && c.Route != Best:
		return fmt.Errorf("route %q: want %s or %s", c.Route, Random, Best)
	case c.Limit < 0:
		return fmt.Errorf("limit %d is negative", c.Limit)
	}
	return nil
}

// Generated is a workload in numbers; blocks but for Requests and Ops.
type Generated struct {
	Requests int    `json:"requests"`
	Ops      uint64 `json:"ops"`
	Stored   int    `json:"blocks_stored"`  // by all replicas
	Removed  int    `json:"blocks_removed"` // by all replicas
	Queried  int    `json:"blocks_queried"`
	Hit      int    `json:"blocks_hit"` // of Queried, cached where the request went
	Workers  int    `json:"workers"`    // replicas included
}

// Generate serves a trace with a fleet and writes, for each request, its query,
// what its worker and that one's replicas stored, and what they removed, least
// recently used first. All requests' hash ids count as whole: a last one that the
// prompt fills in part is cached in full. step, if not nil, is called after each.
func Generate(f io.WriteSeeker, trace fleet.Requests, c Config, step func()) (Generated, error) {
	var g Generated
	if err := c.Validate(); err != nil {
		return g, err
	}
	g.Workers = c.Workers * c.Replicas
	out, err := NewWriter(f, uint32(g.Workers), uint32(c.BlockSize))
	if err != nil {
		return g, err
	}
	served := fleet.New(c.Workers, c.Capacity)
	route := newRouter(&c, served)
	var prompt fleet.Prompt
	for c.Limit == 0 || g.Requests < c.Limit {
		r, err := trace.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return g, err
		}
		prompt.Locals = locals(prompt.Locals[:0], r.HashIDs, fleet.TraceBlock/c.BlockSize)
		prompt.Seqs = index.Chain(prompt.Seqs[:0], prompt.Locals)
		if err := out.Write(&Op{Kind: Query, Query: prompt.Locals}); err != nil {
			return g, err
		}
		worker := route.pick(prompt)
		did := served.Serve(worker, prompt)
		g.Requests++
		g.Queried += len(prompt.Locals)
		g.Hit += did.Hit
		g.Stored += len(did.Stored) * c.Replicas
		g.Removed += len(did.Removed) * c.Replicas
		stored := index.Stored{Parent: did.Parent, HasParent: did.Hit > 0, Locals: did.Stored}
		for _, op := range []Op{{Kind: Store, Stored: stored}, {Kind: Remove, Hashes: did.Removed}} {
			if op.Blocks() == 0 {
				continue
			}
			for replica := range c.Replicas {
				op.Worker = index.Slot(worker + replica*c.Workers)
				if err := out.Write(&op); err != nil {
					return g, err
				}
			}
		}
		if step != nil {
			step()
		}
	}
	g.Ops = out.h.Ops
	return g, out.Finish()
}

// locals appends the local hashes of the blocks of each hash id, each of them per id.
// They are made of ids, not of tokens, so that a trace alone determines them.
func locals(dst []index.LocalHash, ids []uint64, each int) []index.LocalHash {
	var b [24]byte // the first 8 stay 0
	for _, id := range ids {
		binary.LittleEndian.PutUint64(b[8:], id)
		for i := range each {
			binary.LittleEndian.PutUint64(b[16:], uint64(i))
			dst = append(dst, index.LocalHash(xxh3.HashSeed(b[:], 1337)))
		}
	}
	return dst
}

// router picks workers. fleet.Router spreads load better, but published
// workloads were routed like this, and their digests should stay what they are.
type router struct {
	way    Route
	rng    *rand.Rand
	served *fleet.Fleet
	load   []float64 // blocks computed lately, by worker
}

func newRouter(c *Config, served *fleet.Fleet) *router {
	return &router{way: c.Route, rng: rand.New(rand.NewPCG(c.Seed, 7)), served: served, load: make([]float64, c.Workers)}
}

func (r *router) pick(p fleet.Prompt) int {
	worker := r.rng.IntN(len(r.load))
	if r.way == Random {
		return worker
	}
	best := float64(r.served.Depth(worker, p)) - r.load[worker]
	fading := 1 - 1/float64(4*len(r.load))
	for w := range r.load {
		r.load[w] *= fading
		if score := float64(r.served.Depth(w, p)) - r.load[w]; score > best {
			best, worker = score, w
		}
	}
	r.load[worker] += float64(len(p.Seqs)-r.served.Depth(worker, p)) / 4
	return worker
}
