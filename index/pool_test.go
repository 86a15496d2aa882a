package index_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"kvindex/index"
	"kvindex/index/indextest"
)

// gated is a Structure whose Store waits for the gate to be opened and notes
// the order of the stores' first blocks. Local hash bad makes it panic.
type gated struct {
	index.Structure
	gate chan struct{} // nil: open

	mu    sync.Mutex
	order map[index.Slot][]index.LocalHash
}

const bad index.LocalHash = 666

func newGated(gate chan struct{}) *gated {
	return &gated{Structure: index.NewRunIndex(), gate: gate, order: map[index.Slot][]index.LocalHash{}}
}

func (g *gated) Store(slot index.Slot, s index.Stored) (index.Effect, error) {
	if g.gate != nil {
		<-g.gate
	}
	if len(s.Locals) > 0 && s.Locals[0] == bad {
		panic("a bad block")
	}
	g.mu.Lock()
	g.order[slot] = append(g.order[slot], s.Locals...)
	g.mu.Unlock()
	return g.Structure.Store(slot, s)
}

func root(locals ...index.LocalHash) index.Stored { return index.Stored{Locals: locals} }

// must fails the test at the first error.
func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// depths asks a pool and returns the depth of each worker that holds something.
func depths(t *testing.T, p *index.Pool, locals ...index.LocalHash) map[string]int {
	t.Helper()
	var r index.Result
	must(t, p.Find(&index.Query{Locals: locals}, &r))
	got := map[string]int{}
	for _, m := range r.Matches {
		got[fmt.Sprintf("%s/%d", m.Worker.Name, m.Worker.Rank)] += m.Depth
	}
	return got
}

func wantFound(t *testing.T, got map[string]int, want string) {
	t.Helper()
	if s := strings.TrimSuffix(strings.TrimPrefix(fmt.Sprint(got), "map["), "]"); s != want {
		t.Fatalf("depths are %q, want %q", s, want)
	}
}

func TestPoolEvents(t *testing.T) {
	ctx := t.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 2, 4)
	must(t,
		p.AddWorker("a", 0, nil), p.AddWorker("a", 1, nil), p.AddWorker("b", 0, nil),
		p.Store(ctx, "a", 0, index.Device, root(1, 2, 3)),
		p.Store(ctx, "a", 1, index.Device, root(1, 2)),
		p.Store(ctx, "b", 0, index.Device, root(1, 2, 3)),
		p.Store(ctx, "b", 0, index.Host, root(1, 2, 3)),
		p.Remove(ctx, "b", 0, index.Device, index.Chain(nil, []index.LocalHash{1, 2, 3})[2:]),
		p.Store(ctx, "b", 0, index.Device, index.Stored{}), // refused
		p.Flush(ctx))
	wantFound(t, depths(t, p, 1, 2, 3), "a/0:3 a/1:2 b/0:2")
	if st := p.Stats(); st.Refused != 1 || st.Stored != 11 || st.Removed != 1 || st.Queued != 0 {
		t.Fatalf("stats are %+v", st)
	}

	must(t, p.Clear(ctx, "a", 0), p.Flush(ctx))
	wantFound(t, depths(t, p, 1, 2, 3), "a/1:2 b/0:2")
	must(t, p.Retire(ctx, "a", 1), p.Flush(ctx))
	wantFound(t, depths(t, p, 1, 2, 3), "b/0:2")

	n := 0
	must(t, p.Do(ctx, "b", 0, func(w *index.Worker) {
		w.Dump(func(_ index.Tier, s index.Stored) bool { n += len(s.Locals); return true })
	}))
	if n != 5 {
		t.Fatalf("%d blocks were dumped, want 5", n)
	}
	must(t, p.Stop())
}

