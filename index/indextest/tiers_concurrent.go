// This file checks answers by tier while blocks move between tiers.

package indextest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"kvindex/index"
)

// mover is a worker whose blocks move between tiers, and what an answer about the
// trunk may say of it at any moment.
type mover struct {
	name       string
	low, high  index.Depths
	start, act func(m *moverState)
}

type moverState struct {
	w     *index.Worker
	fleet *Fleet // has the worker's name and rank
	wr    WorkerRank
	rng   *rand.Rand
	trunk []index.LocalHash
	seqs  []index.SeqHash
	fail  func(format string, args ...any)
}

func (m *moverState) store(t index.Tier, from, to int) {
	got, err := m.w.Store(t, part(m.trunk, from, to))
	if want, _ := m.fleet.Store(m.wr, t, part(m.trunk, from, to)); err != nil || got != want {
		m.fail("%s, store: got %+v, %v, want %+v", m.wr.Worker, got, err, want)
	}
}

func (m *moverState) remove(t index.Tier, from, to int) {
	got := m.w.Remove(t, m.seqs[from:to])
	if want := m.fleet.Remove(m.wr, t, m.seqs[from:to]); got != want {
		m.fail("%s, remove: got %+v, want %+v", m.wr.Worker, got, want)
	}
}

func (m *moverState) clearTier(t index.Tier) {
	if got, want := m.w.ClearTier(t), m.fleet.ClearTier(m.wr, t); got != want {
		m.fail("%s: cleared %d blocks, want %d", m.wr.Worker, got, want)
	}
}

var movers = []mover{
	{
		name: "offloads and loads back", low: index.Depths{10, trunkLen, trunkLen, trunkLen}, high: index.Depths{trunkLen, trunkLen, trunkLen, trunkLen},
		start: func(m *moverState) {
			m.store(index.Device, 0, trunkLen)
			m.store(index.Host, 5, 6)
		},
		act: func(m *moverState) {
			at := 10 + m.rng.IntN(trunkLen-10)
			m.store(index.Host, at, trunkLen)
			m.remove(index.Device, at, trunkLen)
			m.store(index.Device, at, trunkLen)
			m.remove(index.Host, at, trunkLen)
		},
	}, {
		name: "moves down all tiers and back", low: index.Depths{0, 0, 0, trunkLen}, high: index.Depths{trunkLen, trunkLen, trunkLen, trunkLen},
		start: func(m *moverState) { m.store(index.External, 0, trunkLen) },
		act: func(m *moverState) {
			for _, way := range [][2]index.Tier{{3, 2}, {2, 1}, {1, 0}, {0, 1}, {1, 3}} {
				m.store(way[1], 0, trunkLen)
				m.remove(way[0], 0, trunkLen)
			}
		},
	}, {
		name: "clears and refills host", low: index.Depths{40, 40, 40, 80}, high: index.Depths{40, trunkLen, trunkLen, trunkLen},
		start: func(m *moverState) {
			m.store(index.Device, 0, 40)
			m.store(index.External, 30, 80)
		},
		act: func(m *moverState) {
			m.store(index.Host, 40, trunkLen)
			m.clearTier(index.Host)
		},
	}, {
		name: "clears and refills device", low: index.Depths{0, 60, 60, 60}, high: index.Depths{trunkLen, trunkLen, trunkLen, trunkLen},
		start: func(m *moverState) { m.store(index.Host, 0, 60) },
		act: func(m *moverState) {
			m.store(index.Device, 0, trunkLen)
			m.clearTier(index.Device)
		},
	}, {
		name: "fills holes in turn", low: index.Depths{0, 0, 0, 0}, high: index.Depths{0, trunkLen, trunkLen, trunkLen},
		start: func(m *moverState) {
			for i := 1; i < trunkLen; i += 2 {
				m.store(index.Device, i, i+1)
			}
		},
		act: func(m *moverState) {
			for i := 0; i < trunkLen; i += 2 {
				m.store(index.Host, i, i+1)
			}
			m.remove(index.Host, 0, trunkLen)
		},
	}, {
		name: "retires", low: index.Depths{}, high: index.Depths{20, 50, 50, 70},
		start: func(m *moverState) {},
		act: func(m *moverState) {
			m.store(index.Host, 0, 50)
			m.store(index.Device, 0, 20)
			m.store(index.External, 50, 70)
			if got, want := m.w.Retire(), m.fleet.Clear(m.wr); got != want {
				m.fail("%s: retired %d blocks, want %d", m.wr.Worker, got, want)
			}
		},
	}, {
		name: "device alone", low: index.Depths{33, 33, 33, 33}, high: index.Depths{33, 33, 33, 33},
		start: func(m *moverState) { m.store(index.Device, 0, 33) },
		act:   func(m *moverState) { m.store(index.Device, 0, 33) },
	},
}

