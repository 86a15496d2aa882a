// This file tests what the status says of Kafka.

package relay

import (
	"strings"
	"testing"
	"time"
)

// TestStalled: that Kafka is away shows in the status soon, not first when the
// buffer is full; silence of the engine does not, nor do slow acknowledgements.
func TestStalled(t *testing.T) {
	w := newLives(t)
	f := w.started()
	is := func(want bool) {
		t.Helper()
		if s := f.status(); s.Stalled != want || strings.Contains(s.Problem, "Kafka has acknowledged no record of topic events") != want {
			t.Errorf("stalled %v, problem %q, want %v", s.Stalled, s.Problem, want)
		}
	}
	w.clock = w.clock.Add(time.Minute)
	is(false) // nothing is in flight
	w.kafka.direct = false
	f.applyBatch(storedBatch(1, 1))
	is(false)
	w.clock = w.clock.Add(stalledAfter)
	is(false)
	f.applyBatch(storedBatch(1, 2)) // what comes later does not hide what waits
	w.clock = w.clock.Add(time.Millisecond)
	is(true)
	w.kafka.end(nil)
	is(false)
	w.clock = w.clock.Add(stalledAfter + time.Millisecond)
	is(true)
	w.kafka.end(nil)
	is(false)
}

// TestUnheard: until Kafka has taken a first record nobody knows that it will.
func TestUnheard(t *testing.T) {
	w := newLives(t)
	w.kafka.direct = false
	f := w.feed(w.config())
	if s := f.status(); s.Stalled || s.Problem != "" {
		t.Errorf("before there is anything to say: stalled %v, problem %q", s.Stalled, s.Problem)
	}
	f.empty(true, causeStart)
	if s, want := f.status(), "Kafka has acknowledged no record of topic events yet"; !s.Stalled || s.Problem != want {
		t.Errorf("stalled %v, problem %q, want it, and %q", s.Stalled, s.Problem, want)
	}
	w.kafka.end(nil)
	f.applyBatch(storedBatch(1, 1))
	if s := f.status(); s.Stalled || s.Problem != "" {
		t.Errorf("once it has: stalled %v, problem %q", s.Stalled, s.Problem)
	}
}

// TestRefusalIsTold: the status says what Kafka says, and of which topic.
func TestRefusalIsTold(t *testing.T) {
	w := newLives(t)
	f := w.started()
	w.kafka.refuse = errRefused
	f.applyBatch(storedBatch(1, 1))
	w.after(time.Millisecond, f, true)
	if want := "Kafka refused a record of topic events: refused by the test"; f.status().Problem != want || !strings.Contains(w.log.String(), `topic=events error="refused by the test"`) {
		t.Errorf("problem %q, want %q; log:\n%s", f.status().Problem, want, w.log.String())
	}
	w.kafka.refuse = nil
	w.after(time.Minute, f, true) // the next epoch opens
	w.after(time.Millisecond, f, true)
	if s := f.status(); s.Problem != "" {
		t.Errorf("problem %q, in state %s", s.Problem, s.State)
	}
}