func TestPoolUnknownWorker(t *testing.T) {
	ctx := t.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 1, 4)
	must(t, p.AddWorker("a", 0, nil))
	for name, err := range map[string]error{
		"other rank":   p.Store(ctx, "a", 1, index.Device, root(1)),
		"other name":   p.Remove(ctx, "b", 0, index.Device, nil),
		"clear":        p.Clear(ctx, "b", 0),
		"retire":       p.Retire(ctx, "b", 0),
		"do":           p.Do(ctx, "b", 0, func(*index.Worker) {}),
		"after retire": errors.Join(p.Retire(ctx, "a", 0), p.Store(ctx, "a", 0, index.Device, root(1))),
	} {
		if !errors.Is(err, index.ErrUnknownWorker) {
			t.Errorf("%s: %v, want %v", name, err, index.ErrUnknownWorker)
		}
	}
	must(t, p.AddWorker("a", 0, nil))
	if err := p.AddWorker("a", 0, nil); !errors.Is(err, index.ErrKnownWorker) {
		t.Errorf("added twice: %v, want %v", err, index.ErrKnownWorker)
	}
	must(t, p.Stop())
}

// Each worker belongs to the goroutine that had fewest, until it is retired.
func TestPoolAssignment(t *testing.T) {
	ctx := t.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 3, 4)
	for i := range 8 {
		must(t, p.AddWorker("w", int32(i), nil))
	}
	assigned := func(want ...int) {
		t.Helper()
		if got := p.Stats().Assigned; !slices.Equal(got, want) {
			t.Fatalf("goroutines have %v workers, want %v", got, want)
		}
	}
	assigned(3, 3, 2)
	must(t, p.Retire(ctx, "w", 1), p.Retire(ctx, "w", 4), p.Flush(ctx))
	assigned(3, 1, 2)
	must(t, p.AddWorker("w", 1, nil), p.AddWorker("new", 0, nil))
	assigned(3, 3, 2)
	for _, i := range []int32{0, 1, 2, 3, 5, 6, 7} {
		must(t, p.Retire(ctx, "w", i))
	}
	must(t, p.Retire(ctx, "new", 0), p.Stop())
	assigned(0, 0, 0)
}

// A full queue holds back who hands over to it, and nobody else, until there is room or
// the context ends.
func TestPoolBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := newGated(make(chan struct{}))
		p := index.NewPool(index.New(g), 2, 3)
		must(t, p.AddWorker("slow", 0, nil), p.AddWorker("other", 0, nil))
		for i := range index.LocalHash(4) { // one is begun, three wait
			must(t, p.Store(ctx, "slow", 0, index.Device, root(i+1)))
			synctest.Wait()
		}
		if n := p.Stats().Queued; n != 3 {
			t.Fatalf("%d events are queued, want 3", n)
		}

		short, cancel := context.WithCancel(ctx)
		result := make(chan error, 1)
		go func() { result <- p.Store(short, "slow", 0, index.Device, root(99)) }()
		synctest.Wait()
		select {
		case err := <-result:
			t.Fatalf("a full queue took an event: %v", err)
		default:
		}
		// The other goroutine's worker is not held back, nor is a query.
		must(t, p.Remove(ctx, "other", 0, index.Device, nil), p.Clear(ctx, "other", 0))
		wantFound(t, depths(t, p, 1), "")
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Fatalf("%v, want %v", err, context.Canceled)
		}

		go func() { result <- p.Store(ctx, "slow", 0, index.Device, root(5)) }()
		synctest.Wait()
		close(g.gate)
		must(t, <-result, p.Flush(ctx))
		if got := fmt.Sprint(g.order[0]); got != "[1 2 3 4 5]" {
			t.Fatalf("stored %s", got)
		}
		must(t, p.Stop())
	})
}

