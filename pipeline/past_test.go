package pipeline

// This file is about records that are lost: stories in which what is left of the
// log would bring back what is gone, and such stories at random.

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

var (
	pastSeed    = flag.Uint64("past.seed", 1, "seed of the first story about lost records")
	pastStories = flag.Int("past.stories", 12, "how many stories about lost records")
)

// lab is a log of one partition whose time a test sets, and a prompt.
type lab struct {
	t     *testing.T
	r     *rig
	b     testcontainers.Broker
	now   time.Time
	chain []index.LocalHash
}

func newLab(t *testing.T) *lab {
	t.Helper()
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	return &lab{t: t, r: newTimedRig(t, b, 1), b: b, now: time.Now().Add(-100 * timedGrace).Truncate(time.Millisecond), chain: locals(7, 60)}
}

// begin returns a producer at an epoch from before now.
func (l *lab) begin(worker string, rank int32) *producer {
	p := l.r.produce(worker, rank)
	p.batch.Epoch = l.now.UnixMilli() - 1
	return p
}

// zombie returns one of an epoch before begin's.
func (l *lab) zombie(worker string, rank int32) *producer {
	p := l.begin(worker, rank)
	p.batch.Epoch--
	p.batch.Producer = []byte("zombie")
	return p
}

func (l *lab) send(p *producer, events ...schemas.Event) {
	l.t.Helper()
	if err := p.cl.ProduceSync(l.t.Context(), p.at(l.now, events...)).FirstErr(); err != nil {
		l.t.Fatal(err)
	}
}

func (l *lab) pass(minutes int) { l.now = l.now.Add(time.Duration(minutes) * time.Minute) }

// put writes a record to the snapshot topic.
func (l *lab) put(key string, value []byte) {
	l.t.Helper()
	rec := &kgo.Record{Topic: l.r.cfg.SnapshotTopic, Key: []byte(key), Value: value}
	if err := testcontainers.Client(l.t, l.b).ProduceSync(l.t.Context(), rec).FirstErr(); err != nil {
		l.t.Fatal(err)
	}
}

// trim trims the log to an offset; the oracle has read it before.
func (l *lab) trim(to int64) {
	l.t.Helper()
	l.r.follow()
	testcontainers.DeleteRecords(l.t, l.b, l.r.cfg.Topic, 0, to)
}

// notAbove asks at equal offsets: no answer may be above the truth.
func (l *lab) notAbove(in *instance) {
	l.t.Helper()
	l.r.follow()
	in.caughtUp()
	in.notAbove(1, 50)
}

