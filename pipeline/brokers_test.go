package pipeline

// This file holds the stage to what brokers do to a log: markers, gaps, open
// transactions, topics made anew or grown, trimming, death and truncation.

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/pipeline/verify"
	"kvindex/testcontainers"
)

// mustSay fails the test if no line of the log holds all the parts.
func (r *rig) mustSay(parts ...string) {
	r.t.Helper()
	if !r.logged.has(parts...) {
		r.t.Errorf("the log has no line with all of %q", parts)
	}
}

// restart ends the stage as a crash would and starts another.
func (in *instance) restart() *instance {
	in.r.t.Helper()
	in.abandon()
	return in.r.start()
}

func TestRestoreFromEmptyTopics(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 3)
		one := r.start()
		one.caughtUp()
		two := one.restart()
		two.caughtUp()
		if n := two.counted(restores); n != 3 {
			t.Errorf("%d restores, want one a partition", n)
		}
		r.fleet("w", 5).work(40)
		two.same(1, 100)
	})
}

// A reader that waits for a record at the end waits for ever: the last offset
// of both topics is a transaction's marker.
func TestRestoreFromLogsThatEndInMarkers(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 3)
		one := r.start()
		f := r.fleet("w", 6)
		f.work(60)
		tx := r.transaction(testcontainers.Name("producer"))
		for p := range int32(3) {
			tx.send(r.cfg.Topic, p, []byte("aborted"), []byte("nonsense"))
		}
		tx.end(kgo.TryAbort)
		one.same(1, 100)
		one.saved()
		one.abandon()
		for _, topic := range []string{r.cfg.Topic, r.cfg.SnapshotTopic} {
			ends := testcontainers.StableOffsets(t, b, topic)
			for p, records := range testcontainers.ReadCommitted(t, b, topic) {
				if n := len(records); n > 0 && records[n-1].Offset+1 >= ends[p] {
					t.Errorf("%s/%d ends at %d in a record, want a marker", topic, p, ends[p])
				}
			}
		}
		two := r.start()
		two.same(2, 100)
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none", n)
		}
	})
}

func TestRestoreFromSnapshotsWhoseTailIsCompactedAway(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 2)
		one := r.start()
		f := r.fleet("w", 6)
		for range 3 { // rounds that take each other's place
			f.work(40)
			one.saved()
		}
		one.abandon()
		total := 0
		for _, n := range testcontainers.Compact(t, b, r.cfg.SnapshotTopic) {
			total += n
		}
		if total == 0 {
			t.Fatal("compaction removed nothing")
		}
		ends := testcontainers.StableOffsets(t, b, r.cfg.SnapshotTopic)
		for p, records := range testcontainers.ReadCommitted(t, b, r.cfg.SnapshotTopic) {
			if n := len(records); n > 0 && records[n-1].Offset+1 >= ends[p] {
				t.Errorf("snapshot partition %d: the last record is at %d and the end at %d, want a gap", p, records[n-1].Offset, ends[p])
			}
		}
		two := r.start()
		two.same(2, 100)
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none", n)
		}
		f.work(20)
		two.same(3, 100)
		two.saved()
	})
}

// transaction is a producer of transactions, to be left in any state.
type transaction struct {
	r     *rig
	cl    *kgo.Client
	topic string // of the last record
}

