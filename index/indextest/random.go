// This file runs random histories of one structure against the Oracle.

package indextest

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
)

// Random histories are over few slots and few contents, so that prefixes are
// shared, branches meet again and holes are hit. A prompt is a word over
// segments; long ones make searches leap.
const randomSlots = 5

var segments = [][]index.LocalHash{
	{1}, {2}, {3, 4, 5}, {3, 4, 6}, slices.Repeat([]index.LocalHash{7, 8}, 20),
}

// randomPrompt draws a prompt of at least one block.
func randomPrompt(t *rapid.T) []index.LocalHash {
	var out []index.LocalHash
	for _, i := range rapid.SliceOfN(rapid.IntRange(0, len(segments)-1), 1, 5).Draw(t, "prompt") {
		out = append(out, segments[i]...)
	}
	return out
}

// history is a structure and the oracle that lived through the same events.
type history struct {
	empty  func() index.Structure
	s      index.Structure
	oracle *Oracle
	m      index.SlotMatches
	seen   []index.SeqHash // of all blocks that were ever named, some twice
}

func (h *history) slot(t *rapid.T) index.Slot {
	return index.Slot(rapid.IntRange(0, randomSlots-1).Draw(t, "slot"))
}

func (h *history) store(t *rapid.T) {
	slot, prompt := h.slot(t), randomPrompt(t)
	from := rapid.IntRange(0, len(prompt)-1).Draw(t, "from")
	to := rapid.IntRange(from+1, len(prompt)).Draw(t, "to")
	if rapid.Bool().Draw(t, "whole") {
		from, to = 0, len(prompt)
	}
	s := part(prompt, from, to)
	switch rapid.IntRange(0, 9).Draw(t, "position") {
	case 0:
		s.Position = int32(rapid.IntRange(0, 60).Draw(t, "claim"))
	case 1, 2, 3:
		s.Position = index.NoPosition
	}
	h.seen = append(h.seen, index.Chain(nil, prompt)...)
	got, err := h.s.Store(slot, s)
	want, wantErr := h.oracle.Store(slot, s)
	if got != want || err != wantErr {
		t.Fatalf("slot %d, store %+v: got %+v, %v, want %+v, %v", slot, s, got, err, want, wantErr)
	}
}

func (h *history) remove(t *rapid.T) {
	slot := h.slot(t)
	var hashes []index.SeqHash
	switch rapid.IntRange(0, 3).Draw(t, "what") {
	case 0: // anything
		hashes = rapid.SliceOfN(rapid.SampledFrom(append(h.seen, 12345)), 0, 6).Draw(t, "hashes")
	default: // a part of a prompt, in some order
		seqs := index.Chain(nil, randomPrompt(t))
		from := rapid.IntRange(0, len(seqs)-1).Draw(t, "from")
		hashes = seqs[from:rapid.IntRange(from, len(seqs)).Draw(t, "to")]
		switch rapid.IntRange(0, 2).Draw(t, "order") {
		case 0:
			slices.Reverse(hashes)
		case 1:
			hashes = rapid.Permutation(hashes).Draw(t, "hashes")
		}
	}
	if got, want := h.s.Remove(slot, hashes), h.oracle.Remove(slot, hashes); got != want {
		t.Fatalf("slot %d, remove %x: got %+v, want %+v", slot, hashes, got, want)
	}
}

func (h *history) clear(t *rapid.T) {
	slot := h.slot(t)
	if got, want := h.s.Clear(slot), h.oracle.Clear(slot); got != want {
		t.Fatalf("slot %d: cleared %d blocks, want %d", slot, got, want)
	}
}

// replay goes on with an empty structure into which everything was dumped.
func (h *history) replay(t *rapid.T) {
	fresh := h.empty()
	for slot := range index.Slot(randomSlots) {
		h.s.Dump(slot, func(s index.Stored) bool {
			if e, err := fresh.Store(slot, s); err != nil || e.Stored != len(s.Locals) {
				t.Fatalf("slot %d, replay of %+v: %+v, %v", slot, s, e, err)
			}
			return true
		})
	}
	h.s = fresh
}

// check compares all that can be asked for cheaply, and a drawn query.
func (h *history) check(t *rapid.T) {
	for slot := range index.Slot(randomSlots) {
		if got, want := h.s.Len(slot), h.oracle.Len(slot); got != want {
			t.Fatalf("slot %d holds %d blocks, want %d", slot, got, want)
		}
	}
	got, want := h.s.Stats(), h.oracle.Stats()
	if got.Blocks != want.Blocks || (got.Entries == 0) != (want.Entries == 0) {
		t.Fatalf("stats: got %+v, want %+v", got, want)
	}
	if len(h.seen) > 0 {
		slot, seq := h.slot(t), rapid.SampledFrom(h.seen).Draw(t, "seq")
		if got, want := h.s.Holds(slot, seq), h.oracle.Holds(slot, seq); got != want {
			t.Fatalf("slot %d, block %x: held is %v, want %v", slot, uint64(seq), got, want)
		}
	}
	h.find(t, randomPrompt(t))
	h.locals(t, randomPrompt(t))
}

