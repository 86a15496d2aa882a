package snapshot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// A writer that dies after any step of a round leaves the old or the new state
// of every worker-rank, whole, and the next writer goes on from there.
func TestDeathAfterEachStep(t *testing.T) {
	a1, a2, b1, c1, d1 := locals(1, 170), locals(2, 60), locals(3, 20), locals(4, 100), locals(5, 130)
	first := Round{Position: 10, Dumps: []Dump{dump(idA, 10, a1), dump(idB, 9, b1), dump(idC, 10, c1)}}
	second := func() Round {
		return Round{
			Position:  20,
			Dumps:     []Dump{dump(idA, 18, a2), dump(idD, 20, d1)},
			Refreshes: []Refresh{refresh(idB, 19, 8)},
			Deletes:   []ID{idC},
			Unsaved:   []Unsaved{{idD, 15}},
		}
	}
	before := map[ID]saved{idA: savedAs(first.Dumps[0], a1), idB: savedAs(first.Dumps[1], b1), idC: savedAs(first.Dumps[2], c1)}
	after := map[ID]saved{idA: savedAs(dump(idA, 18, nil), a2), idB: savedAs(dump(idB, 19, nil), b1), idD: savedAs(dump(idD, 20, nil), d1)}

	// What a round that nobody disturbs goes through.
	var steps []Step
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		write(t, w.writer(t, 0), first)
		steps = nil
		write(t, w.writer(t, 0, hook(func(s Step) error { steps = append(steps, s); return nil })), second())
		want := []Step{
			{StepChunk, idA, 0}, {StepManifest, idA, 0}, {StepTombstone, idA, 1}, {StepTombstone, idA, 2},
			{StepChunk, idD, 0}, {StepChunk, idD, 1}, {StepChunk, idD, 2}, {StepManifest, idD, 0},
			{StepManifest, idB, 0},
			{StepTombstone, idC, -1}, {StepTombstone, idC, 0}, {StepTombstone, idC, 1},
			{Kind: StepCommit}, {Kind: StepFloor}, {Kind: StepFloorCommit}, {Kind: StepOffset},
		}
		if !slices.Equal(steps, want) {
			t.Fatalf("steps are\n%v\nwant\n%v", steps, want)
		}
		w = newWorld(t, b, len(steps))
		for k := range steps {
			t.Run(fmt.Sprintf("%02d %v", k+1, steps[k].Kind), func(t *testing.T) {
				p := int32(k)
				write(t, w.writer(t, p), first)
				var n int
				wr := w.writer(t, p, hook(func(Step) error {
					if n++; n == k+1 {
						return errors.New("killed")
					}
					return nil
				}))
				if _, err := wr.Write(deadline(t), second()); !errors.Is(err, ErrKilled) {
					t.Fatalf("write: %v, want %v", err, ErrKilled)
				}
				if kind := steps[k].Kind; kind == StepCommit || kind >= StepFloorCommit {
					settled(t, b, w.topic, p)
				}
				table := w.read(t, p).Table()
				want := before
				if steps[k].Kind >= StepCommit {
					want = after
				}
				wantState(t, state(t, table), want)
				floor, ok := table.Floor()
				for id, s := range want {
					if !ok || floor.Offset > s.W {
						t.Errorf("floor %d (%v) is above %v's W %d", floor.Offset, ok, id, s.W)
					}
				}
				if wantFloor := map[bool]int64{false: 9, true: 18}[steps[k].Kind >= StepFloorCommit]; floor.Offset != wantFloor {
					t.Errorf("floor %d, want %d", floor.Offset, wantFloor)
				}
				// The same instance, started anew, takes the duty and finishes.
				res := write(t, w.writer(t, p), second())
				table = w.read(t, p).Table()
				wantState(t, state(t, table), after)
				if floor, _ := table.Floor(); floor.Offset != 18 || res.Floor != 18 {
					t.Errorf("floor %d, result %d, want 18", floor.Offset, res.Floor)
				}
				if got := w.groupOffset(t, p); got != 18 {
					t.Errorf("group's offset %d, want 18", got)
				}
			})
		}
	})
}

