// This file holds what the topic says to what engines really hold, while engines
// restart, lose batches and publish garbage, and the relay restarts.

package relay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	"kvindex/testcontainers"
)

// form is a kind of engine, in a version's shape.
type form struct {
	kind                Kind
	shape, hashes, name string
	replay              bool
}

var forms = []form{
	{VLLM, fakeengine.Map, fakeengine.Int, "vllm", true},
	{VLLM, fakeengine.Array, fakeengine.Bytes, "vllm-array-bytes", true},
	{SGLang, fakeengine.Map, fakeengine.Int, "sglang", true},
	{SGLang, fakeengine.Array, fakeengine.Int, "sglang-array", true},
	{VLLM, fakeengine.Map, fakeengine.Int, "vllm-without-replay", false},
}

// engineUnderTest is an engine and the requests that it serves.
type engineUnderTest struct {
	*fakeengine.Engine
	form     form
	requests fleet.Requests
}

func newEngineUnderTest(t *testing.T, f form, seed uint64) *engineUnderTest {
	t.Helper()
	cfg := fakeengine.DefaultConfig()
	cfg.Kind, cfg.Shape, cfg.Hashes = string(f.kind), f.shape, f.hashes
	cfg.Listen, cfg.ReplayListen, cfg.BufferSteps = testcontainers.FreeAddress(t, 1), "", 30
	if f.replay {
		cfg.ReplayListen = testcontainers.FreeAddress(t, 1)
	}
	cfg.Rate, cfg.Capacity, cfg.HostCapacity, cfg.Salt, cfg.Seed = 0, 150, 100, 0.3, seed
	if f.kind == VLLM || f.shape == fakeengine.Map {
		cfg.LoRA = 0.3
	}
	cfg.Logger = silent
	e, err := fakeengine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return &engineUnderTest{e, f, fleet.NewSynthetic(1<<20, seed)}
}

func (e *engineUnderTest) serve(t *testing.T, n int) {
	t.Helper()
	for range n {
		q, err := e.requests.Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Serve(q); err != nil {
			t.Fatal(err)
		}
	}
}

func (e *engineUnderTest) config() Engine {
	st := e.State()
	return Engine{
		Worker: e.form.name, Kind: e.form.kind, Events: st.Ranks[0].Events, Replay: st.Ranks[0].Replay,
		Model: "m", BlockSize: st.BlockSize, Ranks: 1,
	}
}

// holds is what the engine really holds.
func (e *engineUnderTest) holds() (h heldBlocks) {
	h = newHeld()
	tiers := e.Held().Ranks[0].Tiers
	for t, tier := range map[index.Tier]fakeengine.HeldTier{index.Device: tiers.Device, index.Host: tiers.Host} {
		for _, c := range tier.Chains {
			s := index.Stored{Parent: index.SeqHash(c.Parent), HasParent: c.Position > 0}
			for _, l := range c.Locals {
				s.Locals = append(s.Locals, index.LocalHash(l))
			}
			h.store(t, &s)
		}
	}
	return h
}

// rounds is how often each engine has something happen to it.
const rounds = 10

// refuseRecords has the broker refuse records for as long as the flag is set, in
// a way that clients do not try again after.
func refuseRecords(b *testcontainers.Kfake, flag *atomic.Bool) {
	b.Cluster().ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		b.Cluster().KeepControl()
		if !flag.Load() {
			return nil, nil, false
		}
		resp := req.ResponseKind().(*kmsg.ProduceResponse)
		for _, t := range req.(*kmsg.ProduceRequest).Topics {
			rt := kmsg.NewProduceResponseTopic()
			rt.Topic, rt.TopicID = t.Topic, t.TopicID
			for _, p := range t.Partitions {
				rp := kmsg.NewProduceResponseTopicPartition()
				rp.Partition, rp.ErrorCode = p.Partition, kerr.TopicAuthorizationFailed.Code
				rt.Partitions = append(rt.Partitions, rp)
			}
			resp.Topics = append(resp.Topics, rt)
		}
		return resp, nil, true
	})
}

