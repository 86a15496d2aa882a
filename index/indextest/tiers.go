// This file checks the tiers of an index's workers on small cases, and that they leave
// nothing behind.

package indextest

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	"kvindex/index"
)

// tiered is an index under test and words to speak about its workers.
type tiered struct {
	t *testing.T
	x *index.Index
	w *index.Worker
}

// store stores the blocks from position from on of the chain locals.
func (f *tiered) store(tier index.Tier, locals []index.LocalHash, from, to int) {
	f.t.Helper()
	if _, err := f.w.Store(tier, part(locals, from, to)); err != nil {
		f.t.Fatal(err)
	}
}

// remove removes those blocks.
func (f *tiered) remove(tier index.Tier, locals []index.LocalHash, from, to int) {
	f.t.Helper()
	if e := f.w.Remove(tier, index.Chain(nil, locals)[from:to]); e.Removed != to-from {
		f.t.Fatalf("removed %+v, want %d", e, to-from)
	}
}

// finds checks the answers about the worker, by each kind of search; no depths mean
// that it is absent.
func (f *tiered) finds(query []index.LocalHash, want ...int) {
	f.t.Helper()
	var r index.Result
	for name, q := range map[string]index.Query{
		"all": {}, "by name": {Workers: []string{f.w.Name}}, "top 1": {TopK: 1}, "kept": {TopK: 1, Keep: func(w *index.Worker) bool { return w == f.w }},
	} {
		q.Locals = query
		f.x.Find(&q, &r)
		var got []int
		for i, m := range r.Matches {
			if m.Worker == f.w {
				d := r.Depths(i)
				got = append(got, d[:]...)
				if m.Depth != d[index.Device] {
					f.t.Fatalf("%s: depth %d of %v", name, m.Depth, d)
				}
			}
		}
		if !slices.Equal(got, want) {
			f.t.Fatalf("%s: depths %v, want %v", name, got, want)
		}
	}
}