// The newest taker writes; its predecessor finds out, stops for good and says so.
func TestFencing(t *testing.T) {
	for name, during := range map[string]Step{
		"idle":                         {Kind: StepOffset, ID: idB}, // never
		"with a transaction open":      {Kind: StepChunk, ID: idB},
		"between manifest and commit":  {Kind: StepManifest, ID: idB},
		"between commit and floor":     {Kind: StepCommit},
		"between floor and its commit": {Kind: StepFloor},
	} {
		t.Run(name, func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				w := newWorld(t, b, 1)
				var taker *Writer
				old := w.writer(t, 0, hook(func(s Step) error {
					if s == during && taker != nil {
						return taker.Take(deadline(t)) // while the old one is paused in the middle
					}
					return nil
				}))
				write(t, old, Round{Position: 5, Dumps: []Dump{dump(idA, 5, locals(1, 10))}})
				taker = w.writer(t, 0)
				if during.Kind == StepOffset {
					if err := taker.Take(deadline(t)); err != nil {
						t.Fatal(err)
					}
				}
				// The floor rises only with a, so that the round has one to write.
				res, err := old.Write(deadline(t), Round{Position: 9, Dumps: []Dump{dump(idB, 9, locals(2, 10))}, Refreshes: []Refresh{refresh(idA, 6, 0)}})
				committed := during.Kind == StepCommit || during.Kind == StepFloor
				if !errors.Is(err, ErrFenced) || committed != (len(res.Written) > 0) {
					t.Fatalf("old writer: %+v, %v, want %v", res, err, ErrFenced)
				}
				want := map[ID]saved{idA: savedAs(dump(idA, 5, nil), locals(1, 10)), idC: savedAs(dump(idC, 7, nil), locals(3, 10))}
				if committed {
					want[idA] = savedAs(dump(idA, 6, nil), locals(1, 10))
					want[idB] = savedAs(dump(idB, 9, nil), locals(2, 10))
				}
				if err := old.Take(deadline(t)); !errors.Is(err, ErrFenced) {
					t.Errorf("old writer takes: %v, want %v", err, ErrFenced)
				}
				write(t, taker, Round{Position: 7, Dumps: []Dump{dump(idC, 7, locals(3, 10))}})
				wantState(t, state(t, w.read(t, 0).Table()), want)
			})
		})
	}
}