// transaction begins one.
func (r *rig) transaction(id string) *transaction {
	r.t.Helper()
	cl := testcontainers.Client(r.t, r.broker, kgo.TransactionalID(id), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err := cl.BeginTransaction(); err != nil {
		r.t.Fatal(err)
	}
	return &transaction{r: r, cl: cl}
}

func (tx *transaction) send(topic string, partition int32, key, value []byte) {
	tx.r.t.Helper()
	tx.topic = topic
	rec := &kgo.Record{Topic: topic, Partition: partition, Key: key, Value: value}
	if err := tx.cl.ProduceSync(tx.r.t.Context(), rec).FirstErr(); err != nil {
		tx.r.t.Fatal(err)
	}
}

// end ends the transaction, the only open one on its topic. Brokers answer before
// the log shows it.
func (tx *transaction) end(commit kgo.TransactionEndTry) {
	tx.r.t.Helper()
	if err := tx.cl.EndTransaction(tx.r.t.Context(), commit); err != nil {
		tx.r.t.Fatal(err)
	}
	testcontainers.Eventually(tx.r.t, patience, func() error {
		stable, end := testcontainers.StableOffsets(tx.r.t, tx.r.broker, tx.topic), testcontainers.EndOffsets(tx.r.t, tx.r.broker, tx.topic)
		if !slices.Equal(stable, end) {
			return fmt.Errorf("topic %s ends at %v, and is stable up to %v", tx.topic, end, stable)
		}
		return nil
	})
}

// A writer that was killed leaves its transaction open. A restore reads what is
// committed below it; the next writer's takeover aborts it.
func TestRestoreBelowTheTransactionOfAKilledWriter(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 2)
		one := r.start()
		f := r.fleet("w", 6)
		f.work(40)
		one.saved()
		one.abandon()
		for n := range int32(2) {
			tx := r.transaction(fmt.Sprintf("%s-snapshot-%s-%d", r.cfg.Group, r.cfg.SnapshotTopic, n))
			for _, p := range f.all {
				// Were it ever read, every worker-rank would be damaged.
				tx.send(r.cfg.SnapshotTopic, n, fmt.Appendf(nil, "manifest/%d/%s", p.batch.Rank, p.batch.Worker), []byte("nonsense"))
			}
		}
		open := testcontainers.StableOffsets(t, b, r.cfg.SnapshotTopic)
		for p, end := range testcontainers.EndOffsets(t, b, r.cfg.SnapshotTopic) {
			if open[p] >= end {
				t.Fatalf("snapshot partition %d: the last stable offset is the end %d: no transaction is open", p, end)
			}
		}
		f.work(20)
		two := r.start()
		two.same(2, 100)
		if n := two.counted(restoresDamaged); n != 0 {
			t.Errorf("%d worker-ranks damaged: an open transaction was read", n)
		}
		two.saved()
		for p, stable := range testcontainers.StableOffsets(t, b, r.cfg.SnapshotTopic) {
			if stable <= open[p] {
				t.Errorf("snapshot partition %d: the last stable offset is still %d, that of the transaction that nobody ended", p, stable)
			}
		}
		two.restart().same(3, 100)
	})
}

// recreated waits until the stage has dropped and restored everything.
func (in *instance) recreated(restoredBefore int64) {
	in.r.t.Helper()
	in.eventually(func() error {
		if n, want := in.counted(restores), restoredBefore+int64(len(in.Stage.consumer.Partitions())); n < want {
			return fmt.Errorf("%d restores, want %d", n, want)
		}
		return nil
	})
	in.caughtUp()
}

var eventsConfig = map[string]string{"message.timestamp.type": "LogAppendTime"}

// What was read from the old topic is no longer true, and its snapshots are of
// offsets that mean something else now.
func TestEventsTopicRecreated(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(map[bool]string{true: "while the stage runs", false: "while it is down"}[running], func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				r := newRig(t, b, 3)
				in := r.start()
				r.fleet("old", 6).work(60)
				in.same(1, 50)
				in.saved()
				old := r.queries(1, 100)
				before := in.counted(restores)
				if !running {
					in.abandon()
				}
				testcontainers.RecreateTopic(t, b, r.cfg.Topic, 3, eventsConfig)
				r.forget()
				if running {
					in.recreated(before)
					r.mustSay("level=WARN", "deleted and created again", r.cfg.Topic)
				} else {
					in = r.start()
					in.caughtUp()
				}
				for p := range 3 {
					r.mustSay("level=ERROR", "snapshots are of another log", fmt.Sprintf("partition=%d", p))
				}
				in.answersNone(old)
				if all := in.Workers(""); len(all) > 0 {
					t.Fatalf("worker-ranks of the topic that is gone are listed: %v", all)
				}

				r.fleet("new", 6).work(60)
				in.same(2, 100)
				in.saved()
				two := in.restart()
				two.same(3, 100)
				if read, discarded := two.counted(recordsRead), two.counted(snapshotsDiscarded); read+discarded != 0 {
					t.Errorf("%d records were read again and %d snapshots discarded, want none: the new topic's snapshots are there", read, discarded)
				}
			})
		})
	}
}

// A topic made anew may have fewer partitions: those that are gone have nothing
// and delay nothing.
func TestEventsTopicRecreatedWithOtherPartitions(t *testing.T) {
	for _, n := range []int{2, 5} {
		t.Run(fmt.Sprintf("%d instead of 3", n), func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				r := newRig(t, b, 3)
				testcontainers.AddPartitions(t, b, r.cfg.SnapshotTopic, 5)
				in := r.start()
				r.fleet("old", 6).work(60)
				in.same(1, 50)
				in.saved()
				testcontainers.RecreateTopic(t, b, r.cfg.Topic, n, eventsConfig)
				r.forget()
				in.eventually(func() error {
					if got := len(in.Status().Partitions); got != n {
						return fmt.Errorf("%d partitions in the status, want %d", got, n)
					}
					if all := in.Workers(""); len(all) > 0 {
						return fmt.Errorf("%d worker-ranks of the topic that is gone are listed", len(all))
					}
					return nil
				})
				r.fleet("new", 6).work(60)
				in.same(2, 100)
				in.saved()
				in.restart().same(3, 100)
			})
		})
	}
}

