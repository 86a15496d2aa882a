package pipeline

// This file is a fleet for the stage's tests: workers whose caches fill, evict,
// clear and begin anew, all from a seed.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// fleet is some worker-ranks that share prompts, so that queries find several.
type fleet struct {
	r   *rig
	rng *rand.Rand
	cl  *kgo.Client
	all []*producer

	opaque bool // hashes are the workers' own
}

// fleet makes n workers of that name, every third of two ranks.
func (r *rig) fleet(name string, n int) *fleet {
	r.t.Helper()
	f := &fleet{r: r, rng: rand.New(rand.NewPCG(uint64(n), uint64(len(name))))}
	f.reconnect()
	for i := range n {
		for rank := range int32(1 + (i%3)/2) {
			p := &producer{r: r, cl: f.cl, partition: -1, batch: schemas.Batch{
				Producer: []byte("producer-1"), Worker: fmt.Appendf(nil, "%s-%d", name, i), Rank: rank, Epoch: 1, Seq: -1,
				Model: []byte(testModel), BlockSize: testBlockSize,
			}}
			f.all = append(f.all, p)
		}
	}
	return f
}

// reconnect takes a new client: one that knew a topic before it was recreated
// or grew does not know it afterwards.
func (f *fleet) reconnect() {
	f.cl = f.r.client()
	for _, p := range f.all {
		p.cl = f.cl
	}
}

// renew begins a new epoch of every worker-rank.
func (f *fleet) renew() {
	for _, p := range f.all {
		p.renew()
	}
}

// work writes n records and returns once brokers have them all.
func (f *fleet) work(n int) {
	f.r.t.Helper()
	ctx, cancel := context.WithTimeout(f.r.t.Context(), patience)
	defer cancel()
	var mu sync.Mutex
	var failed error
	for range n {
		p := f.all[f.rng.IntN(len(f.all))]
		events := f.events()
		if f.opaque {
			f.disguise(events)
		}
		rec := &kgo.Record{Partition: p.partition, Key: p.batch.Worker, Value: p.encode(events...)}
		f.cl.Produce(ctx, rec, func(_ *kgo.Record, err error) {
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
			}
		})
	}
	if err := f.cl.Flush(ctx); err != nil {
		f.r.t.Fatal(err)
	}
	if failed != nil {
		f.r.t.Fatal(failed)
	}
}

// events are a few changes of one of eight prompts, in one of the tiers.
func (f *fleet) events() []schemas.Event {
	tier := index.Device
	if f.rng.IntN(2) == 0 {
		tier = index.Tier(f.rng.IntN(index.Tiers))
	}
	events := f.changes()
	for i := range events {
		if !events[i].AllTiers {
			events[i].Tier = tier
		}
	}
	return events
}

func (f *fleet) changes() []schemas.Event {
	prompt := locals(uint64(f.rng.IntN(8)), 24)
	seqs := index.Chain(nil, prompt)
	from, to := f.rng.IntN(11), 12+f.rng.IntN(13)
	switch f.rng.IntN(13) {
	case 12:
		return []schemas.Event{{Kind: schemas.KindCleared}} // the tier
	case 0:
		return nil // a heartbeat
	case 1:
		return []schemas.Event{cleared(), stored(nil, prompt[:to]...)}
	case 2, 3:
		return []schemas.Event{removed(seqs[from], seqs[to-1])}
	case 4, 5:
		return []schemas.Event{stored(&seqs[from], prompt[from+1:to]...)} // an orphan, unless its parent is held
	default:
		return []schemas.Event{stored(nil, prompt[:to]...)}
	}
}

// queries returns n prompts worth asking about now.
func (r *rig) queries(seed uint64, n int) []verify.Query {
	return r.oracle.Queries(rand.New(rand.NewPCG(seed, 1)), n)
}

// forget begins the oracle anew, for another topic.
func (r *rig) forget() {
	r.oracle, r.read = verify.New(r.cfg.WorkerGrace), map[int32]int64{}
}

// answersNone fails the test if any of the queries finds a worker.
func (in *instance) answersNone(queries []verify.Query) {
	in.r.t.Helper()
	for _, q := range queries {
		if _, err := in.Model(q.Model, int(q.BlockSize), ""); err != nil {
			continue // no record named it
		}
		if got := in.depths(q); len(got) > 0 {
			in.r.t.Fatalf("depths %v, want none", got)
		}
	}
}

// eventually waits for what the stage does by itself.
func (in *instance) eventually(check func() error) {
	in.r.t.Helper()
	testcontainers.Eventually(in.r.t, patience, check)
}