// locals looks at what the structure knows by sequence hashes alone, if it does.
func (h *history) locals(t *rapid.T, query []index.LocalHash) {
	s, ok := h.s.(index.SeqReader)
	if !ok {
		return
	}
	seqs := index.Chain(nil, query)
	got := s.Locals([]index.LocalHash{99}, seqs)
	deepest := 0
	for _, depth := range h.oracle.Depths(query) {
		deepest = max(deepest, depth)
	}
	if n := len(got) - 1; n < deepest || n > len(query) || got[0] != 99 || !slices.Equal(got[1:], query[:n]) {
		t.Fatalf("locals by sequence hashes: got %v of %v, of which %d are held", got, query, deepest)
	}
	// A list that is no chain ends where it is none.
	at := rapid.IntRange(0, len(seqs)-1).Draw(t, "wrong")
	seqs[at] = rapid.SampledFrom(append(h.seen, 0, 12345)).Draw(t, "seq")
	if got := s.Locals(nil, seqs); len(got) > at && !slices.Equal(seqs[:len(got)], index.Chain(nil, got)) {
		t.Fatalf("locals by sequence hashes that are no chain: got %v", got)
	}
}

// find compares the answers to a query, with and without options.
func (h *history) find(t *rapid.T, query []index.LocalHash) {
	truth := h.oracle.Depths(query)
	if got := h.depths(t, query, index.FindOptions{}); !maps.Equal(got, truth) || h.m.LowerBounds {
		t.Fatalf("query %v: got %v, want %v\n%s", query, got, truth, describe(h.oracle, 0, 1, 2, 3, 4))
	}
	h.best(t, query, index.FindOptions{})
	var only index.SlotSet
	for slot := range index.Slot(randomSlots) {
		if rapid.Bool().Draw(t, "only") {
			only.Add(slot)
		}
	}
	maps.DeleteFunc(truth, func(slot index.Slot, _ int) bool { return !only.Has(slot) })
	if got := h.depths(t, query, index.FindOptions{Only: &only}); !maps.Equal(got, truth) {
		t.Fatalf("query %v of some slots: got %v, want %v", query, got, truth)
	}
	h.best(t, query, index.FindOptions{Only: &only})
	got := h.depths(t, query, index.FindOptions{Only: &only, EarlyExit: true})
	if why := earlyExit(got, truth, h.m.LowerBounds); why != "" {
		t.Fatalf("query %v: %s", query, why)
	}
}

// best compares the best k of the answer to a query.
func (h *history) best(t *rapid.T, query []index.LocalHash, opt index.FindOptions) {
	k := rapid.IntRange(1, randomSlots+1).Draw(t, "k")
	h.oracle.FindBest(query, k, opt, &h.m)
	want, _ := byDepth(&h.m)
	h.s.FindBest(query, k, opt, &h.m)
	if got, bad := byDepth(&h.m); bad || !maps.Equal(got, want) || h.m.LowerBounds {
		t.Fatalf("query %v, best %d: got %v, want %v\n%s", query, k, h.m.Matches, want, describe(h.oracle, 0, 1, 2, 3, 4))
	}
}

func (h *history) depths(t *rapid.T, query []index.LocalHash, opt index.FindOptions) map[index.Slot]int {
	h.s.Find(query, opt, &h.m)
	out, twice := byDepth(&h.m)
	if twice {
		t.Fatalf("query %v: a slot twice, or without depth, in %v", query, h.m.Matches)
	}
	return out
}

// content is everything a slot holds, as its dump tells.
func content(s index.Structure, slot index.Slot) map[index.SeqHash]string {
	out := make(map[index.SeqHash]string)
	dumped(s, slot, func(seq index.SeqHash, b index.Stored) {
		out[seq] += fmt.Sprintf("%d at %d after %x (%v);", b.Locals[0], b.Position, uint64(b.Parent), b.HasParent)
	})
	return out
}

// RunRandom checks random histories: shared prefixes, branches, holes, orphans,
// wrong positions, duplicates, clears and reused slots, and dumps replayed in the
// middle.
func RunRandom(t *testing.T, empty func() index.Structure) {
	rapid.Check(t, func(t *rapid.T) {
		h := &history{empty: empty, s: empty(), oracle: NewOracle()}
		t.Repeat(map[string]func(*rapid.T){
			"store":      h.store,
			"storeMore":  h.store,
			"storeOften": h.store,
			"remove":     h.remove,
			"removeMore": h.remove,
			"clear":      h.clear,
			"replay":     h.replay,
			"":           h.check,
		})
		h.end(t)
	})
}

// end checks that the dumps are the oracle's, and that nothing is left once all slots
// are cleared.
func (h *history) end(t *rapid.T) {
	for slot := range index.Slot(randomSlots) {
		if got, want := content(h.s, slot), content(h.oracle, slot); !maps.Equal(got, want) {
			t.Fatalf("slot %d: dumped\n%v, want\n%v", slot, got, want)
		}
		h.s.Clear(slot)
	}
	if got := h.s.Stats(); got != (index.Stats{}) {
		t.Fatalf("stats after all was cleared: %+v", got)
	}
}
