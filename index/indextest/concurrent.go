// This file checks a structure under concurrent writers and readers.

package indextest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"kvindex/index"
)

// The chains of the concurrent check: trunk, and twin, which differs from it in
// the one block at fork and is the same content again behind it.
const (
	trunkLen = 120
	fork     = 40
)

// actor is a writer and what may be seen of it at any moment.
type actor struct {
	name       string
	trunk      [2]int // least and greatest depth that an answer about trunk may give
	twin       [2]int // and about twin
	start, act func(w *slotWriter)
}

// slotWriter is one actor's slot, in the structure under test and in an oracle.
type slotWriter struct {
	slot        index.Slot
	s           index.Structure
	oracle      *Oracle
	rng         *rand.Rand
	trunk, twin []index.LocalHash
	trunkSeqs   []index.SeqHash
	twinSeqs    []index.SeqHash
	mask        index.SeqHash // 0, or what makes hashes opaque
	fail        func(format string, args ...any)
	m           index.SlotMatches
}

// sees checks that the writer finds what it did itself.
func (w *slotWriter) sees(query []index.LocalHash) {
	w.s.Find(query, index.FindOptions{}, &w.m)
	got, _ := byDepth(&w.m)
	if want := w.oracle.depth(w.slot, query); got[w.slot] != want {
		w.fail("slot %d: after its own events it has depth %d, want %d", w.slot, got[w.slot], want)
	}
}

func (w *slotWriter) store(locals []index.LocalHash, from, to int) {
	ev := part(locals, from, to)
	if w.mask != 0 {
		if ev.HasParent {
			ev.Parent ^= w.mask
		}
		ev.Hashes = w.seqs(locals)[from:to]
	}
	got, err := w.s.Store(w.slot, ev)
	want, wantErr := w.oracle.Store(w.slot, ev)
	if got != want || err != wantErr {
		w.fail("slot %d, store: got %+v, %v, want %+v, %v", w.slot, got, err, want, wantErr)
	}
}

// seqs returns the hashes by which the writer names blocks.
func (w *slotWriter) seqs(locals []index.LocalHash) []index.SeqHash {
	seqs := index.Chain(nil, locals)
	for i := range seqs {
		seqs[i] ^= w.mask
	}
	return seqs
}

func (w *slotWriter) remove(seqs []index.SeqHash) {
	if got, want := w.s.Remove(w.slot, seqs), w.oracle.Remove(w.slot, seqs); got != want {
		w.fail("slot %d, remove: got %+v, want %+v", w.slot, got, want)
	}
}

func (w *slotWriter) clear() {
	if got, want := w.s.Clear(w.slot), w.oracle.Clear(w.slot); got != want {
		w.fail("slot %d: cleared %d, want %d", w.slot, got, want)
	}
}

// shuffled returns seqs leaf first, root first or mixed.
func (w *slotWriter) shuffled(seqs []index.SeqHash) []index.SeqHash {
	seqs = slices.Clone(seqs)
	switch w.rng.IntN(3) {
	case 0:
		slices.Reverse(seqs)
	case 1:
		w.rng.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
	}
	return seqs
}