// RunTiersConcurrent has workers move blocks between tiers while readers ask, and
// checks that every answer was possible: no depth is less than that of the tier
// before, none less or more than what was held together at all times or at some.
func RunTiersConcurrent(t *testing.T, empty func() index.Structure) {
	const each, rounds, readers = 2, 30, 3
	x := index.New(empty())
	trunk := blocks("trunk", trunkLen)
	var failed atomic.Pointer[string]
	fail := func(format string, args ...any) {
		why := fmt.Sprintf(format, args...)
		failed.CompareAndSwap(nil, &why)
	}
	var states []*moverState
	var names []string
	for i := range each * len(movers) {
		name := fmt.Sprint(i)
		m := &moverState{
			fleet: NewFleet(), wr: WorkerRank{Worker: name}, rng: rand.New(rand.NewPCG(4, uint64(i))),
			trunk: trunk, seqs: index.Chain(nil, trunk), fail: fail,
		}
		m.w = x.AddWorker(name, 0, i%len(movers))
		movers[i%len(movers)].start(m)
		states, names = append(states, m), append(names, name)
	}
	var writing, reading sync.WaitGroup
	var done atomic.Bool
	for i, m := range states {
		writing.Go(func() {
			var r index.Result
			for range rounds {
				if failed.Load() != nil {
					return
				}
				kind := movers[i%len(movers)]
				kind.act(m)
				if kind.name == "retires" {
					m.w = x.AddWorker(m.wr.Worker, 0, i%len(movers))
				}
				x.Find(&index.Query{Locals: trunk, Workers: []string{m.wr.Worker}}, &r)
				want := m.fleet.Find(trunk)[m.wr]
				var got index.Depths
				for j := range r.Matches {
					got = r.Depths(j)
				}
				if got != want || len(r.Matches) > 1 {
					fail("worker that %s: after its own events it has depths %v, want %v", kind.name, got, want)
				}
			}
		})
	}
	for i := range readers {
		reading.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(i)))
			var r index.Result
			for n := 0; (n < 100 || !done.Load()) && failed.Load() == nil; n++ {
				q := index.Query{Locals: trunk[:1+rng.IntN(trunkLen)]}
				switch rng.IntN(5) {
				case 0:
					q.Workers = names[:1+rng.IntN(len(names))]
				case 1:
					q.TopK = len(names)
				case 2:
					q.Keep = func(w *index.Worker) bool { return true }
				}
				x.Find(&q, &r)
				seen := make(map[string]bool)
				for j, m := range r.Matches {
					seen[m.Worker.Name] = true
					kind, d := movers[m.Worker.Tag.(int)], r.Depths(j)
					for tier := range d {
						low, high := min(kind.low[tier], len(q.Locals)), min(kind.high[tier], len(q.Locals))
						if d[tier] < low || d[tier] > high || tier > 0 && d[tier] < d[tier-1] || m.Depth != d[0] {
							fail("worker that %s: depths %v of %d, possible are %v to %v", kind.name, d, len(q.Locals), kind.low, kind.high)
						}
					}
				}
				for j, name := range names {
					if kind := movers[j%len(movers)]; kind.low[index.External] > 0 && !seen[name] && q.Workers == nil {
						fail("worker that %s is absent", kind.name)
					}
				}
				x.Stats()
			}
		})
	}
	writing.Wait()
	done.Store(true)
	reading.Wait()
	if why := failed.Load(); why != nil {
		t.Fatal(*why)
	}
	for _, m := range states {
		m.w.Retire()
	}
	if st := x.Stats(); st != (index.Stats{}) {
		t.Fatalf("stats after all retired: %+v", st)
	}
}
