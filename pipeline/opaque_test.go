package pipeline

// This file has the stage read records with opaque hashes, among others.

import (
	"testing"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// opaqueFleet makes n workers whose hashes are their own.
func (r *rig) opaqueFleet(name string, n int) *fleet {
	r.t.Helper()
	f := r.fleet(name, n)
	f.opaque = true
	for _, p := range f.all {
		p.batch.Model, p.batch.Hasher = []byte("opaque"), index.Opaque
	}
	return f
}

// disguise gives events hashes that nobody can compute, one or the other for each
// block. Some blocks become each other's ancestors, under hashes that no other tier
// has: one that is at different places in two tiers has no place in both together.
func (f *fleet) disguise(events []schemas.Event) {
	for i := range events {
		e := &events[i]
		mask := index.SeqHash(1+f.rng.IntN(2)) << 60
		circle := len(e.Stored.Locals) > 1 && e.Stored.HasParent && f.rng.IntN(4) == 0
		if circle {
			mask |= index.SeqHash(1+e.Tier) << 56
		}
		for j := range e.Removed {
			e.Removed[j] ^= mask
		}
		if len(e.Stored.Locals) == 0 {
			continue
		}
		s := &e.Stored
		var seq index.SeqHash
		for j, l := range s.Locals {
			switch {
			case j > 0:
				seq = index.Next(seq, l)
			case s.HasParent:
				seq = index.Next(s.Parent, l)
			default:
				seq = index.SeqHash(l)
			}
			s.Hashes = append(s.Hashes, seq^mask)
		}
		s.Parent ^= mask
		if f.rng.IntN(8) == 0 {
			s.Position = 1000 // which contradicts the parent, if that is known
		}
		if circle {
			s.Parent = s.Hashes[len(s.Hashes)-1]
		}
	}
}

func TestOpaqueHashes(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 3)
		one := r.start()
		computed, own := r.fleet("w", 4), r.opaqueFleet("o", 5)
		for i := range uint64(4) {
			computed.work(20)
			own.work(60)
			one.same(i, 100)
		}
		for _, k := range []counter{eventsOpaque, eventsRejected} {
			if n := one.counted(k); n != 0 {
				t.Errorf("%d of %s, want none", n, counterNames[k].name)
			}
		}
		for _, k := range []counter{blocksDuplicate, blocksOrphan, blocksContradiction} {
			if one.counted(k) == 0 {
				t.Errorf("none of %s: the records are too tame", counterNames[k].name)
			}
		}

		one.saved()
		two := one.restart()
		two.same(10, 200)
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none: the snapshots have all", n)
		}
		own.work(100) // on what was restored
		two.same(11, 200)

		two.abandon()
		own.work(50)
		three := r.start()
		three.same(12, 200)
		own.renew()
		own.work(50)
		three.same(13, 200)
	})
}