var actors = []actor{
	{
		name: "grows and shrinks", trunk: [2]int{10, trunkLen}, twin: [2]int{10, fork},
		start: func(w *slotWriter) { w.store(w.trunk, 0, 10) },
		act: func(w *slotWriter) {
			w.store(w.trunk, 10, 11+w.rng.IntN(trunkLen-10))
			w.remove(w.shuffled(w.trunkSeqs[10:]))
		},
	}, {
		name: "loses a block in the middle", trunk: [2]int{30, trunkLen}, twin: [2]int{30, fork},
		start: func(w *slotWriter) { w.store(w.trunk, 0, trunkLen) },
		act: func(w *slotWriter) {
			at := 30 + w.rng.IntN(trunkLen-30)
			w.remove(w.trunkSeqs[at : at+1])
			w.store(w.trunk, at, at+1)
		},
	}, {
		name: "moves to the twin and back", trunk: [2]int{fork, trunkLen}, twin: [2]int{fork, trunkLen},
		start: func(w *slotWriter) { w.store(w.trunk, 0, fork) },
		act: func(w *slotWriter) {
			w.store(w.trunk, fork, trunkLen)
			w.remove(w.shuffled(w.trunkSeqs[fork:]))
			w.store(w.twin, fork, trunkLen)
			w.remove(w.shuffled(w.twinSeqs[fork:]))
		},
	}, {
		name: "only ever the twin", trunk: [2]int{fork, fork}, twin: [2]int{fork, trunkLen},
		start: func(w *slotWriter) { w.store(w.twin, 0, fork) },
		act: func(w *slotWriter) {
			w.store(w.twin, fork, trunkLen)
			w.remove(w.shuffled(w.twinSeqs[fork:]))
		},
	}, {
		name: "orphans", trunk: [2]int{5, 5}, twin: [2]int{5, 5},
		start: func(w *slotWriter) { w.store(w.trunk, 0, 5) },
		act: func(w *slotWriter) {
			w.store(w.trunk, 20, 60)
			w.store(w.twin, 50, 90)
			w.remove(w.shuffled(w.trunkSeqs[20:60]))
			w.remove(w.shuffled(w.twinSeqs[50:90]))
		},
	}, {
		name: "orphans that arrive", trunk: [2]int{5, trunkLen}, twin: [2]int{5, fork},
		start: func(w *slotWriter) { w.store(w.trunk, 0, 5) },
		act: func(w *slotWriter) {
			w.store(w.trunk, 20, trunkLen)
			w.store(w.trunk, 5, 20)
			w.remove(w.shuffled(w.trunkSeqs[5:]))
		},
	}, {
		name: "clears", trunk: [2]int{0, trunkLen}, twin: [2]int{0, trunkLen},
		start: func(w *slotWriter) {},
		act: func(w *slotWriter) {
			w.store(w.trunk, 0, trunkLen)
			w.store(w.twin, 0, 1+w.rng.IntN(trunkLen))
			w.clear()
		},
	}, {
		name: "has one block for moments", trunk: [2]int{0, 0}, twin: [2]int{0, 0},
		start: func(w *slotWriter) {},
		act: func(w *slotWriter) {
			// Blocks that nobody else has, so that they come and go for all.
			spot := []index.LocalHash{1, 2}
			for range 20 {
				w.store(spot, 0, 2)
				w.sees(spot)
				w.remove(w.seqs(spot))
				w.sees(spot)
			}
		},
	}, {
		name: "has the same block elsewhere", trunk: [2]int{0, 0}, twin: [2]int{0, 0},
		start: func(w *slotWriter) {},
		act: func(w *slotWriter) {
			spot := []index.LocalHash{3, 2}
			for range 20 {
				w.store(spot, 0, 2)
				w.sees(spot)
				w.remove(w.seqs(spot))
				w.sees(spot)
			}
		},
	}, {
		name: "never changes", trunk: [2]int{trunkLen, trunkLen}, twin: [2]int{fork, fork},
		start: func(w *slotWriter) { w.store(w.trunk, 0, trunkLen) },
		act:   func(w *slotWriter) { w.store(w.trunk, 0, trunkLen) },
	},
}

// RunConcurrent lets a writer for each of many slots and several readers at the
// structure, checks that every answer was possible, and in the end that the
// structure holds what the oracle does. Run it with -race.
func RunConcurrent(t *testing.T, empty func() index.Structure) {
	runConcurrent(t, empty(), NewOracle(), actors, func(index.Slot) index.SeqHash { return 0 })
}