// Workers whose key maps elsewhere after a topic grew begin a new epoch there.
func TestPartitionsAdded(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(map[bool]string{true: "while the stage runs", false: "while it is down"}[running], func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				r := newRig(t, b, 2)
				in := r.start()
				f := r.fleet("w", 8)
				f.work(60)
				in.same(1, 50)
				in.saved()
				if !running {
					in.abandon()
				}
				testcontainers.AddPartitions(t, b, r.cfg.SnapshotTopic, 5)
				testcontainers.AddPartitions(t, b, r.cfg.Topic, 5)
				if running {
					in.eventually(func() error {
						if n := len(in.Status().Partitions); n != 5 {
							return fmt.Errorf("%d partitions, want 5", n)
						}
						return nil
					})
					r.mustSay("level=WARN", "more partitions than before")
				} else {
					in = r.start()
				}
				in.same(2, 50)
				f.reconnect()
				f.renew()
				f.work(60)
				in.same(3, 100)
				in.saved()
				two := in.restart()
				two.same(4, 100)
				if n := two.counted(recordsRead); n != 0 {
					t.Errorf("%d records were read again, want none: all partitions have snapshots again", n)
				}
			})
		})
	}
}

// Whatever is before the floor is safe to trim, and not one record more.
func TestEventsTrimmed(t *testing.T) {
	for _, c := range []struct {
		name string
		at   func(floor int64) int64
	}{
		{"below the floor", func(floor int64) int64 { return floor / 2 }},
		{"at the floor", func(floor int64) int64 { return floor }},
	} {
		t.Run(c.name, func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				r := newRig(t, b, 2)
				one := r.start()
				f := r.fleet("w", 6)
				f.work(60)
				one.same(1, 50)
				one.saved()
				for _, p := range one.Status().Partitions {
					if p.Floor > 0 {
						testcontainers.DeleteRecords(t, b, r.cfg.Topic, p.Partition, c.at(p.Floor))
					}
				}
				f.work(30)
				one.same(2, 50)
				two := one.restart()
				two.same(3, 100)
				for _, w := range two.Workers("") {
					if w.Incomplete {
						t.Errorf("%+v is incomplete, want complete: nothing is lost", w)
					}
				}
			})
		})
	}

	// Everything past the floor is gone, as by retention that outran it: who
	// missed records is not answered, and that is said, until it begins anew.
	t.Run("past the floor", func(t *testing.T) {
		testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
			r := newRig(t, b, 2)
			one := r.start()
			f := r.fleet("w", 6)
			f.work(60)
			one.saved()
			one.abandon()
			f.work(40)
			r.follow()
			for p, end := range testcontainers.StableOffsets(t, b, r.cfg.Topic) {
				testcontainers.DeleteRecords(t, b, r.cfg.Topic, int32(p), end)
			}
			two := r.start()
			f.work(20) // of epochs that began in what is gone
			two.caughtUp()
			for _, w := range two.Workers("") {
				if !w.Incomplete || w.Blocks != [index.Tiers]int{} {
					t.Errorf("%+v is answered or complete: its records are gone", w)
				}
				r.mustSay("level=ERROR", "the log was trimmed past", "worker="+w.Worker, fmt.Sprintf("partition=%d", w.Partition))
			}
			if !slices.ContainsFunc(two.Status().Warnings, func(s string) bool { return strings.Contains(s, "are not answered") }) {
				t.Errorf("no warning of unanswered worker-ranks in %q", two.Status().Warnings)
			}
			r.nextMillisecond() // an epoch would be no newer than the loss
			f.renew()
			f.work(80)
			two.same(2, 100)
			two.saved()
			two.restart().same(3, 100)
		})
	})
}

