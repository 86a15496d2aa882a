// This file tests what a feed does, rule by rule.

package relay

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/schemas"
)

// said is what a record says, in short: "h" for a heartbeat or the numbers of
// blocks stored and removed and "c" for a clear, and its seq.
func said(t *testing.T, value []byte) string {
	t.Helper()
	var b schemas.Batch
	if err := b.Decode(value); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, e := range b.Events {
		switch e.Kind {
		case schemas.KindStored:
			fmt.Fprintf(&text, "+%d", len(e.Stored.Locals))
		case schemas.KindRemoved:
			fmt.Fprintf(&text, "-%d", len(e.Removed))
		case schemas.KindCleared:
			text.WriteString("c")
		}
	}
	if len(b.Events) == 0 {
		text.WriteString("h")
	}
	return fmt.Sprintf("%s@%d", &text, b.Seq)
}

// told is what was written since the last call.
func (w *lives) told() (all []string) {
	w.Helper()
	for _, r := range w.kafka.log {
		all = append(all, said(w.T, r.value))
	}
	w.kafka.log = nil
	return all
}

// tells fails unless that is what was written since the last call.
func (w *lives) tells(want ...string) {
	w.Helper()
	if got := w.told(); !reflect.DeepEqual(got, want) {
		w.Errorf("written: %q, want %q", got, want)
	}
}

// after has the feed tick once, that much later.
func (w *lives) after(d time.Duration, f *feed, alive bool) {
	w.clock = w.clock.Add(d)
	f.tick(w.now(), alive)
}

// started returns a feed whose epoch is whole and said to Kafka.
func (w *lives) started() *feed {
	w.Helper()
	f := w.feed(w.config())
	f.empty(true, causeStart)
	w.tells("h@-1")
	return f
}

// hold has nothing written before release or empty, as before a feed's first
// connection, so that there is something to be said anew.
func (f *feed) hold() {
	if f.state == held {
		return
	}
	f.end(causeGap, false)
	f.state = held
	f.publish()
}

func TestEpochBegins(t *testing.T) {
	w := newLives(t)
	f := w.feed(w.config())
	f.applyBatch(storedBatch(2, 1))
	w.after(time.Minute, f, true)
	w.tells() // nothing is written before the engine's state is known
	f.empty(true, causeStart)
	w.tells("h@-1")
	f.applyBatch(storedBatch(2, 1))
	w.tells("+1+1@0")
	f.applyBatch(&engine.Batch{})
	f.applyBatch(storedBatch(2, 1))
	w.tells() // no record without effect
	f.empty(false, causeGap)
	w.tells("h@0") // a gap: the stage knows that it may be less
	f.applyBatch(storedBatch(1, 1))
	f.applyBatch(&engine.Batch{Events: []engine.Event{{Kind: engine.Cleared}}})
	w.tells("+1@1", "c@2")
	if !f.status().Whole && !f.whole {
		t.Error("not whole after a clear")
	}
	f.applyBatch(removedBatch(1, 1))
	f.applyBatch(storedBatch(1, 1))
	f.applyBatch(removedBatch(1, 1))
	w.tells("+1@3", "-1@4")
	f.hold()
	f.applyBatch(storedBatch(3, 1))
	w.after(time.Minute, f, true)
	w.tells()
	f.release()
	w.tells("h@-1", "+1+1+1@0")
	f.release()
	w.tells()
}

// TestEmptyAgain: what the stage knows already costs no epoch, however often an
// engine that is gone is found gone.
func TestEmptyAgain(t *testing.T) {
	w := newLives(t)
	f := w.started()
	for range 3 {
		f.empty(true, causeRestart)
	}
	w.tells()
	f.empty(false, causeGap)
	f.empty(false, causeGap)
	w.tells("h@0")
	f.empty(true, causeRestart)
	w.tells("h@-1")
	f.applyBatch(storedBatch(1, 1))
	f.empty(true, causeRestart)
	w.tells("+1@0", "h@-1")
	if n := f.counts.epochs[causeRestart].Load(); n != 2 {
		t.Errorf("%d epochs for restarts", n)
	}
}

