// This file holds what is published to what the caches hold, at each step.

package fakeengine

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/testcontainers"
)

// testConfig is an engine's whose caches turn over quickly.
func testConfig(kind, shape, hashes string) Config {
	cfg := DefaultConfig()
	cfg.Kind, cfg.Shape, cfg.Hashes = kind, shape, hashes
	cfg.Listen, cfg.ReplayListen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Rate, cfg.Capacity, cfg.Salt = 0, 150, 0.3
	if kind == VLLM || shape == Map {
		cfg.LoRA = 0.3
	}
	return cfg
}

func newEngine(t *testing.T, cfg Config) *Engine {
	t.Helper()
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// listener is what reads a rank's batches.
type listener struct {
	mapping *engine.Mapping
	next    uint64
	counts  engine.Counts
	events  map[engine.Kind]int
	sizes   map[int]int // of removals, in blocks
}

func newListener(t *testing.T, cfg *Config) *listener {
	t.Helper()
	c := engine.Config{Engine: engine.VLLM, Hasher: index.BlockHasher{BlockSize: cfg.BlockSize, Scheme: cfg.Hasher}}
	if cfg.Kind == SGLang {
		c.Engine = engine.SGLang
	}
	m, err := engine.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return &listener{mapping: m, events: map[engine.Kind]int{}, sizes: map[int]int{}}
}

// read takes the batches that a rank has kept and the listener has not read.
func (l *listener) read(t *testing.T, r *rank) {
	t.Helper()
	var b engine.Batch
	var out engine.Output
	for i := range r.buffer {
		kept := r.buffer[(r.first+i)%len(r.buffer)]
		if kept.seq < l.next {
			continue
		}
		if kept.seq != l.next {
			t.Fatalf("batch %d, want %d", kept.seq, l.next)
		}
		l.next++
		if err := b.Decode(kept.payload, engine.Limits{}); err != nil {
			t.Fatal(err)
		}
		if b.Rank != int32(r.number) || b.LostRemovals > 0 || len(b.Events) == 0 {
			t.Fatalf("rank %d, %d lost removals, %d events", b.Rank, b.LostRemovals, len(b.Events))
		}
		l.counts.Add(&b.Counts)
		for i := range b.Events {
			e := &b.Events[i]
			l.events[e.Kind]++
			if e.Kind == engine.Removed {
				l.sizes[len(e.Hashes)]++
			}
			l.mapping.Apply(e, &out)
		}
		out.Reset()
	}
}

// holding is a set of blocks by tier.
type holding [tiers]map[index.SeqHash]bool

func (h *holding) add(t index.Tier, s index.Stored) error {
	if h[t] == nil {
		h[t] = map[index.SeqHash]bool{}
	}
	seq := s.Parent
	for i, l := range s.Locals {
		if i == 0 && !s.HasParent {
			seq = index.SeqHash(l)
		} else {
			seq = index.Next(seq, l)
		}
		if h[t][seq] {
			return fmt.Errorf("block %x is said twice", seq)
		}
		h[t][seq] = true
	}
	return nil
}

// heard returns what the listener was told is held.
func (l *listener) heard() (h holding, err error) {
	l.mapping.Dump(func(t index.Tier, s index.Stored) bool {
		err = h.add(t, s)
		return err == nil
	})
	return h, err
}

// said returns what an answer says is held.
func (r *HeldRank) said() (h holding, err error) {
	for t, tier := range []HeldTier{r.Tiers.Device, r.Tiers.Host} {
		for _, c := range tier.Chains {
			s := index.Stored{Parent: index.SeqHash(c.Parent), HasParent: c.Position > 0}
			for _, l := range c.Locals {
				s.Locals = append(s.Locals, index.LocalHash(l))
			}
			if err := h.add(index.Tier(t), s); err != nil {
				return h, err
			}
		}
		if len(h[t]) != tier.Blocks {
			return h, fmt.Errorf("%d blocks, %d in chains", tier.Blocks, len(h[t]))
		}
	}
	return h, nil
}

// compare compares what was heard with what is held.
func compare(t *testing.T, l *listener, r *HeldRank) {
	t.Helper()
	heard, err := l.heard()
	if err != nil {
		t.Fatal(err)
	}
	said, err := r.said()
	if err != nil {
		t.Fatal(err)
	}
	for tier := range heard {
		if !maps.Equal(heard[tier], said[tier]) {
			t.Fatalf("rank %d, %v: %d blocks heard of, %d held", r.Rank, index.Tier(tier), len(heard[tier]), len(said[tier]))
		}
	}
}

var forms = []struct{ kind, shape, hashes string }{
	{VLLM, Map, Int}, {VLLM, Map, Bytes}, {VLLM, Array, Int}, {VLLM, Array, Bytes}, {SGLang, Map, Int}, {SGLang, Array, Int},
}

// TestStreamIsWhatIsHeld reads every batch, and after each request what the
// batches say is what the caches hold; also after clears and restarts.
func TestStreamIsWhatIsHeld(t *testing.T) {
	for _, f := range forms {
		for _, host := range []int{0, 7, 400} {
			t.Run(fmt.Sprint(f.kind, f.shape, f.hashes, host), func(t *testing.T) {
				cfg := testConfig(f.kind, f.shape, f.hashes)
				cfg.Ranks, cfg.HostCapacity, cfg.BufferSteps = 2, host, 100
				cfg.Listen, cfg.ReplayListen = testcontainers.FreeAddress(t, 2), testcontainers.FreeAddress(t, 2)
				cfg.Hasher = index.Hasher(host % 2)
				e := newEngine(t, cfg)
				listeners := []*listener{newListener(t, &cfg), newListener(t, &cfg)}
				check := func() {
					t.Helper()
					held := e.Held()
					holdsLast(t, e, &held)
					for i, r := range e.ranks {
						listeners[i].read(t, r)
						if !held.Ranks[i].ClearUnsaid {
							compare(t, listeners[i], &held.Ranks[i])
						}
					}
				}
				trace := fleet.NewSynthetic(150, 7)
				for n := 0; ; n++ {
					q, err := trace.Next()
					if err != nil {
						break
					}
					if _, err := e.Serve(q); err != nil {
						t.Fatal(err)
					}
					check()
					switch n {
					case 60:
						e.Clear()
						if unsaid := e.Held().Ranks[0].ClearUnsaid; unsaid != (f.kind == VLLM) {
							t.Errorf("clear unsaid: %v", unsaid)
						}
						check()
					case 110:
						if err := e.Restart(0); err != nil {
							t.Fatal(err)
						}
						for _, l := range listeners {
							l.mapping.Clear()
							l.next = 0
						}
					}
				}
				for _, l := range listeners {
					tell(t, &cfg, l)
				}
			})
		}
	}
}

// holdsLast checks that the last prompt is held as far as it fits, by what a
// router would ask.
func holdsLast(t *testing.T, e *Engine, held *Held) {
	t.Helper()
	p := e.Prompts(1)[0]
	h := index.BlockHasher{BlockSize: e.cfg.BlockSize, Scheme: e.cfg.Hasher}
	seqs := index.Chain(nil, h.Append(nil, p.Tokens, index.Extra{LoRA: p.LoRA, Salt: p.Salt}))
	said, err := held.Ranks[p.Rank].said()
	if err != nil {
		t.Fatal(err)
	}
	if len(said[index.Device]) == 0 {
		return // cleared
	}
	for i, s := range seqs[:min(len(seqs), e.cfg.Capacity)] {
		if !said[index.Device][s] {
			t.Fatalf("block %d of the last prompt is not held", i)
		}
	}
	for tier, most := range []int{e.cfg.Capacity, e.cfg.HostCapacity} {
		if len(said[tier]) > most {
			t.Fatalf("%d blocks in %v", len(said[tier]), index.Tier(tier))
		}
	}
}

// tell checks that everything happened and that nothing was passed over.
func tell(t *testing.T, cfg *Config, l *listener) {
	t.Helper()
	for _, k := range []engine.Kind{engine.Stored, engine.Removed, engine.Cleared} {
		if l.events[k] == 0 {
			t.Errorf("no event %v", k)
		}
	}
	switch {
	case cfg.Kind == VLLM && (len(l.sizes) != 1 || l.sizes[1] == 0):
		t.Errorf("removals of %v blocks; vLLM has one event a block", slices.Collect(maps.Keys(l.sizes)))
	case cfg.Kind == SGLang && len(l.sizes) < 3:
		t.Errorf("removals of %v blocks; SGLang has one event a node", slices.Collect(maps.Keys(l.sizes)))
	}
	counts := l.mapping.Counts
	counts.Add(&l.counts)
	for i, n := range counts {
		if why := engine.Reason(i); n > 0 && !(why == engine.BlindBlocks && cfg.Kind == SGLang && cfg.Shape == Array) {
			t.Errorf("%d times %v", n, why)
		}
	}
}

// Two incarnations of vLLM name the same blocks differently, and so do no two
// batches of the same content have equal payloads.
func TestIncarnationsDiffer(t *testing.T) {
	names := map[string]bool{}
	cfg := testConfig(VLLM, Map, Int)
	cfg.Listen, cfg.ReplayListen = testcontainers.FreeAddress(t, 1), testcontainers.FreeAddress(t, 1)
	e := newEngine(t, cfg)
	for range 3 {
		q, err := fleet.NewSynthetic(1, 1).Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Serve(q); err != nil {
			t.Fatal(err)
		}
		var b engine.Batch
		if err := b.Decode(e.ranks[0].buffer[0].payload, engine.Limits{}); err != nil {
			t.Fatal(err)
		}
		if name := fmt.Sprint(b.Events[0].Hashes[0]); names[name] {
			t.Error("the same name again")
		} else {
			names[name] = true
		}
		if err := e.Restart(0); err != nil {
			t.Fatal(err)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for want, spoil := range map[string]func(*Config){
		"kind":                func(c *Config) { c.Kind = "tgi" },
		"shape":               func(c *Config) { c.Shape = "" },
		"hashes":              func(c *Config) { c.Hashes = "hex" },
		"integers always":     func(c *Config) { c.Kind, c.Hashes = SGLang, Bytes },
		"in maps":             func(c *Config) { c.Kind, c.Shape, c.LoRA = SGLang, Array, 0.1 },
		"does not divide":     func(c *Config) { c.BlockSize = 48 },
		"hasher":              func(c *Config) { c.Hasher = index.Opaque },
		"ranks is 0":          func(c *Config) { c.Ranks = 0 },
		"host capacity is -1": func(c *Config) { c.HostCapacity = -1 },
		"buffer steps is 0":   func(c *Config) { c.BufferSteps = 0 },
		"share of salt":       func(c *Config) { c.Salt = 1.5 },
		"rate":                func(c *Config) { c.Rate = -1 },
		"no port for rank 1":  func(c *Config) { c.Listen, c.Ranks = "127.0.0.1:65535", 2 },
		"missing port":        func(c *Config) { c.ReplayListen = "localhost" },
		"no address":          func(c *Config) { c.Listen = "" },
	} {
		cfg := testConfig(VLLM, Map, Int)
		spoil(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	cfg := testConfig(VLLM, Map, Int)
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
}