// RunTiers checks cumulative depths: how deep device, device and host, and so on hold
// a prompt together.
func RunTiers(t *testing.T, empty func() index.Structure) {
	const device, host, disk, external = index.Device, index.Host, index.Disk, index.External
	a, b := blocks("a", 100), blocks("b", 100)
	for _, c := range []struct {
		name string
		test func(f *tiered)
	}{
		{"device alone", func(f *tiered) {
			f.store(device, a, 0, 7)
			f.finds(a, 7, 7, 7, 7)
			f.finds(b)
		}},
		{"a worker with blocks in a lower tier alone is there", func(f *tiered) {
			f.store(disk, a, 0, 5)
			f.finds(a, 0, 0, 5, 5)
			f.store(host, a, 0, 3)
			f.finds(a, 0, 3, 5, 5)
			f.remove(disk, a, 0, 5)
			f.finds(a, 0, 3, 3, 3)
			f.remove(host, a, 0, 3)
			f.finds(a)
		}},
		{"each tier goes on where the one before ends", func(f *tiered) {
			f.store(external, a, 40, 100)
			f.store(device, a, 0, 10)
			f.store(host, a, 10, 20)
			f.finds(a, 10, 20, 20, 20)
			f.store(disk, a, 20, 40)
			f.finds(a, 10, 20, 40, 100)
			f.finds(a[:30], 10, 20, 30, 30)
		}},
		{"only external beside device", func(f *tiered) {
			f.store(device, a, 0, 10)
			f.store(external, a, 0, 30)
			f.finds(a, 10, 10, 10, 30)
			f.store(device, a, 10, 20)
			f.finds(a, 20, 20, 20, 30)
			f.store(host, a, 20, 25)
			f.finds(a, 20, 25, 25, 30)
			f.store(host, a, 25, 50)
			f.finds(a, 20, 50, 50, 50)
			f.w.ClearTier(host)
			f.finds(a, 20, 20, 20, 30)
		}},
		{"a host chain begins behind a hole that device fills", func(f *tiered) {
			f.store(host, a, 50, 100)
			f.finds(a)
			f.store(device, a, 0, 30)
			f.finds(a, 30, 30, 30, 30)
			f.store(device, a, 30, 50)
			f.finds(a, 50, 100, 100, 100)
			f.remove(device, a, 40, 41)
			f.finds(a, 40, 40, 40, 40)
			f.store(host, a, 40, 41)
			f.finds(a, 40, 100, 100, 100)
		}},
		{"in turn", func(f *tiered) {
			for i := range 50 {
				f.store(index.Tier(i%2), a, 2*i, 2*i+2)
			}
			f.finds(a, 2, 100, 100, 100)
			f.remove(host, a, 2, 4)
			f.finds(a, 2, 2, 2, 2)
		}},
		{"removed from host while device holds it", func(f *tiered) {
			f.store(device, a, 0, 10)
			f.store(host, a, 0, 20)
			f.remove(host, a, 0, 10)
			f.finds(a, 10, 20, 20, 20)
			f.remove(device, a, 5, 6)
			f.finds(a, 5, 5, 5, 5)
		}},
		{"removed from device while host holds it", func(f *tiered) {
			f.store(host, a, 0, 20)
			f.store(device, a, 0, 10)
			f.remove(device, a, 0, 10)
			f.finds(a, 0, 20, 20, 20)
			if f.w.Holds(device, index.Chain(nil, a)[0]) || !f.w.Holds(host, index.Chain(nil, a)[0]) {
				f.t.Fatal("Holds does not say what is held")
			}
		}},
		{"a block stays in the unions of a tier that holds it", func(f *tiered) {
			for tier := range index.Tier(index.Tiers) {
				f.store(tier, a, 0, 8)
			}
			f.remove(device, a, 0, 8)
			f.finds(a, 0, 8, 8, 8)
			f.remove(disk, a, 0, 8)
			f.finds(a, 0, 8, 8, 8)
			f.remove(host, a, 0, 8)
			f.finds(a, 0, 0, 0, 8)
			f.store(disk, a, 0, 2)
			f.finds(a, 0, 0, 2, 8)
		}},
		{"removing what the tier does not hold changes nothing", func(f *tiered) {
			f.store(device, a, 0, 8)
			f.store(host, b, 0, 8)
			if e := f.w.Remove(host, index.Chain(nil, a)); e != (index.Effect{Unknown: 100}) {
				f.t.Fatalf("%+v", e)
			}
			if e := f.w.Remove(host, slices.Concat(index.Chain(nil, a), index.Chain(nil, b[:4]))); e != (index.Effect{Unknown: 100, Removed: 4}) {
				f.t.Fatalf("%+v", e)
			}
			f.finds(a, 8, 8, 8, 8)
			f.finds(b)
		}},
		{"one tier is cleared", func(f *tiered) {
			f.store(device, a, 0, 10)
			f.store(host, a, 5, 20)
			f.store(external, a, 0, 30)
			f.w.ClearTier(device)
			f.finds(a, 0, 0, 0, 30)
			f.store(device, a, 0, 5)
			f.finds(a, 5, 20, 20, 30)
			f.w.ClearTier(external)
			f.finds(a, 5, 20, 20, 20)
			f.store(disk, a, 19, 40)
			f.w.ClearTier(host)
			f.finds(a, 5, 5, 5, 5)
			f.store(host, a, 0, 19)
			f.finds(a, 5, 19, 40, 40)
			f.store(device, b, 0, 1)
			if n := f.w.Clear(); n != 5+19+21+1 {
				f.t.Fatalf("cleared %d blocks", n)
			}
			f.finds(a)
			f.store(host, a, 0, 3)
			f.finds(a, 0, 3, 3, 3)
		}},
		{"effects are the tier's own", func(f *tiered) {
			f.store(device, a, 0, 10)
			if e, err := f.w.Store(host, part(a, 5, 15)); err != nil || e != (index.Effect{Stored: 10, Orphan: 1}) {
				f.t.Fatalf("%+v, %v", e, err)
			}
			if e, err := f.w.Store(host, part(a, 0, 5)); err != nil || e != (index.Effect{Stored: 5}) {
				f.t.Fatalf("%+v, %v", e, err)
			}
			if st := f.x.Stats(); st.Blocks != 25 {
				f.t.Fatalf("stats: %+v", st)
			}
			n := make(map[index.Tier]int)
			f.w.Dump(func(tier index.Tier, s index.Stored) bool { n[tier] += len(s.Locals); return true })
			if !maps.Equal(n, map[index.Tier]int{device: 10, host: 15}) {
				f.t.Fatalf("dumped %v", n)
			}
		}},
		{"a refused event changes nothing", func(f *tiered) {
			f.store(device, a, 0, 10)
			for range 2 {
				if _, err := f.w.Store(host, index.Stored{Position: 0}); err != index.ErrEmptyStore {
					f.t.Fatal(err)
				}
				if _, err := f.w.Store(host, index.Stored{HasParent: true, Locals: b[:1]}); err != index.ErrNullHash {
					f.t.Fatal(err)
				}
				f.finds(a, 10, 10, 10, 10)
				f.finds(b)
				f.store(host, a, 0, 1)
			}
			if st := f.x.Stats(); st.Blocks != 11 {
				f.t.Fatalf("stats: %+v", st)
			}
		}},
		{"top k is by device, then by what follows", func(f *tiered) {
			for i, depths := range [][2]int{{10, 0}, {10, 20}, {0, 90}, {0, 80}, {12, 0}, {0, 70}} {
				f.w = f.x.AddWorker("w", int32(i), nil)
				if depths[0] > 0 {
					f.store(device, a, 0, depths[0])
				}
				if depths[1] > 0 {
					f.store(host, a, 0, depths[1])
				}
			}
			var r index.Result
			for k := 1; k < 8; k++ {
				f.x.Find(&index.Query{Locals: a, TopK: k}, &r)
				var got []int32
				for _, m := range r.Matches {
					got = append(got, m.Worker.Rank)
				}
				if want := []int32{4, 1, 0, 2, 3, 5}; !slices.Equal(got, want[:min(k, 6)]) {
					f.t.Fatalf("top %d: %v, want %v", k, got, want)
				}
			}
		}},
		{"who comes after a retired one has nothing of it", func(f *tiered) {
			keeper := f.x.AddWorker("keeper", 0, nil)
			for i := range 20 {
				for tier := range index.Tier(index.Tiers) {
					f.store(tier, a, 0, 20+int(tier))
				}
				f.finds(a, 20, 21, 22, 23)
				if n := f.w.Retire(); n != 20+21+22+23 {
					f.t.Fatalf("retired %d blocks", n)
				}
				f.w = f.x.AddWorker(fmt.Sprint(i), 0, nil)
				f.finds(a)
				f.store(host, b, 0, 1)
				f.finds(b, 0, 1, 1, 1)
				f.finds(a)
				f.remove(host, b, 0, 1)
			}
			keeper.Retire()
			f.w.Retire()
			if st := f.x.Stats(); st != (index.Stats{}) {
				f.t.Fatalf("stats: %+v", st)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := index.New(empty())
			c.test(&tiered{t, x, x.AddWorker("w", 0, nil)})
		})
	}
	t.Run("memory is that of what is live", func(t *testing.T) { tiersChurn(t, empty()) })
}

// tiersChurn has blocks come and go through the tiers, tiers cleared and workers
// retired, and checks that heap and stats end where they were.
func tiersChurn(t *testing.T, s index.Structure) {
	const workers, chains, length, turns = 3, 20, 40, 12
	x := index.New(s)
	load := NewWorkload(11, 0, 0)
	type owner struct {
		w      *index.Worker
		chains [][]index.LocalHash
	}
	base := heap()
	var all [workers]owner
	down := func(w *index.Worker, from, to index.Tier, c []index.LocalHash) {
		seqs := index.Chain(nil, c)
		if _, err := w.Store(to, part(c, 0, length)); err != nil {
			t.Fatal(err)
		}
		slices.Reverse(seqs)
		if e := w.Remove(from, seqs); e.Removed != length {
			t.Fatalf("removed %+v", e)
		}
	}
	turn := func(n int) {
		for i := range all {
			o := &all[i]
			switch n % 3 {
			case 0:
				if o.w != nil {
					o.w.Retire()
				}
				o.w, o.chains = x.AddWorker("w", int32(i), nil), nil
			case 1:
				o.w.ClearTier(index.Device)
				o.w.ClearTier(index.Host)
				o.w.ClearTier(index.External)
				o.chains = nil
			case 2:
				o.w.Clear()
				o.chains = nil
			}
			// The newest chains are in device, those before in host, the oldest external.
			for range 4 * chains {
				c := load.Fresh(length)
				if _, err := o.w.Store(index.Device, part(c, 0, length)); err != nil {
					t.Fatal(err)
				}
				o.chains = append(o.chains, c)
				for at, tier := range []index.Tier{index.Host, index.External} {
					if k := len(o.chains) - 1 - (at+1)*chains; k >= 0 {
						down(o.w, []index.Tier{index.Device, index.Host}[at], tier, o.chains[k])
					}
				}
				if len(o.chains) > 3*chains {
					o.w.Remove(index.External, index.Chain(nil, o.chains[0]))
					o.chains = slices.Clone(o.chains[1:])
				}
			}
		}
	}
	for n := range 6 {
		turn(n)
	}
	live, before := heap(), x.Stats()
	if before.Blocks != workers*3*chains*length {
		t.Fatalf("stats: %+v", before)
	}
	for n := range turns {
		turn(n)
	}
	if now := x.Stats(); now != before {
		t.Errorf("stats were %+v and are %+v", before, now)
	}
	if after, limit := heap(), live+(live-base)/4+64<<10; after > limit {
		t.Errorf("the same live set took %d KiB and takes %d KiB", (live-base)>>10, (after-base)>>10)
	}
	for i := range all {
		all[i].w.Retire()
		all[i].chains = nil
	}
	if st := x.Stats(); st != (index.Stats{}) {
		t.Errorf("stats after all retired: %+v", st)
	}
	if left := heap() - base; left > (live-base)/20+64<<10 {
		t.Errorf("%d KiB are left of %d KiB", left>>10, (live-base)>>10)
	}
	runtime.KeepAlive(x)
}