// TestUnreadable: after a payload, or a removal, that cannot be read, the index
// must not credit what the engine may not hold.
func TestUnreadable(t *testing.T) {
	w := newLives(t)
	f := w.started()
	f.applyBatch(storedBatch(2, 1))
	f.apply([]byte{0xc1})
	w.tells("+1+1@0", "h@0")
	f.applyBatch(storedBatch(2, 1))
	lost := storedBatch(2, 9)
	lost.LostRemovals = 1
	f.applyBatch(lost)
	w.tells("+1+1@1", "h@0")
	if f.counts.payloads.Load() != 1 || f.counts.removalsLost.Load() != 1 || f.counts.epochs[causePayload].Load() != 2 {
		t.Errorf("%d payloads, %d batches with lost removals", f.counts.payloads.Load(), f.counts.removalsLost.Load())
	}
}

// TestWrongRank: batches of another rank are refused and said, and do not begin
// an epoch each.
func TestWrongRank(t *testing.T) {
	w := newLives(t)
	f := w.started()
	f.applyBatch(storedBatch(2, 1))
	for i := range 5 {
		b := storedBatch(2, uint64(10*i))
		b.Rank, b.HasRank = 2, true
		f.applyBatch(b)
	}
	w.tells("+1+1@0", "h@0")
	if p := f.status().Problem; f.counts.wrongRank.Load() != 5 || !strings.Contains(p, "rank 2, not 3") || strings.Count(w.log.String(), "another rank") != 1 {
		t.Errorf("%d, problem %q, log %s", f.counts.wrongRank.Load(), p, w.log.String())
	}
	b := storedBatch(2, 1)
	b.Rank, b.HasRank = 3, true
	f.applyBatch(b)
	w.tells("+1+1@1")
	if p := f.status().Problem; p != "" {
		t.Errorf("problem %q", p)
	}
}

// TestWindowGrown: the mapping clears when another group turns out to be the main
// one, but that does not make it all that the engine holds.
func TestWindowGrown(t *testing.T) {
	w := newLives(t)
	f := w.started()
	event := func(hash uint64, window int64) *engine.Batch {
		b := storedBatch(1, hash)
		b.Events[0].Window = window
		return b
	}
	f.applyBatch(event(1, 128))
	f.applyBatch(event(2, 4096))
	w.tells("+1@0", "h@0", "+1@1")
	if f.whole || f.counts.epochs[causeWindow].Load() != 1 {
		t.Errorf("whole %t", f.whole)
	}
}

// TestHeartbeat: a quiet engine that is alive has one sent with the last seq; not
// if it may be dead, while a record is on its way, or nothing is written.
func TestHeartbeat(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.after(9*time.Second, f, true)
	w.tells()
	w.after(time.Second, f, false)
	w.tells()
	f.tick(w.now(), true)
	w.tells("h@-1")
	f.applyBatch(storedBatch(1, 1))
	w.after(9*time.Second, f, true)
	w.tells("+1@0")
	w.after(time.Second, f, true)
	w.tells("h@0")
	w.kafka.direct = false
	f.applyBatch(storedBatch(1, 2))
	for range 5 {
		w.after(10*time.Second, f, true)
	}
	if n := len(w.kafka.pending); n != 1 {
		t.Errorf("%d records on their way", n)
	}
	w.kafka.fail(1, 0, errRefused)
	w.kafka.refuse = errRefused
	for range 5 {
		w.after(10*time.Second, f, true)
	}
	w.tells()
	f.hold()
	w.kafka.refuse, w.kafka.direct = nil, true
	w.after(time.Minute, f, true)
	w.tells()
	if n := f.counts.heartbeats.Load(); n != 2 {
		t.Errorf("%d heartbeats counted", n)
	}
}

