// This file has the engine, the sockets and the feed that streams are tested
// with. They run in a synctest bubble, on its clock, and know of each batch which
// process of the engine published it.

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kvindex/pipeline/relay/zmtp"
)

// world is an engine and whoever follows it. Its methods are what may happen.
type world struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced when anything happens

	keep     int // batches kept for replays
	hwm      int // messages that may wait for a subscriber
	oldForm  bool
	payload  func(*process) string // of the next batch
	started  int                   // processes of the engine so far
	up       *process              // nil: none runs
	replayOf *process              // what answers replays, if not up

	// What goes wrong.
	slowJoin    int   // so many messages after a connection began are not sent on it
	loseLive    int   // so many messages are lost on their way
	unreachable error // why connecting fails
	frozen      bool  // the subscriber gets nothing
	noRouter    bool  // the replay endpoint refuses
	fault       replayFault
	faults      int // so many replays have the fault

	// before is called when something is about to happen, without the lock.
	before func(what string)

	sub struct {
		conn  *liveConn
		retry time.Time
		heard time.Time
		given [][]byte
	}
	dealer struct {
		to      *process
		replies [][][]byte
		given   [][]byte
		asked   []int64 // all requests
	}
	feed fakeFeed
}

// process is one incarnation of the engine.
type process struct {
	number int
	dead   bool
	next   int64
	kept   []item
	conns  []*liveConn
}

type item struct {
	seq     int64
	payload string
}

// liveConn is a subscriber's connection.
type liveConn struct {
	of     *process
	skip   int
	queue  [][][]byte
	closed error
}

// replayFault is what a replay does wrong.
type replayFault int

const (
	faultNone    replayFault = iota
	faultSilent              // never answers
	faultNoEnd               // the last message is lost
	faultSkip                // one in the middle is lost
	faultTail                // the second half is lost
	faultCut                 // the connection breaks in the middle
	faultGarbage             // messages that are none among the answers
	faultTwice               // each is said twice
	numFaults
)

func newWorld() *world {
	w := &world{changed: make(chan struct{}), keep: 1000, hwm: 1000, before: func(string) {}}
	w.payload = func(p *process) string { return fmt.Sprintf("%d/%d", p.number, p.next) }
	w.feed.w = w
	return w
}

// do changes the world.
func (w *world) do(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

// start starts the engine.
func (w *world) start() {
	w.do(func() {
		if w.up == nil {
			w.started++
			w.up = &process{number: w.started}
		}
	})
}

// kill ends the engine; what is on its way to the subscriber still comes.
func (w *world) kill() {
	w.do(func() {
		if w.up == nil {
			return
		}
		w.up.dead = true
		for _, c := range w.up.conns {
			c.closed = io.EOF
		}
		w.up = nil
	})
}

func (w *world) restart() { w.kill(); w.start() }

// publish publishes n batches.
func (w *world) publish(n int) {
	w.do(func() {
		for range n {
			if w.up != nil {
				w.up.publish(w)
			}
		}
	})
}

func (p *process) publish(w *world) {
	it := item{p.next, w.payload(p)}
	p.next++
	if p.kept = append(p.kept, it); len(p.kept) > w.keep {
		p.kept = p.kept[1:]
	}
	for _, c := range p.conns {
		switch {
		case c.skip > 0:
			c.skip--
		case w.loseLive > 0:
			w.loseLive--
		case len(c.queue) < w.hwm:
			c.queue = append(c.queue, [][]byte{{}, number(it.seq), []byte(it.payload)})
		}
	}
}

// fail uses up a number without publishing anything.
func (w *world) fail() { w.do(func() { w.up.next++ }) }

// backward has the engine's connection bring the batches of another process, as
// one behind a proxy does that restarts.
func (w *world) backward() {
	w.do(func() {
		old := w.up
		w.started++
		w.up = &process{number: w.started, conns: old.conns}
	})
}

// forward is backward with a proxy that forwards the new process's first batch, and
// n more. Without the first nothing might show that it is another one.
func (w *world) forward(n int) {
	w.do(func() {
		if w.up == nil {
			return
		}
		old, hwm := w.up, w.hwm
		w.started++
		w.up = &process{number: w.started, conns: old.conns}
		for _, c := range w.up.conns {
			c.skip = 0
		}
		w.loseLive, w.hwm = 0, 1<<30
		w.up.publish(w)
		w.hwm = hwm
		for range n {
			w.up.publish(w)
		}
	})
}

// heal ends all that goes wrong.
func (w *world) heal() {
	w.do(func() {
		if c := w.sub.conn; c != nil {
			c.skip = 0
		}
		w.faults, w.slowJoin, w.loseLive, w.noRouter, w.frozen, w.unreachable = 0, 0, 0, false, false, nil
	})
}

// inject puts a message on the subscriber's connection.
func (w *world) inject(frames ...[]byte) {
	w.do(func() {
		if w.up == nil {
			return
		}
		for _, c := range w.up.conns {
			c.queue = append(c.queue, frames)
		}
	})
}

// cut breaks the subscriber's connection.
func (w *world) cut() {
	w.do(func() {
		if c := w.sub.conn; c != nil && c.closed == nil {
			c.closed, c.queue = syscall.ECONNRESET, nil
			c.of.conns = nil
		}
	})
}

func number(seq int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(seq)) }

