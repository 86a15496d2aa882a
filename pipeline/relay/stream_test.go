// This file tests streams by stories: what may happen to an engine and on the
// way to it, and what must have come of it.

package relay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

// once returns what calls f when what happens for the nth time.
func once(what string, nth int, f func()) func(string) {
	return func(now string) {
		if now == what {
			if nth--; nth == 0 {
				f()
			}
		}
	}
}

func TestStories(t *testing.T) {
	for _, story := range []struct {
		name  string
		setup func(w *world)
		tell  func(w *world)
		run   string // what is applied in the end: process: first-last whole
		empty []string
		alone string   // the same without a replay endpoint, if it is to be told so
		after []string // likewise
	}{
		{
			name: "publishing from the beginning",
			tell: func(w *world) { w.start(); settled(); w.publish(5); settled(); w.publish(5) },
			run:  "1: 0-9 true", empty: []string{"engine_restart true"},
			alone: "1: 0-9 true", after: []string{"engine_restart true", "connection false", "connection true"},
		}, {
			name:  "published before",
			setup: func(w *world) { w.start(); w.publish(20) },
			tell:  func(w *world) { w.publish(5) },
			run:   "1: 0-24 true", empty: []string{"start true"},
			alone: "1: 20-24 false", after: []string{"connection false"},
		}, {
			name:  "more published before than is kept",
			setup: func(w *world) { w.keep = 10; w.start(); w.publish(20) },
			tell:  func(w *world) { settled(); w.publish(5) },
			run:   "1: 10-24 false", empty: []string{"start false"},
		}, {
			name:  "old form of replays",
			setup: func(w *world) { w.oldForm = true; w.start(); w.publish(20) },
			tell:  func(w *world) { settled(); w.publish(1); w.cut(); settled(); w.publish(1) },
			run:   "1: 0-21 true", empty: []string{"start true"},
		}, {
			name:  "lost on the way",
			setup: func(w *world) { w.start() },
			tell: func(w *world) {
				w.publish(5)
				settled()
				w.do(func() { w.loseLive = 7 })
				w.publish(10)
				settled()
			},
			run: "1: 0-14 true", empty: []string{"start true"},
			alone: "1: 12-14 false", after: []string{"connection false", "connection true", "events_lost false"},
		}, {
			name:  "the last ones lost on the way, then silence",
			setup: func(w *world) { w.start() },
			tell:  func(w *world) { w.publish(5); settled(); w.do(func() { w.loseLive = 5 }); w.publish(5) },
			run:   "1: 0-9 true", empty: []string{"start true"},
		}, {
			name:  "a subscription that takes effect late",
			setup: func(w *world) { w.slowJoin = 3; w.start() },
			tell:  func(w *world) { time.Sleep(time.Second / 2); w.publish(3) },
			run:   "1: 0-2 true", empty: []string{"start true"},
		}, {
			name:  "too slow a reader",
			setup: func(w *world) { w.hwm = 3; w.start() },
			tell: func(w *world) {
				w.publish(2)
				settled()
				w.do(func() { w.frozen = true })
				w.publish(10)
				w.do(func() { w.frozen = false })
				settled()
				w.publish(1)
			},
			run: "1: 0-12 true", empty: []string{"start true"},
			alone: "1: 12-12 false", after: []string{"connection false", "connection true", "events_lost false"},
		}, {
			name:  "too slow a reader, and more lost than is kept",
			setup: func(w *world) { w.hwm, w.keep = 3, 5; w.start() },
			tell: func(w *world) {
				w.publish(2)
				settled()
				w.do(func() { w.frozen = true })
				w.publish(20)
				w.do(func() { w.frozen = false })
			},
			run: "1: 17-21 false", empty: []string{"start true", "events_lost false"},
		}, {
			name:  "connection lost, nothing else",
			setup: func(w *world) { w.start(); w.publish(4) },
			tell:  func(w *world) { settled(); w.cut(); w.publish(4); settled(); w.publish(2) },
			run:   "1: 0-9 true", empty: []string{"start true"},
			alone: "1: 8-9 false", after: []string{"connection false"},
		}, {
			name:  "connection lost, more published meanwhile than is kept",
			setup: func(w *world) { w.keep = 5; w.start(); w.publish(4) },
			tell:  func(w *world) { settled(); w.cut(); w.publish(8); settled(); w.publish(2) },
			run:   "1: 7-13 false", empty: []string{"start true", "events_lost false"},
		}, {
			name:  "restart",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.restart(); w.publish(3); settled(); w.publish(3) },
			run:   "2: 0-5 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name:  "restart with a pause, in which nobody listens",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell: func(w *world) {
				settled()
				w.kill()
				settled()
				w.start()
				settled()
				w.publish(3)
			},
			run: "2: 0-2 true", empty: []string{"start true", "engine_restart true"},
			alone: "2: 0-2 true", after: []string{"connection false", "engine_restart true", "connection false", "connection true"},
		}, {
			name:  "restart that passed the next batch before the connection",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.restart(); w.publish(30); settled(); w.publish(3) },
			run:   "2: 0-32 true", empty: []string{"start true", "engine_restart true"},
			alone: "2: 30-32 false", after: []string{"connection false"},
		}, {
			name:  "restart that is at the very next batch",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.restart(); w.publish(10); settled(); w.publish(1) },
			run:   "2: 0-10 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name:  "restart and more than is kept",
			setup: func(w *world) { w.keep = 5; w.start(); w.publish(4) },
			tell:  func(w *world) { settled(); w.restart(); w.publish(30); settled(); w.publish(3) },
			run:   "2: 25-32 false", empty: []string{"start true", "events_lost false"},
		}, {
			name: "restart between the two connections",
			setup: func(w *world) {
				w.start()
				w.publish(10)
				w.before = once("connected", 1, func() { w.publish(2); w.restart(); w.publish(11) })
			},
			tell: func(w *world) { settled(); w.publish(2) },
			run:  "2: 0-12 true", empty: []string{"start true"},
		}, {
			name: "restart between the two connections, when there is a past",
			setup: func(w *world) {
				w.start()
				w.publish(10)
				w.before = once("connected", 2, func() { w.publish(2); w.restart(); w.publish(12) })
			},
			tell: func(w *world) { settled(); w.cut(); settled(); w.publish(2) },
			run:  "2: 0-13 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name: "restart between question and answer",
			setup: func(w *world) {
				w.start()
				w.publish(10)
				w.before = once("answer", 1, func() { w.publish(2); w.restart(); w.publish(12) })
			},
			tell: func(w *world) { settled(); w.publish(2) },
			run:  "2: 0-13 true",
		}, {
			name: "restart amid the answers",
			setup: func(w *world) {
				w.start()
				w.publish(10)
				w.before = once("recv", 4, func() { w.publish(2); w.restart(); w.publish(12) })
			},
			tell: func(w *world) { settled(); w.publish(2) },
			run:  "2: 0-13 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name: "old messages wait on the connection while the new process answers",
			setup: func(w *world) {
				w.start()
				w.publish(2)
				w.before = once("connected", 1, func() { w.publish(20); w.restart(); w.publish(2) })
			},
			tell: func(w *world) { settled(); w.publish(2) },
			run:  "2: 0-3 true", empty: []string{"start true"},
		}, {
			name:  "restart behind a proxy",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell: func(w *world) {
				w.publish(1)
				settled()
				w.backward()
				w.publish(2)
				settled()
				w.publish(1)
			},
			run: "2: 0-2 true", empty: []string{"start true", "engine_restart true"},
			alone: "2: 2-2 false", after: []string{"connection false", "connection false"},
		}, {
			name:  "restart behind a proxy, published less than before",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.backward(); w.publish(15); settled(); w.publish(1) },
			run:   "2: 0-15 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name:  "a number used up",
			setup: func(w *world) { w.start(); w.publish(3) },
			tell: func(w *world) {
				w.publish(2)
				settled()
				w.fail()
				w.publish(2)
				settled()
				w.publish(1)
			},
			run: "1: 6-8 false", empty: []string{"start true", "events_lost false"},
			alone: "1: 6-8 false", after: []string{"connection false", "events_lost false"},
		}, {
			name:  "the first number used up",
			setup: func(w *world) { w.start(); w.fail(); w.publish(3) },
			tell:  func(w *world) { settled(); w.publish(2) },
			run:   "1: 1-5 false", empty: []string{"start false"},
		}, {
			name:  "replay that never answers, from the start",
			setup: func(w *world) { w.fault, w.faults = faultSilent, 1<<30; w.start(); w.publish(3) },
			tell:  func(w *world) { settled(); w.publish(2); settled(); w.publish(1) },
			run:   "1: 3-5 false", empty: []string{"start false"},
		}, {
			name:  "replay that never answers, after a past",
			setup: func(w *world) { w.start(); w.publish(3) },
			tell: func(w *world) {
				settled()
				w.do(func() { w.fault, w.faults = faultSilent, 1<<30 })
				w.cut()
				settled()
				settled()
				w.publish(2)
				settled()
				w.publish(1)
			},
			run: "1: 3-5 false", empty: []string{"start true", "connection false"},
		}, {
			name:  "replay that answers at last",
			setup: func(w *world) { w.fault, w.faults = faultSilent, 5; w.start(); w.publish(3) },
			tell:  func(w *world) { settled(); settled(); time.Sleep(time.Minute); settled() },
			run:   "1: 0-2 true", empty: []string{"start false", "connection true"},
		}, {
			name:  "replay endpoint that refuses",
			setup: func(w *world) { w.noRouter = true; w.start(); w.publish(3) },
			tell: func(w *world) {
				settled()
				w.publish(2)
				w.do(func() { w.loseLive = 1 })
				settled()
				w.publish(2)
			},
			run: "1: 6-6 false", empty: []string{"start false", "events_lost false"},
		}, {
			name:  "replays lose their ends",
			setup: func(w *world) { w.fault, w.faults = faultNoEnd, 2; w.start(); w.publish(30) },
			tell:  func(w *world) { settled(); w.publish(2) },
			run:   "1: 0-31 true", empty: []string{"start true"},
		}, {
			name:  "replays skip",
			setup: func(w *world) { w.fault, w.faults = faultSkip, 4; w.start(); w.publish(100) },
			tell:  func(w *world) { settled(); w.publish(2) },
			run:   "1: 0-101 true", empty: []string{"start true"},
		}, {
			name:  "replays lose their second half and say that is all",
			setup: func(w *world) { w.fault, w.faults = faultTail, 4; w.start(); w.publish(100) },
			tell:  func(w *world) { settled(); w.publish(2) },
			run:   "1: 0-101 true", empty: []string{"start true"},
		}, {
			name:  "replays break off",
			setup: func(w *world) { w.fault, w.faults = faultCut, 5; w.start(); w.publish(100) },
			tell:  func(w *world) { settled(); w.publish(2) },
			run:   "1: 0-101 true", empty: []string{"start true"},
		}, {
			name:  "garbage in replays",
			setup: func(w *world) { w.fault, w.faults = faultGarbage, 1<<30; w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.cut(); settled(); w.publish(2) },
			run:   "1: 0-11 true", empty: []string{"start true"},
		}, {
			name:  "garbage in the replay of another process",
			setup: func(w *world) { w.start(); w.publish(10) },
			tell: func(w *world) {
				settled()
				w.do(func() { w.fault, w.faults = faultGarbage, 1<<30 })
				w.restart()
				w.publish(20)
			},
			run: "2: 0-19 true", empty: []string{"start true", "engine_restart true"},
		}, {
			name:  "replays say all twice",
			setup: func(w *world) { w.fault, w.faults = faultTwice, 1<<30; w.start(); w.publish(10) },
			tell:  func(w *world) { settled(); w.publish(2); w.cut(); settled(); w.publish(2) },
			run:   "1: 0-13 true", empty: []string{"start true"},
		}, {
			name:  "garbage on the connection",
			setup: func(w *world) { w.start(); w.publish(2) },
			tell: func(w *world) {
				settled()
				w.inject([]byte("one"))
				w.inject(nil, []byte("short"), []byte("x"))
				w.inject(nil, number(-1), nil)
				w.inject(nil, number(7), []byte("x"), nil)
				w.publish(2)
			},
			run: "1: 0-3 true", empty: []string{"start true"},
		}, {
			name:  "the replay endpoint is another engine's",
			setup: func(w *world) { w.start(); w.publish(2); w.replayOf = w.up; w.do(func() { w.up = nil }); w.start() },
			tell: func(w *world) {
				for range 8 {
					settled()
					w.publish(3)
				}
			},
			run: "2: 9-23 false",
		}, {
			name:  "nobody listens",
			setup: func(w *world) { w.start(); w.publish(2) },
			tell:  func(w *world) { settled(); w.kill(); settled() },
			run:   "nothing true", empty: []string{"start true", "engine_restart true"},
			alone: "nothing true", after: []string{"connection false", "engine_restart true"},
		}, {
			name:  "out of reach, and then as before",
			setup: func(w *world) { w.start(); w.publish(2) },
			tell: func(w *world) {
				settled()
				w.do(func() { w.unreachable = errUnreachable })
				w.cut()
				w.publish(5)
				settled()
				w.do(func() { w.unreachable = nil })
				settled()
				w.publish(1)
			},
			run: "1: 0-7 true", empty: []string{"start true"},
		},
	} {
		for _, replay := range []bool{true, false} {
			want, empties := story.run, story.empty
			if !replay {
				want, empties = story.alone, story.after
				if want == "" {
					continue
				}
			}
			t.Run(fmt.Sprintf("%s/%t", story.name, replay), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld()
					if story.setup != nil {
						story.setup(w)
					}
					w.run(t, replay, position{next: -1}, func(s *stream) {
						synctest.Wait()
						story.tell(w)
						settled()
						for _, wrong := range w.check(true) {
							t.Error(wrong)
						}
						if got := w.feed.run(); got != want {
							t.Errorf("applied %s, want %s", got, want)
						}
						if empties != nil && !slices.Equal(w.feed.emptied, empties) {
							t.Errorf("emptied: %s; want %s", strings.Join(w.feed.emptied, ", "), strings.Join(empties, ", "))
						}
						if (w.up != nil) != w.feed.alive {
							t.Errorf("alive: %t", w.feed.alive)
						}
					})
				})
			})
		}
	}
}

