package pipeline

// This file damages what is on the snapshot topic and restores from it.

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/index"
	"kvindex/pipeline/verify"
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

// flip returns a change that flips one bit in the middle of a value.
func flip(v []byte) []byte { v[len(v)/2] ^= 1; return v }

func nonsense([]byte) []byte { return []byte("nonsense") }

// Whatever is wrong on the snapshot topic, a restore says it and replays. From a
// whole log that is exact. From a trimmed one a worker-rank that lacks something
// is incomplete or not answered, and no depth is above the truth: not when
// records come late of an epoch that was retired or that a newer one followed,
// not later and not after the next restart. The producer's next epoch makes it
// whole, or twice the grace and a clear.
func TestDamagedSnapshots(t *testing.T) {
	for _, c := range []struct {
		name   string
		key    string
		change func(value []byte) []byte
		said   []string
		hurts  func(worker string, rank int32) bool // whom it takes something from if the log is trimmed
		counts counter                              // is 1; numCounters: none is
	}{
		{"a flipped byte in a chunk", "chunk/0/0/hurt", flip,
			[]string{"is damaged", "worker=hurt", "rank=0", "CRC-32C"}, only("hurt", 0), restoresDamaged},
		{"a missing chunk", "chunk/0/0/hurt", func([]byte) []byte { return nil },
			[]string{"is damaged", "worker=hurt", "rank=0", "chunk 0 of 1 is missing"}, only("hurt", 0), restoresDamaged},
		{"a flipped byte in a manifest", "manifest/0/hurt", flip,
			[]string{"is damaged", "worker=hurt", "rank=0", "manifest cannot be read"}, only("hurt", 0), restoresDamaged},
		{"an unreadable manifest", "manifest/0/hurt", nonsense,
			[]string{"is damaged", "worker=hurt", "rank=0", "manifest cannot be read"}, only("hurt", 0), restoresDamaged},
		{"an unreadable manifest of one whose sibling retired it", "manifest/0/pair", nonsense,
			[]string{"is damaged", "worker=pair", "rank=0", "manifest cannot be read"}, only("pair", 0), restoresDamaged},
		{"an unreadable manifest of one whose sibling retired it later", "manifest/0/late", nonsense,
			[]string{"is damaged", "worker=late", "rank=0", "manifest cannot be read"}, only("late", 0), restoresDamaged},
		{"an unreadable manifest of one that is silent until two restarts later", "manifest/0/mute", nonsense,
			[]string{"is damaged", "worker=mute", "rank=0", "manifest cannot be read"}, only("mute", 0), restoresDamaged},
		{"an unreadable manifest of one that two producers claim", "manifest/1/hurt", nonsense,
			[]string{"is damaged", "worker=hurt", "rank=1", "manifest cannot be read"}, only("hurt", 1), restoresDamaged},
		{"a flipped byte in the floor", "floor", flip,
			[]string{"cannot be decoded", "snapshot floor"}, only("", 0), numCounters},
		{"a floor of another topic", "floor",
			func(v []byte) []byte {
				var f schemas.Floor
				if err := schemas.DecodeFloor(&f, v); err != nil {
					t.Fatal(err)
				}
				f.TopicID[0] ^= 1
				return schemas.AppendFloor(nil, &f)
			},
			[]string{"snapshots are of another log"}, func(string, int32) bool { return true }, snapshotsDiscarded},
	} {
		for _, trimmed := range []bool{false, true} {
			t.Run(c.name+map[bool]string{false: ", whole log", true: ", trimmed log"}[trimmed], func(t *testing.T) {
				testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
					r := newTimedRig(t, b, 1)
					now := time.Now().Add(-100 * timedGrace).Truncate(time.Millisecond)
					chain := locals(7, 60)
					seqs := index.Chain(nil, chain)
					begin := func(worker string, rank int32) *producer {
						p := r.produce(worker, rank)
						p.batch.Epoch = now.UnixMilli() - 1
						return p
					}
					send := func(p *producer, events ...schemas.Event) {
						t.Helper()
						if err := p.cl.ProduceSync(t.Context(), p.at(now, events...)).FirstErr(); err != nil {
							t.Fatal(err)
						}
					}

					one := r.start()
					hurt, hurt1, well := begin("hurt", 0), begin("hurt", 1), begin("well", 0)
					pair, pair1 := begin("pair", 0), begin("pair", 1)
					late, late1 := begin("late", 0), begin("late", 1)
					mute, mute1 := begin("mute", 0), begin("mute", 1)
					zombie := begin("hurt", 0)
					zombie.batch.Epoch--
					zombie.batch.Producer = []byte("zombie")
					rival := begin("hurt", 1)
					rival.batch.Producer = []byte("rival")
					all := []*producer{hurt, hurt1, well, pair, pair1, late, late1, mute, mute1}
					for _, p := range all {
						send(p, stored(nil, chain[:20]...))
						send(p, removed(seqs[17]), stored(nil, locals(9, 6)...))
					}
					send(pair1, retired())
					send(mute1, retired())
					one.same(1, 50)
					one.saved()
					one.abandon()
					if trimmed {
						testcontainers.DeleteRecords(t, b, r.cfg.Topic, 0, r.floors()[0])
					}
					rec := &kgo.Record{Topic: r.cfg.SnapshotTopic, Key: []byte(c.key), Value: c.change(r.last(c.key))}
					if err := testcontainers.Client(t, b).ProduceSync(t.Context(), rec).FirstErr(); err != nil {
						t.Fatal(err)
					}
					now = now.Add(timedStep)
					// What a replay gets of it in any case, and what it must not take.
					send(zombie, stored(nil, chain[:50]...))
					send(pair, stored(nil, chain[:5]...))
					send(late1, retired())
					send(late, stored(nil, chain[:40]...))
					rival.batch.Seq = 1
					send(rival, stored(nil, chain[:50]...))
					send(hurt, stored(&seqs[15], chain[16:25]...))
					send(hurt1, stored(&seqs[18], chain[19:30]...))
					send(well, stored(&seqs[16], chain[17:35]...))

					two := r.start()
					r.follow()
					two.caughtUp()
					r.mustSay(append(c.said, "level=ERROR")...)
					if c.counts != numCounters {
						if n := two.counted(c.counts); n != 1 {
							t.Errorf("%s is %d, want 1", counterNames[c.counts].name, n)
						}
					}
					if !trimmed {
						two.same(2, 200)
						two.saved()
						three := two.restart()
						three.same(3, 200)
						three.undamaged()
						return
					}
					check := func(in *instance, seed uint64, whole func(worker string, rank int32) bool) {
						t.Helper()
						r.follow()
						in.caughtUp()
						in.notAbove(seed, 200)
						for _, w := range r.oracle.Workers() {
							if !c.hurts(w.Worker, w.Rank) || whole(w.Worker, w.Rank) {
								in.sameWorker(w)
							}
						}
						for _, w := range in.Workers("") {
							if c.hurts(w.Worker, w.Rank) && !w.Incomplete && !w.Retired && !whole(w.Worker, w.Rank) {
								t.Errorf("%s rank %d has lost what was trimmed, but is not incomplete", w.Worker, w.Rank)
							}
						}
					}
					check(two, 2, only("", 0))
					two.saved()
					two = two.restart()
					check(two, 3, only("", 0))

					// The next epoch is what a worker-rank needs.
					now = now.Add(timedStep)
					hurt.batch.Epoch, hurt.batch.Seq = now.UnixMilli(), -1
					send(hurt, stored(nil, chain[:12]...))
					send(zombie, stored(nil, chain[:50]...))
					send(pair, stored(nil, chain[:9]...))
					send(late, stored(nil, chain[:9]...))
					send(mute, stored(nil, chain[:9]...))
					check(two, 4, only("hurt", 0))

					// As is time. All the while nothing is above the truth.
					for i := range 14 {
						now = now.Add(timedStep)
						send(rival, stored(nil, chain[:50]...))
						for _, p := range []*producer{hurt, hurt1, well, pair, late, mute, zombie} {
							send(p, stored(nil, chain[:10+i]...), removed(seqs[9+i]))
						}
						if i%5 == 2 {
							two.saved()
							two = two.restart()
						}
						r.follow()
						two.caughtUp()
						two.notAbove(uint64(5+i), 50)
					}
					now = now.Add(timedStep)
					hurt1.batch.Epoch, hurt1.batch.Seq = now.UnixMilli(), -1 // time does not settle a dispute
					for _, p := range []*producer{hurt, hurt1, well, pair, late, mute} {
						send(p, cleared(), stored(nil, chain[:11]...))
					}
					two.same(20, 200)
					two.saved()
					three := two.restart()
					three.same(21, 200)
					three.undamaged()
				})
			})
		}
	}
}