// copyOf returns a copy of a directory in which files come and go.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	var to string
	testcontainers.Eventually(t, patience, func() error {
		to = filepath.Join(t.TempDir(), "copy")
		return os.CopyFS(to, os.DirFS(dir))
	})
	return to
}

func TestTopicIsWhatEnginesHold(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	var refuse atomic.Bool
	refuseRecords(b, &refuse)
	cfg := DefaultConfig()
	cfg.Topic = testcontainers.NewTopic(t, b, "events", 2, nil)
	cfg.StateDir = t.TempDir()
	cfg.CheckpointEvery = 500 * time.Millisecond
	var engines []*engineUnderTest
	for i, f := range forms {
		e := newEngineUnderTest(t, f, uint64(i))
		engines = append(engines, e)
		cfg.Engines = append(cfg.Engines, e.config())
	}
	rng := rand.New(rand.NewPCG(1, 7))
	r := startRelay(t, b, cfg)
	topic := readTopic(t, b, cfg.Topic)
	counts := map[string]int{}
	for round := range rounds {
		for _, e := range engines {
			e.serve(t, rng.IntN(20))
			switch fault := rng.IntN(11); fault {
			case 0, 1:
				if err := e.Restart(time.Duration(rng.IntN(3)) * 100 * time.Millisecond); err != nil {
					t.Fatal(err)
				}
				counts["restart"]++
			case 2:
				e.Gap()
				counts["gap"]++
			case 3:
				e.Garbage()
				counts["garbage"]++
			case 4:
				e.Clear()
				counts["clear"]++
			case 5:
				refuse.Store(!refuse.Load())
				counts["Kafka refuses"]++
			case 6, 7:
				// As if it was killed some time ago: its checkpoint is of then, and
				// what it wrote since is in the topic.
				killed := fault == 7
				then := copyOf(t, cfg.StateDir)
				e.serve(t, rng.IntN(10))
				if err := r.stop(); err != nil {
					t.Fatal(err)
				}
				e.serve(t, rng.IntN(20))
				if killed {
					cfg.StateDir = then
					counts["relay killed"]++
				} else {
					counts["relay stopped"]++
				}
				r = startRelay(t, b, cfg)
			}
			e.serve(t, 3+rng.IntN(10))
		}
		refuse.Store(false)
		for _, e := range engines {
			topic.compare(t, r, e, round)
		}
	}
	for name, one := range topic.ranks {
		t.Logf("%s: %d epochs, incomplete %t", name, len(topic.epochs[name]), one.incomplete)
	}
	t.Log(counts)
}

// compare waits until the topic has all of the engine, and compares.
func (r *topicReader) compare(t *testing.T, relay *running, e *engineUnderTest, round int) {
	t.Helper()
	name := e.form.name + "/0"
	served := false
	testcontainers.Eventually(t, patience, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		r.client.PollFetches(ctx).EachRecord(func(rec *kgo.Record) { r.take(t, rec) })
		var row RankStatus
		for _, s := range relay.Status().Ranks {
			if s.Worker == e.form.name {
				row = s
			}
		}
		if want := int64(e.State().Ranks[0].NextSeq); row.EngineSeq != want {
			if !e.form.replay && row.Source == "live" && !served {
				// Nothing tells of what is missed but the next batch.
				served = true
				e.serve(t, 3)
			}
			return fmt.Errorf("%s: relay is at %d, the engine at %d: %+v", name, row.EngineSeq, want, row)
		}
		one := r.ranks[name]
		if one == nil || one.epoch != row.Epoch || one.seq != row.Seq || row.State != "writing" {
			return fmt.Errorf("%s: the topic is not at %+v", name, row)
		}
		// Status is a second old at most, so what is on its way may show yet.
		holds := e.holds()
		for tier := range one.held {
			for seq := range one.held[tier] {
				if !holds[tier][seq] {
					return fmt.Errorf("round %d: %s: a block on tier %d that the engine does not hold: %+v", round, name, tier, row)
				}
			}
		}
		if !one.incomplete && !one.held.equal(&holds) {
			return fmt.Errorf("round %d: %s: %d of %d blocks, and not incomplete: %+v", round, name, len(one.held[0]), len(holds[0]), row)
		}
		return nil
	})
}
