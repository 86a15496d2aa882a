package snapshot

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/testcontainers"
)

// What a broker may answer besides records, the reader gets over.
func TestReadFaults(t *testing.T) {
	fetchError := func(code int16) func(*kmsg.FetchRequest, int) kmsg.Response {
		return func(req *kmsg.FetchRequest, n int) kmsg.Response {
			if n > 2 {
				return nil
			}
			return fetchAnswer(req, func(p *kmsg.FetchResponseTopicPartition) { p.ErrorCode = code })
		}
	}
	for _, tc := range []struct {
		name   string
		answer func(req *kmsg.FetchRequest, n int) kmsg.Response // to the nth fetch, from 1; nil: the truth
		min    int                                               // fetches there must be
		empty  bool                                              // the reader believes that nothing is there
	}{
		{"leader moved", fetchError(kerr.NotLeaderForPartition.Code), 3, false},
		{"leader epoch is old", fetchError(kerr.FencedLeaderEpoch.Code), 3, false},
		{"topic id is unknown for a moment", fetchError(kerr.UnknownTopicID.Code), 3, false},
		{"log start moved", fetchError(kerr.OffsetOutOfRange.Code), 3, false},
		{"throttled: no partition in the answer", func(req *kmsg.FetchRequest, n int) kmsg.Response {
			if n > 2 {
				return nil
			}
			resp := req.ResponseKind().(*kmsg.FetchResponse)
			resp.ThrottleMillis = 5
			return resp
		}, 3, false},
		{"a new leader that does not know what is stable", func(req *kmsg.FetchRequest, n int) kmsg.Response {
			if n > 2 {
				return nil
			}
			return fetchAnswer(req, func(p *kmsg.FetchResponseTopicPartition) { p.LastStableOffset, p.HighWatermark = 0, 0 })
		}, 3, false},
		{"a gap up to the end", func(req *kmsg.FetchRequest, _ int) kmsg.Response {
			return fetchAnswer(req, func(p *kmsg.FetchResponseTopicPartition) {
				p.LastStableOffset, p.HighWatermark = 1000, 1000
			})
		}, 1, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{Nodes: 2})
			w := newWorld(t, b, 1)
			write(t, w.writer(t, 0), Round{Position: 9, Dumps: []Dump{dump(idA, 5, locals(1, 100))}})
			var fetches atomic.Int32
			b.Cluster().ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
				b.Cluster().KeepControl()
				resp := tc.answer(req.(*kmsg.FetchRequest), int(fetches.Add(1)))
				return resp, nil, resp != nil
			})
			r := w.read(t, 0)
			want := map[ID]saved{idA: savedAs(dump(idA, 5, nil), locals(1, 100))}
			if tc.empty {
				want = nil
			}
			wantState(t, state(t, r.Table()), want)
			if end := testcontainers.EndOffsets(t, b, w.topic)[0]; r.Position() != end {
				t.Errorf("position %d, want %d", r.Position(), end)
			}
			if n := int(fetches.Load()); n < tc.min {
				t.Errorf("%d fetches, want %d or more", n, tc.min)
			}
		})
	}
}

func fetchAnswer(req *kmsg.FetchRequest, change func(*kmsg.FetchResponseTopicPartition)) kmsg.Response {
	resp := req.ResponseKind().(*kmsg.FetchResponse)
	rt := kmsg.NewFetchResponseTopic()
	rt.Topic, rt.TopicID = req.Topics[0].Topic, req.Topics[0].TopicID
	p := kmsg.NewFetchResponseTopicPartition()
	p.Partition = req.Topics[0].Partitions[0].Partition
	p.RecordBatches = []byte{}
	change(&p)
	rt.Partitions = append(rt.Partitions, p)
	resp.Topics = append(resp.Topics, rt)
	return resp
}

// The leader moves between two nodes for as long as the reader reads.
func TestReadWhileLeaderMoves(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{Nodes: 2})
	w := newWorld(t, b, 1)
	wr, r := w.writer(t, 0), w.reader(0)
	for i := range 10 {
		write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idA, int64(i), locals(i, 100))}})
		if err := b.Cluster().MoveTopicPartition(w.topic, 0, int32(i%2)); err != nil {
			t.Fatal(err)
		}
		if err := r.ReadToEnd(deadline(t)); err != nil {
			t.Fatal(err)
		}
		wantState(t, state(t, r.Table()), map[ID]saved{idA: savedAs(dump(idA, int64(i), nil), locals(i, 100))})
	}
}