// only says yes to one worker-rank.
func only(worker string, rank int32) func(string, int32) bool {
	return func(w string, r int32) bool { return w == worker && r == rank }
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
		// A restore asks the leader that it has found; others look without one.
		if topic := req.(*kmsg.ListOffsetsRequest).Topics[0]; topic.Topic == r.cfg.SnapshotTopic && topic.Partitions[0].CurrentLeaderEpoch >= 0 {
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

// notAbove asks n random queries at equal offsets: no answer may be above the truth.
func (in *instance) notAbove(seed uint64, n int) {
	in.r.t.Helper()
	queries := in.r.oracle.Queries(rand.New(rand.NewPCG(seed, 1)), n)
	// What only refused records stored the oracle does not ask for.
	for _, prompt := range []uint64{7, 8} {
		queries = append(queries, verify.Query{Model: testModel, BlockSize: testBlockSize, Locals: locals(prompt, 60)})
	}
	for i, q := range queries {
		if _, err := in.Model(q.Model, int(q.BlockSize), ""); err != nil {
			continue // no record that counts named it
		}
		want := in.r.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		for w, depth := range in.depths(q) {
			for tier := range depth {
				if depth[tier] > want[w][tier] {
					in.r.t.Fatalf("query %d: %v has depths %v, the truth is %v", i, w, depth, want[w])
				}
			}
		}
	}
}