// Records of an open transaction are not applied, and hold back what comes
// after them on their partition; those of an aborted one never are.
func TestEventsInTransactions(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 2)
		one := r.start()
		f := r.fleet("w", 6)
		f.work(30)
		one.same(1, 50)

		p := r.produce("transactional", 0)
		prompt := locals(99, 10)
		ask := []verify.Query{{Model: testModel, BlockSize: testBlockSize, Locals: prompt}}
		depth := func(in *instance) int {
			return in.depths(ask[0])[verify.WorkerRank{Worker: "transactional"}][index.Device]
		}
		tx := r.transaction(testcontainers.Name("producer"))
		const partition = 1
		tx.send(r.cfg.Topic, partition, p.batch.Worker, p.encode(stored(nil, prompt[:4]...)))
		f.work(40)
		one.same(2, 50) // up to the last stable offset
		one.answersNone(ask)
		two := one.restart()
		two.same(3, 50) // an open transaction does not keep a restore from ending
		two.answersNone(ask)
		tx.end(kgo.TryCommit)
		two.same(4, 50)
		if got := depth(two); got != 4 {
			t.Errorf("depth %d after the commit, want 4", got)
		}

		read := two.counted(recordsRead)
		if err := tx.cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		seq := p.batch.Seq
		tx.send(r.cfg.Topic, partition, p.batch.Worker, p.encode(stored(nil, prompt...)))
		tx.end(kgo.TryAbort)
		p.batch.Seq = seq
		two.same(5, 50)
		if n := two.counted(recordsRead); n != read {
			t.Errorf("%d records of an aborted transaction were read", n-read)
		}
		if got := depth(two); got != 4 {
			t.Errorf("depth %d after an aborted transaction, want 4", got)
		}
		two.saved()
		two.restart().same(6, 50)
	})
}

func TestEventsTopicIsCreatedLater(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 2)
		r.cfg.Topic = testcontainers.Name("later")
		in := r.start()
		if got := in.Readiness(); got.Ready || !strings.Contains(strings.Join(got.Missing, ""), r.cfg.Topic) {
			t.Errorf("readiness %+v, want not ready and the topic named", got)
		}
		in.eventually(func() error {
			if !r.logged.has("level=WARN", "waiting for the topic", consumer.ErrNoTopic.Error()) {
				return fmt.Errorf("nothing is said")
			}
			return nil
		})
		adm := testcontainers.Admin(t, b)
		timestamps := "LogAppendTime"
		if _, err := adm.CreateTopic(t.Context(), 2, -1, map[string]*string{"message.timestamp.type": &timestamps}, r.cfg.Topic); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { adm.DeleteTopic(t.Context(), r.cfg.Topic) })
		in.eventually(func() error {
			if got := in.Readiness(); !got.Ready {
				return fmt.Errorf("not ready: %v", got.Missing)
			}
			return nil
		})
		r.fleet("w", 5).work(40)
		in.same(1, 100)
		in.saved()
	})
}

// Without a place for snapshots the stage serves and says what is missing; once
// there is one, it is used.
func TestSnapshotTopicMissingOrTooSmall(t *testing.T) {
	for _, partitions := range []int{0, 2} {
		t.Run(fmt.Sprintf("%d of 4 partitions", partitions), func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				r := newRig(t, b, 4)
				r.cfg.SnapshotTopic = testcontainers.Name("snapshots")
				adm := testcontainers.Admin(t, b)
				compact := "compact"
				create := func(n int) {
					t.Helper()
					if _, err := adm.CreateTopic(t.Context(), int32(n), -1, map[string]*string{"cleanup.policy": &compact}, r.cfg.SnapshotTopic); err != nil {
						t.Fatal(err)
					}
				}
				if partitions > 0 {
					create(partitions)
				}
				in := r.start()
				r.fleet("w", 9).work(60)
				in.same(1, 100)
				in.showsTopics(adm)
				in.eventually(func() error {
					lacks := fmt.Sprintf("topic %s has %d partitions of the 4", r.cfg.SnapshotTopic, partitions)
					if partitions == 0 {
						lacks = "topic " + r.cfg.SnapshotTopic + ": " + consumer.ErrNoTopic.Error()
					}
					if got := in.Status().Warnings; len(got) != 1 || !strings.Contains(got[0], lacks) {
						return fmt.Errorf("warnings %q, want one with %q", got, lacks)
					}
					return nil
				})
				if partitions > 0 {
					testcontainers.AddPartitions(t, b, r.cfg.SnapshotTopic, 4)
				} else {
					create(4)
				}
				in.saved()
				in.showsTopics(adm)
				in.eventually(func() error {
					if got := in.Status().Warnings; len(got) > 0 {
						return fmt.Errorf("warnings %q, want none any more", got)
					}
					return nil
				})
				two := in.restart()
				two.same(2, 100)
				if n := two.counted(recordsRead); n != 0 {
					t.Errorf("%d records were read again, want none", n)
				}
			})
		})
	}
}

