package pipeline

// This file has two instances of one partition take the duty from one another,
// wherever each of them stands in the log. The snapshot topic is a map here, so
// that thousands of interleavings take no time.

import (
	"cmp"
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

	"kvindex/schemas"
	"kvindex/snapshot"
)

var (
	takeoverSeed    = flag.Uint64("takeover.seed", 0, "seed of the first story of two who take the duty from one another, 0: a new one")
	takeoverStories = flag.Int("takeover.stories", 1000, "how many stories of two who take the duty from one another")
)

// shelf is the snapshot topic of one partition: manifests and the floor. An
// unreadable manifest is nil. put follows snapshot.Writer's rules.
type shelf struct {
	manifests map[snapshot.ID]*schemas.Manifest
	floor     int64
}

// ids returns those that have a manifest, in order.
func (s *shelf) ids() []snapshot.ID {
	return slices.SortedFunc(maps.Keys(s.manifests), func(a, b snapshot.ID) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
}

// put writes a round, of which it says what became.
func (s *shelf) put(r *round) (done roundResult) {
	done = roundResult{round: r, Result: snapshot.Result{Floor: s.floor}}
	if s.floor > r.Position {
		done.err = snapshot.ErrBehind
		return done
	}
	write := func(m schemas.Manifest, err error) {
		id := snapshot.ID{Worker: m.Worker, Rank: m.Rank}
		if old := s.manifests[id]; err == nil && (m.W < s.floor || old != nil && m.W < old.W) {
			err = snapshot.ErrBehind
		}
		if err != nil {
			done.Refused = append(done.Refused, snapshot.Refusal{ID: id, Err: err})
			return
		}
		s.manifests[id] = &m
		done.Written = append(done.Written, id)
	}
	for _, d := range r.Dumps {
		write(d.Manifest, nil)
	}
	for _, f := range r.Refreshes {
		var err error
		if old := s.manifests[snapshot.ID{Worker: f.Manifest.Worker, Rank: f.Manifest.Rank}]; old == nil {
			err = snapshot.ErrNoManifest
		} else if old.W < f.Changed {
			err = snapshot.ErrChanged
		}
		write(f.Manifest, err)
	}
	for _, id := range r.Deletes {
		old, ok := s.manifests[id]
		switch {
		case !ok:
		case old != nil && old.W > r.Position:
			done.Refused = append(done.Refused, snapshot.Refusal{ID: id, Err: snapshot.ErrBehind})
		default:
			delete(s.manifests, id)
			done.Written = append(done.Written, id)
		}
	}
	floor := r.Position
	for _, m := range s.manifests {
		if m != nil {
			floor = min(floor, m.W)
		}
	}
	for _, u := range r.Unsaved {
		if s.manifests[u.ID] == nil {
			floor = min(floor, u.First)
		}
	}
	s.floor = max(s.floor, floor)
	done.Floor = s.floor
	return done
}

// duelist is one of the two: a partition that nothing drives but the test.
type duelist struct {
	*partition
	turns int64
}

// take has the duelist find what is on the shelf.
func (d *duelist) take(s *shelf, end int64) {
	d.stop()
	d.turns++
	d.saver.turn.Store(d.turns)
	d.saver.floor.Store(s.floor)
	told := roundResult{turn: d.turns, end: end}
	for _, id := range s.ids() {
		told.onTopic = append(told.onTopic, onTopic{id, s.manifests[id]})
	}
	d.saver.results <- told
}

// stop takes the duty from the duelist.
func (d *duelist) stop() {
	d.saver.turn.Store(0)
	select {
	case r := <-d.saver.rounds:
		d.saver.results <- roundResult{round: r, err: errDropped}
	default:
	}
}

// restore is what Restore makes of the shelf, but for blocks, of which there are none
// here, and a log that has been trimmed.
func (d *duelist) restore(s *shelf) {
	damaged := false
	for id, m := range s.manifests {
		if m == nil {
			damaged, d.spoiled[id] = true, true
		}
	}
	if damaged || s.floor < 0 {
		return
	}
	for _, id := range s.ids() {
		m := s.manifests[id]
		if _, err := d.restored(m); err != nil {
			panic(err) // BUG: they are of this partition and of a model that is served
		}
	}
	d.position = s.floor
}

// known lists the worker-ranks that are not forgotten, but not their blocks.
func (p *partition) known() string {
	var all []string
	for _, w := range p.workers {
		for _, k := range w.ranks {
			if k.status.Load().gone {
				continue
			}
			all = append(all, fmt.Sprintf("%v: epoch %d seq %d retired %v", k.id(), k.epoch, k.seq.Load(), k.retired))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// write does what a saver does with the round that the partition gives, if it gives
// one, and loses what became of it if the duty is taken at that moment.
func (d *duelist) write(s *shelf, lost bool) ([]snapshot.Refusal, error) {
	if err := d.saveTick(time.Now()); err != nil {
		return nil, err
	}
	select {
	case r := <-d.saver.rounds:
		done := s.put(r)
		if lost {
			done = roundResult{round: r, err: snapshot.ErrFenced}
			d.saver.turn.Store(0)
		}
		d.saver.results <- done
		if done.err == nil {
			d.saver.floor.Store(done.Floor)
		}
		return done.Refused, nil
	default:
		return nil, nil
	}
}

// Whoever is forgotten leaves nothing on the topic, whoever is not has a manifest,
// and the floor rises to the log's end, once both are there and one of them writes.
func TestDutyTakenAnywhere(t *testing.T) {
	first := *takeoverSeed
	if first == 0 {
		first = rand.Uint64()
	}
	for i := range uint64(*takeoverStories) {
		if err := takeoverStory(t, first+i); err != nil {
			t.Fatalf("-takeover.seed=%d -takeover.stories=1: %v", first+i, err)
		}
	}
}

func takeoverStory(t *testing.T, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 3))
	topic := &shelf{manifests: map[snapshot.ID]*schemas.Manifest{}, floor: -1}
	var both [2]*duelist
	var log []*kgo.Record
	begin := func(i int) {
		p := bare(t)
		p.stage.policy.MinBytes, p.stage.policy.MaxAge = 1, time.Duration(rng.IntN(2))*time.Hour
		p.stage.policy.RoundCount = []int{1, 2, roundCount}[rng.IntN(3)]
		p.stage.cfg.WorkerGrace = timedGrace
		p.stage.budget = snapshot.NewBudget(0, 0)
		p.saver.results = make(chan roundResult, 100)
		both[i] = &duelist{partition: p}
		both[i].restore(topic)
		both[i].replayTo = int64(len(log))
	}
	begin(0)
	begin(1)
	var story []string
	say := func(format string, args ...any) { story = append(story, fmt.Sprintf(format, args...)) }
	now := time.UnixMilli(1_000_000_000_000)
	var producers []*producer
	for worker, ranks := range []int32{2, 1, 2} {
		for rank := range ranks {
			producers = append(producers, &producer{r: &rig{t: t}, batch: schemas.Batch{
				Producer: []byte("p"), Worker: fmt.Appendf(nil, "%c", 'a'+worker), Rank: rank, Epoch: 1, Seq: -1,
				Model: []byte(testModel), BlockSize: testBlockSize,
			}})
		}
	}
	append1 := func(p *producer, events ...schemas.Event) {
		r := p.at(now, events...)
		r.Offset, r.Partition = int64(len(log)), 0
		log = append(log, r)
		say("%d at %s: %s/%d epoch %d seq %d, %d events", r.Offset, now.Format(time.TimeOnly), r.Key, p.batch.Rank, p.batch.Epoch, p.batch.Seq, len(events))
	}
	read := func(i int, n int64) {
		d := both[i]
		for range max(0, min(n, int64(len(log))-d.position)) {
			d.Apply(log[d.position:d.position+1], d.position+1, 0)
		}
		say("%d reads to %d", i, d.position)
	}
	has := 0
	take := func(i int) {
		both[has].stop()
		has = i
		read(i, both[i].replayTo-both[i].position) // nobody takes it who is not live
		say("%d takes the duty at %d, floor %d", i, both[i].position, topic.floor)
		both[i].take(topic, int64(len(log)))
	}
	write := func(lost bool) error {
		refused, err := both[has].write(topic, lost)
		say("%d writes at %d, lost %v, refused %v: %v", has, both[has].position, lost, refused, topic)
		for _, r := range refused {
			if errors.Is(r.Err, snapshot.ErrBehind) {
				return fmt.Errorf("one that is behind writes: %v", r)
			}
		}
		return err
	}
	// fresh compares one that begins from the shelf with one that has read everything.
	fresh := func() error {
		var told [2]string
		for i, from := range []*shelf{topic, {floor: -1}} {
			d := &duelist{partition: bare(t)}
			d.stage.cfg.WorkerGrace = timedGrace
			d.restore(from)
			d.Apply(log[max(0, d.position):], int64(len(log)), 0)
			told[i] = d.known()
		}
		if told[0] != told[1] {
			return fmt.Errorf("after a restart it knows %s, want %s", told[0], told[1])
		}
		return nil
	}
	take(0)
	chain := locals(uint64(seed), 8)
	for range 20 + rng.IntN(60) {
		var err error
		switch x := rng.IntN(18); {
		case x == 16:
			i := rng.IntN(2)
			say("%d begins anew", i)
			begin(i)
			take(rng.IntN(2))
		case x == 17:
			for _, id := range topic.ids() {
				if rng.IntN(8) == 0 {
					say("manifest of %v is damaged", id)
					topic.manifests[id] = nil
				}
			}
		case x < 5:
			p := producers[rng.IntN(len(producers))]
			switch rng.IntN(8) {
			case 0:
				append1(p)
			case 1:
				append1(p, retired())
			case 2:
				p.batch.Epoch++
				p.batch.Seq = -1
				append1(p, stored(nil, chain...))
			default:
				append1(p, stored(nil, chain[:1+rng.IntN(7)]...))
			}
		case x < 7:
			now = now.Add(timedStep * time.Duration(1+rng.IntN(14)))
		case x < 11:
			read(rng.IntN(2), 1+rng.Int64N(6))
		case x < 12:
			take(rng.IntN(2))
		case x < 13:
			err = write(true)
			take(rng.IntN(2))
		default:
			if err = write(false); err == nil {
				err = fresh()
			}
		}
		if err != nil {
			return fmt.Errorf("%w\n%s", err, strings.Join(story, "\n"))
		}
	}
	end := int64(len(log))
	read(0, end)
	read(1, end)
	for range 40 { // rounds may be of one worker-rank
		for _, d := range both {
			d.stage.policy.MaxAge = time.Nanosecond
		}
		if err := write(false); err != nil {
			return err
		}
	}
	var got, want []string
	for _, id := range topic.ids() {
		got = append(got, fmt.Sprint(id))
	}
	for _, w := range both[has].workers {
		for _, k := range w.ranks {
			want = append(want, fmt.Sprint(k.id()))
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) || len(want) > 0 && topic.floor < end {
		return fmt.Errorf("on the topic are %v, want %v; floor %d of %d\n%s", got, want, topic.floor, end, strings.Join(story, "\n"))
	}
	return nil
}

// Whose removal is refused is not removed, and is not forgotten about.
func TestRefusedRemovalIsTriedAgain(t *testing.T) {
	p := bare(t)
	there, gone := snapshot.ID{Worker: "there"}, snapshot.ID{Worker: "gone"}
	for _, id := range []snapshot.ID{there, gone} {
		p.forgotten[id] = newGoner(schemas.Manifest{Worker: id.Worker, W: 1}, 2)
	}
	done := roundResult{round: &round{Round: snapshot.Round{Deletes: []snapshot.ID{there, gone}}}}
	done.Written, done.Refused = []snapshot.ID{gone}, []snapshot.Refusal{{ID: there, Err: snapshot.ErrBehind}}
	if err := p.saveDone(done, time.Now()); err != nil {
		t.Fatal(err)
	}
	if p.forgotten[there] == nil || p.forgotten[gone] != nil {
		t.Errorf("to be removed are %v, want only the one whose removal was refused", p.forgotten)
	}
}

// String shows each manifest's W, and the floor.
func (s *shelf) String() string {
	var b strings.Builder
	for _, id := range s.ids() {
		m := s.manifests[id]
		fmt.Fprintf(&b, "%v: ", id)
		if m == nil {
			b.WriteString("unreadable ")
			continue
		}
		fmt.Fprintf(&b, "W %d retired %v at %d, ", m.W, m.Retired, m.RetiredAt)
	}
	fmt.Fprintf(&b, "floor %d", s.floor)
	return b.String()
}
