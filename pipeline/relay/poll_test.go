// This file tests polling against an HTTP server that gives its events away as
// TensorRT-LLM's does: each once.

package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvindex/pipeline/relay/engine"
)

// eventServer is an engine's.
type eventServer struct {
	*httptest.Server
	events []string // waiting to be read
	method string   // the only one allowed; empty: any
	answer func(w http.ResponseWriter, body string)
	asked  atomic.Int32
}

func newEventServer(t *testing.T) *eventServer {
	s := &eventServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.asked.Add(1)
		if s.method != "" && r.Method != s.method {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		body := "[" + strings.Join(s.events, ", ") + "]"
		s.events = nil
		if s.answer != nil {
			s.answer(w, body)
			return
		}
		io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return s
}

// publish adds n events from number first on, of a rank if it is not negative.
func (s *eventServer) publish(rank, first, n int) {
	for id := first; id < first+n; id++ {
		of := ""
		if rank >= 0 {
			of = fmt.Sprintf(`, "attention_dp_rank": %d`, rank)
		}
		s.events = append(s.events, fmt.Sprintf(`{"event_id": %d, "data": {"type": "removed", "block_hashes": [%d]}, "window_size": 64%s}`, id, id, of))
	}
}

// pollFeed notes what a feed is told.
type pollFeed struct {
	t    *testing.T
	told []string
	pos  position
	next int64 // the least number that the next event may have
}

func (f *pollFeed) applyBatch(b *engine.Batch) {
	for _, e := range b.Events {
		if e.ID < f.next {
			f.t.Errorf("event %d after %d", e.ID, f.next-1)
		}
		f.next = e.ID + 1
	}
	if n := len(b.Events); n > 0 {
		f.told = append(f.told, fmt.Sprintf("%d-%d", b.Events[0].ID, b.Events[n-1].ID))
	}
	if b.LostRemovals > 0 {
		f.told = append(f.told, fmt.Sprintf("lost removals %d", b.LostRemovals))
	}
}

func (f *pollFeed) empty(whole bool, why cause) {
	f.told = append(f.told, fmt.Sprintf("%s %t", why, whole))
	f.next = 0
}

func (f *pollFeed) unreadable(error)     { f.empty(false, causePayload) }
func (f *pollFeed) at(p position)        { f.pos = p }
func (f *pollFeed) release()             {}
func (f *pollFeed) pending() bool        { return false }
func (f *pollFeed) tick(time.Time, bool) {}

// newTestPoller returns a poller of so many ranks from first on.
func newTestPoller(t *testing.T, url string, first, ranks int) (*poller, []*pollFeed) {
	var feeds []*pollFeed
	var all []*pollRank
	for range ranks {
		f := &pollFeed{t: t}
		feeds = append(feeds, f)
		all = append(all, &pollRank{feed: f, counts: &streamCounts{}, status: newStreamStatus(), next: -1})
	}
	return newPoller(silent, url, int32(first), all), feeds
}

func TestPolls(t *testing.T) {
	for _, c := range []struct {
		name  string
		first int
		ranks int
		polls []func(s *eventServer) // what is there to be read
		told  []string               // by rank, what its feed is told
	}{
		{
			"from the beginning", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) {},
				func(s *eventServer) { s.publish(-1, 0, 3) },
				func(s *eventServer) { s.publish(-1, 3, 2) },
			},
			[]string{"start false, start true, 0-2, 3-4"},
		}, {
			"published before", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.publish(-1, 7, 3) }, func(s *eventServer) { s.publish(-1, 10, 1) }},
			[]string{"start false, 7-9, 10-10"},
		}, {
			"lost", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.publish(-1, 0, 3); s.publish(-1, 5, 2) }, func(s *eventServer) { s.publish(-1, 9, 1) }},
			[]string{"start true, 0-2, events_lost false, 5-6, events_lost false, 9-9"},
		}, {
			"restart", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.publish(-1, 0, 3) }, func(s *eventServer) { s.publish(-1, 0, 9) }, func(s *eventServer) { s.publish(-1, 5, 1) }},
			[]string{"start true, 0-2, engine_restart true, 0-8, engine_restart false, 5-5"},
		}, {
			"restart within an answer", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.publish(-1, 0, 3); s.publish(-1, 0, 2) }},
			[]string{"start true, 0-2, engine_restart true, 0-1"},
		}, {
			"ranks", 2, 3,
			[]func(*eventServer){
				func(s *eventServer) { s.publish(2, 0, 2); s.publish(4, 0, 1); s.publish(2, 2, 1); s.publish(9, 0, 1) },
				func(s *eventServer) { s.publish(4, 1, 2); s.publish(2, 4, 1) },
			},
			[]string{"start true, 0-2, events_lost false, 4-4", "start false", "start true, 0-0, 1-2"},
		}, {
			"only GET", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.method = http.MethodGet; s.publish(-1, 0, 1) }, func(s *eventServer) { s.publish(-1, 1, 1) }},
			[]string{"start true, 0-0, 1-1"},
		}, {
			"not there", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) { s.answer = func(w http.ResponseWriter, _ string) { w.WriteHeader(404) } },
				func(s *eventServer) { s.answer = nil; s.publish(-1, 0, 1) },
				func(s *eventServer) { s.answer = func(w http.ResponseWriter, _ string) { w.WriteHeader(404) } },
				func(s *eventServer) { s.answer = nil; s.publish(-1, 1, 1) },
			},
			[]string{"start true, 0-0, 1-1"},
		}, {
			"an error in the engine", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) { s.publish(-1, 0, 1) },
				func(s *eventServer) {
					s.publish(-1, 1, 1)
					s.answer = func(w http.ResponseWriter, _ string) { w.WriteHeader(500) }
				},
				func(s *eventServer) { s.answer = nil; s.publish(-1, 2, 1) },
			},
			[]string{"start true, 0-0, events_lost false, start false, 2-2"},
		}, {
			"an answer cut off", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) { s.publish(-1, 0, 1) },
				func(s *eventServer) {
					s.publish(-1, 1, 1)
					s.answer = func(w http.ResponseWriter, body string) {
						w.Header().Set("Content-Length", "1000")
						io.WriteString(w, body)
					}
				},
				func(s *eventServer) { s.answer = nil; s.publish(-1, 2, 1) },
			},
			[]string{"start true, 0-0, events_lost false, start false, 2-2"},
		}, {
			"no JSON from the middle on", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) { s.publish(-1, 0, 2); s.events = append(s.events, "{oops") },
				func(s *eventServer) { s.publish(-1, 3, 1) },
			},
			[]string{"start true, 0-1, events_lost false, start false, 3-3"},
		}, {
			"not an array", 0, 1,
			[]func(*eventServer){func(s *eventServer) {
				s.answer = func(w http.ResponseWriter, _ string) { io.WriteString(w, `{"error": "no"}`) }
			}},
			[]string{"events_lost false"},
		}, {
			"an event without a number", 0, 1,
			[]func(*eventServer){func(s *eventServer) { s.publish(-1, 0, 1); s.events = append(s.events, `{"data": {}}`) }},
			[]string{"start true, 0-0, events_lost false"},
		}, {
			"kinds that are not known, or say nothing, have numbers too", 0, 1,
			[]func(*eventServer){func(s *eventServer) {
				s.publish(-1, 0, 1)
				s.events = append(s.events,
					`{"event_id": 1, "data": {"type": "dreamt"}}`,
					`{"event_id": 2, "data": {"type": "updated", "block_hash": 1, "priority": {"type": "event_diff", "new_value": 1, "old_value": 2}}}`)
			}, func(s *eventServer) { s.publish(-1, 3, 1) }},
			[]string{"start true, 0-0, 3-3"},
		}, {
			"a removal that cannot be read", 0, 2,
			[]func(*eventServer){func(s *eventServer) {
				s.publish(0, 0, 1)
				s.publish(1, 0, 1)
				s.events = append(s.events, `{"event_id": 1, "attention_dp_rank": 1, "data": {"type": "removed", "block_hashes": "all"}}`)
			}},
			[]string{"start true, 0-0", "start true, 0-0, lost removals 1"},
		}, {
			"too large", 0, 1,
			[]func(*eventServer){
				func(s *eventServer) { s.publish(-1, 0, 1) },
				func(s *eventServer) {
					s.answer = func(w http.ResponseWriter, _ string) {
						blanks := strings.Repeat(" ", 1<<20)
						for range 1 << 10 { // 1 GiB
							if _, err := io.WriteString(w, blanks); err != nil {
								return
							}
						}
					}
				},
			},
			[]string{"start true, 0-0, events_lost false"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newEventServer(t)
			p, feeds := newTestPoller(t, s.URL, c.first, c.ranks)
			for _, prepare := range c.polls {
				prepare(s)
				p.poll(t.Context())
			}
			for i, want := range c.told {
				got := strings.Join(feeds[i].told, ", ")
				if got != want {
					t.Errorf("rank %d is told %s; want %s", i, got, want)
				}
				if feeds[i].pos.next != p.ranks[i].next {
					t.Errorf("rank %d is at %d, its feed is told %d", i, p.ranks[i].next, feeds[i].pos.next)
				}
			}
		})
	}
}