// TestRefused: after Kafka refused a record nothing but an epoch's heartbeat is
// tried, less and less often, until it is taken. Then comes everything.
func TestRefused(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.kafka.refuse = errRefused
	f.applyBatch(storedBatch(2, 1))
	var tries []string
	w.kafka.seen = func(value []byte) { tries = append(tries, said(t, value)) }
	for range 60 {
		w.after(time.Second, f, true)
		f.applyBatch(storedBatch(1, 5))
	}
	if want := []string{"h@-1", "h@-1", "h@-1", "h@-1", "h@-1"}; !reflect.DeepEqual(tries, want) { // after 1, 3, 7, 15, 31 s
		t.Errorf("tried %v, want %v", tries, want)
	}
	if s := f.status(); s.State != "due" || s.Cause != "kafka_failed" || s.Failed != 6 || strings.Count(w.log.String(), "refused a record") > 6 {
		t.Errorf("%+v, log %s", s, w.log.String())
	}
	w.kafka.refuse, w.kafka.direct = nil, false
	f.applyBatch(&engine.Batch{Events: []engine.Event{{Kind: engine.Cleared}}})
	f.applyBatch(storedBatch(2, 1))
	tries = nil
	w.after(3*time.Second, f, true)
	if f.state != opening || len(tries) != 1 || !f.pending() {
		t.Fatalf("%s, tried %v", f.state, tries)
	}
	f.applyBatch(storedBatch(1, 9))
	w.after(time.Minute, f, true)
	if len(tries) != 1 {
		t.Errorf("tried %v", tries)
	}
	w.kafka.ack(1)
	f.settle()
	w.kafka.direct = true
	w.kafka.ack(len(w.kafka.pending))
	w.tells("h@-1", "+1+1+1@0")
	f.applyBatch(storedBatch(1, 10))
	w.tells("+1@1")
	if f.check(); f.failures != 0 || f.pending() {
		t.Errorf("%d failures, %s", f.failures, f.state)
	}
}

// TestRefusedLate: that Kafka takes heartbeats does not make it one that takes
// the rest.
func TestRefusedLate(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.kafka.large = 100
	f.applyBatch(storedBatch(50, 1))
	tries := 0
	w.kafka.seen = func(value []byte) {
		if len(value) <= w.kafka.large {
			tries++
		}
	}
	for range 60 {
		w.after(time.Second, f, true)
	}
	if tries < 4 || tries > 5 {
		t.Errorf("%d epochs in a minute", tries)
	}
	w.kafka.large = 0
	for range 31 {
		w.after(time.Second, f, true)
	}
	if r := w.read(); f.failures != 0 || len(r.held[0]) != 50 || r.incomplete {
		t.Errorf("%d failures, %d blocks", f.failures, len(r.held[0]))
	}
}

// TestClearWhileOpening: a clear that comes after an epoch's first heartbeat ends
// what the heartbeat said of losses.
func TestClearWhileOpening(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.kafka.refuse = errRefused
	f.empty(false, causeGap)
	w.kafka.refuse, w.kafka.direct = nil, false
	w.after(time.Second, f, false) // finds the failure
	w.after(time.Second, f, false)
	if f.state != opening {
		t.Fatal(f.state)
	}
	f.applyBatch(&engine.Batch{Events: []engine.Event{{Kind: engine.Cleared}}})
	f.applyBatch(storedBatch(2, 1))
	w.kafka.direct = true
	w.kafka.ack(1)
	f.settle()
	w.tells("h@0", "c+1+1@1")
	if r := w.read(); r.incomplete {
		t.Error("incomplete")
	}
}

// TestOldFailure: what becomes of an old epoch's records does not matter once a
// new one began.
func TestOldFailure(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.kafka.direct = false
	f.applyBatch(storedBatch(2, 1))
	f.applyBatch(storedBatch(2, 3))
	f.empty(true, causeRestart)
	f.applyBatch(storedBatch(3, 1))
	epoch := f.record.Epoch
	w.kafka.fail(2, 1, errRefused)
	w.after(time.Second, f, false)
	w.kafka.ack(2)
	w.after(time.Second, f, false)
	if f.record.Epoch != epoch || f.state != writing || f.failures != 0 {
		t.Errorf("%s in epoch %d, was %d", f.state, f.record.Epoch, epoch)
	}
	w.tells("+1+1@0", "h@-1", "+1+1+1@0")
}