// From a checkpoint: the engine goes on, has restarted, or has published more
// than it keeps.
func TestStreamResumes(t *testing.T) {
	for _, c := range []struct {
		name  string
		tell  func(w *world)
		run   string
		empty []string
	}{
		{"went on", func(w *world) { w.publish(5) }, "1: 0-14 false", nil},
		{"nothing new", func(w *world) {}, "1: 0-9 false", nil},
		{"restarted", func(w *world) { w.restart(); w.publish(15) }, "2: 0-14 true", []string{"engine_restart true"}},
		{"is gone", func(w *world) { w.kill() }, "nothing true", []string{"engine_restart true"}},
		{"rolled over", func(w *world) { w.publish(30) }, "1: 20-39 false", []string{"events_lost false"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.keep = 20
				w.start()
				w.publish(10)
				c.tell(w)
				for i := range 10 {
					w.feed.apply(fmt.Appendf(nil, "1/%d", i))
				}
				w.run(t, true, position{next: 10, sum: xxh3.HashString("1/9")}, func(s *stream) {
					settled()
					for _, wrong := range w.check(true) {
						t.Error(wrong)
					}
					if got := w.feed.run(); got != c.run || !slices.Equal(w.feed.emptied, c.empty) {
						t.Errorf("applied %s, emptied %s; want %s, %s", got, w.feed.emptied, c.run, c.empty)
					}
				})
			})
		})
	}
}