// showsTopics waits until the status has both topics as the broker has them.
func (in *instance) showsTopics(adm *kadm.Client) {
	in.r.t.Helper()
	in.eventually(func() error {
		topics, err := adm.ListTopics(in.r.t.Context(), in.r.cfg.Topic, in.r.cfg.SnapshotTopic)
		if err != nil {
			return err
		}
		want := func(name string) query.TopicStatus {
			if topics[name].Err != nil {
				return query.TopicStatus{Name: name}
			}
			return query.TopicStatus{Name: name, ID: fmt.Sprintf("%x", [16]byte(topics[name].ID))}
		}
		st := in.Status()
		if st.Events != want(in.r.cfg.Topic) || st.Snapshots != want(in.r.cfg.SnapshotTopic) {
			return fmt.Errorf("topics %v and %v, want %v and %v", st.Events, st.Snapshots, want(in.r.cfg.Topic), want(in.r.cfg.SnapshotTopic))
		}
		return nil
	})
}

// agrees compares answers without asking brokers anything.
func (in *instance) agrees(queries []verify.Query) {
	in.r.t.Helper()
	for i, q := range queries {
		if got, want := in.depths(q), in.r.oracle.Depths(q.Model, q.BlockSize, q.Locals); !maps.Equal(got, want) {
			in.r.t.Fatalf("query %d, %d blocks: depths %v, want %v", i, len(q.Locals), got, want)
		}
	}
}

func TestBrokerDiesUnderTheStage(t *testing.T) {
	b := testcontainers.NewNative(t, testcontainers.NativeConfig{})
	r := newRig(t, b, 3)
	in := r.start()
	f := r.fleet("w", 6)
	f.work(60)
	in.same(1, 100)
	in.saved()
	queries := r.queries(2, 100)
	if err := b.Kill(0); err != nil {
		t.Fatal(err)
	}
	in.eventually(func() error {
		if !r.logged.has("level=WARN", "cannot look at the topic") {
			return fmt.Errorf("nobody noticed that the broker is gone")
		}
		in.agrees(queries) // from memory
		return nil
	})
	if got := in.Readiness(); !got.Ready {
		t.Errorf("not ready while brokers are away: %v; what was read is still true", got.Missing)
	}
	if err := b.Start(0); err != nil {
		t.Fatal(err)
	}
	in.agrees(queries)
	f.work(60)
	in.same(3, 100)
	in.saved()
	in.eventually(func() error {
		for _, p := range in.Status().Partitions {
			if p.Problem != "" {
				return fmt.Errorf("partition %d: problem %q, want none any more", p.Partition, p.Problem)
			}
		}
		return nil
	})
	if n := in.counted(restores); n != 3 {
		t.Errorf("%d restores, want one a partition: nothing was lost", n)
	}
	in.restart().same(4, 100)
}

// A broker that died lost its newest records, and others take their offsets:
// what the stage holds of them, in memory and in snapshots, never happened.
func TestLogTruncated(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(map[bool]string{true: "under the stage", false: "while it is down"}[running], func(t *testing.T) {
			data := filepath.Join(t.TempDir(), "data")
			b := testcontainers.NewNative(t, testcontainers.NativeConfig{Properties: map[string]string{"log.dirs": data}})
			r := newRig(t, b, 1)
			in := r.start()
			f := r.fleet("w", 6)
			f.work(60)
			log := filepath.Join(data, r.cfg.Topic+"-0", "00000000000000000000.log")
			kept, err := os.Stat(log)
			if err != nil {
				t.Fatal(err)
			}
			r.follow()
			f.work(60)
			in.caughtUp()
			in.saved()
			end := in.Status().Partitions[0].End
			if !running {
				in.abandon()
			}
			if err := b.Kill(0); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(log, kept.Size()); err != nil {
				t.Fatal(err)
			}
			if err := b.Start(0); err != nil {
				t.Fatal(err)
			}
			if now := testcontainers.EndOffsets(t, b, r.cfg.Topic)[0]; now >= end {
				t.Fatalf("the log ends at %d, want it truncated below %d", now, end)
			}
			if running {
				in.eventually(func() error {
					if n := in.counted(restores); n < 2 {
						return fmt.Errorf("%d restores, want one after the truncation", n)
					}
					return nil
				})
			} else {
				in = r.start()
			}
			in.same(1, 100)
			if n := in.counted(snapshotsDiscarded); n != 1 {
				t.Errorf("snapshots were discarded %d times, want once", n)
			}
			f.reconnect()
			f.renew()
			f.work(80) // past where the log ended before
			in.same(2, 100)
			in.saved()
			two := in.restart()
			two.same(3, 100)
			if n := two.counted(snapshotsDiscarded); n != 0 {
				t.Errorf("snapshots were discarded %d times, want them good again", n)
			}
		})
	}
}