func runConcurrent(t *testing.T, s index.Structure, oracle *Oracle, actors []actor, mask func(index.Slot) index.SeqHash) {
	const (
		each    = 3 // writers of each kind
		rounds  = 30
		readers = 3
	)
	trunk := blocks("trunk", trunkLen)
	twin := slices.Clone(trunk)
	twin[fork] = blocks("twin", fork+1)[fork]

	var failed atomic.Pointer[string]
	fail := func(format string, args ...any) {
		why := fmt.Sprintf(format, args...)
		failed.CompareAndSwap(nil, &why)
	}
	var writers []*slotWriter
	for i := range each * len(actors) {
		w := &slotWriter{
			slot: index.Slot(i), s: s, oracle: oracle, rng: rand.New(rand.NewPCG(1, uint64(i))),
			trunk: trunk, twin: twin, mask: mask(index.Slot(i)), fail: fail,
		}
		w.trunkSeqs, w.twinSeqs = w.seqs(trunk), w.seqs(twin)
		actors[i%len(actors)].start(w)
		writers = append(writers, w)
	}

	var writing, reading sync.WaitGroup
	var done atomic.Bool
	for i, w := range writers {
		writing.Go(func() {
			for range rounds {
				if failed.Load() != nil {
					return
				}
				actors[i%len(actors)].act(w)
				w.sees(trunk)
				w.sees(twin)
			}
		})
	}
	for i := range readers {
		reading.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(i)))
			var m index.SlotMatches
			for n := 0; n < 100 || !done.Load(); n++ {
				query, isTrunk := trunk, rng.IntN(2) == 0
				if !isTrunk {
					query = twin
				}
				query = query[:1+rng.IntN(trunkLen)]
				asked := query
				if s, ok := s.(index.SeqReader); ok && rng.IntN(2) == 0 {
					asked = s.Locals(nil, index.Chain(nil, query))
					if !slices.Equal(asked, query[:len(asked)]) {
						fail("by their sequence hashes, %v are %v", query, asked)
					}
				}
				best := rng.IntN(3) == 0
				if best {
					s.FindBest(asked, each, index.FindOptions{}, &m)
				} else {
					s.Find(asked, index.FindOptions{}, &m)
				}
				got, bad := byDepth(&m)
				if bad {
					fail("a slot twice, or without depth, in %v", m.Matches)
				}
				for j := range writers {
					a := actors[j%len(actors)]
					if _, found := got[index.Slot(j)]; best && !found {
						// Left out as it must be, if it is not one of those that never
						// change: as many as are asked for, and the deepest.
						if j%len(actors) == len(actors)-1 && (isTrunk || len(query) <= fork) {
							fail("writer that %s: not among the best, in %v", a.name, m.Matches)
						}
						continue
					}
					may := a.trunk
					if !isTrunk {
						may = a.twin
					}
					d := got[index.Slot(j)]
					if d < min(may[0], len(query)) || d > min(may[1], len(query)) {
						fail("writer that %s: depth %d of %d, possible are %v (trunk: %v)", a.name, d, len(query), may, isTrunk)
					}
					delete(got, index.Slot(j))
				}
				if len(got) > 0 {
					fail("slots nobody writes to: %v", got)
				}
				s.Stats()
				if failed.Load() != nil {
					return
				}
			}
		})
	}
	writing.Wait()
	done.Store(true)
	reading.Wait()
	if why := failed.Load(); why != nil {
		t.Fatal(*why)
	}
	var m index.SlotMatches
	for _, query := range [][]index.LocalHash{trunk, twin} {
		s.Find(query, index.FindOptions{}, &m)
		if got, bad := byDepth(&m); bad || !maps.Equal(got, oracle.Depths(query)) {
			t.Fatalf("in the end: got %v, want %v", m.Matches, oracle.Depths(query))
		}
	}
	if got, want := s.Stats().Blocks, oracle.Stats().Blocks; got != want {
		t.Fatalf("in the end: %d blocks, want %d", got, want)
	}
	for _, w := range writers {
		if got, want := content(s, w.slot), content(oracle, w.slot); !maps.Equal(got, want) {
			t.Fatalf("slot %d in the end: %v, want %v", w.slot, got, want)
		}
		s.Clear(w.slot)
	}
	if st := s.Stats(); st != (index.Stats{}) {
		t.Fatalf("stats after all was cleared: %+v", st)
	}
}