// An answer that comes too slowly is lost; an engine that is gone holds nothing.
func TestPollOfSlowAndGone(t *testing.T) {
	s := newEventServer(t)
	p, feeds := newTestPoller(t, s.URL, 0, 1)
	s.publish(-1, 0, 1)
	if err := p.poll(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.publish(-1, 1, 1)
	hung := make(chan struct{})
	s.answer = func(w http.ResponseWriter, body string) {
		io.WriteString(w, body[:5])
		w.(http.Flusher).Flush()
		<-hung
	}
	patient := p.client.Timeout
	p.client.Timeout = 2 * time.Second
	if err := p.poll(t.Context()); err == nil {
		t.Error("no error")
	}
	p.client.Timeout = patient
	close(hung)
	s.Close()
	for range 2 {
		if err := p.poll(t.Context()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error %v", err)
		}
	}
	want := []string{"start true", "0-0", "events_lost false", "engine_restart true", "engine_restart true"}
	if !slices.Equal(feeds[0].told, want) {
		t.Errorf("told %q, want %q", feeds[0].told, want)
	}
}

// The engine's own payloads pass, with every event.
func TestPollOfPayloads(t *testing.T) {
	for _, name := range []string{"v1_json", "v2_json", "v2_sha256_hex"} {
		body, err := os.ReadFile(filepath.Join("engine", "testdata", "trtllm", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		s := newEventServer(t)
		s.answer = func(w http.ResponseWriter, _ string) { w.Write(body) }
		p, feeds := newTestPoller(t, s.URL, 0, 2)
		if err := p.poll(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var events []struct {
			ID   int64 `json:"event_id"`
			Rank int   `json:"attention_dp_rank"`
		}
		if err := json.Unmarshal(body, &events); err != nil {
			t.Fatal(err)
		}
		last := events[len(events)-1]
		if got := feeds[last.Rank].pos.next; got != last.ID+1 {
			t.Errorf("%s: at %d, want %d", name, got, last.ID+1)
		}
	}
}

// TestAnswerLostOnce: a question whose answer is lost is not asked again unnoticed,
// as Go's client does with a GET on a connection that it has used before.
func TestAnswerLostOnce(t *testing.T) {
	for _, method := range []string{http.MethodPost, http.MethodGet} {
		t.Run(method, func(t *testing.T) {
			s := newEventServer(t)
			s.method = method
			p, feeds := newTestPoller(t, s.URL, 0, 1)
			s.publish(-1, 0, 3)
			if err := p.poll(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.asked.Store(0)
			s.publish(-1, 3, 2)
			s.answer = func(w http.ResponseWriter, body string) {
				s.answer = nil
				c, _, err := w.(http.Hijacker).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				c.Close()
			}
			err := p.poll(t.Context())
			told, n := strings.Join(feeds[0].told, ", "), s.asked.Load()
			if err == nil || n != 1 || told != "start true, 0-2, events_lost false" {
				t.Errorf("error %v, asked %d times: %s", err, n, told)
			}
		})
	}
}
