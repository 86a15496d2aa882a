// This file has what is between the engines of depths_test.go and the relay: the
// sockets of a publisher, or TensorRT-LLM's buffer behind HTTP.

package relay

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

// way is a rank of an engine and how what it says gets to the relay. Its methods
// may be called with the story's lock.
type way interface {
	start()
	kill()
	restart()
	publish(n int) // n batches
	happens(what, n int)
	lie(n int) // the next answers to what was missed, or to what there is, are wrong
	heal()     // what goes wrong ends
	engine() *madeUp
	// follow gives the rank's feed a source, and returns what runs it, or nil if
	// another rank's does.
	follow(log *slog.Logger, pos position, restored bool) func(context.Context)
}

// published is the way of an engine that publishes.
type published struct {
	*world
	r       *depthsRank
	replay  bool // there is a replay endpoint
	engines map[int]*madeUp
}

func newPublished(r *depthsRank) *published {
	s := r.story
	w := &published{world: newWorld(), r: r, replay: s.gentle || s.rng.IntN(5) > 0, engines: map[int]*madeUp{}}
	w.hwm = 1 + s.rng.IntN(30)
	if w.keep = 1 << 20; !s.gentle && s.rng.IntN(3) == 0 {
		w.keep = 1 + s.rng.IntN(30)
	}
	w.payload = func(p *process) string { return w.of(p).batch() }
	w.before = func(string) { s.happens(r) }
	return w
}

// of returns a process's engine.
func (w *published) of(p *process) *madeUp {
	if w.engines[p.number] == nil {
		w.engines[p.number] = newMadeUp(w.r.story.dialect, w.r.story.rng, w.r.number, &w.r.story.sent)
	}
	return w.engines[p.number]
}

func (w *published) engine() *madeUp {
	if w.up == nil {
		return nil
	}
	return w.of(w.up)
}

func (w *published) follow(log *slog.Logger, pos position, _ bool) func(context.Context) {
	var dealer asker
	if w.replay {
		dealer = fakeDealer{w.world}
	}
	return newStream(log, w.r.feed, fakeSub{w.world}, dealer, pos, &w.r.counts, newStreamStatus()).run
}

func (w *published) lie(n int) {
	w.do(func() { w.fault, w.faults = replayFault(w.r.story.rng.IntN(int(numFaults))), n })
}

func (w *published) happens(what, n int) {
	s := w.r.story
	switch what {
	case 4:
		w.cut()
	case 5:
		w.do(func() { w.loseLive = n })
		w.publish(n + 1)
	case 6:
		w.do(func() { w.slowJoin = n })
	case 7:
		fault := replayFault(s.rng.IntN(int(numFaults)))
		if s.gentle {
			fault = faultGarbage + fault%2 // or faultTwice
		}
		w.do(func() { w.fault, w.faults = fault, 1+n/3 })
	case 8:
		w.do(func() { w.noRouter = !w.noRouter && !s.gentle })
	case 9: // a number is used up
		w.do(func() {
			if w.up != nil && !s.gentle {
				w.up.next++
			}
		})
	case 10:
		w.forward(n)
	case 11:
		w.do(func() { w.oldForm = !w.oldForm })
	case 12:
		w.do(func() {
			if w.unreachable = nil; n < 4 {
				w.unreachable = errUnreachable
			}
		})
	case 13:
		w.do(func() { w.frozen = n < 4 })
	case 14:
		w.inject([]byte{}, number(int64(n))[:n], []byte("x"))
	case 15: // said twice
		if w.up != nil && len(w.up.kept) > 0 {
			it := w.up.kept[s.rng.IntN(len(w.up.kept))]
			w.inject([]byte{}, number(it.seq), []byte(it.payload))
		}
	}
}

// buffer is TensorRT-LLM's: what each rank of one process has said and nobody has
// read yet.
type buffer struct {
	story   *depthsStory
	up      []*bufferedRank // nil: no process runs
	started int
	keep    int // events of a rank
	get     bool
	away    bool // cannot be reached
	fault   answerFault
	faults  int // so many answers have it
	relay   *poller
}

// bufferedRank is one rank of a process.
type bufferedRank struct {
	*madeUp
	next   int64
	events []string // the last of those before next
}

// answerFault is what is wrong with an answer.
type answerFault int

const (
	answerRefused    answerFault = iota
	answerStrange                // it has an event of a rank that is not configured
	answerLost                   // with all its events, from here on
	answerFailed                 // as the engine says
	answerCut                    // off in the middle
	answerHangs                  // until the relay has no more patience
	answerOther                  // it is no JSON
	answerSpoilt                 // it is none from some event on
	answerUnnumbered             // an event has no number
	answerStolen                 // somebody else had the events
	numAnswerFaults

	gentleAnswers = answerLost
)

// buffered is the way of one rank of a buffer.
type buffered struct {
	*buffer
	r      *depthsRank
	reader int // the process that last gave this rank's events away
}

func (b *buffer) start() {
	if b.up != nil {
		return
	}
	b.started++
	for _, r := range b.story.ranks {
		b.up = append(b.up, &bufferedRank{madeUp: newMadeUp(b.story.dialect, b.story.rng, r.number, &b.story.sent)})
		r.way.publish(1)
	}
}

func (b *buffer) kill()    { b.up = nil }
func (b *buffer) restart() { b.kill(); b.start() }
func (b *buffer) heal()    { b.away, b.faults = false, 0 }