// A writer of an instance that lags writes nothing below what is there.
func TestBehind(t *testing.T) {
	w := newWorld(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	write(t, w.writer(t, 0), Round{Position: 20, Dumps: []Dump{dump(idA, 15, locals(1, 10)), dump(idB, 18, locals(2, 10))}})
	lagging := w.writer(t, 0)
	// Below the floor, 15: all of it waits.
	res, err := lagging.Write(deadline(t), Round{Position: 14, Dumps: []Dump{dump(idC, 14, nil)}})
	if !errors.Is(err, ErrBehind) || res.Floor != 15 {
		t.Errorf("below the floor: %+v, %v, want %v", res, err, ErrBehind)
	}
	// Above it: each worker-rank by itself.
	res, err = lagging.Write(deadline(t), Round{
		Position:  17,
		Dumps:     []Dump{dump(idA, 17, locals(4, 10)), dump(idC, 14, nil), dump(ID{"bad\xff", 0}, 17, nil)},
		Refreshes: []Refresh{refresh(idB, 17, 10)},
		Deletes:   []ID{idB},
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(res.Written, []ID{idA}) || res.Floor != 17 {
		t.Errorf("wrote %v, floor %d, want %v and 17", res.Written, res.Floor, idA)
	}
	var refused []ID
	for _, r := range res.Refused {
		refused = append(refused, r.ID)
		if r.ID.Worker != "bad\xff" && !errors.Is(r.Err, ErrBehind) {
			t.Errorf("%v: %v, want %v", r.ID, r.Err, ErrBehind)
		}
	}
	if want := []ID{idC, {"bad\xff", 0}, idB, idB}; !slices.Equal(refused, want) {
		t.Errorf("refused %v, want %v", refused, want)
	}
	wantState(t, state(t, w.read(t, 0).Table()), map[ID]saved{
		idA: savedAs(dump(idA, 17, nil), locals(4, 10)), idB: savedAs(dump(idB, 18, nil), locals(2, 10))})
}

// Of a worker all ranks are written or none, so that they have one W.
func TestRanksAreWrittenTogether(t *testing.T) {
	var topic Memory
	w := topic.Take(WriterConfig{Topic: "snapshots", Source: consumer.Topic{Name: "events", Partitions: 1}})
	one, two, other := ID{"a", 0}, ID{"a", 1}, ID{"b", 0}
	res, err := w.Write(deadline(t), Round{Position: 10, Dumps: []Dump{dump(one, 10, locals(1, 10)), dump(two, 10, locals(2, 10)), dump(other, 10, nil)}})
	if err != nil || len(res.Refused) > 0 {
		t.Fatalf("%+v, %v", res, err)
	}
	res, err = w.Write(deadline(t), Round{
		Position:  20,
		Dumps:     []Dump{dump(one, 20, locals(3, 10)), dump(other, 20, nil)},
		Refreshes: []Refresh{refresh(two, 20, 15)},
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(res.Written, []ID{other}) || res.Floor != 10 {
		t.Errorf("wrote %v, floor %d, want %v and 10", res.Written, res.Floor, other)
	}
	if len(res.Refused) != 2 || res.Refused[0].ID != two || !errors.Is(res.Refused[0].Err, ErrChanged) || res.Refused[1].ID != one || !errors.Is(res.Refused[1].Err, ErrSibling) {
		t.Errorf("refused %v, want %v for %v and %v for %v", res.Refused, two, ErrChanged, one, ErrSibling)
	}
	if a, b := topic.Table().Manifest(one).W, topic.Table().Manifest(two).W; a != 10 || b != 10 {
		t.Errorf("W are %d and %d, want 10 of both", a, b)
	}
}

// A refresh keeps chunks and generation, if they are still the worker-rank's.
func TestRefresh(t *testing.T) {
	w := newWorld(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	wr := w.writer(t, 0)
	write(t, wr, Round{Position: 20, Dumps: []Dump{dump(idA, 10, locals(1, 200))}})
	for _, tc := range []struct {
		name    string
		refresh Refresh
		want    error
	}{
		{"unchanged", refresh(idA, 15, 10), nil},
		{"the same again", refresh(idA, 15, 10), nil},
		{"changed since", refresh(idA, 18, 16), ErrChanged},
		{"without a snapshot", refresh(idB, 18, 0), ErrNoManifest},
		{"backwards", refresh(idA, 14, 10), ErrBehind},
	} {
		t.Run(tc.name, func(t *testing.T) {
			res, err := wr.Write(deadline(t), Round{Position: 20, Refreshes: []Refresh{tc.refresh}})
			if err != nil {
				t.Fatal(err)
			}
			if tc.want == nil && len(res.Refused) > 0 || tc.want != nil && (len(res.Refused) != 1 || !errors.Is(res.Refused[0].Err, tc.want)) {
				t.Fatalf("refused %v, want %v", res.Refused, tc.want)
			}
			wantState(t, state(t, w.read(t, 0).Table()), map[ID]saved{idA: savedAs(dump(idA, 15, nil), locals(1, 200))})
		})
	}
	if m := w.read(t, 0).Table().Manifest(idA); m.Generation != 1 || m.Chunks != 4 {
		t.Errorf("generation %d, %d chunks, want 1 and 4", m.Generation, m.Chunks)
	}
	// A worker-rank that could not be loaded is not refreshed by its instance.
	r := w.read(t, 0)
	r.Table().entries[idA].chunks[1][20] ^= 1
	if err := r.Table().Check(idA); !errors.Is(err, ErrDamaged) {
		t.Fatal(err)
	}
	wr = w.writer(t, 0, func(cfg *WriterConfig) { cfg.Reader = r })
	res, err := wr.Write(deadline(t), Round{Position: 30, Refreshes: []Refresh{refresh(idA, 30, 10)}})
	if err != nil || len(res.Refused) != 1 || !errors.Is(res.Refused[0].Err, ErrNoManifest) {
		t.Errorf("%+v, %v, want %v", res, err, ErrNoManifest)
	}
}

// The floor is the least of what has to be replayed, and never goes back.
func TestFloor(t *testing.T) {
	w := newWorld(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	wr := w.writer(t, 0)
	for _, tc := range []struct {
		name    string
		round   Round
		floor   int64
		written bool
	}{
		{"nothing there", Round{Position: 5}, 5, true},
		{"the same", Round{Position: 5}, 5, false},
		{"a worker without manifest", Round{Position: 50, Unsaved: []Unsaved{{idB, 7}, {idA, 6}}}, 6, true},
		{"it gets one", Round{Position: 60, Dumps: []Dump{dump(idA, 55, nil)}, Unsaved: []Unsaved{{idB, 7}, {idA, 6}}}, 7, true},
		{"so does the other", Round{Position: 70, Dumps: []Dump{dump(idB, 65, nil)}, Unsaved: []Unsaved{{idB, 7}}}, 55, true},
		{"an older one turns up", Round{Position: 70, Unsaved: []Unsaved{{idC, 3}}}, 55, false},
		{"the oldest goes", Round{Position: 70, Deletes: []ID{idA}}, 65, true},
		{"all go", Round{Position: 71, Deletes: []ID{idB}}, 71, true},
		{"what is not there goes", Round{Position: 71, Deletes: []ID{idB}}, 71, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			res := write(t, wr, tc.round)
			floor, _ := w.read(t, 0).Table().Floor()
			if res.Floor != tc.floor || floor.Offset != tc.floor || res.FloorWritten != tc.written {
				t.Errorf("floor %d, written %v, on the topic %d; want %d, %v", res.Floor, res.FloorWritten, floor.Offset, tc.floor, tc.written)
			}
			if got := w.groupOffset(t, 0); got != tc.floor {
				t.Errorf("group's offset %d, want %d", got, tc.floor)
			}
		})
	}
}

// A floor that cannot be committed for the group harms nothing else.
func TestCommitError(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		// A member in the group: Kafka refuses commits from outside it.
		member := testcontainers.Client(t, b, kgo.ConsumerGroup(w.group), kgo.ConsumeTopics(w.source.Name), kgo.DisableAutoCommit())
		go member.PollFetches(t.Context())
		wr := w.writer(t, 0)
		offset := int64(5)
		testcontainers.Eventually(t, longWait, func() error {
			offset++
			res, err := wr.Write(deadline(t), Round{Position: offset, Dumps: []Dump{dump(idA, offset, locals(1, 10))}})
			if err != nil {
				t.Fatal(err)
			}
			if floor, _ := w.read(t, 0).Table().Floor(); floor.Offset != offset {
				t.Fatalf("floor %d, want %d", floor.Offset, offset)
			}
			var commit *CommitError
			if !errors.As(res.CommitErr, &commit) || commit.Offset != offset {
				return fmt.Errorf("commit error %v, want a *CommitError (is the member in yet?)", res.CommitErr)
			}
			return nil
		})
		member.CloseAllowingRebalance()
		testcontainers.Eventually(t, longWait, func() error {
			write, err := wr.Write(deadline(t), Round{Position: offset})
			if err != nil {
				t.Fatal(err)
			}
			return write.CommitErr
		})
		if got := w.groupOffset(t, 0); got != offset {
			t.Errorf("group's offset %d, want %d", got, offset)
		}
	})
}

// The answer to a commit is lost: whether it happened or not, the writer finds
// out before it writes again, and nothing is lost or written twice in part.
func TestCommitOutcomeUnknown(t *testing.T) {
	for name, reaches := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
				w := newWorld(t, b, 1)
				var f faultyDialer
				wr := w.writer(t, 0, func(cfg *WriterConfig) {
					cfg.Opts = append(cfg.Opts, kgo.Dialer(f.dial), kgo.RequestRetries(0))
				})
				write(t, wr, Round{Position: 5, Dumps: []Dump{dump(idA, 5, locals(1, 100))}})
				mode := int32(dropRequest)
				if reaches {
					mode = dropAnswer
				}
				f.mode.Store(mode)
				round := Round{Position: 9, Dumps: []Dump{dump(idA, 9, locals(2, 10))}}
				_, err := wr.Write(deadline(t), round)
				if err == nil || errors.Is(err, ErrFenced) {
					t.Fatalf("write: %v, want an error that can be tried again", err)
				}
				f.mode.Store(0)
				if reaches {
					// Nobody has asked yet, but everybody else sees it.
					testcontainers.Eventually(t, longWait, func() error {
						if m := w.read(t, 0).Table().Manifest(idA); m.W != 9 {
							return fmt.Errorf("W is %d, want 9", m.W)
						}
						return nil
					})
				}
				write(t, wr, round)
				generation := int64(2)
				if reaches {
					generation = 3 // the writer has seen its own second
				}
				table := w.read(t, 0).Table()
				wantState(t, state(t, table), map[ID]saved{idA: savedAs(dump(idA, 9, nil), locals(2, 10))})
				if got := table.Manifest(idA).Generation; got != generation {
					t.Errorf("generation %d, want %d", got, generation)
				}
			})
		})
	}
}