func TestLostPast(t *testing.T) {
	for _, c := range []struct {
		name  string
		story func(t *testing.T, l *lab)
	}{
		{"a floor that cannot be read, and one forgotten whom a sibling retired, whole log", forgottenSibling(false)},
		{"a floor that cannot be read, and one forgotten whom a sibling retired, trimmed log", forgottenSibling(true)},
		{"forgotten before the loss is over", func(t *testing.T, l *lab) {
			one := l.r.start()
			x, w := l.begin("x", 0), l.begin("w", 0)
			z := l.zombie("x", 0)
			l.send(x, stored(nil, l.chain[:20]...))
			l.send(w, stored(nil, l.chain[:2]...))
			one.saved()
			one.abandon()
			l.trim(l.r.floors()[0])
			l.put("manifest/0/x", nonsense(nil))
			l.pass(10)
			z.batch.Seq = 4
			l.send(z, retired())
			two := l.r.start()
			l.notAbove(two)
			for range 7 {
				l.pass(10)
				l.send(w, stored(nil, l.chain[:3]...))
			}
			l.notAbove(two)
			two.saved()
			two = two.restart()
			l.notAbove(two)
			l.pass(5)
			l.send(x, stored(nil, l.chain[:50]...)) // refused: silent for the grace
			l.notAbove(two)

		}},
		{"the floor lies among records from before the loss was over", func(t *testing.T, l *lab) {
			one := l.r.start()
			x, w := l.begin("x", 0), l.begin("w", 0)
			l.send(x, stored(nil, l.chain[:20]...))
			l.send(w, stored(nil, l.chain[:2]...))
			one.saved()
			one.abandon()
			l.trim(l.r.floors()[0])
			var f schemas.Floor
			if err := schemas.DecodeFloor(&f, l.r.last("floor")); err != nil {
				t.Fatal(err)
			}
			f.TopicID[0] ^= 1
			l.put("floor", schemas.AppendFloor(nil, &f))
			l.pass(1)
			w.batch.Epoch, w.batch.Seq = l.now.UnixMilli()+1, -1
			l.send(w, stored(nil, l.chain[:2]...)) // T
			l.pass(1)
			w.batch.Epoch, w.batch.Seq = l.now.UnixMilli()+1, -1
			two := l.r.start()
			for range 11 {
				l.pass(10)
				l.send(w, stored(nil, l.chain[:2]...))
			}
			two.saved()
			two.abandon()
			l.r.cfg.SnapshotMaxAge = time.Hour // of X no snapshot soon
			two = l.r.start()
			two.saved()
			l.pass(5)
			l.send(w, stored(nil, l.chain[:2]...))
			l.send(x, stored(nil, l.chain[:50]...)) // refused
			l.notAbove(two)
			l.pass(7)
			for range 60 {
				l.send(w, stored(nil, locals(99, 9000)...), cleared())
			}
			l.notAbove(two)
			testcontainers.Eventually(t, patience, func() error {
				if l.r.floors()[0] <= 14 {
					return errors.New("the floor has not risen")
				}
				return nil
			})
			two = two.restart()
			l.notAbove(two)

		}},
		{"another instance has mended the manifest", func(t *testing.T, l *lab) {
			one := l.r.start()
			x, w := l.begin("x", 0), l.begin("w", 0)
			l.send(x, stored(nil, l.chain[:20]...))
			l.send(x, retired())
			l.send(w, stored(nil, l.chain[:2]...))
			one.saved()
			l.trim(l.r.floors()[0])
			l.put("manifest/0/x", nonsense(nil))
			two := l.r.start()
			two.caughtUp()
			l.r.mustSay("is damaged", "worker=x")
			l.pass(10)
			l.send(w, stored(nil, l.chain[:3]...))
			var m schemas.Manifest
			testcontainers.Eventually(t, patience, func() error { return schemas.DecodeManifest(&m, l.r.last("manifest/0/x")) })
			one.abandon()
			l.send(w, stored(nil, l.chain[:3]...))
			testcontainers.Eventually(t, patience, func() error {
				v := l.r.last("manifest/0/x")
				if v == nil {
					return nil
				}
				if err := schemas.DecodeManifest(&m, v); err != nil {
					return nil
				}
				if m.RetiredAt != forgottenAt {
					return errors.New("not yet")
				}
				return nil
			})
			l.notAbove(two)
			two = two.restart()
			l.pass(10)
			l.send(x, stored(nil, l.chain[:50]...)) // refused
			l.notAbove(two)

		}},
		{"a zombie retires the siblings", func(t *testing.T, l *lab) {
			one := l.r.start()
			x0, x1, w := l.begin("x", 0), l.begin("x", 1), l.begin("w", 0)
			z0, z1 := l.zombie("x", 0), l.zombie("x", 1)
			l.send(x0, stored(nil, l.chain[:20]...))
			l.send(x1, stored(nil, l.chain[:20]...))
			l.send(w, stored(nil, l.chain[:2]...))
			one.saved()
			one.abandon()
			l.trim(l.r.floors()[0])
			l.put("manifest/0/x", nonsense(nil))
			l.pass(10)
			z0.batch.Seq = 4
			l.send(z0, retired())
			two := l.r.start()
			for range 6 {
				l.pass(9)
				l.send(w, stored(nil, l.chain[:3]...))
				l.send(x1, stored(nil, l.chain[:3]...))
				l.send(x0, stored(nil, l.chain[:3]...))
			}
			l.notAbove(two)
			l.pass(9)
			l.send(w, stored(nil, l.chain[:3]...))
			l.send(z1, stored(nil, l.chain[:50]...)) // stale
			l.notAbove(two)

		}},
		{"an older manifest shows through", func(t *testing.T, l *lab) {
			one := l.r.start()
			x, w := l.begin("x", 0), l.begin("w", 0)
			l.send(w, stored(nil, l.chain[:2]...))
			l.send(x, stored(nil, l.chain[:20]...))
			one.saved()
			older := slices.Clone(l.r.last("manifest/0/x"))
			l.send(w, stored(nil, l.chain[:3]...))
			l.send(x, retired())
			l.send(w, stored(nil, l.chain[:3]...))
			one.saved()
			one.abandon()
			l.trim(1)
			l.put("manifest/0/x", older)
			l.send(x, stored(nil, l.chain[:50]...)) // refused
			two := l.r.start()
			l.notAbove(two)

		}},
		{"retired later than in truth, it refuses what retires its sibling", func(t *testing.T, l *lab) {
			one := l.r.start()
			x0, x1 := l.begin("x", 0), l.begin("x", 1)
			l.send(x0, stored(nil, l.chain[:20]...))
			l.send(x1, stored(nil, l.chain[:20]...))
			one.saved()
			one.abandon()
			l.trim(l.r.floors()[0])
			l.put("manifest/1/x", nonsense(nil))
			two := l.r.start()
			for i := range 13 {
				l.pass(10)
				l.send(x0, stored(nil, l.chain[:3]...))
				if i == 6 {
					l.send(x1, stored(nil, l.chain[:3]...)) // 70: refused in truth, heard here
				}
			}
			l.pass(1)
			l.send(x1, retired()) // 131: forgotten in truth since 120, here retired since 130
			l.notAbove(two)

		}},
		{"of two producers of an epoch, the right one retires the worker", func(t *testing.T, l *lab) {
			one := l.r.start()
			x0, x1 := l.begin("x", 0), l.begin("x", 1)
			rival := l.begin("x", 1)
			rival.batch.Producer = []byte("rival")
			l.send(x0, stored(nil, l.chain[:20]...))
			l.send(x1, stored(nil, l.chain[:20]...))
			one.saved()
			one.abandon()
			l.trim(l.r.floors()[0])
			l.put("manifest/1/x", nonsense(nil))
			two := l.r.start()
			l.pass(1)
			rival.batch.Seq = 3
			l.send(rival, stored(nil, l.chain[:3]...))
			l.send(x1, retired())
			l.notAbove(two)

		}},
	} {
		t.Run(c.name, func(t *testing.T) { c.story(t, newLab(t)) })
	}
}

