package pipeline

// This file dumps stages and has what comes out answer like them.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/pipeline/verify"
	"kvindex/testcontainers"
)

// dumpOf is what Dynamo's API has of a dump.
type dumpOf map[string]struct {
	BlockSize int `json:"block_size"`
	Events    []struct {
		Worker string `json:"worker_id"`
		Tier   string `json:"storage_tier"`
		Event  struct {
			ID   int `json:"event_id"`
			Data struct {
				Stored struct {
					Parent   *uint64 `json:"parent_hash"`
					Position *int32  `json:"start_position"`
					Blocks   []struct {
						Seq   uint64 `json:"block_hash"`
						Local uint64 `json:"tokens_hash"`
					}
				}
			}
			Rank int32 `json:"dp_rank"`
		}
	}
}

// A dump over HTTP, stored again elsewhere, answers every query as the stage does.
func TestDumpAnswersAlike(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 3)
	one := r.start()
	f := r.fleet("w", 6)
	f.work(40)
	one.same(1, 50)

	dump := getDump(t, one, "")
	tiers := map[string]index.Tier{"device": index.Device, "host_pinned": index.Host, "disk": index.Disk, "external": index.External}
	copies := map[string]*index.Index{}
	blocks := int64(0)
	for name, of := range dump {
		x := index.New(index.NewRunIndex())
		copies[name] = x
		workers := map[string]*index.Worker{}
		for i, e := range of.Events {
			if e.Event.ID != i {
				t.Fatalf("event %d has the id %d", i, e.Event.ID)
			}
			key := fmt.Sprint(e.Worker, " ", e.Event.Rank)
			if workers[key] == nil {
				workers[key] = x.AddWorker(e.Worker, e.Event.Rank, nil)
			}
			s := index.Stored{Position: index.NoPosition}
			if p := e.Event.Data.Stored.Parent; p != nil {
				s.HasParent, s.Parent = true, index.SeqHash(*p)
			}
			if p := e.Event.Data.Stored.Position; p != nil {
				s.Position = *p
			}
			for _, b := range e.Event.Data.Stored.Blocks {
				s.Locals = append(s.Locals, index.LocalHash(b.Local))
			}
			if effect, err := workers[key].Store(tiers[e.Tier], s); err != nil || effect.Stored != len(s.Locals) {
				t.Fatalf("%+v: %+v, %v", e, effect, err)
			}
			last := e.Event.Data.Stored.Blocks[len(s.Locals)-1].Seq
			if !workers[key].Holds(tiers[e.Tier], index.SeqHash(last)) {
				t.Fatalf("%+v: its last block has another hash", e)
			}
		}
		blocks += x.Stats().Blocks
	}
	if blocks == 0 {
		t.Fatal("an empty dump")
	}
	asked := 0
	for _, q := range r.oracle.Queries(rand.New(rand.NewPCG(1, 1)), 200) {
		x := copies[q.Model+":default"]
		if x == nil {
			t.Fatalf("no %s in the dump", q.Model)
		}
		want := r.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		if got := depthsOf(x, q.Locals); !maps.Equal(got, want) {
			t.Errorf("a dump has %v, want %v", got, want)
		}
		asked += len(want)
	}
	if asked == 0 {
		t.Error("no query had an answer")
	}

	name := string(f.all[0].batch.Worker)
	for _, of := range getDump(t, one, "?instance_id="+name) {
		for _, e := range of.Events {
			if e.Worker != name {
				t.Errorf("a dump of %s has %s", name, e.Worker)
			}
		}
	}
}

// One that would be too large, or that nobody answers, fails.
func TestDumpFails(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 2)
	one := r.start()
	w := r.produce("w", 0)
	w.send(stored(nil, locals(1, 10)...))
	one.same(1, 1)
	m := one.Status().Models[0]
	f := query.DumpFilter{Model: m.Model, BlockSize: m.BlockSize, MaxBlocks: 9}
	if held, err := one.Dump(t.Context(), f); !errors.Is(err, query.ErrDumpTooLarge) {
		t.Errorf("10 blocks of at most 9: %d, %v", query.Blocks(held), err)
	}
	f.MaxBlocks = 10
	if held, err := one.Dump(t.Context(), f); err != nil || query.Blocks(held) != 10 {
		t.Errorf("10 blocks of at most 10: %d, %v", query.Blocks(held), err)
	}
	one.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if held, err := one.Dump(ctx, f); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("of a stage that has ended: %v, %v", held, err)
	}
}

// depthsOf is an index's answer.
func depthsOf(x *index.Index, prompt []index.LocalHash) map[verify.WorkerRank]index.Depths {
	var res index.Result
	x.Find(&index.Query{Locals: prompt}, &res)
	out := map[verify.WorkerRank]index.Depths{}
	for i, m := range res.Matches {
		out[verify.WorkerRank{Worker: m.Worker.Name, Rank: m.Worker.Rank}] = res.Depths(i)
	}
	return out
}

func getDump(t *testing.T, in *instance, query string) (d dumpOf) {
	t.Helper()
	resp, err := http.Get("http://" + in.HTTPAddr().String() + "/dynamo/dump" + query)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%d, %v: %.500s", resp.StatusCode, err, body)
	}
	if err := json.Unmarshal(body, &d); err != nil {
		t.Fatalf("%v: %.500s", err, body)
	}
	return d
}
