package snapshot

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvindex/index"
	"kvindex/testcontainers"
)

// history is what happened to some worker-ranks, by offset: what every instance
// applies, each at its own pace.
type history []happening

type happening struct {
	id  ID
	add index.LocalHash // a block more; 0: the worker-rank retires, and has none
}

func randomHistory(rng *rand.Rand, n int) history {
	ids := []ID{idA, idB, idC, idD}
	h := make(history, n)
	for o := range h {
		// One is idle from some time on, others come and go.
		h[o] = happening{id: ids[rng.IntN(len(ids)-o*2/n)], add: index.LocalHash(rng.Uint64() | 1)}
		if rng.IntN(6) == 0 {
			h[o].add = 0
		}
	}
	return h
}

// blocks returns what the worker-rank holds before offset at, if at offset from
// it held start.
func (h history) blocks(id ID, start []index.LocalHash, from, at int64) []index.LocalHash {
	held := slices.Clone(start)
	for _, e := range h[from:max(from, at)] {
		if e.id != id {
			continue
		}
		if held = append(held, e.add); e.add == 0 {
			held = held[:0]
		}
	}
	return held
}

// first returns the offset of the first record of the worker-rank's state before
// at, and changed the one after its last, 0 if there is none.
func (h history) first(id ID, at int64) (first, changed int64) {
	first = -1
	for o, e := range h[:at] {
		if e.id != id {
			continue
		}
		changed = int64(o) + 1
		switch {
		case e.add == 0:
			first = -1
		case first < 0:
			first = int64(o)
		}
	}
	return first, changed
}

// round asks for random things that are right for an instance at the position.
func (h history) round(rng *rand.Rand, at int64) Round {
	r := Round{Position: at}
	for _, id := range []ID{idA, idB, idC, idD} {
		held := h.blocks(id, nil, 0, at)
		first, changed := h.first(id, at)
		if first >= 0 {
			r.Unsaved = append(r.Unsaved, Unsaved{id, first})
		}
		switch rng.IntN(4) {
		case 0:
			r.Dumps = append(r.Dumps, dump(id, at, held))
		case 1:
			r.Refreshes = append(r.Refreshes, refresh(id, at, changed))
		case 2:
			if len(held) == 0 {
				r.Deletes = append(r.Deletes, id)
			}
		}
	}
	return r
}

// Two instances apply the same events, one or the other lagging, and write when
// they like: taking the duty from one another, in the middle of rounds too, and
// dying there. At every moment a restore, replayed from the floor, is the truth,
// and no W and no floor goes back.
func TestInterleavings(t *testing.T) {
	const worlds, steps, offsets = 40, 25, 80
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	w := newWorld(t, b, worlds)
	var written, fenced, behind, killed int
	for seed := range worlds {
		rng := rand.New(rand.NewPCG(uint64(seed), 1))
		h, p := randomHistory(rng, offsets), int32(seed)
		var writers [2]*Writer
		var at [2]int64
		var owner int // who took last
		var die bool
		take := func(ctx context.Context, i int) {
			if writers[i] != nil {
				writers[i].Close()
			}
			writers[i] = w.writer(t, p, hook(func(s Step) error {
				switch rng.IntN(40) {
				case 0:
					die = true
					return errors.New("killed")
				case 1:
					if s.Kind < StepCommit && writers[1-i] != nil && writers[1-i].dead == nil {
						// The other instance comes in between, with a writer of its own that the next take closes.
						other := w.writer(t, p)
						if err := other.Take(ctx); err != nil {
							t.Error(err)
						}
						writers[1-i].Close()
						writers[1-i], owner = other, 1-i
					}
				}
				return nil
			}))
			if err := writers[i].Take(ctx); err != nil {
				t.Fatal(err)
			}
			owner = i
		}
		reader := w.reader(p)
		lastW, lastFloor := make(map[ID]int64), int64(-1)
		for step := range steps {
			i := rng.IntN(2)
			at[i] = min(at[i]+int64(rng.IntN(12)), offsets)
			if writers[i] == nil || rng.IntN(4) == 0 {
				take(t.Context(), i)
			}
			die = false
			round := h.round(rng, at[i])
			res, err := writers[i].Write(deadline(t), round)
			switch {
			case errors.Is(err, ErrFenced):
				fenced++
				if owner == i {
					t.Fatalf("seed %d step %d: fenced, but nobody took over", seed, step)
				}
				writers[i] = nil
			case errors.Is(err, ErrKilled):
				if killed++; !die {
					t.Fatalf("seed %d step %d: %v", seed, step, err)
				}
				writers[i] = nil
			case errors.Is(err, ErrBehind):
				behind++
			case err != nil:
				t.Fatalf("seed %d step %d: %v", seed, step, err)
			default:
				written += len(res.Written)
				if len(res.Written) > 0 && owner != i {
					t.Fatalf("seed %d step %d: wrote after another took over", seed, step)
				}
			}

			if err := reader.ReadToEnd(deadline(t)); err != nil {
				t.Fatal(err)
			}
			if rng.IntN(5) == 0 {
				reader = w.read(t, p) // a fresh one sees the same
			}
			if err := h.check(t, reader.Table(), lastW, &lastFloor, round.Deletes); err != nil {
				t.Fatalf("seed %d step %d: instance %d at offset %d: %v", seed, step, i, at[i], err)
			}
		}
	}
	t.Logf("%d items written, %d writers fenced, %d killed, %d rounds behind", written, fenced, killed, behind)
	for what, n := range map[string]int{"written": written, "fenced": fenced, "behind": behind, "killed": killed} {
		if n < 20 {
			t.Errorf("only %d %s: the test tests little", n, what)
		}
	}
}

// check compares a restore with the truth.
func (h history) check(t *testing.T, table *Table, lastW map[ID]int64, lastFloor *int64, deleted []ID) error {
	end := int64(len(h))
	floor := int64(0)
	if f, ok := table.Floor(); ok {
		floor = f.Offset
	}
	if floor < *lastFloor {
		return fmt.Errorf("floor went from %d back to %d", *lastFloor, floor)
	}
	*lastFloor = floor
	for _, id := range []ID{idA, idB, idC, idD} {
		start, w := []index.LocalHash(nil), floor
		if m := table.Manifest(id); m != nil {
			if m.W < lastW[id] && !slices.Contains(deleted, id) {
				return fmt.Errorf("%v: W went from %d back to %d", id, lastW[id], m.W)
			}
			w = m.W
			if w < floor {
				return fmt.Errorf("%v: W %d is below the floor %d", id, w, floor)
			}
			var err error
			if start, _, err = load(table, id); err != nil {
				return err
			}
			if want := h.blocks(id, nil, 0, w); !slices.Equal(start, want) {
				return fmt.Errorf("%v: snapshot at W %d has %d blocks that are not the %d of the truth", id, w, len(start), len(want))
			}
			lastW[id] = w
		} else {
			delete(lastW, id)
		}
		if got, want := h.blocks(id, start, w, end), h.blocks(id, nil, 0, end); !slices.Equal(got, want) {
			return fmt.Errorf("%v: replayed from %d to %d it has %d blocks that are not the %d of the truth", id, w, end, len(got), len(want))
		}
	}
	return nil
}