// forgottenSibling is the story of a worker-rank that its sibling retired and that is
// forgotten: a replay from below the sibling's W passes over what retired it.
func forgottenSibling(trimmed bool) func(t *testing.T, l *lab) {
	return func(t *testing.T, l *lab) {
		one := l.r.start()
		old := l.begin("old", 0)
		l.send(old, stored(nil, l.chain[:3]...))
		l.send(old, stored(nil, l.chain[:4]...))
		l.pass(10)
		p0, p1 := l.begin("pair", 0), l.begin("pair", 1)
		p0.batch.Epoch += 60000
		l.send(p0, stored(nil, l.chain[:20]...))
		l.send(p1, stored(nil, l.chain[:20]...))
		l.send(p1, retired())
		l.pass(10)
		p1.batch.Epoch, p1.batch.Seq = l.now.UnixMilli(), -1
		l.send(p1, stored(nil, l.chain[:2]...))
		l.pass(40)
		l.send(p1, stored(nil, l.chain[:3]...))
		l.send(p0, stored(nil, l.chain[:50]...)) // refused
		l.pass(20)
		l.send(p1, stored(nil, l.chain[:4]...))
		one.same(1, 50)
		one.saved()
		testcontainers.Eventually(t, patience, func() error {
			if l.r.last("manifest/0/pair") != nil {
				return errors.New("one that is forgotten still has a manifest")
			}
			return nil
		})
		one.abandon()
		l.put("floor", nonsense(nil))
		if trimmed {
			l.trim(1)
		}
		two := l.r.start()
		l.notAbove(two)
	}
}

func TestLostPastAtRandom(t *testing.T) {
	for i := range uint64(*pastStories) {
		t.Run(fmt.Sprint(*pastSeed+i), func(t *testing.T) {
			t.Parallel() // they mostly wait
			lostPastAtRandom(t, *pastSeed+i)
		})
	}
}