// scribble spoils frames whose time is over.
func scribble(frames [][]byte) {
	for _, f := range frames {
		for i := range f {
			f[i] = 0xee
		}
	}
}

// fakeSub is the stream's subscription.
type fakeSub struct{ *world }

func (s fakeSub) Heard() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sub.conn != nil && s.sub.conn.closed == nil {
		return time.Now() // PINGs are answered
	}
	return s.sub.heard
}

func (s fakeSub) Disconnect() {
	s.do(func() { s.drop(); s.sub.retry = time.Now().Add(100 * time.Millisecond) })
}

func (w *world) drop() {
	if c := w.sub.conn; c != nil {
		w.sub.heard = time.Now()
		c.of.conns = nil
		w.sub.conn = nil
	}
}

func (s fakeSub) Next(ctx context.Context) (zmtp.Event, error) {
	for {
		s.before("next")
		s.mu.Lock()
		scribble(s.sub.given)
		s.sub.given = nil
		e, wait := s.event()
		changed := s.changed
		s.mu.Unlock()
		switch {
		case e.Kind == zmtp.Connected:
			s.before("connected")
			return e, nil
		case e.Kind != 0:
			return e, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return zmtp.Event{}, ctx.Err()
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (s fakeSub) Close() error {
	s.do(s.drop)
	return nil
}

// event returns what comes next, or how long to wait for it.
func (w *world) event() (zmtp.Event, time.Duration) {
	now, c := time.Now(), w.sub.conn
	fail := func(kind zmtp.Kind, err error) (zmtp.Event, time.Duration) {
		w.sub.retry = now.Add(100 * time.Millisecond)
		return zmtp.Event{Kind: kind, Err: fmt.Errorf("connecting: %w", err), Retry: w.sub.retry}, 0
	}
	switch {
	case c == nil && now.Before(w.sub.retry):
		return zmtp.Event{}, w.sub.retry.Sub(now)
	case c == nil && w.unreachable != nil:
		return fail(zmtp.Failed, w.unreachable)
	case c == nil && w.up == nil:
		return fail(zmtp.Failed, os.NewSyscallError("connect", syscall.ECONNREFUSED))
	case c == nil:
		w.sub.conn = &liveConn{of: w.up, skip: w.slowJoin}
		w.up.conns = []*liveConn{w.sub.conn}
		return zmtp.Event{Kind: zmtp.Connected}, 0
	case w.frozen:
	case len(c.queue) > 0:
		w.sub.given, c.queue = c.queue[0], c.queue[1:]
		return zmtp.Event{Kind: zmtp.Message, Frames: w.sub.given}, 0
	case c.closed != nil:
		w.sub.conn, w.sub.heard = nil, now
		return fail(zmtp.Disconnected, c.closed)
	}
	return zmtp.Event{}, time.Hour
}

// fakeDealer is the stream's way to the replay endpoint.
type fakeDealer struct{ *world }

func (d fakeDealer) Disconnect() {
	d.do(func() { d.dealer.to, d.dealer.replies = nil, nil })
}

func (d fakeDealer) Close() error {
	d.Disconnect()
	return nil
}

func (d fakeDealer) Send(ctx context.Context, frames ...[]byte) error {
	d.before("ask")
	d.mu.Lock()
	if d.dealer.to == nil {
		d.dealer.to = d.up
		if d.replayOf != nil {
			d.dealer.to = d.replayOf
		}
	}
	p := d.dealer.to
	if p == nil || d.noRouter {
		d.dealer.to = nil
		d.mu.Unlock()
		return os.NewSyscallError("connect", syscall.ECONNREFUSED)
	}
	from := int64(binary.BigEndian.Uint64(frames[1]))
	d.dealer.asked = append(d.dealer.asked, from)
	d.mu.Unlock()
	d.before("answer")
	d.do(func() {
		if !p.dead {
			d.dealer.replies = d.replies(p, from)
		}
	})
	return nil
}

// replies are a process's, with what goes wrong.
func (w *world) replies(p *process, from int64) (out [][][]byte) {
	reply := func(topic string, seq []byte, payload string) [][]byte {
		if w.oldForm {
			return [][]byte{{}, seq, []byte(payload)}
		}
		return [][]byte{{}, []byte(topic), seq, []byte(payload)}
	}
	for _, it := range p.kept {
		if it.seq >= from {
			out = append(out, reply("kv", number(it.seq), it.payload))
		}
	}
	end := reply("", number(-1), "")
	fault := faultNone
	if w.faults > 0 {
		w.faults--
		fault = w.fault
	}
	switch n := len(out); fault {
	case faultSilent:
		return nil
	case faultNoEnd:
		return out
	case faultSkip:
		if n > 0 {
			out = append(out[:n/2], out[n/2+1:]...)
		}
	case faultTail:
		out = out[:(n+1)/2]
	case faultCut:
		return append(out[:n/2], nil)
	case faultGarbage:
		bad := [][][]byte{{{}}, {{}, {1, 2}, {3}}, {{}, {}, {}, {}, {}, {}}, reply("", number(-2), "x"), {{1}, number(5), {2}}}
		out = append(append(bad, out...), reply("", number(-5), ""))
	case faultTwice:
		var twice [][][]byte
		for _, r := range out {
			again := [][]byte{}
			for _, f := range r {
				again = append(again, append([]byte{}, f...))
			}
			twice = append(twice, r, again)
		}
		out = twice
	}
	return append(out, end)
}

func (d fakeDealer) Recv(ctx context.Context) ([][]byte, error) {
	d.before("recv")
	for {
		d.mu.Lock()
		scribble(d.dealer.given)
		d.dealer.given = nil
		to, changed := d.dealer.to, d.changed
		if len(d.dealer.replies) > 0 {
			r := d.dealer.replies[0]
			d.dealer.replies = d.dealer.replies[1:]
			if r == nil { // cut
				d.dealer.to, d.dealer.replies = nil, nil
				d.mu.Unlock()
				return nil, io.ErrUnexpectedEOF
			}
			d.dealer.given = r
			d.mu.Unlock()
			return r, nil
		}
		d.mu.Unlock()
		if to == nil {
			return nil, zmtp.ErrNotConnected
		}
		if to.dead {
			return nil, io.EOF
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		}
	}
}

// fakeFeed checks what a feed is told.
type fakeFeed struct {
	w *world

	mu       sync.Mutex
	process  int   // that the run is of, 0 if it has nothing yet
	first    int64 // of the run
	next     int64
	whole    bool
	emptied  []string
	pos      position
	released int
	ticks    int
	alive    bool
	applied  int
	wrong    []string
}

func (f *fakeFeed) bad(format string, args ...any) {
	f.wrong = append(f.wrong, fmt.Sprintf(format, args...))
}

func (f *fakeFeed) apply(payload []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var process int
	var seq int64
	if n, err := fmt.Sscanf(string(payload), "%d/%d", &process, &seq); n != 2 || err != nil {
		f.bad("payload %q", payload)
		return
	}
	switch {
	case f.process == 0:
		if f.whole && seq != 0 {
			f.bad("told that the engine is empty, and then batch %d of process %d", seq, process)
		}
		f.process, f.first = process, seq
	case process != f.process:
		f.bad("batch %d of process %d after batch %d of process %d", seq, process, f.next-1, f.process)
	case seq != f.next:
		f.bad("batch %d of process %d, want %d", seq, process, f.next)
	}
	f.next = seq + 1
	f.applied++
}

func (f *fakeFeed) empty(whole bool, why cause) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.emptied = append(f.emptied, fmt.Sprintf("%s %t", why, whole))
	f.process, f.first, f.next, f.whole = 0, 0, 0, whole
	f.released++
}

func (f *fakeFeed) at(p position) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pos = p
	if f.process != 0 && p.next >= 0 && p.next != f.next {
		f.bad("position %d after batch %d", p.next, f.next-1)
	}
}

func (f *fakeFeed) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.released++
}

