package index

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
)

// members returns the slots of a set, as a reader sees them.
func members(h *holders) map[Slot]bool {
	out := make(map[Slot]bool)
	if h == nil {
		return out
	}
	set := make([]uint64, h.words())
	h.copyTo(set)
	for s := range Slot(len(set) * 64) {
		if set[s/64]&(1<<(s%64)) != 0 {
			out[s] = true
		}
	}
	return out
}

// The holders of a block are a list while they are few and a bitmap when they are
// many, and the same set all along.
func TestHoldersGrowAndShrink(t *testing.T) {
	const slots = 2000
	p := NewPositionalIndex(0)
	p.addSlot(slots - 1)
	rng := rand.New(rand.NewPCG(1, 1))
	at, seq := place{local: 1}, SeqHash(1)
	want := make(map[Slot]bool)
	for _, target := range []int{1, 2, 9, 3, 1, 0, 100, 10, 1500, 40, 12, 3, 1, 0} {
		for len(want) != target {
			slot := Slot(rng.IntN(slots))
			if grow := len(want) < target; grow && !want[slot] {
				if fresh := p.publish(at, seq, p.slot(slot)); fresh != (len(want) == 0) {
					t.Fatalf("first of %d holders: %v", len(want)+1, fresh)
				}
				want[slot] = true
			} else if !grow && want[slot] {
				delete(want, slot)
				if gone := p.withdraw(at, seq, slot); gone != (len(want) == 0) {
					t.Fatalf("last but %d holders: %v", len(want), gone)
				}
			}
		}
		h := p.find(at, seq)
		got := members(h)
		if len(got) != len(want) {
			t.Fatalf("%d holders, want %d", len(got), len(want))
		}
		for s := range want {
			if !got[s] {
				t.Fatalf("slot %d is missing among %d", s, target)
			}
		}
		switch {
		case target == 0:
			if h != nil || p.heads.Size() != 0 {
				t.Fatal("a block without holders is still there")
			}
		case target == 1:
			for s := range want {
				if h != &p.slot(s).self {
					t.Fatal("a single holder takes a set of its own")
				}
			}
		case target <= 12:
			if h.bits != nil {
				t.Fatalf("%d holders are a bitmap", target)
			}
		case target >= 100:
			if h.bits == nil {
				t.Fatalf("%d holders are a list", target)
			}
		}
	}
}

// A place that empties and fills all the time is never lost: whoever is in finds
// itself, whoever left does not. Run with more goroutines than processors so that
// they are stopped anywhere.
func TestPlacesComeAndGo(t *testing.T) {
	const goroutines, turns = 8, 20_000
	p := NewPositionalIndex(0)
	p.addSlot(goroutines - 1)
	at := place{local: 1, pos: 1}
	var wg sync.WaitGroup
	for g := range Slot(goroutines) {
		wg.Go(func() {
			seq := SeqHash(1 + g%2) // two blocks at one place
			in := func() bool {
				h := p.find(at, seq)
				set := []uint64{1 << g}
				return h.missing(set, set, 1) == 0
			}
			for turn := range turns {
				p.publish(at, seq, p.slot(g))
				if turn%4 == 0 {
					runtime.Gosched()
				}
				if !in() {
					t.Errorf("slot %d does not find itself", g)
					return
				}
				p.withdraw(at, seq, g)
				if in() {
					t.Errorf("slot %d finds itself after it left", g)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := p.heads.Size() + p.more.Size(); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}