func (w *buffered) publish(n int) {
	for range n {
		if w.up == nil {
			return
		}
		e := w.up[w.r.number]
		events := e.numbered(e.next, len(w.story.ranks))
		e.next += int64(len(events))
		e.events = append(e.events, events...)
		e.events = e.events[max(0, len(e.events)-w.keep):]
	}
}

func (w *buffered) engine() *madeUp {
	if w.up == nil {
		return nil
	}
	return w.up[w.r.number].madeUp
}

func (b *buffer) lie(n int) {
	b.fault, b.faults = answerFault(b.story.rng.IntN(int(numAnswerFaults))), n
	if b.story.gentle {
		b.fault %= gentleAnswers
	}
}

func (w *buffered) happens(what, n int) {
	switch {
	case what == 4:
		w.away = n < 4
	case what == 5:
		w.get = !w.get
	case what < 10:
		w.lie(1 + n/3)
	case what < 13:
		w.publish(n + 1)
	}
}

func (w *buffered) follow(log *slog.Logger, pos position, restored bool) func(context.Context) {
	k := newPollRank(w.r.feed, pos, restored, &w.r.counts, newStreamStatus())
	if w.r.number == 0 {
		w.relay = newPoller(log, "http://engine/kv_cache_events", 0, nil)
		w.relay.client.Transport = w.buffer
	}
	if w.relay.ranks = append(w.relay.ranks, k); len(w.relay.ranks) < len(w.story.ranks) {
		return nil
	}
	return w.relay.run
}

// RoundTrip implements http.RoundTripper: it is asked by the relay.
func (b *buffer) RoundTrip(req *http.Request) (*http.Response, error) {
	s := b.story
	for _, r := range s.ranks {
		s.happens(r)
	}
	time.Sleep(time.Duration(s.drawn(2000)) * time.Millisecond) // or idle stories would take long
	s.mu.Lock()
	defer s.mu.Unlock()
	dial := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)}
	}
	answer := func(code int, body io.Reader) (*http.Response, error) {
		return &http.Response{StatusCode: code, Status: http.StatusText(code), Body: io.NopCloser(body), Request: req}, nil
	}
	switch dead := s.dead; {
	case !s.effect():
		if !dead && b.up != nil && s.rng.IntN(2) == 0 {
			b.take()
		}
		return nil, errDead
	case b.away:
		return nil, dial(syscall.EHOSTUNREACH)
	case b.up == nil:
		return nil, dial(syscall.ECONNREFUSED)
	case b.get != (req.Method == http.MethodGet):
		return answer(http.StatusMethodNotAllowed, strings.NewReader(""))
	case b.faults == 0:
		return answer(http.StatusOK, strings.NewReader("["+strings.Join(b.take(), ", ")+"]"))
	}
	b.faults--
	if b.fault == answerRefused {
		return answer(http.StatusNotFound, strings.NewReader("no such path"))
	}
	events := b.take()
	at := s.rng.IntN(len(events) + 1)
	whole := "[" + strings.Join(events, ", ") + "]"
	put := func(event string) (*http.Response, error) {
		if at > 0 {
			event = strings.Join(events[:at], ", ") + ", " + event
		}
		return answer(http.StatusOK, strings.NewReader("["+event+strings.Join(append([]string{""}, events[at:]...), ", ")+"]"))
	}
	switch b.fault {
	case answerStrange:
		return put(`{"event_id": 3, "attention_dp_rank": 77, "data": {"type": "removed", "block_hashes": [1]}, "more": [{}]}`)
	case answerLost:
		return nil, io.ErrUnexpectedEOF
	case answerFailed:
		return answer(http.StatusInternalServerError, strings.NewReader("no"))
	case answerCut:
		return answer(http.StatusOK, io.MultiReader(strings.NewReader(whole[:s.rng.IntN(len(whole))]), broken{}))
	case answerHangs:
		s.mu.Unlock()
		<-req.Context().Done()
		s.mu.Lock()
		return nil, req.Context().Err()
	case answerOther:
		return answer(http.StatusOK, strings.NewReader("<html>"))
	case answerSpoilt:
		return put("{oops")
	case answerUnnumbered:
		return put(`{"data": {"type": "removed", "block_hashes": [1]}}`)
	}
	return answer(http.StatusOK, strings.NewReader("[]"))
}

// broken is a connection that breaks.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// take takes all events, each rank's in order. One case is left out that docs/relay.md
// has as what cannot be told: a new process whose first event has exactly the number
// that was next of the old one.
func (b *buffer) take() (events []string) {
	var left [][]string
	for _, r := range b.story.ranks {
		w, e := r.way.(*buffered), b.up[r.number]
		if first := e.next - int64(len(e.events)); len(e.events) > 0 {
			if first > 0 && w.reader != b.started && first == b.relay.ranks[r.number].next {
				e.events = e.events[1:]
			}
			w.reader = b.started
		}
		left = append(left, e.events)
		e.events = nil
	}
	for n := b.story.rng.IntN(len(left)); len(left) > 0; {
		if len(left[n]) == 0 {
			left = append(left[:n], left[n+1:]...)
		} else {
			events, left[n] = append(events, left[n][0]), left[n][1:]
		}
		if len(left) > 0 {
			n = b.story.rng.IntN(len(left))
		}
	}
	return events
}

// CloseIdleConnections is called by the relay's client.
func (b *buffer) CloseIdleConnections() {}