func (f *fakeFeed) tick(_ time.Time, alive bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ticks++
	f.alive = alive
}

func (f *fakeFeed) pending() bool { return false }

// run describes what was applied since the feed was emptied.
func (f *fakeFeed) run() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.process == 0 {
		return fmt.Sprintf("nothing %t", f.whole)
	}
	return fmt.Sprintf("%d: %d-%d %t", f.process, f.first, f.next-1, f.whole)
}

// check returns what was wrong so far and, if the engine is up, that the run is
// not all there is of it.
func (w *world) check(toTheEnd bool) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	f := &w.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	wrong := f.wrong
	if toTheEnd && w.up != nil {
		p := w.up
		switch {
		case f.process == 0 && p.next > 0:
			wrong = append(wrong, fmt.Sprintf("nothing is applied, the engine is at %d", p.next))
		case f.process != 0 && f.process != p.number:
			wrong = append(wrong, fmt.Sprintf("the run is of process %d, not %d", f.process, p.number))
		case f.process != 0 && f.next != p.next:
			wrong = append(wrong, fmt.Sprintf("the run ends before %d, the engine is at %d", f.next, p.next))
		case f.released == 0:
			wrong = append(wrong, "the feed was never released")
		}
	}
	return wrong
}

// settled lets time pass until nothing more is to be expected.
func settled() {
	time.Sleep(20 * time.Second)
	synctest.Wait()
}

// run runs a stream in the world while story goes on. replay: there is a replay endpoint.
func (w *world) run(t *testing.T, replay bool, from position, story func(s *stream)) *stream {
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("STREAM_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	var dealer asker
	if replay {
		dealer = fakeDealer{w}
	}
	s := newStream(log, &w.feed, fakeSub{w}, dealer, from, &streamCounts{}, newStreamStatus())
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { s.run(ctx) })
	story(s)
	cancel()
	done.Wait()
	return s
}

var errUnreachable = errors.New("no route to host")
