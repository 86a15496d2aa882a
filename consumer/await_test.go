package consumer

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"kvindex/testcontainers"
)

// at puts a partition that has no goroutine where a test wants it.
func (p *Partition) at(s State, position int64) {
	p.position.Store(position)
	p.state.Store(int32(s))
	p.moved()
}

// A waiter returns once its record is applied, and none is ever missed.
func TestAwaitApplied(t *testing.T) {
	r := newRig(t, 1)
	r.run(nil)
	r.live()
	p, h := r.Partitions()[0], r.handler(0)
	for n := range 50 {
		applied := make(chan error, 1)
		go func() { applied <- p.AwaitApplied(t.Context(), int64(n)) }()
		r.send(0, numbers(n, 1)...)
		if err := <-applied; err != nil {
			t.Fatal(err)
		}
		if got := len(h.values()); got <= n {
			t.Fatalf("%d records are applied, the one at %d was waited for", got, n)
		}
	}
	if p.Applied(50) || !p.Applied(49) {
		t.Error("position and Applied differ")
	}
}

func TestEveryWaiterIsWoken(t *testing.T) {
	p := &Partition{}
	p.at(Live, 0)
	const most = 2000
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for offset := int64(0); offset < most; offset += 1 + rng.Int64N(3) {
				if err := p.AwaitApplied(t.Context(), offset); err != nil {
					t.Error(err)
					return
				}
				if got := p.Position(); got <= offset {
					t.Errorf("position %d, offset %d was waited for", got, offset)
				}
			}
		})
	}
	for n := range int64(most) {
		p.at(Live, n+1)
	}
	wg.Wait()
	if n, left := p.waiters.n.Load(), len(p.waiters.list); n != 0 || left != 0 {
		t.Errorf("%d and %d waiters are left", n, left)
	}
}

// What has been dropped is not applied, whatever the position still says.
func TestWaitersOutlastARestore(t *testing.T) {
	p := &Partition{}
	p.at(Live, 10)
	if !p.Applied(9) {
		t.Fatal("9 is not applied at position 10")
	}
	p.state.Store(int32(Restoring))
	if p.Applied(9) {
		t.Error("9 is applied although it was dropped")
	}
	applied := make(chan error, 1)
	go func() { applied <- p.AwaitApplied(t.Context(), 9) }()
	p.at(CatchingUp, 5)
	select {
	case err := <-applied:
		t.Fatalf("returned %v at position 5", err)
	case <-time.After(10 * time.Millisecond):
	}
	p.at(CatchingUp, 10)
	if err := <-applied; err != nil {
		t.Error(err)
	}
}

func TestAWaiterThatLeavesLeavesNothing(t *testing.T) {
	p := &Partition{}
	p.at(Live, 0)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.AwaitApplied(ctx, 5); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if n, left := p.waiters.n.Load(), len(p.waiters.list); n != 0 || left != 0 {
		t.Errorf("%d and %d waiters are left", n, left)
	}
	if n := testcontainers.LeastAllocs(100, p.moved); n != 0 {
		t.Errorf("moving costs %v allocations", n)
	}
}

// BenchmarkMoved is what waiters cost a partition's goroutine, once a batch.
func BenchmarkMoved(b *testing.B) {
	for name, waiting := range map[string]int{"nobody waits": 0, "one waits": 1, "1024 wait": 1024} {
		b.Run(name, func(b *testing.B) {
			p := &Partition{}
			p.at(Live, 0)
			for range waiting {
				p.waiters.add(&waiter{1 << 60, make(chan struct{})})
			}
			b.ReportAllocs()
			for b.Loop() {
				p.moved()
			}
		})
	}
}

// What a partition had applied before it was dropped says nothing of what a restore has
// loaded so far.
func TestAppliedToWhileRestoring(t *testing.T) {
	p := new(Partition)
	for s, want := range map[State]int64{Restoring: 0, CatchingUp: 1000, Live: 1000} {
		p.at(s, 1000)
		if got := p.AppliedTo(); got != want || p.Applied(999) != (want > 0) {
			t.Errorf("%v: applied to %d, want %d", s, got, want)
		}
	}
}