// lostPastAtRandom has five worker-ranks, whose producers begin anew, have zombies and
// rivals, retire and fall silent, while the stage is killed and started, the log
// trimmed, and records on the snapshot topic damaged or gone. No answer is ever above
// the truth, and once all have begun anew each is the truth.
func lostPastAtRandom(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 77))
	l := newLab(t)
	var story []string
	say := func(f string, a ...any) {
		story = append(story, fmt.Sprintf("%s ", l.now.Format("15:04:05"))+fmt.Sprintf(f, a...))
	}
	defer func() {
		if t.Failed() {
			t.Logf("-past.seed=%d -past.stories=1\n%s", seed, strings.Join(story, "\n"))
		}
	}()
	chains := [][]index.LocalHash{locals(7, 60)[:12], locals(8, 60)[:12]}
	type ident struct {
		worker string
		rank   int32
	}
	ids := []ident{{"a", 0}, {"a", 1}, {"b", 0}, {"b", 1}, {"c", 0}}
	cur := map[ident]*producer{}
	var old []*producer
	proto := map[ident]*producer{}
	for _, id := range ids {
		proto[id] = l.r.produce(id.worker, id.rank)
	}
	last := int64(0)
	renew := func(id ident) {
		if p := cur[id]; p != nil {
			old = append(old, p)
		}
		p := *proto[id]
		last = max(last+1, l.now.UnixMilli())
		l.now = time.UnixMilli(last)
		p.batch.Epoch, p.batch.Seq, p.batch.Producer = last, -1, fmt.Appendf(nil, "p-%d", last)
		cur[id] = &p
		say("renew %v epoch %d", id, last)
	}
	events := func() (es []schemas.Event) {
		for range 1 + rng.IntN(2) {
			c := chains[rng.IntN(2)]
			seqs := index.Chain(nil, c)
			n, x := 1+rng.IntN(len(c)-1), rng.IntN(20)
			switch {
			case x < 11:
				es = append(es, stored(nil, c[:n]...))
			case x < 13:
				es = append(es, stored(&seqs[n-1], c[n:]...))
			case x < 18:
				es = append(es, removed(seqs[n]))
			case x == 18:
				es = append(es, cleared())
			default:
				if rng.IntN(3) == 0 {
					es = append(es, retired())
				}
			}
		}
		return es
	}
	send := func(what string, p *producer) {
		es := events()
		l.send(p, es...)
		say("%s %s/%d epoch %d seq %d: %v", what, p.batch.Worker, p.batch.Rank, p.batch.Epoch, p.batch.Seq, len(es))
		for _, e := range es {
			say("    kind %v locals %v removed %v", e.Kind, len(e.Stored.Locals), e.Removed)
		}
	}
	for _, id := range ids {
		renew(id)
	}
	in := l.r.start()
	first, trimmed := true, int64(0)
	for range 70 {
		l.pass([]int{0, 0, 0, 3, 10, 25}[rng.IntN(6)])
		l.now = l.now.Add(time.Millisecond)
		switch x := rng.IntN(20); {
		case x < 10:
			send("live", cur[ids[rng.IntN(len(ids))]])
		case x < 13 && len(old) > 0:
			send("zombie", old[rng.IntN(len(old))])
		case x == 13:
			p := *cur[ids[rng.IntN(len(ids))]]
			p.batch.Producer = []byte("rival")
			send("rival", &p)
		case x == 14:
			id := ids[rng.IntN(len(ids))]
			renew(id)
			send("live", cur[id])
		case x == 15 && rng.IntN(2) == 0:
			in.saved()
			say("saved, floor %d", l.r.floors()[0])
		case x == 16 && rng.IntN(2) == 0:
			l.pass(70)
		case x >= 18 && !first:
			if rng.IntN(2) == 0 {
				in.saved()
			}
			in.abandon()
			l.r.follow()
			floor := l.r.floors()[0]
			if rng.IntN(2) == 0 && floor > 0 {
				to := rng.Int64N(floor + 1)
				if rng.IntN(3) == 0 {
					to = floor
				}
				if rng.IntN(6) == 0 {
					to = min(l.r.read[0], floor+rng.Int64N(6))
				}
				to = max(to, trimmed)
				trimmed = to
				testcontainers.DeleteRecords(t, l.b, l.r.cfg.Topic, 0, to)
				say("trimmed to %d, floor %d", to, floor)
			}
			if rng.IntN(3) > 0 {
				live := map[string][]byte{}
				for _, rec := range testcontainers.ReadCommitted(t, l.b, l.r.cfg.SnapshotTopic)[0] {
					live[string(rec.Key)] = rec.Value
					if rec.Value == nil {
						delete(live, string(rec.Key))
					}
				}
				keys := slices.Sorted(maps.Keys(live))
				for range 1 + rng.IntN(2)*rng.IntN(2) {
					if len(keys) == 0 {
						break
					}
					key := keys[rng.IntN(len(keys))]
					v := bytes.Clone(live[key])
					what := "flip"
					var f schemas.Floor
					switch {
					case key == "floor" && rng.IntN(2) == 0 && schemas.DecodeFloor(&f, v) == nil:
						f.TopicID[0] ^= 1
						v, what = schemas.AppendFloor(nil, &f), "other topic"
					case !strings.HasPrefix(key, "manifest") && rng.IntN(3) == 0:
						v, what = nil, "missing"
					default:
						v = flip(v)
					}
					l.put(key, v)
					say("damage %s: %s", key, what)
				}
			}
			if rng.IntN(3) == 0 && len(old) > 0 {
				send("zombie", old[rng.IntN(len(old))])
			}
			in = l.r.start()
			say("restart, floor was %d, end %d", floor, l.r.read[0])
		}
		first = false
		l.notAbove(in)
	}
	l.pass(200)
	send("live", cur[ids[0]]) // where the last loss ends, if it is after everything
	l.pass(1)
	for _, id := range ids {
		renew(id)
	}
	for _, id := range ids {
		l.send(cur[id], stored(nil, chains[0][:5]...))
	}
	in.same(1, 50)
	in.saved()
	in = in.restart()
	in.same(2, 50)
	in.undamaged()
}
