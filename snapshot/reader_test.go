package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/testcontainers"
)

var (
	idA = ID{"worker/a", 0}
	idB = ID{"worker/b", 1}
	idC = ID{"worker/c", 0}
	idD = ID{"worker/d", 3}
)

// What was committed past another's open transaction is not read before that ends, and
// the log says so.
func TestReadToEndBelowAnOpenTransaction(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		wr := w.writer(t, 0)
		chain := locals(1, 10)
		write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idA, 5, chain)}})
		held := testcontainers.EndOffsets(t, b, w.topic)[0]
		foreign := testcontainers.Client(t, b, kgo.TransactionalID(testcontainers.Name("foreign")), kgo.DefaultProduceTopic(w.topic))
		if err := foreign.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		if err := foreign.ProduceSync(deadline(t), &kgo.Record{Key: []byte("foreign")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if _, err := wr.Write(deadline(t), Round{Position: 9, Dumps: []Dump{dump(idA, 8, chain)}}); err != nil {
			t.Fatal(err)
		}
		read := func() (map[ID]saved, Progress, string) {
			t.Helper()
			var log bytes.Buffer
			r := NewReader(ReaderConfig{Client: w.cl, Topic: w.topic, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			if err := r.ReadToEnd(deadline(t)); err != nil {
				t.Fatal(err)
			}
			return state(t, r.Table()), r.Read(), log.String()
		}
		got, p, log := read()
		wantState(t, got, map[ID]saved{idA: savedAs(dump(idA, 5, nil), chain)})
		if p.Target != held || p.End <= held {
			t.Errorf("read to %d of %d, want to %d", p.Target, p.End, held)
		}
		if want := fmt.Sprintf("topic=%s partition=0 last_stable_offset=%d end=%d", w.topic, held, p.End); !strings.Contains(log, want) {
			t.Errorf("log %q, want %q", log, want)
		}
		if err := foreign.EndTransaction(deadline(t), kgo.TryAbort); err != nil {
			t.Fatal(err)
		}
		settled(t, b, w.topic, 0)
		got, p, log = read()
		wantState(t, got, map[ID]saved{idA: savedAs(dump(idA, 8, nil), chain)})
		if p.Target != p.End || log != "" {
			t.Errorf("read to %d of %d, log %q", p.Target, p.End, log)
		}
	})
}

// A reader reaches the end whatever the log's end looks like, and has the last
// committed state there.
func TestReadToEnd(t *testing.T) {
	chainA, chainB := locals(1, 100), locals(2, 10)
	for _, tc := range []struct {
		name string
		make func(t *testing.T, w *world)
		want map[ID]saved
		end  func(t *testing.T, w *world) int64
	}{
		{
			name: "empty",
			make: func(*testing.T, *world) {},
		},
		{
			name: "commit marker at the end",
			make: func(t *testing.T, w *world) {
				write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, chainA)}})
			},
			want: map[ID]saved{idA: savedAs(dump(idA, 5, nil), chainA)},
		},
		{
			name: "tail compacted away",
			make: func(t *testing.T, w *world) {
				wr := w.writer(t, 0)
				write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idA, 5, chainA)}})
				write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idB, 6, chainB)}})
				write(t, wr, Round{Position: 9, Deletes: []ID{idB}})
				// The tombstones and everything after the last record of a are removed.
				if removed := testcontainers.Compact(t, w.b, w.topic); removed[0] == 0 {
					t.Fatal("compaction removed nothing")
				}
			},
			want: map[ID]saved{idA: savedAs(dump(idA, 5, nil), chainA)},
		},
		{
			name: "transaction left open by a killed writer",
			make: func(t *testing.T, w *world) {
				write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, chainA)}})
				wr := w.writer(t, 0, hook(func(s Step) error {
					if s.Kind == StepManifest {
						return errors.New("killed")
					}
					return nil
				}))
				_, err := wr.Write(deadline(t), Round{Position: 9, Dumps: []Dump{dump(idA, 8, chainB)}})
				if !errors.Is(err, ErrKilled) {
					t.Fatal(err)
				}
			},
			want: map[ID]saved{idA: savedAs(dump(idA, 5, nil), chainA)},
			end: func(t *testing.T, w *world) int64 {
				stable := testcontainers.StableOffsets(t, w.b, w.topic)[0]
				if end := testcontainers.EndOffsets(t, w.b, w.topic)[0]; stable >= end {
					t.Fatalf("no transaction is open: stable offset %d, end %d", stable, end)
				}
				return stable
			},
		},
		{
			name: "aborted data",
			make: func(t *testing.T, w *world) {
				write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, chainA)}})
				abortRecord(t, w, key{kind: manifestKey, id: idA}.bytes(), nil)
			},
			want: map[ID]saved{idA: savedAs(dump(idA, 5, nil), chainA)},
		},
		{
			name: "only aborted data",
			make: func(t *testing.T, w *world) {
				abortRecord(t, w, []byte("floor"), []byte("x"))
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				w := newWorld(t, b, 1)
				tc.make(t, w)
				r := w.read(t, 0)
				wantState(t, state(t, r.Table()), tc.want)
				end := int64(0)
				if tc.end != nil {
					end = tc.end(t, w)
				} else {
					end = testcontainers.EndOffsets(t, b, w.topic)[0]
				}
				if r.Position() != end {
					t.Errorf("position %d, want %d", r.Position(), end)
				}
				// And once more from there, where nothing is.
				if err := r.ReadToEnd(deadline(t)); err != nil || r.Position() != end {
					t.Errorf("again: position %d, want %d: %v", r.Position(), end, err)
				}
			})
		})
	}
}

