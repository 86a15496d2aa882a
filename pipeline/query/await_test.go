package query

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// wants is a query that wants the record at an offset of partition 0, of which the
// first 10 are applied.
func wants(offset int64) *pb.MatchRequest {
	return &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1, MinOffsets: map[int32]int64{0: offset}}
}

func TestWaitsForTheRecord(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{Limits: Limits{MaxConcurrent: 1, QueueTimeout: time.Minute, Deadline: time.Minute}})
	for i, a := range askers(t, s) {
		t.Run(a.name, func(t *testing.T) {
			answer := make(chan *pb.MatchResponse, 1)
			go func() {
				resp, err := a.ask(wants(int64(12 + 3*i)))
				if err != nil {
					t.Error(err)
				}
				answer <- resp
			}()
			eventually(t, "the query waits", func() bool { return s.service.waiting.Load() == 1 })
			// It waits outside the gate, which lets one in at a time.
			if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
				t.Errorf("another query: %v", err)
			}
			f.apply(2)
			if n := s.service.waiting.Load(); n != 1 {
				t.Errorf("%d queries wait, want 1: the record is the next", n)
			}
			f.apply(1)
			if got := <-answer; show(got) != "deep/0:3" || got.Partial {
				t.Errorf("got %v", got)
			}
		})
	}
	if !s.gate.empty(s.limits.MaxConcurrent + s.limits.MaxQueue) {
		t.Error("places or slots are taken")
	}
}

// empty reports whether nobody has a slot or one of so many places.
func (g *gate) empty(places int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.slots) == 0 && g.free == places
}

func TestTheTimeToWait(t *testing.T) {
	const farOff = 500
	for _, c := range []struct {
		name     string
		change   func(*pb.MatchRequest)
		callers  time.Duration // deadline; 0: none
		missing  string        // readiness
		code     codes.Code
		took     time.Duration
		partial  []string
		whatever string // of the error
	}{
		{"the limit", func(*pb.MatchRequest) {}, 0, "", codes.DeadlineExceeded, time.Second, nil, "partition 0: offset 500 is not applied yet"},
		{"timeout_ms", func(r *pb.MatchRequest) { r.TimeoutMs = 70 }, 0, "", codes.DeadlineExceeded, 70 * time.Millisecond, nil, "partition 0"},
		{"timeout_ms above the limit", func(r *pb.MatchRequest) { r.TimeoutMs = 5000 }, 0, "", codes.DeadlineExceeded, time.Second, nil, ""},
		{"the caller's", func(*pb.MatchRequest) {}, 80 * time.Millisecond, "", codes.DeadlineExceeded, 80 * time.Millisecond, nil, ""},
		{"fail open", func(r *pb.MatchRequest) { r.FailOpen, r.TimeoutMs = true, 70 }, 0, "", codes.OK, 70 * time.Millisecond,
			[]string{"partition 0: offset 500 is not applied yet"}, ""},
		{"fail open in the caller's time", func(r *pb.MatchRequest) { r.FailOpen = true }, 100 * time.Millisecond, "", codes.OK, 90 * time.Millisecond,
			[]string{"partition 0: offset 500 is not applied yet"}, ""},
		{"not ready", func(*pb.MatchRequest) {}, 0, "kv-events/1: restoring", codes.Unavailable, 0, nil, "restoring"},
		{"not ready, partial allowed", func(r *pb.MatchRequest) { r.AllowPartial = true }, 0, "kv-events/1: restoring", codes.DeadlineExceeded, time.Second, nil, "offset 500"},
		{"not ready, fail open", func(r *pb.MatchRequest) { r.FailOpen, r.TimeoutMs = true, 10 }, 0, "kv-events/1: restoring", codes.OK, 10 * time.Millisecond,
			[]string{"kv-events/1: restoring", "partition 0: offset 500 is not applied yet"}, ""},
		{"not ready, unknown partition", func(r *pb.MatchRequest) { r.MinOffsets = map[int32]int64{9: 1} }, 0, "kv-events/1: restoring", codes.Unavailable, 0, nil, "unknown partition 9"},
		{"not ready, unknown partition, fail open", func(r *pb.MatchRequest) { r.FailOpen, r.MinOffsets = true, map[int32]int64{9: 1} }, 0, "kv-events/1: restoring", codes.OK, 0,
			[]string{"kv-events/1: restoring", "unknown partition 9: there are 4"}, ""},
		{"nothing to wait for, fail open", func(r *pb.MatchRequest) { r.FailOpen, r.MinOffsets = true, nil }, 0, "kv-events/1: restoring", codes.OK, 0,
			[]string{"kv-events/1: restoring"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fleet(t)
				if c.missing != "" {
					f.setReady(Readiness{Missing: []string{c.missing}})
				}
				req := wants(farOff)
				c.change(req)
				ctx := t.Context()
				if c.callers > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.callers)
					defer cancel()
				}
				began := time.Now()
				resp, err := NewService(f, Limits{}).Match(ctx, req)
				if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.whatever) {
					t.Fatalf("got %v, %v, want %v", resp, err, c.code)
				}
				if took := time.Since(began); took != c.took {
					t.Errorf("took %v, want %v", took, c.took)
				}
				if err == nil && (show(resp) != "deep/0:3" || !resp.Partial || !slices.Equal(resp.Missing, c.partial)) {
					t.Errorf("got %v, want %q", resp, c.partial)
				}
			})
		})
	}
}