// TestSilence: when so long nothing was acknowledged that the stage may have
// retired the epoch, the next thing to say begins another.
func TestSilence(t *testing.T) {
	for name, speak := range map[string]func(w *lives, f *feed){
		"a batch":     func(_ *lives, f *feed) { f.applyBatch(storedBatch(1, 9)) },
		"a heartbeat": func(w *lives, f *feed) { f.tick(w.now(), true) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newLives(t)
			f := w.started()
			f.applyBatch(storedBatch(2, 1))
			w.told()
			w.after(testGrace/2, f, false)
			w.tells()
			w.after(time.Second, f, false)
			w.tells()
			speak(w, f)
			if got := w.told(); len(got) != 2 || got[0] != "h@-1" || !strings.HasPrefix(got[1], "+1+1") || f.counts.epochs[causeSilence].Load() != 1 {
				t.Errorf("written: %q", got)
			}
		})
	}
	t.Run("records on their way", func(t *testing.T) {
		w := newLives(t)
		f := w.started()
		w.kafka.direct = false
		f.applyBatch(storedBatch(2, 1))
		w.after(time.Minute, f, false)
		w.clock = w.clock.Add(2 * testGrace)
		w.kafka.direct = true
		w.kafka.ack(1) // too late: refused as the epoch was retired
		w.after(time.Second, f, false)
		w.tells("+1+1@0", "h@-1", "+1+1@0")
	})
	t.Run("an epoch's beginning", func(t *testing.T) {
		w := newLives(t)
		f := w.feed(w.config())
		f.empty(true, causeStart)
		f.hold()
		f.applyBatch(storedBatch(2, 1))
		w.kafka.direct = false
		f.release()
		w.clock = w.clock.Add(2 * testGrace)
		w.kafka.direct = true
		w.kafka.ack(2) // an epoch that begins late is none too late
		w.after(time.Second, f, false)
		w.tells("h@-1", "h@-1", "+1+1@0")
	})
}

// TestDumpWaits: a dump larger than the room goes on as records are acknowledged,
// and is given up when none are.
func TestDumpWaits(t *testing.T) {
	w := newLives(t)
	f := w.feed(w.config())
	f.flight.limit = 3 * (600 + recordOverhead)
	f.split.maxBytes = 500
	f.empty(true, causeStart)
	w.tells("h@-1")
	f.hold()
	f.applyBatch(storedBatch(500, 1))
	w.kafka.direct = false
	waits := 0
	f.out.await = func(_ <-chan struct{}, seen int64, patience time.Duration) bool {
		if patience != 10*time.Second || f.out.done.Load() != seen {
			t.Errorf("patience %v", patience)
		}
		waits++
		if waits == 7 {
			return false
		}
		w.kafka.ack(1)
		return true
	}
	f.release()
	if f.state != due || f.why != causeNoRoom || waits != 7 {
		t.Errorf("%s for %s after %d waits", f.state, f.why, waits)
	}
	w.after(time.Second, f, false)
	if f.state != due {
		t.Error("an epoch begins with records in flight")
	}
	w.kafka.ack(len(w.kafka.pending))
	waits = 100
	w.after(time.Second, f, false)
	if f.state != writing || waits < 110 {
		t.Errorf("%s after %d waits", f.state, waits)
	}
	f.applyBatch(storedBatch(1, 1000))
	if f.state != writing {
		t.Errorf("no room after a dump: %s for %s", f.state, f.why)
	}
	w.kafka.ack(len(w.kafka.pending))
	if r := w.read(); len(r.held[0]) != 501 || r.incomplete {
		t.Errorf("%d blocks, incomplete %t", len(r.held[0]), r.incomplete)
	}
	// A record that fails during a dump ends it at once.
	f.hold()
	waits = 100
	f.out.await = func(_ <-chan struct{}, seen int64, _ time.Duration) bool {
		waits++
		w.kafka.fail(1, 0, errRefused)
		return true
	}
	f.release()
	if f.state != due || f.why != causeFailed || waits != 101 {
		t.Errorf("%s for %s after %d waits", f.state, f.why, waits-100)
	}
}