// A writer writes on while a reader reads: the reader takes in no part of a
// transaction that was not there when it asked for the end.
func TestReadWhileWritten(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		wr := w.writer(t, 0)
		write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idA, 1, locals(1, 300))}})
		var more atomic.Bool
		cfg := ReaderConfig{Client: w.cl, Topic: w.topic, Progress: func(p Progress) {
			if p.Position < p.Target && more.CompareAndSwap(false, true) {
				write(t, wr, Round{Position: 9, Dumps: []Dump{dump(idA, 2, locals(2, 250))}})
			}
		}}
		r := NewReader(cfg)
		r.fetchBytes = 1 // a batch at a time
		if err := r.ReadToEnd(deadline(t)); err != nil {
			t.Fatal(err)
		}
		if !more.Load() {
			t.Fatal("nothing was written while reading")
		}
		wantState(t, state(t, r.Table()), map[ID]saved{idA: savedAs(dump(idA, 1, nil), locals(1, 300))})
		if err := r.ReadToEnd(deadline(t)); err != nil {
			t.Fatal(err)
		}
		wantState(t, state(t, r.Table()), map[ID]saved{idA: savedAs(dump(idA, 2, nil), locals(2, 250))})
	})
}

// A record that the broker refuses aborts the round; the next one goes well.
func TestProduceFails(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	w := newWorld(t, b, 1)
	wr := w.writer(t, 0)
	write(t, wr, Round{Position: 5, Dumps: []Dump{dump(idA, 5, locals(1, 100))}})
	for n := range 3 {
		var left atomic.Int32
		left.Store(int32(n))
		b.Cluster().ControlKey(int16(kmsg.Produce), func(kreq kmsg.Request) (kmsg.Response, error, bool) {
			if left.Add(-1) >= 0 {
				return nil, nil, false
			}
			req := kreq.(*kmsg.ProduceRequest)
			resp := req.ResponseKind().(*kmsg.ProduceResponse)
			rt := kmsg.NewProduceResponseTopic()
			rt.Topic, rt.TopicID = req.Topics[0].Topic, req.Topics[0].TopicID
			p := kmsg.NewProduceResponseTopicPartition()
			p.ErrorCode = kerr.MessageTooLarge.Code
			rt.Partitions = append(rt.Partitions, p)
			resp.Topics = append(resp.Topics, rt)
			return resp, nil, true
		})
		wr.cfg.Hook = func(Step) error { return nil } // a request a record
		round := Round{Position: 9, Dumps: []Dump{dump(idA, 9, locals(2+n, 200))}}
		res, err := wr.Write(deadline(t), round)
		if !errors.Is(err, kerr.MessageTooLarge) || len(res.Written) > 0 {
			t.Fatalf("%+v, %v, want %v", res, err, kerr.MessageTooLarge)
		}
		if got := w.read(t, 0).Table().Manifest(idA).Generation; got != int64(n+1) {
			t.Fatalf("generation %d, want %d", got, n+1)
		}
		if res := write(t, wr, round); res.Records == 0 {
			t.Error("nothing was written")
		}
		wantState(t, state(t, w.read(t, 0).Table()), map[ID]saved{idA: savedAs(dump(idA, 9, nil), locals(2+n, 200))})
	}
}

// Many small worker-ranks share a transaction.
func TestRoundOfMany(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 1)
		r, want := Round{Position: 9}, make(map[ID]saved)
		for i := range 500 {
			id := ID{fmt.Sprintf("worker-%03d", i), int32(i % 3)}
			r.Dumps = append(r.Dumps, dump(id, int64(i%9), locals(i, 10)))
			want[id] = savedAs(r.Dumps[i], locals(i, 10))
		}
		start := testcontainers.EndOffsets(t, b, w.topic)[0]
		res := write(t, w.writer(t, 0), r)
		wantState(t, state(t, w.read(t, 0).Table()), want)
		// 500 chunks and manifests, a floor, and two markers.
		if end := testcontainers.EndOffsets(t, b, w.topic)[0]; end-start != 1003 || res.Records != 1001 {
			t.Errorf("%d offsets and %d records, want 1003 and 1001", end-start, res.Records)
		}
	})
}
