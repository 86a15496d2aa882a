package pipeline

// This file has workers keep blocks in several tiers, over restarts.

import (
	"fmt"
	"testing"

	"kvindex/index"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func in(tier index.Tier, e schemas.Event) schemas.Event {
	e.Tier = tier
	return e
}

func TestTiersOverRestarts(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 2)
		one := r.start()
		prompt := locals(1, 20)
		seqs := index.Chain(nil, prompt)
		w, lower, alone := r.produce("w", 0), r.produce("lower", 0), r.produce("alone", 0)
		w.send(stored(nil, prompt[:4]...), in(index.Host, stored(&seqs[3], prompt[4:8]...)),
			in(index.External, stored(&seqs[11], prompt[12:]...)), in(index.Disk, stored(&seqs[5], prompt[6:12]...)))
		lower.send(in(index.Disk, stored(nil, prompt[:9]...)), in(index.Host, stored(&seqs[8], prompt[9:11]...)))
		alone.send(stored(nil, prompt[:3]...))

		expect := func(in *instance, w, lower index.Depths) {
			t.Helper()
			in.caughtUp()
			got := in.depths(verify.Query{Model: testModel, BlockSize: testBlockSize, Locals: prompt})
			want := map[verify.WorkerRank]index.Depths{{Worker: "w"}: w, {Worker: "lower"}: lower, {Worker: "alone"}: {3, 3, 3, 3}}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("depths %v, want %v", got, want)
			}
			in.same(1, 50)
		}
		expect(one, index.Depths{4, 8, 12, 20}, index.Depths{0, 0, 11, 11})
		one.saved()
		two := one.restart()
		expect(two, index.Depths{4, 8, 12, 20}, index.Depths{0, 0, 11, 11})
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none: the snapshots have all", n)
		}
		// Unions of what was restored are kept true.
		w.send(in(index.Host, removed(seqs[6])), in(index.Host, stored(nil, prompt[:4]...)), removed(seqs[1]))
		lower.send(schemas.Event{Kind: schemas.KindCleared, Tier: index.Host}, stored(nil, prompt[:2]...))
		expect(two, index.Depths{1, 6, 12, 20}, index.Depths{2, 2, 9, 9})
		two.abandon()
		expect(r.start(), index.Depths{1, 6, 12, 20}, index.Depths{2, 2, 9, 9})
	})
}