// Stop applies what was handed over, and who waits to hand over still may.
func TestPoolStopDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := newGated(make(chan struct{}))
		x := index.New(g)
		p := index.NewPool(x, 1, 2)
		must(t, p.AddWorker("a", 0, nil))
		result := make(chan error, 5)
		for i := range index.LocalHash(5) {
			go func() { result <- p.Store(ctx, "a", 0, index.Device, root(i+1)) }()
			synctest.Wait()
		}
		stopped := make(chan error, 2)
		for range 2 {
			go func() { stopped <- p.Stop() }()
		}
		for p.Err() == nil {
			runtime.Gosched() // Stop waits for a lock, which synctest.Wait does not take for waiting
		}
		for name, err := range map[string]error{
			"store": p.Store(ctx, "a", 0, index.Device, root(9)),
			"add":   p.AddWorker("b", 0, nil),
			"find":  p.Find(&index.Query{Locals: []index.LocalHash{1}}, new(index.Result)),
			"flush": p.Flush(ctx),
			"err":   p.Err(),
		} {
			if !errors.Is(err, index.ErrPoolStopped) {
				t.Errorf("%s while stopping: %v, want %v", name, err, index.ErrPoolStopped)
			}
		}
		close(g.gate)
		must(t, <-stopped, <-stopped)
		taken := 0
		for range 5 {
			if err := <-result; err == nil {
				taken++
			} else if !errors.Is(err, index.ErrPoolStopped) {
				t.Error(err)
			}
		}
		if n := x.Stats().Blocks; taken < 3 || n != int64(taken) {
			t.Errorf("%d events were taken and %d applied", taken, n)
		}
	})
}

// A panic makes everything fail, also those who wait, and nobody gets an answer
// any more.
func TestPoolPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := newGated(make(chan struct{}))
		p := index.NewPool(index.New(g), 2, 1)
		must(t, p.AddWorker("a", 0, nil), p.AddWorker("b", 0, nil))
		must(t, p.Store(ctx, "a", 0, index.Device, root(1)))
		g.gate <- struct{}{}
		must(t, p.Flush(ctx))
		wantFound(t, depths(t, p, 1), "a/0:1")

		must(t, p.Store(ctx, "a", 0, index.Device, root(bad)))
		synctest.Wait()
		must(t, p.Store(ctx, "a", 0, index.Device, root(2)))
		waiting := make(chan error, 3)
		go func() { waiting <- p.Store(ctx, "a", 0, index.Device, root(3)) }()
		go func() { waiting <- p.Flush(ctx) }()
		go func() { waiting <- p.Do(ctx, "a", 0, func(*index.Worker) {}) }()
		synctest.Wait()
		must(t, p.Err())
		g.gate <- struct{}{}
		for range 3 {
			if err := <-waiting; !errors.Is(err, index.ErrPoolFailed) {
				t.Errorf("who waited got %v", err)
			}
		}

		r := index.Result{Matches: make([]index.Match, 1)}
		for name, err := range map[string]error{
			"store": p.Store(ctx, "b", 0, index.Device, root(1)),
			"add":   p.AddWorker("c", 0, nil),
			"find":  p.Find(&index.Query{Locals: []index.LocalHash{1}}, &r),
			"flush": p.Flush(ctx),
			"err":   p.Err(),
			"stop":  p.Stop(),
			"again": p.Stop(),
		} {
			var cause *index.PoolPanic
			if !errors.As(err, &cause) || cause.Value != "a bad block" || !strings.Contains(string(cause.Stack), "gated).Store") {
				t.Errorf("%s after a panic: %v", name, err)
			}
		}
		if len(r.Matches) > 0 {
			t.Error("a failed pool answered")
		}
	})
}

// A function that ends its goroutine instead of returning is as bad as a panic.
func TestPoolGoexit(t *testing.T) {
	p := index.NewPool(index.New(index.NewRunIndex()), 1, 1)
	must(t, p.AddWorker("a", 0, nil))
	if err := p.Do(t.Context(), "a", 0, func(*index.Worker) { runtime.Goexit() }); !errors.Is(err, index.ErrPoolFailed) {
		t.Errorf("%v, want %v", err, index.ErrPoolFailed)
	}
	if err := p.Stop(); !errors.Is(err, index.ErrPoolFailed) {
		t.Errorf("%v, want %v", err, index.ErrPoolFailed)
	}
}

