package pipeline

// This file kills the snapshot writer after each of its steps and restores.

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvindex/index"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/snapshot"
	"kvindex/testcontainers"

	"github.com/twmb/franz-go/pkg/kgo"
)

// newTimedRig is newRig with an events topic whose records have the time that
// their producer gives them, so that silence and forgetting take no time.
func newTimedRig(t *testing.T, b testcontainers.Broker, partitions int) *rig {
	t.Helper()
	r := newRig(t, b, partitions)
	r.cfg.Topic = testcontainers.NewTopic(t, b, "timed-events", partitions, map[string]string{"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
	r.cfg.WorkerTTL, r.cfg.WorkerGrace = timedGrace, timedGrace
	r.oracle = verify.New(timedGrace)
	return r
}

// timedGrace is the silence that retires in a timed rig. Tests move its clocks
// by sixths of it, which is far more than they take.
const (
	timedGrace = time.Hour
	timedStep  = timedGrace / 6
)

// at makes one record of the next seq for the partition and the time.
func (p *producer) at(when time.Time, events ...schemas.Event) *kgo.Record {
	p.r.t.Helper()
	return &kgo.Record{Partition: p.partition, Timestamp: when, Key: slices.Clone(p.batch.Worker), Value: p.encode(events...)}
}

// roots are single blocks without parents, which take the most room in a chunk:
// n of them from number first on.
func roots(first, n int) (events []schemas.Event, hashes []index.SeqHash) {
	for _, l := range locals(1<<20, first+n)[first:] {
		events = append(events, stored(nil, l))
		hashes = append(hashes, index.SeqHash(l))
	}
	return events, hashes
}

// Chunks are small here, so that a few blocks make several: chunkRoots is more
// roots than one of smallChunk bytes holds and less than two do.
const (
	smallChunk = 8 << 10
	chunkRoots = 250
)

// errKilledByTest is the error of a hook that kills.
var errKilledByTest = errors.New("killed by the test")

// The writer is stopped dead after its k-th acknowledged step, for every k of a
// round that has every kind of step: partition k's writer after step k. Nothing
// but Kafka is left; a fresh stage answers as if nothing had happened, also with
// everything below the floor trimmed.
func TestWriterKilledAfterEveryStep(t *testing.T) {
	const partitions = 20 // more than the round has steps; partition 0's is not killed
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newTimedRig(t, b, partitions)
		cl := r.client()
		now := time.Now().Add(-48 * time.Hour).Truncate(time.Second)
		send := func(records ...*kgo.Record) {
			t.Helper()
			if err := cl.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		type workers struct{ big, idle, idle1, gone, gone1, old, fresh *producer }
		var all [partitions]workers
		for n := range int32(partitions) {
			of := func(name string, rank int32) *producer {
				p := &producer{r: r, cl: cl, partition: n, batch: schemas.Batch{
					Producer: []byte("producer-1"), Worker: fmt.Appendf(nil, "%s-%d", name, n), Rank: rank, Epoch: 1, Seq: -1,
					Model: []byte(testModel), BlockSize: testBlockSize,
				}}
				return p
			}
			all[n] = workers{of("big", 0), of("idle", 0), of("idle", 1), of("gone", 0), of("gone", 1), of("old", 0), of("fresh", 0)}
		}
		chain := locals(7, 30)
		for _, w := range all {
			for i := range 2 {
				events, _ := roots(i*chunkRoots, chunkRoots)
				send(w.big.at(now, events...))
			}
			send(w.idle.at(now, stored(nil, chain[:10]...)), w.idle1.at(now, stored(nil, chain[:20]...)),
				w.gone.at(now, stored(nil, chain[:15]...)), w.gone1.at(now, stored(nil, chain[:16]...)), w.old.at(now, stored(nil, chain...)))
		}
		one := r.start(func(s *Stage) { s.chunkBytes = smallChunk })
		one.same(1, 50)
		one.saved()
		one.abandon()

		// The round to be: big shrinks from three chunks to two, idle ones only
		// live on, gone is retired, old was silent and is forgotten, fresh is new.
		for range 12 {
			now = now.Add(timedStep)
			for _, w := range all {
				send(w.big.at(now), w.idle.at(now), w.idle1.at(now), w.gone.at(now), w.gone1.at(now))
			}
		}
		_, hashes := roots(chunkRoots, chunkRoots)
		for _, w := range all {
			send(w.big.at(now, removed(hashes...)), w.gone1.at(now, retired()), w.fresh.at(now, stored(nil, chain[:25]...)))
		}

		var mu sync.Mutex
		steps := make([][]snapshot.Step, partitions)
		ended := make([]bool, partitions) // killed, or the round is over
		two := r.start(func(s *Stage) {
			s.chunkBytes = smallChunk
			s.policy.MaxAge, s.policy.MinBytes = time.Nanosecond, 1
			s.hook = func(n int32, step snapshot.Step) error {
				mu.Lock()
				if ended[n] {
					mu.Unlock()
					return nil // a later round
				}
				steps[n] = append(steps[n], step)
				dies := len(steps[n]) == int(n)
				ended[n] = dies || step.Kind == snapshot.StepOffset
				mu.Unlock()
				if dies {
					<-s.saving.Done() // dead is dead until the process ends
					return errKilledByTest
				}
				return nil
			}
		})
		two.eventually(func() error {
			mu.Lock()
			defer mu.Unlock()
			if n := slices.Index(ended, false); n >= 0 {
				return fmt.Errorf("partition %d: %d steps: %v", n, len(steps[n]), steps[n])
			}
			return nil
		})
		two.abandon()
		mu.Lock()
		whole := steps[0]
		kinds := map[snapshot.StepKind]int{}
		var said strings.Builder
		for k, s := range whole {
			kinds[s.Kind]++
			fmt.Fprintf(&said, "\n%2d %v %v %d", k+1, s.Kind, s.ID, s.Chunk)
		}
		t.Logf("the round's %d steps:%s", len(whole), &said)
		if len(whole) >= partitions {
			t.Fatalf("%d steps, but only %d partitions to be killed in", len(whole), partitions-1)
		}
		for kind, least := range map[snapshot.StepKind]int{
			snapshot.StepChunk: 2, snapshot.StepManifest: 5, snapshot.StepTombstone: 4, snapshot.StepCommit: 1,
			snapshot.StepFloor: 1, snapshot.StepFloorCommit: 1, snapshot.StepOffset: 1,
		} {
			if kinds[kind] < least {
				t.Errorf("%d steps of kind %v, want %d at least", kinds[kind], kind, least)
			}
		}
		for n, s := range steps {
			if want := min(n, len(whole)); n > 0 && len(s) != want {
				t.Errorf("partition %d: %d steps, want %d", n, len(s), want)
			}
		}
		mu.Unlock()

		// A fresh stage that writes nothing yet, then one that has only what is
		// at or past the floor.
		three := r.start(func(s *Stage) { s.hook = func(int32, snapshot.Step) error { return errKilledByTest } })
		three.same(3, 200)
		three.whole()
		// Between a round's two transactions the floor lies below the manifests' W.
		if skipped, twice := three.counted(recordsSkipped), three.counted(recordsDuplicate); skipped == 0 || twice > 0 {
			t.Errorf("%d records that snapshots hold were passed over, want some, and %d taken for duplicates, want none", skipped, twice)
		}
		three.abandon()
		for n, floor := range r.floors() {
			testcontainers.DeleteRecords(t, b, r.cfg.Topic, int32(n), floor)
		}
		four := r.start(func(s *Stage) { s.chunkBytes = smallChunk })
		four.same(4, 200)
		four.whole()
		for _, w := range all {
			send(w.big.at(now, stored(nil, chain[:9]...)), w.idle.at(now, stored(nil, chain[:12]...)), w.gone.at(now, stored(nil, chain...)))
		}
		four.same(5, 50)
		four.saved()
		five := four.restart()
		five.same(6, 200)
		five.whole()
		if n := five.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none", n)
		}
	})
}

// whole fails the test if a restore found anything wrong.
func (in *instance) whole() {
	in.r.t.Helper()
	for _, k := range []counter{restoresDamaged, snapshotsDiscarded, gaps} {
		if n := in.counted(k); n != 0 {
			in.r.t.Errorf("%s is %d, want 0", counterNames[k].name, n)
		}
	}
}

// table reads a partition of the snapshot topic.
func (r *rig) table(partition int32) *snapshot.Table {
	r.t.Helper()
	reader := snapshot.NewReader(snapshot.ReaderConfig{Client: testcontainers.Client(r.t, r.broker), Topic: r.cfg.SnapshotTopic, Partition: partition})
	if err := reader.ReadToEnd(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	return reader.Table()
}

// floors reads the floor of each partition, 0 if it has none.
func (r *rig) floors() []int64 {
	r.t.Helper()
	floors := make([]int64, len(testcontainers.StableOffsets(r.t, r.broker, r.cfg.SnapshotTopic)))
	for n := range floors {
		if f, ok := r.table(int32(n)).Floor(); ok {
			floors[n] = f.Offset
		}
	}
	return floors
}
