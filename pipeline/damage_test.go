package pipeline

// This file damages what is on the snapshot topic and restores from it.

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// last returns the value of the last record of a key on the snapshot topic.
func (r *rig) last(key string) []byte {
	r.t.Helper()
	records := testcontainers.ReadCommitted(r.t, r.broker, r.cfg.SnapshotTopic)[0]
	for _, rec := range slices.Backward(records) {
		if string(rec.Key) == key {
			return rec.Value
		}
	}
	r.t.Fatalf("no record of key %s on the snapshot topic", key)
	return nil
}

// Whatever is wrong on the snapshot topic, a restore says it and replays. From a
// whole log that is exact; from a trimmed one a worker-rank that lacks something
// is incomplete or unknown, and no depth is above the truth.
func TestDamagedSnapshots(t *testing.T) {
	for _, c := range []struct {
		name   string
		key    string
		change func(value []byte) []byte
		said   []string
		others bool    // worker-ranks other than the damaged one are as they should be, also from a trimmed log
		counts counter // is 1
	}{
		{"a flipped byte in a chunk", "chunk/0/0/hurt",
			func(v []byte) []byte { v[len(v)/2] ^= 1; return v },
			[]string{"is damaged", "worker=hurt", "rank=0", "CRC-32C"}, true, restoresDamaged},
		{"a missing chunk", "chunk/0/0/hurt",
			func([]byte) []byte { return nil },
			[]string{"is damaged", "worker=hurt", "rank=0", "chunk 0 of 1 is missing"}, true, restoresDamaged},
		{"an unreadable manifest", "manifest/0/hurt",
			func([]byte) []byte { return []byte("nonsense") },
			[]string{"is damaged", "worker=hurt", "rank=0", "manifest cannot be read"}, true, restoresDamaged},
		{"an unreadable manifest of one whose sibling retired it", "manifest/0/pair",
			func([]byte) []byte { return []byte("nonsense") },
			[]string{"is damaged", "worker=pair", "rank=0", "manifest cannot be read"}, true, restoresDamaged},
		{"a floor of another topic", "floor",
			func(v []byte) []byte {
				var f schemas.Floor
				if err := schemas.DecodeFloor(&f, v); err != nil {
					t.Fatal(err)
				}
				f.TopicID[0] ^= 1
				return schemas.AppendFloor(nil, &f)
			},
			[]string{"snapshots are of another log"}, false, snapshotsDiscarded},
	} {
		for _, trimmed := range []bool{false, true} {
			t.Run(c.name+map[bool]string{false: ", whole log", true: ", trimmed log"}[trimmed], func(t *testing.T) {
				b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
				r := newRig(t, b, 1)
				one := r.start()
				chain := locals(7, 40)
				seqs := index.Chain(nil, chain)
				hurt, hurt1, well := r.produce("hurt", 0), r.produce("hurt", 1), r.produce("well", 0)
				pair, pair1 := r.produce("pair", 0), r.produce("pair", 1)
				for _, p := range []*producer{hurt, hurt1, well, pair, pair1} {
					p.send(stored(nil, chain[:20]...))
					p.send(removed(seqs[17]), stored(nil, locals(9, 6)...))
				}
				pair1.send(retired())
				one.same(1, 50)
				one.saved()
				one.abandon()
				if trimmed {
					testcontainers.DeleteRecords(t, b, r.cfg.Topic, 0, r.floors()[0])
				}
				plain := testcontainers.Client(t, b)
				rec := &kgo.Record{Topic: r.cfg.SnapshotTopic, Key: []byte(c.key), Value: c.change(r.last(c.key))}
				if err := plain.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
					t.Fatal(err)
				}
				// What a replay gets of it in any case.
				hurt.send(stored(&seqs[15], chain[16:25]...))
				hurt1.send(stored(&seqs[18], chain[19:30]...))
				well.send(stored(&seqs[16], chain[17:35]...))
				if !trimmed {
					pair.send(stored(nil, chain[:5]...)) // late, and refused; where nothing is left that says so, only incomplete
				}

				two := r.start()
				r.follow()
				two.caughtUp()
				r.mustSay(append(c.said, "level=ERROR")...)
				if n := two.counted(c.counts); n != 1 {
					t.Errorf("%s is %d, want 1", counterNames[c.counts].name, n)
				}
				if !trimmed {
					two.same(2, 200)
					two.saved()
					three := two.restart()
					three.same(3, 200)
					three.undamaged()
					return
				}
				two.notAbove(2, 200)
				for _, w := range two.Workers("") {
					damaged := w.Worker == c.key[len(c.key)-4:] && w.Rank == 0 || !c.others
					if damaged && !w.Incomplete && w.Blocks != [index.Tiers]int{} {
						t.Errorf("%s rank %d has lost what was trimmed, but is not incomplete", w.Worker, w.Rank)
					}
					if w.Worker == "well" && c.others && w.Incomplete {
						t.Errorf("%s rank %d is incomplete for no reason", w.Worker, w.Rank)
					}
				}
				// The producer's next clear makes it whole again.
				for _, p := range []*producer{hurt, hurt1, well} {
					p.send(cleared(), stored(nil, chain[:12]...))
				}
				r.follow()
				two.saved()
				two.notAbove(3, 200)
				three := two.restart()
				three.caughtUp()
				three.undamaged()
				three.notAbove(4, 200)
				for _, w := range r.oracle.Workers() {
					if w.Worker != "pair" {
						three.sameWorker(w)
					}
				}
			})
		}
	}
}

// notAbove asks n random queries at equal offsets: no answer may be above the truth.
func (in *instance) notAbove(seed uint64, n int) {
	in.r.t.Helper()
	for i, q := range in.r.oracle.Queries(rand.New(rand.NewPCG(seed, 1)), n) {
		want := in.r.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		for w, depth := range in.depths(q) {
			if depth > want[w] {
				in.r.t.Fatalf("query %d: %v has depth %d, the truth is %d", i, w, depth, want[w])
			}
		}
	}
}

// Another instance writes on while one restores: what the restore reads is of
// records that came after it began.
func TestRestoreWhileAnotherWrites(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	r := newRig(t, b, 1)
	one := r.start()
	f := r.fleet("w", 4)
	f.work(40)
	one.same(1, 50)
	one.saved()

	// The next look at the snapshot topic's bounds, a part of the restore, waits.
	var once sync.Once
	looking, goOn := make(chan struct{}), make(chan struct{})
	cluster := b.Cluster()
	cluster.ControlKey(int16(kmsg.ListOffsets), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if req.(*kmsg.ListOffsetsRequest).Topics[0].Topic == r.cfg.SnapshotTopic {
			once.Do(func() {
				cluster.SleepControl(func() {
					close(looking)
					<-goOn
				})
			})
		}
		return nil, nil, false
	})
	two := r.start()
	select {
	case <-looking:
	case <-t.Context().Done():
		t.Fatal("no restore")
	}
	f.work(40)
	one.saved()
	close(goOn)
	two.same(2, 100)
	two.undamaged()
	if n := two.counted(recordsRead); n > 0 {
		t.Errorf("%d records were read again, want none", n)
	}
}