// What may be on a missing partition fails open too.
func TestFailOpenWithoutTheModel(t *testing.T) {
	f := fleet(t)
	f.setReady(Readiness{Missing: []string{"kv-events: waiting for the topic"}})
	resp, err := NewService(f, Limits{}).Match(t.Context(), &pb.MatchRequest{Model: "x", BlockSize: 4, Tokens: prompt, FailOpen: true})
	if err != nil || len(resp.Matches) != 0 || !resp.Partial || len(resp.Missing) != 2 {
		t.Errorf("got %v, %v", resp, err)
	}
}

// What waited until its time was over is still searched for.
func TestFailOpenWithoutTime(t *testing.T) {
	svc := NewService(fleet(t), Limits{Deadline: 1})
	resp, err := svc.Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1, FailOpen: true})
	if err != nil || show(resp) != "deep/0:3" || resp.Partial {
		t.Errorf("got %v, %v", resp, err)
	}
}

// A query that gets no slot after its wait leaves when its time is over, with what it
// has.
func TestNoSlotAfterTheWait(t *testing.T) {
	const late = "partition 0: offset 12 is not applied yet"
	for name, c := range map[string]struct {
		applied int64
		open    bool
		missing []string
	}{
		"the record is there":                {3, false, []string{errNoTurn.Error()}},
		"the record is there, fail open":     {3, true, []string{errNoTurn.Error()}},
		"the record is not there":            {1, false, []string{late, errNoTurn.Error()}},
		"the record is not there, fail open": {1, true, []string{late, errNoTurn.Error()}},
	} {
		t.Run(name, func(t *testing.T) {
			type ask func(*pb.MatchRequest) (*pb.MatchResponse, error)
			asks := func(s *Server) map[string]ask {
				all := map[string]ask{}
				for _, a := range askers(t, s) {
					all[a.name] = func(req *pb.MatchRequest) (*pb.MatchResponse, error) {
						req.MinOffsets, req.TimeoutMs = map[int32]int64{0: 12}, 100
						return a.ask(req)
					}
				}
				for _, a := range manyAskers(t, s) {
					all[a.name+", a batch"] = func(req *pb.MatchRequest) (*pb.MatchResponse, error) {
						resp, err := a.ask(&pb.MatchManyRequest{Requests: []*pb.MatchRequest{req}, MinOffsets: map[int32]int64{0: 12}, TimeoutMs: 100})
						if err == nil && resp.Results[0].Error != nil {
							err = status.Error(codes.DeadlineExceeded, resp.Results[0].Error.Message)
						}
						return resp.GetResults()[0].GetAnswer(), err
					}
				}
				return all
			}
			for _, transport := range slices.Sorted(maps.Keys(asks(nil))) {
				f := fleet(t)
				s := serve(t, f, Config{Limits: Limits{MaxConcurrent: 1}})
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					resp, err := asks(s)[transport](&pb.MatchRequest{Model: "m", Tokens: prompt, FailOpen: c.open})
					switch {
					case !c.open:
						if want := strings.Join(c.missing, "; "); status.Code(err) != codes.DeadlineExceeded || status.Convert(err).Message() != want {
							t.Errorf("%s: %v, want %s", transport, err, want)
						}
					case err != nil || !resp.Partial || len(resp.Matches) > 0 || !slices.Equal(resp.Missing, c.missing):
						t.Errorf("%s: %v, %v, want %q", transport, resp, err, c.missing)
					}
				}()
				eventually(t, "the query waits", func() bool { return s.service.waiting.Load() == 1 && len(s.gate.slots) == 0 })
				s.gate.slots <- struct{}{}
				f.apply(c.applied)
				<-ended
				<-s.gate.slots
				if !s.gate.empty(s.limits.MaxConcurrent + s.limits.MaxQueue) {
					t.Error("places or slots are taken")
				}
			}
		})
	}
}