// TestBudget: feeds share the budget, and none has more than its part.
func TestBudget(t *testing.T) {
	w := newLives(t)
	w.kafka.direct = false
	out, err := newOutlet(&w.kafka, "events", "p", leastBuffer)
	if err != nil {
		t.Fatal(err)
	}
	var feeds []*feed
	for i := range 6 {
		c := w.config()
		c.worker = fmt.Sprint(i)
		f, err := newFeed(c, out)
		if err != nil {
			t.Fatal(err)
		}
		f.empty(true, causeStart)
		feeds = append(feeds, f)
	}
	for i := range uint64(2000) {
		for _, f := range feeds {
			if f.state == writing {
				f.applyBatch(storedBatch(64, i*1000))
			}
		}
	}
	total := int64(0)
	for _, f := range feeds {
		s := f.status()
		total += s.Bytes
		if s.Bytes > leastBuffer/feedShare || s.Cause != "no_room" {
			t.Errorf("%+v", s)
		}
	}
	if used := out.used.Load(); used != total || used > leastBuffer || used < leastBuffer*9/10 {
		t.Errorf("%d bytes used, %d of the feeds", used, total)
	}
	// Nothing of its own may be in flight, and half of the budget must be free,
	// before a feed begins anew.
	one := feeds[0]
	rest := w.kafka.pending
	w.kafka.pending = nil
	rest = slices.DeleteFunc(rest, func(p pendingRecord) bool {
		if string(p.r.Key) != one.cfg.worker {
			return false
		}
		p.done(p.r, nil)
		return true
	})
	w.after(time.Second, one, false)
	if s := one.status(); s.State != "due" || s.InFlight > 0 {
		t.Errorf("%+v", s)
	}
	for len(rest) > 0 && out.used.Load() > leastBuffer/2 {
		rest[0].done(rest[0].r, nil)
		rest = rest[1:]
	}
	one.cfg.patience, out.await = 0, func(<-chan struct{}, int64, time.Duration) bool { return false }
	w.after(time.Second, one, false)
	if n := one.counts.epochs[causeNoRoom].Load(); n != 1 {
		t.Errorf("%d epochs, want 1: there is room", n)
	}
	w.after(time.Second, feeds[1], false)
	if s := feeds[1].status(); s.State != "due" || s.InFlight == 0 {
		t.Errorf("%+v", s)
	}
	if _, err := newOutlet(&w.kafka, "events", "p", leastBuffer-1); err == nil {
		t.Error("a budget too small is taken")
	}
}

// TestCallbacksFromElsewhere: Kafka answers and others look while the feed works.
func TestCallbacksFromElsewhere(t *testing.T) {
	k := &goKafka{}
	c := testConfig(time.Now)
	c.stateDir = t.TempDir()
	f := newTestFeed(t, k, c)
	stop := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				f.status()
			}
		}
	})
	f.empty(true, causeStart)
	for i := range uint64(300) {
		f.applyBatch(storedBatch(4, i))
		f.applyBatch(removedBatch(2, i))
		f.at(position{next: int64(i)})
		f.tick(time.Now(), true)
	}
	ctx := t.Context()
	f.close(ctx)
	close(stop)
	looking.Wait()
	if s := f.status(); s.InFlight != 0 || s.Bytes != 0 || f.out.used.Load() != 0 {
		t.Errorf("%+v", s)
	}
}

// goKafka answers each record on a goroutine, every 50th badly.
type goKafka struct{ n int }

func (k *goKafka) TryProduce(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	k.n++
	var err error
	if k.n%50 == 0 {
		err = errRefused
	}
	go done(r, err)
}

// TestNewFeedRefuses what records cannot carry.
func TestNewFeedRefuses(t *testing.T) {
	for name, change := range map[string]func(c *feedConfig){
		"no worker":    func(c *feedConfig) { c.worker = "" },
		"no model":     func(c *feedConfig) { c.model = "" },
		"not UTF-8":    func(c *feedConfig) { c.worker = "\xff" },
		"rank":         func(c *feedConfig) { c.rank = -1 },
		"hasher":       func(c *feedConfig) { c.engine.Hasher.Scheme = index.Opaque },
		"endless name": func(c *feedConfig) { c.model = strings.Repeat("m", recordBytes) },
	} {
		c := testConfig(time.Now)
		change(&c)
		if _, err := newFeed(c, &outlet{}); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

// TestLogIsThin: an engine of which every other payload cannot be read does not
// fill the log.
func TestLogIsThin(t *testing.T) {
	w := newLives(t)
	f := w.started()
	for i := range uint64(1000) {
		f.apply([]byte{0xc1})
		f.applyBatch(storedBatch(1, i))
	}
	if n := strings.Count(w.log.String(), "\n"); n > 20 || f.counts.epochs[causePayload].Load() != 1000 {
		t.Errorf("%d lines for %d epochs", n, f.counts.epochs[causePayload].Load())
	}
}