const (
	dropRequest = 1 + iota // the connection breaks before an EndTxn is sent
	dropAnswer             // it breaks instead of the answer
)

// faultyDialer makes connections that lose EndTxn requests or their answers.
type faultyDialer struct{ mode atomic.Int32 }

func (f *faultyDialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &faultyConn{Conn: c, f: f}, nil
}

type faultyConn struct {
	net.Conn
	f    *faultyDialer
	sent atomic.Bool // an EndTxn whose answer is to be lost
}

func (c *faultyConn) Write(b []byte) (int, error) {
	const endTxn = 26
	if len(b) > 6 && int(b[4])<<8|int(b[5]) == endTxn {
		switch c.f.mode.Load() {
		case dropRequest:
			c.Close()
			return 0, net.ErrClosed
		case dropAnswer:
			c.sent.Store(true)
		}
	}
	return c.Conn.Write(b)
}

func (c *faultyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.sent.Load() {
		c.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// A writer whose source topic is another by now takes no duty; the next one
// discards what was made of the old topic.
func TestSourceChanged(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		for name, change := range map[string]func(topic string){
			"recreated":        func(topic string) { testcontainers.RecreateTopic(t, b, topic, 1, nil) },
			"partitions added": func(topic string) { testcontainers.AddPartitions(t, b, topic, 2) },
		} {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, b, 1)
				write(t, w.writer(t, 0), Round{Position: 50, Dumps: []Dump{dump(idA, 50, locals(1, 100)), dump(idB, 50, nil)}})
				r := w.read(t, 0)
				if reason, err := Stale(deadline(t), w.cl, w.source, 0, 1<<62, r.Table()); reason != "" || err != nil {
					t.Fatalf("stale before the change: %q, %v", reason, err)
				}
				change(w.source.Name)
				if err := w.writer(t, 0).Take(deadline(t)); !errors.Is(err, ErrSource) {
					t.Fatalf("take: %v, want %v", err, ErrSource)
				}
				var err error
				if w.source, err = consumer.DescribeTopic(deadline(t), w.cl, w.source.Name); err != nil {
					t.Fatal(err)
				}
				if reason, err := Stale(deadline(t), w.cl, w.source, 0, 1<<62, r.Table()); reason == "" || err != nil {
					t.Errorf("stale after the change: %q, %v", reason, err)
				}
				// Offsets of the old topic are in nobody's way, and b's blocks are not refreshed.
				wr := w.writer(t, 0)
				res, err := wr.Write(deadline(t), Round{Position: 3, Dumps: []Dump{dump(idA, 2, locals(2, 10))}, Refreshes: []Refresh{refresh(idB, 3, 0)}})
				if err != nil || !slices.Equal(res.Written, []ID{idA}) || !errors.Is(res.Refused[0].Err, ErrNoManifest) || res.Floor != 2 {
					t.Fatalf("%+v, %v", res, err)
				}
				if err := wr.Discard(deadline(t), func(m *schemas.Manifest) bool { return m.TopicID != w.source.ID || m.Partitions != w.source.Partitions }); err != nil {
					t.Fatal(err)
				}
				settled(t, b, w.topic, 0)
				table := w.read(t, 0).Table()
				wantState(t, state(t, table), map[ID]saved{idA: savedAs(dump(idA, 2, nil), locals(2, 10))})
				if f, ok := table.Floor(); ok {
					t.Errorf("floor %+v, want none", f)
				}
				if reason, err := Stale(deadline(t), w.cl, w.source, 0, 1<<62, table); reason != "" || err != nil {
					t.Errorf("stale after the discard: %q, %v", reason, err)
				}
			})
		}
	})
}