func TestTooManyWait(t *testing.T) {
	f := fleet(t)
	cfg := measured(t)
	cfg.Limits = Limits{MaxWaiting: 1, Deadline: time.Minute}
	s := serve(t, f, cfg)
	answered := make(chan error, 1)
	client := dial(t, s)
	go func() {
		_, err := client.Match(context.Background(), wants(10))
		answered <- err
	}()
	eventually(t, "the query waits", func() bool { return s.service.waiting.Load() == 1 })
	for _, a := range askers(t, s) {
		if _, err := a.ask(wants(10)); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: %v, want that too many wait", a.name, err)
		}
	}
	for _, transport := range []string{"grpc", "http"} {
		if n := metricOf(t, s, refusedMetric(transport, "waiting")); n != "1" {
			t.Errorf("%s: %s counted", transport, n)
		}
	}
	f.apply(1)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestBehindIsSaid(t *testing.T) {
	f := fleet(t)
	f.behind = 1200
	for _, a := range askers(t, serve(t, f, Config{})) {
		resp, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
		if err != nil || len(resp.Behind) != 1 || resp.Behind[0].Partition != 0 || resp.Behind[0].Offsets != 1200 || resp.Partial {
			t.Errorf("%s: got %v, %v", a.name, resp, err)
		}
	}
}

// Records of partitions that nobody knows are bounded: each would be named in each
// answer of a batch.
func TestTooManyOffsets(t *testing.T) {
	f := fleet(t)
	f.setReady(Readiness{Missing: []string{"kv-events: waiting for the topic"}})
	s := serve(t, f, Config{Limits: Limits{MaxOffsets: 3}})
	records := map[int32]int64{0: 1, 100: 1, 101: 1, 102: 1}
	req := &pb.MatchRequest{Model: "m", Tokens: prompt, FailOpen: true}
	const want = "min_offsets: 4 partitions are above the limit of 3"
	for _, a := range manyAskers(t, s) {
		_, err := a.ask(&pb.MatchManyRequest{Requests: []*pb.MatchRequest{req}, MinOffsets: records})
		if status.Code(err) != codes.InvalidArgument || status.Convert(err).Message() != want {
			t.Errorf("%s, a batch: %v", a.name, err)
		}
	}
	for _, a := range askers(t, s) {
		_, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, FailOpen: true, MinOffsets: records})
		if status.Code(err) != codes.InvalidArgument || status.Convert(err).Message() != want {
			t.Errorf("%s: %v", a.name, err)
		}
	}
}