// abortRecord writes a record in a transaction that is aborted.
func abortRecord(t *testing.T, w *world, key, value []byte) {
	t.Helper()
	cl := testcontainers.Client(t, w.b, kgo.TransactionalID(testcontainers.Name("txn")), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := cl.ProduceSync(deadline(t), &kgo.Record{Topic: w.topic, Key: key, Value: value}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if err := cl.EndTransaction(deadline(t), kgo.TryAbort); err != nil {
		t.Fatal(err)
	}
	settled(t, w.b, w.topic, 0)
}

// A reader reads on from where it was, and sees what came since.
func TestReadOn(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		wr, r := w.writer(t, 0), w.reader(0)
		for i := range 3 {
			d := dump(idA, int64(i), locals(i, 70-20*i))
			write(t, wr, Round{Position: 9, Dumps: []Dump{d}})
			before := r.Position()
			if err := r.ReadToEnd(deadline(t)); err != nil {
				t.Fatal(err)
			}
			if r.Position() <= before {
				t.Fatalf("position stays at %d", before)
			}
			wantState(t, state(t, r.Table()), map[ID]saved{idA: savedAs(d, locals(i, 70-20*i))})
		}
	})
}

// A reader whose log's start moved past it, or whose topic was created anew,
// starts over and forgets what is gone.
func TestReadStartsOver(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		for name, lose := range map[string]func(t *testing.T, w *world){
			"trimmed": func(t *testing.T, w *world) {
				wr := w.writer(t, 0)
				write(t, wr, Round{Position: 9, Deletes: []ID{idA}})
				end := testcontainers.EndOffsets(t, b, w.topic)[0]
				write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idB, 9, locals(2, 9))}})
				testcontainers.DeleteRecords(t, b, w.topic, 0, end)
			},
			"recreated": func(t *testing.T, w *world) {
				testcontainers.RecreateTopic(t, b, w.topic, 1, map[string]string{"cleanup.policy": "compact"})
				write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idB, 9, locals(2, 9))}})
			},
		} {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, b, 1)
				write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, locals(1, 9))}})
				r := w.read(t, 0)
				lose(t, w)
				if err := r.ReadToEnd(deadline(t)); err != nil {
					t.Fatal(err)
				}
				wantState(t, state(t, r.Table()), map[ID]saved{idB: savedAs(dump(idB, 9, nil), locals(2, 9))})
			})
		}
	})
}