// Several producers, each with workers of its own, readers and a Flush from time to
// time: what a pool holds after it is what an oracle holds that applied each worker's
// events in order.
func TestPoolProducers(t *testing.T) {
	const producers, workersEach, rounds = 4, 3, 60
	ctx := t.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 3, 8)
	load := indextest.NewWorkload(1, 4, 8)
	var prompts [][]index.LocalHash
	for range 40 {
		prompts = append(prompts, load.Prompt(8, 48))
	}
	// find compares all answers about one producer's workers with its oracle.
	find := func(producer int, oracle *indextest.Fleet) error {
		var r index.Result
		for _, q := range prompts {
			if err := p.Find(&index.Query{Locals: q}, &r); err != nil {
				return err
			}
			got := map[indextest.WorkerRank]index.Depths{}
			for i, m := range r.Matches {
				if m.Worker.Rank/workersEach == int32(producer) {
					got[indextest.WorkerRank{Worker: m.Worker.Name, Rank: m.Worker.Rank}] = r.Depths(i)
				}
			}
			if want := oracle.Find(q); fmt.Sprint(got) != fmt.Sprint(want) {
				return fmt.Errorf("answers are %v, want %v", got, want)
			}
		}
		return nil
	}
	produce := func(producer int) error {
		rng := rand.New(rand.NewPCG(uint64(producer), 1))
		oracle := indextest.NewFleet()
		for i := range workersEach {
			if err := p.AddWorker("w", int32(producer*workersEach+i), nil); err != nil {
				return err
			}
		}
		for round := range rounds {
			for range 20 {
				rank := int32(producer*workersEach + rng.IntN(workersEach))
				w := indextest.WorkerRank{Worker: "w", Rank: rank}
				q := prompts[rng.IntN(len(prompts))]
				var err error
				switch rng.IntN(10) {
				case 0:
					oracle.Clear(w)
					err = p.Clear(ctx, "w", rank)
				case 1:
					oracle.Clear(w)
					err = errors.Join(p.Retire(ctx, "w", rank), p.AddWorker("w", rank, nil))
				case 2, 3, 4:
					seqs := index.Chain(nil, q)
					seqs = seqs[rng.IntN(len(seqs)):]
					oracle.Remove(w, index.Device, seqs)
					err = p.Remove(ctx, "w", rank, index.Device, seqs)
				default:
					s := root(q...)
					if _, err = oracle.Store(w, index.Device, s); err == nil {
						err = p.Store(ctx, "w", rank, index.Device, s)
					}
				}
				if err != nil {
					return err
				}
			}
			if err := p.Flush(ctx); err != nil {
				return err
			}
			if err := find(producer, oracle); err != nil {
				return fmt.Errorf("producer %d, round %d: %w", producer, round, err)
			}
		}
		return nil
	}
	var all sync.WaitGroup
	for producer := range producers {
		all.Go(func() {
			if err := produce(producer); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	must(t, p.Stop())
}

func TestPoolAllocations(t *testing.T) {
	ctx := t.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 1, 8)
	must(t, p.AddWorker("a", 0, nil))
	s := root(1, 2, 3)
	var r index.Result
	q := index.Query{Locals: s.Locals}
	must(t, p.Store(ctx, "a", 0, index.Device, s), p.Flush(ctx), p.Find(&q, &r))
	if n := testing.AllocsPerRun(100, func() {
		must(t, p.Store(ctx, "a", 0, index.Device, s), p.Find(&q, &r))
	}); n > 0 {
		t.Errorf("%v allocations to hand over an event and to ask", n)
	}
	must(t, p.Stop())
}

// BenchmarkPoolStore hands over a store of what is there, and has it applied.
func BenchmarkPoolStore(b *testing.B) {
	ctx := b.Context()
	p := index.NewPool(index.New(index.NewRunIndex()), 1, 1024)
	if err := p.AddWorker("a", 0, nil); err != nil {
		b.Fatal(err)
	}
	s := root(1)
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Store(ctx, "a", 0, index.Device, s); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Stop(); err != nil {
		b.Fatal(err)
	}
}