// What happens at random moments, at random.
func TestStreamRandom(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		choices := rapid.SliceOfN(rapid.Uint16(), 50, 400).Draw(rt, "choices")
		replay := rapid.Float64Range(0, 1).Draw(rt, "replay") < 0.8
		keep := rapid.IntRange(1, 30).Draw(rt, "keep")
		hwm := rapid.IntRange(1, 30).Draw(rt, "hwm")
		var wrong []string
		synctest.Test(t, func(t *testing.T) { wrong = wander(t, choices, replay, keep, hwm) })
		if len(wrong) > 0 {
			rt.Fatal(strings.Join(wrong, "\n"))
		}
	})
}

// wander runs a stream while choices say what happens at each moment.
func wander(t *testing.T, choices []uint16, replay bool, keep, hwm int) []string {
	w := newWorld()
	w.keep, w.hwm = keep, hwm
	w.start()
	next := func() int {
		if len(choices) == 0 {
			return -1
		}
		c := choices[0]
		choices = choices[1:]
		return int(c)
	}
	w.before = func(string) {
		w.mu.Lock()
		c := next()
		w.mu.Unlock()
		if c < 0 {
			return
		}
		n := c / 32 % 16
		switch c % 32 {
		case 0, 1:
			w.publish(n)
		case 2:
			w.restart()
		case 3:
			w.restart()
			w.publish(n)
		case 4:
			w.kill()
		case 5, 6:
			w.start()
		case 7:
			w.cut()
		case 8:
			w.do(func() { w.loseLive = n })
			w.publish(n)
		case 9:
			w.do(func() { w.slowJoin = n })
		case 10:
			w.do(func() { w.fault, w.faults = replayFault(n%int(numFaults)), 1+n/4 })
		case 11:
			w.do(func() { w.noRouter = !w.noRouter })
		case 12:
			w.do(func() {
				if w.up != nil {
					w.up.next++
				}
			})
		case 13:
			w.forward(n)
		case 14:
			w.do(func() { w.oldForm = !w.oldForm })
		case 15:
			w.do(func() {
				if w.unreachable = nil; n < 8 {
					w.unreachable = errUnreachable
				}
			})
		case 16:
			w.do(func() { w.frozen = n < 8 })
		case 17:
			w.inject([]byte{}, number(int64(n))[:n%8], []byte("x"))
		}
	}
	var wrong []string
	w.run(t, replay, position{next: -1}, func(s *stream) {
		time.Sleep(3 * time.Minute)
		w.do(func() { choices = nil })
		w.heal()
		w.start()
		settled()
		time.Sleep(6 * time.Minute) // a replay endpoint that did not answer is asked seldom
		w.publish(1)                // without replays it may be lost
		settled()
		w.publish(1)
		settled()
		wrong = w.check(true)
	})
	return wrong
}