// Responses smaller than the log, and a target within one: the reader stops at
// whole transactions.
func TestReadManyFetches(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		wr := w.writer(t, 0)
		const workers, blocks = 12, 200_000 // some 19 MB, hardly compressible
		want := make(map[ID]saved)
		r := Round{Position: 9}
		for i := range workers {
			id := ID{fmt.Sprint("w", i), 0}
			chain := make([]index.LocalHash, blocks)
			for j := range chain {
				chain[j] = index.LocalHash(index.Next(index.SeqHash(i), index.LocalHash(j)))
			}
			d := dump(id, int64(i), nil)
			d.Blocks = new(Packed)
			d.Blocks.Add(index.Device, index.Stored{Position: 0, Locals: chain})
			r.Dumps = append(r.Dumps, d)
			want[id] = savedAs(d, chain)
		}
		write(t, wr, r)
		var fetches int
		rd := NewReader(ReaderConfig{Client: w.cl, Topic: w.topic, Progress: func(p Progress) {
			if fetches++; p.Position > p.Target || p.Target != testcontainers.EndOffsets(t, b, w.topic)[0] {
				t.Errorf("progress %+v", p)
			}
		}})
		if err := rd.ReadToEnd(deadline(t)); err != nil {
			t.Fatal(err)
		}
		if fetches < 2 {
			t.Errorf("%d fetches, want several", fetches)
		}
		wantState(t, state(t, rd.Table()), want)
	})
}

func TestReadErrors(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		cl := testcontainers.Client(t, b)
		topic := testcontainers.NewTopic(t, b, "snapshots", 1, nil)
		for _, tc := range []struct {
			topic     string
			partition int32
		}{{testcontainers.Name("nowhere"), 0}, {topic, 1}} {
			err := NewReader(ReaderConfig{Client: cl, Topic: tc.topic, Partition: tc.partition}).ReadToEnd(deadline(t))
			if !errors.Is(err, kerr.UnknownTopicOrPartition) {
				t.Errorf("topic %s partition %d: %v, want %v", tc.topic, tc.partition, err, kerr.UnknownTopicOrPartition)
			}
		}
	})
	t.Run("no broker", func(t *testing.T) {
		cl, err := kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"))
		if err != nil {
			t.Fatal(err)
		}
		defer cl.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := NewReader(ReaderConfig{Client: cl, Topic: "t"}).ReadToEnd(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want %v", err, context.DeadlineExceeded)
		}
	})
}

// Records that cannot be decoded are counted and named; the others count.
func TestReadUndecodable(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, locals(1, 9)), dump(idB, 5, locals(2, 9))}})
		cl := testcontainers.Client(t, b)
		bad := []*kgo.Record{
			{Topic: w.topic, Key: []byte("manifest/x/y"), Value: []byte("?")},
			{Topic: w.topic, Key: key{kind: manifestKey, id: idA}.bytes(), Value: []byte("?")},
			{Topic: w.topic, Key: []byte("floor"), Value: []byte("?")},
			{Topic: w.topic, Key: []byte{}, Value: []byte("?")},
		}
		if err := cl.ProduceSync(deadline(t), bad...).FirstErr(); err != nil {
			t.Fatal(err)
		}
		var got []BadRecord
		r := NewReader(ReaderConfig{Client: w.cl, Topic: w.topic, Bad: func(b BadRecord) { got = append(got, b) }})
		if err := r.ReadToEnd(deadline(t)); err != nil {
			t.Fatal(err)
		}
		if len(got) != len(bad) || r.Table().Bad() != len(bad) {
			t.Fatalf("reported %v, counted %d, want %d", got, r.Table().Bad(), len(bad))
		}
		for i, rec := range bad {
			if g := got[i]; g.Topic != w.topic || g.Partition != 0 || g.Offset != rec.Offset || g.Key != string(rec.Key) || g.Err == nil {
				t.Errorf("reported %+v, want offset %d, key %q", g, rec.Offset, rec.Key)
			}
		}
		// The older manifest of a does not come back, and no floor is as good as the log's start.
		if _, _, err := load(r.Table(), idA); !errors.Is(err, ErrDamaged) {
			t.Errorf("load a: %v, want %v", err, ErrDamaged)
		}
		if _, _, err := load(r.Table(), idB); err != nil {
			t.Errorf("load b: %v", err)
		}
		if f, ok := r.Table().Floor(); ok {
			t.Errorf("floor %+v, want none", f)
		}
		// The next dump mends it.
		write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 6, locals(3, 9))}})
		wantState(t, state(t, w.read(t, 0).Table()), map[ID]saved{
			idA: savedAs(dump(idA, 6, nil), locals(3, 9)), idB: savedAs(dump(idB, 5, nil), locals(2, 9))})
	})
}