// A log that ends below what its manifests have seen was cut.
func TestStaleTruncated(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		if err := w.cl.ProduceSync(deadline(t), &kgo.Record{Topic: w.source.Name, Value: []byte("1")}, &kgo.Record{Topic: w.source.Name, Value: []byte("2")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			name  string
			w     int64
			epoch int32
			stale bool
		}{
			{"at the end", 2, 0, false},
			{"above the end", 3, 0, true},
			{"of an epoch that is no more", 2, 7, true},
			{"of an unknown epoch", 3, -1, false},
			{"floor at the end", -2, -1, false},
			{"floor above the end", -3, -1, true},
		} {
			table := newTable()
			if tc.w < 0 {
				table.floor = &schemas.Floor{Offset: -tc.w, TopicID: w.source.ID, Partitions: 1}
			}
			table.setManifest(idA, &schemas.Manifest{W: tc.w, LeaderEpoch: tc.epoch, TopicID: w.source.ID, Partitions: 1}, nil)
			reason, err := Stale(deadline(t), w.cl, w.source, 0, 2, table)
			if err != nil || (reason != "") != tc.stale {
				t.Errorf("%s: %q, %v, want stale %v", tc.name, reason, err, tc.stale)
			}
		}
	})
}

// What a writer wrote is what an index dumped.
func TestIndexThereAndBack(t *testing.T) {
	w := newWorld(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	from := index.New(index.NewPositionalIndex(32)).AddWorker(idA.Worker, idA.Rank, nil)
	fill(t, from)
	d := dump(idA, 5, nil)
	from.Dump(d.Blocks.Add)
	write(t, w.writer(t, 0), Round{Position: 5, Dumps: []Dump{d}})

	to := index.New(index.NewPositionalIndex(32)).AddWorker(idA.Worker, idA.Rank, nil)
	if _, err := w.read(t, 0).Table().Load(idA, func(c schemas.Chain) error {
		_, err := to.Store(c.Tier, c.Stored)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if got, want := dumped(to), dumped(from); !slices.Equal(got, want) {
		t.Fatalf("%d blocks are not the %d that were dumped", len(got), len(want))
	}
}
