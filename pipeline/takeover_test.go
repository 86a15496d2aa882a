package pipeline

// This file has two instances of one partition take the duty from one another,
// wherever each of them stands in the log, restart, and find damaged what they
// wrote. The snapshot topic is in memory here, so that thousands of stories take
// no time. Everything else is what it is with a broker: the partition, its writer,
// what a restore loads, and the oracle that says what the answers must be.

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/snapshot"
)

var (
	takeoverSeed    = flag.Uint64("takeover.seed", 0, "seed of the first story of two who take the duty from one another, 0: a new one")
	takeoverStories = flag.Int("takeover.stories", 300, "how many stories of two who take the duty from one another")
)

// Whoever restarts, wherever the log has been trimmed to, answers what the oracle
// says. After damage to what is on the topic of a trimmed log, nothing is above that,
// and all is equal to it once every producer has begun anew. In the end whoever is
// forgotten leaves nothing on the topic, whoever is not has a manifest, and the floor
// rises to the log's end.
func TestDutyTakenAnywhere(t *testing.T) {
	first := cmp.Or(*takeoverSeed, rand.Uint64())
	synctest.Test(t, func(t *testing.T) { // time stands still
		seen := map[string]int{}
		for i := range uint64(*takeoverStories) {
			s := newStory(t, first+i, seen)
			if err := s.tell(); err != nil {
				t.Fatalf("-takeover.seed=%d -takeover.stories=1: %v\n%s", first+i, err, strings.Join(s.said, "\n"))
			}
		}
		t.Logf("%d stories, compared after: %v", *takeoverStories, seen)
		for _, what := range []string{"a trimmed log", "damage to a whole log", "damage to a trimmed log"} {
			if seen[what] < *takeoverStories/20 {
				t.Errorf("compared after %s only %d times: the test tests little", what, seen[what])
			}
		}
	})
}

// story is a log, the snapshot topic of its partition, and two instances.
type story struct {
	t        *testing.T
	rng      *rand.Rand
	log      []*kgo.Record
	start    int64 // what is before is trimmed
	topic    snapshot.Memory
	careless bool              // things on the topic are damaged
	older    map[string][]byte // what was on the topic a while ago
	damaged  bool              // something on the topic is, or was, since all producers began anew
	oracle   *verify.Oracle
	now      time.Time
	ranks    []*producer // of each worker-rank the newest
	zombies  []*producer // of older epochs, or of a second producer
	both     [2]*duelist
	said     []string
	seen     map[string]int // how often an instance was compared with the oracle after what, by all stories
}

// duelist is one of the two: a partition and its saver, which nothing drives but the story.
type duelist struct {
	*partition
	name    int
	writer  *snapshot.Writer // nil: it does not have the duty, as far as it knows
	trouble int              // steps until there is trouble, 0: none
	kind    trouble
}

// trouble is what happens in the middle of a round.
type trouble int

const (
	killed trouble = iota
	robbed         // of the duty
	unsure         // of whether something was committed

	troubles
)

func newStory(t *testing.T, seed uint64, seen map[string]int) *story {
	s := &story{
		t:      t,
		rng:    rand.New(rand.NewPCG(seed, 3)),
		older:  map[string][]byte{},
		seen:   seen,
		oracle: verify.New(timedGrace),
		now:    time.UnixMilli(1_000_000_000_000),
	}
	s.careless = s.rng.IntN(2) == 0
	for worker, ranks := range []int32{2, 1, 2} {
		for rank := range ranks {
			s.ranks = append(s.ranks, &producer{r: &rig{t: t}, batch: schemas.Batch{
				Producer: []byte("p"), Worker: fmt.Appendf(nil, "%c", 'a'+worker), Rank: rank, Epoch: s.now.UnixMilli(), Seq: -1,
				Model: []byte(testModel), BlockSize: testBlockSize,
			}})
		}
	}
	s.begin(0)
	s.begin(1)
	return s
}

func (s *story) say(format string, args ...any) {
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

func (s *story) end() int64 { return int64(len(s.log)) }

// tell goes on at random, and then to a good end.
func (s *story) tell() error {
	s.take(0)
	for range 20 + s.rng.IntN(100) {
		if err := s.happen(); err != nil {
			return err
		}
	}
	return s.mend()
}

// mend has all producers begin anew if something was damaged, which makes up for it.
func (s *story) mend() error {
	if s.damaged {
		s.append(s.ranks[0].at(s.now)) // what is lost, was before it at the latest
		for _, p := range s.ranks {
			s.append(s.begins(p))
		}
		s.zombies = nil // they would have to wait for twice the grace
	}
	return s.settle()
}

// happen does one thing.
func (s *story) happen() error {
	one := s.rng.IntN(2)
	if s.both[one].writer == nil && s.rng.IntN(2) == 0 {
		one = 1 - one // likely to be the one that writes
	}
	switch x := s.rng.IntN(35); {
	case x < 10:
		s.append(s.record())
	case x < 13:
		s.now = s.now.Add(timedStep * time.Duration(1+s.rng.IntN(14)))
	case x < 17:
		return s.read(one, 1+s.rng.Int64N(6))
	case x < 19:
		return s.take(one)
	case x < 22:
		return s.tick(one)
	case x < 24:
		return s.serve(one)
	case x < 25:
		return s.drain(one)
	case x < 26:
		return cmp.Or(s.begin(one), s.take(s.rng.IntN(2)))
	case x < 28:
		d := s.both[one]
		d.trouble, d.kind = 1+s.rng.IntN(8), trouble(s.rng.IntN(int(troubles)))
		err := s.write(one)
		d.trouble = 0
		return cmp.Or(err, s.fresh())
	case x < 31:
		return cmp.Or(s.write(one), s.fresh())
	case x < 34:
		s.trim()
		return s.fresh()
	case s.careless && s.rng.IntN(4) > 0:
		s.damage()
		return s.fresh()
	case s.damaged:
		return s.mend()
	}
	return nil
}

// record makes a worker-rank's next record, or one that is not its next.
func (s *story) record() *kgo.Record {
	p := s.ranks[s.rng.IntN(len(s.ranks))]
	b := &p.batch
	if len(s.zombies) > 0 && s.rng.IntN(8) == 0 {
		p = s.zombies[s.rng.IntN(len(s.zombies))]
		return p.at(s.now, s.events()...)
	}
	switch s.rng.IntN(16) {
	case 0:
		return p.at(s.now) // heartbeat
	case 1:
		return p.at(s.now, append(s.events(), retired())...)
	case 2:
		b.Seq = max(-1, b.Seq-1) // a duplicate
	case 3:
		b.Seq += s.rng.Int64N(2) // a gap
	case 4:
		rival := *p
		rival.batch.Producer = []byte("q")
		s.zombies = append(s.zombies, &rival)
		return rival.at(s.now, s.events()...)
	case 5, 6:
		return s.begins(p)
	case 7:
		other := *p
		other.batch.BlockSize *= 2
		return other.at(s.now, s.events()...)
	}
	return p.at(s.now, s.events()...)
}

// begins makes the first record of the next epoch: a time in milliseconds that has come.
func (s *story) begins(p *producer) *kgo.Record {
	was := *p
	s.zombies = append(s.zombies, &was)
	s.now = s.now.Add(time.Millisecond)
	p.batch.Epoch, p.batch.Seq = s.now.UnixMilli(), -1
	return p.at(s.now, s.events()...)
}

// prompts share their first blocks.
var prompts = func() (all [3][]index.LocalHash) {
	all[0] = locals(1, 6)
	all[1] = append(slices.Clone(all[0][:3]), locals(2, 3)...)
	all[2] = locals(3, 4)
	return all
}()

// events makes what happens to a cache.
func (s *story) events() (all []schemas.Event) {
	for range 1 + s.rng.IntN(2) {
		prompt := prompts[s.rng.IntN(len(prompts))]
		tier := index.Device
		if s.rng.IntN(3) == 0 {
			tier = index.Tier(s.rng.IntN(index.Tiers))
		}
		from := s.rng.IntN(len(prompt))
		to := from + 1 + s.rng.IntN(len(prompt)-from)
		seqs := index.Chain(nil, prompt)
		var e schemas.Event
		switch x := s.rng.IntN(16); {
		case x == 0:
			e = cleared()
		case x == 1:
			e = schemas.Event{Kind: schemas.KindCleared}
		case x < 5:
			e = removed(seqs[from:to]...)
		case from > 0 && x < 10:
			e = stored(&seqs[from-1], prompt[from:to]...)
		default:
			e = stored(nil, prompt[:to]...)
		}
		e.Tier = tier
		all = append(all, e)
	}
	return all
}

func (s *story) append(r *kgo.Record) {
	r.Offset, r.Partition = s.end(), 0
	s.log = append(s.log, r)
	s.oracle.Apply(0, r.Timestamp.UnixMilli(), r.Key, r.Value)
	var b schemas.Batch
	if err := b.Decode(r.Value); err != nil {
		s.t.Fatal(err)
	}
	var events strings.Builder
	for _, e := range b.Events {
		fmt.Fprintf(&events, " %s", [...]string{"stored", "removed", "cleared", "retired"}[e.Kind])
	}
	s.say("%d at %s: %s/%d epoch %d seq %d of %s:%s", r.Offset, r.Timestamp.Format(time.DateTime), b.Worker, b.Rank, b.Epoch, b.Seq, b.Producer, &events)
}

// begin starts an instance, as its process would.
func (s *story) begin(i int) error {
	s.both[i] = s.instance(i)
	s.load(s.both[i])
	return nil
}

func (s *story) instance(i int) *duelist {
	p := bare(s.t)
	p.stage.parts = []*partition{p}
	p.stage.cfg.WorkerGrace, p.stage.cfg.WorkerTTL = timedGrace, 1<<62
	p.stage.budget = snapshot.NewBudget(0, 0)
	p.stage.policy.MinBytes, p.stage.policy.MaxAge = 1, []time.Duration{0, timedStep, 1, 1}[s.rng.IntN(4)]
	p.stage.policy.RoundCount = []int{1, 2, roundCount}[s.rng.IntN(3)]
	p.saver.results = make(chan roundResult, 100)
	p.save.passed = map[snapshot.ID]bool{}
	return &duelist{partition: p, name: i}
}

// load restores an instance.
func (s *story) load(d *duelist) {
	d.Drop(nil)
	s.leaves(d)
	table := s.topic.Table()
	start, err := d.loadTable(table, consumer.Bounds{Start: s.start, End: s.end()}, func() error { return nil })
	if err != nil {
		s.t.Fatal(err)
	}
	d.position, d.replayTo = start, s.end()
	if f, ok := table.Floor(); ok {
		d.saver.floor.Store(f.Offset)
	}
	s.say("%d begins at %d with %v", d.name, start, d.known())
}

// read has an instance apply so many records. One whose next record is trimmed is
// restored, and at the log's end one is compared with the oracle.
func (s *story) read(i int, n int64) error {
	d := s.both[i]
	if d.position < s.start {
		s.load(d)
	}
	s.apply(d, n)
	if n <= 0 || d.position < s.end() {
		return nil
	}
	return s.check(d)
}

func (s *story) apply(d *duelist, n int64) {
	to := min(d.position+max(0, n), s.end())
	for d.position < to {
		d.Apply(s.log[d.position:d.position+1], d.position+1, 0)
	}
	s.say("%d reads to %d", d.name, d.position)
}

// take gives an instance the duty. The other learns of it when it writes.
func (s *story) take(i int) error {
	d := s.both[i]
	if err := s.read(i, d.replayTo-d.position); err != nil { // nobody takes it who is not live
		return err
	}
	s.leaves(d)
	cfg := snapshot.WriterConfig{}
	if s.rng.IntN(4) > 0 {
		cfg.Hook = func(snapshot.Step) error { return s.step(d, killed, robbed) }
	}
	d.writer = s.topic.Take(cfg)
	s.topic.Answer = func() error { return s.step(d, unsure) }
	d.saver.turns++
	d.saver.turn.Store(d.saver.turns)
	d.saver.tell(s.t.Context(), d.writer, s.end())
	s.say("%d takes the duty at %d", i, d.position)
	return nil
}

// step follows each step of a writer that can end in those kinds of trouble.
func (s *story) step(d *duelist, kinds ...trouble) error {
	if !slices.Contains(kinds, d.kind) {
		return nil
	}
	if d.trouble--; d.trouble != 0 {
		return nil
	}
	if d.kind == robbed {
		return s.take(1 - d.name)
	}
	return errKilledByTest
}

// leaves has an instance learn that it has the duty no more.
func (s *story) leaves(d *duelist) {
	d.writer = nil
	d.saver.turn.Store(0)
	select {
	case r := <-d.saver.rounds:
		d.saver.results <- roundResult{round: r, err: errDutyTaken}
	default:
	}
}

// tick has an instance take notice of what its saver did, and make a round.
func (s *story) tick(i int) error { return s.both[i].saveTick(s.now) }

// serve has an instance's saver write the round that it was given, if it was.
func (s *story) serve(i int) error {
	select {
	case r := <-s.both[i].saver.rounds:
		return s.put(s.both[i], r)
	default:
		return nil
	}
}

func (s *story) write(i int) error { return cmp.Or(s.tick(i), s.serve(i)) }

func (s *story) put(d *duelist, r *round) error {
	if d.writer == nil || r.turn != d.saver.turns {
		d.saver.results <- roundResult{round: r, err: errDropped}
		return nil
	}
	res, err := d.saver.writeRound(s.t.Context(), d.writer, &r.Round)
	d.saver.results <- roundResult{round: r, Result: res, err: err}
	s.say("%d writes what it held at %d: %v, refused %v, error %v; on the topic are%v", d.name, r.Position, res.Written, res.Refused, err, s)
	switch {
	case errors.Is(err, snapshot.ErrBehind):
		return err
	case errors.Is(err, snapshot.ErrFenced), errors.Is(err, errKilledByTest):
		s.leaves(d)
		return nil
	case err != nil:
		return err
	}
	if s.rng.IntN(4) == 0 {
		for _, key := range s.topic.Keys() {
			s.older[key] = s.topic.Value(key)
		}
	}
	d.saver.floor.Store(res.Floor)
	for _, refusal := range res.Refused {
		if errors.Is(refusal.Err, snapshot.ErrBehind) {
			return fmt.Errorf("one that is behind writes: %w", refusal.Err)
		}
	}
	return nil
}

// drain has an instance end as it should, and begin again.
func (s *story) drain(i int) (err error) {
	d := s.both[i]
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.saveLast(ctx)
	}()
	for {
		select {
		case r := <-d.saver.rounds:
			err = cmp.Or(err, s.put(d, r))
		case <-done:
			return cmp.Or(err, s.begin(i))
		}
	}
}

// trim removes records from the log's start that nobody needs any more.
func (s *story) trim() {
	f, ok := s.topic.Table().Floor()
	switch {
	case ok && f.Offset > s.start:
		s.start += 1 + s.rng.Int64N(f.Offset-s.start)
	case s.careless && s.end() > s.start && s.rng.IntN(8) == 0: // retention outran who writes
		s.start += 1 + s.rng.Int64N(s.end()-s.start)
		s.damaged = true
	}
	s.say("trimmed to %d, floor %d", s.start, f.Offset)
}

// damage does something to a record on the topic.
func (s *story) damage() {
	keys := s.topic.Keys()
	if len(keys) == 0 {
		return
	}
	key := keys[s.rng.IntN(len(keys))]
	if s.rng.IntN(4) == 0 {
		key = "floor"
	}
	what := "flipped"
	switch x := s.rng.IntN(4); {
	case x == 2 && strings.HasPrefix(key, "manifest") && s.older[key] != nil:
		what = "an older one"
		s.topic.Put(key, s.older[key])
	case x == 0 && s.topic.Value(other(key)) != nil:
		what = "removed"
		s.topic.Put(key, nil)
	case x == 1:
		what = "nonsense"
		s.topic.Put(key, nonsense(nil))
	case s.topic.Value(key) != nil:
		s.topic.Put(key, flip(slices.Clone(s.topic.Value(key))))
	}
	s.damaged = true
	s.say("%s is damaged: %s", key, what)
}

// other returns the key of the chunk that a manifest has, or of the manifest that a
// chunk has. If both were removed nothing would tell that there was such a worker-rank.
func other(key string) string {
	switch part := strings.Split(key, "/"); part[0] {
	case "manifest":
		return fmt.Sprintf("chunk/%s/0/%s", part[1], part[2])
	case "chunk":
		return fmt.Sprintf("manifest/%s/%s", part[1], part[3])
	}
	return ""
}

// fresh restarts one from what is there.
func (s *story) fresh() error {
	d := s.instance(2)
	s.load(d)
	s.apply(d, s.end())
	return s.check(d)
}

// check compares an instance that is at the log's end with the oracle.
func (s *story) check(d *duelist) error {
	users := map[*query.Model]int{}
	for _, w := range d.workers {
		for _, k := range w.ranks {
			users[k.model]++
		}
	}
	if !maps.Equal(users, d.stage.models.users) {
		return fmt.Errorf("worker-ranks of the models are %v, counted are %v", users, d.stage.models.users)
	}
	in := &instance{Stage: d.stage, r: &rig{t: s.t}}
	exact := !s.damaged || s.start == 0
	switch {
	case !exact:
		s.seen["damage to a trimmed log"]++
	case s.damaged:
		s.seen["damage to a whole log"]++
	case s.start > 0:
		s.seen["a trimmed log"]++
	}
	var got, want []string
	for _, w := range s.oracle.Workers() {
		want = append(want, fmt.Sprintf("%s/%d epoch %d seq %d retired %v incomplete %v blocks %v", w.Worker, w.Rank, w.Epoch, w.Seq, w.Retired, w.Incomplete, w.Blocks))
	}
	for _, w := range in.Workers("") {
		got = append(got, fmt.Sprintf("%s/%d epoch %d seq %d retired %v incomplete %v blocks %v", w.Worker, w.Rank, w.Epoch, w.Seq, w.Retired, w.Incomplete, w.Blocks))
		if last := got[len(got)-1]; !exact && !w.Retired && !w.Incomplete && !slices.Contains(want, last) {
			return fmt.Errorf("%d says %s is complete, want %s", d.name, last, want)
		}
	}
	if exact && !slices.Equal(got, want) {
		return fmt.Errorf("%d knows\n\t%s\nwant\n\t%s", d.name, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
	for i := range 2 * len(prompts) {
		q := verify.Query{Model: testModel, BlockSize: testBlockSize << (i % 2), Locals: prompts[i/2]}
		want := s.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		var got map[verify.WorkerRank]index.Depths
		if _, err := in.Model(q.Model, int(q.BlockSize), ""); err == nil {
			got = in.depths(q)
		}
		if exact && !maps.Equal(got, want) {
			return fmt.Errorf("%d answers %v to %v, want %v", d.name, got, q, want)
		}
		for w, depths := range got {
			for tier := range depths {
				if depths[tier] > want[w][tier] {
					return fmt.Errorf("%d answers %v of %v to %v: the truth is %v", d.name, depths, w, q, want[w])
				}
			}
		}
	}
	return nil
}

// settle has both read everything and one write everything.
func (s *story) settle() error {
	has := s.rng.IntN(2)
	if err := cmp.Or(s.read(0, s.end()), s.read(1, s.end()), s.take(has)); err != nil {
		return err
	}
	d := s.both[has]
	age := d.stage.policy.MaxAge
	defer func() { d.stage.policy.MaxAge = age }()
	d.stage.policy.MaxAge = 1
	err := errors.New("not settled")
	for tries := 40; err != nil; tries-- { // rounds may be of one worker-rank
		if tries == 0 {
			return err
		}
		s.now = s.now.Add(time.Millisecond)
		if err = s.write(has); err != nil {
			return err
		}
		err = s.settled(d)
	}
	s.damaged = false
	return cmp.Or(s.check(s.both[0]), s.check(s.both[1]), s.fresh())
}

// settled says what is not on the topic as it should be, or should not be there.
func (s *story) settled(d *duelist) error {
	table := s.topic.Table()
	var got, want []string
	records := 0
	if len(s.topic.Keys()) > 0 {
		records++ // the floor
	}
	for _, id := range table.IDs() {
		got = append(got, fmt.Sprint(id))
		if err := table.Check(id); err != nil {
			return err
		}
		records += 1 + int(table.Manifest(id).Chunks)
	}
	if keys := s.topic.Keys(); len(keys) != records {
		return fmt.Errorf("on the topic are %v, want %d records", keys, records)
	}
	for _, w := range d.workers {
		for _, k := range w.ranks {
			want = append(want, fmt.Sprint(k.id()))
		}
	}
	slices.Sort(want)
	if f, _ := table.Floor(); !slices.Equal(got, want) || len(want) > 0 && f.Offset < s.end() {
		return fmt.Errorf("on the topic are %v, want %v; floor %d of %d", got, want, f.Offset, s.end())
	}
	return nil
}

// String shows what is on the topic.
func (s *story) String() string {
	var b strings.Builder
	t := s.topic.Table()
	for _, id := range t.IDs() {
		if m := t.Manifest(id); m != nil {
			fmt.Fprintf(&b, " %v W %d retired %v at %d lost %d,", id, m.W, m.Retired, m.RetiredAt, m.PastLostAt)
		} else {
			fmt.Fprintf(&b, " %v unreadable,", id)
		}
	}
	f, ok := t.Floor()
	fmt.Fprintf(&b, " floor %d %v lost %d", f.Offset, ok, f.PastLostAt)
	return b.String()
}

// known shows the worker-ranks of a partition.
func (p *partition) known() string {
	var all []string
	for _, w := range p.workers {
		for _, k := range w.ranks {
			all = append(all, fmt.Sprintf("%v W %d epoch %d seq %d held %d retired %v unknown %v", k.id(), k.restoredW, k.epoch, k.seq.Load(), k.held(), k.retired, k.past != nil))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
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

// A reader that compaction overtook finds a worker-rank damaged, and reads on. By then
// its sibling has been written anew too, and both are taken from there: between the
// two is what retired the worker.
func TestRanksAreLoadedTogether(t *testing.T) {
	source := consumer.Topic{Name: "events", Partitions: 1}
	var topic snapshot.Memory
	writer := topic.Take(snapshot.WriterConfig{Topic: "snapshots", Source: source})
	chain := locals(1, 8)
	write := func(w int64, retired bool) {
		t.Helper()
		var r snapshot.Round
		r.Position = w
		for rank := range int32(2) {
			m := schemas.Manifest{Worker: "a", Rank: rank, W: w, LeaderEpoch: -1, Model: testModel, BlockSize: testBlockSize, Epoch: 1, Seq: w, Producer: "p", Retired: retired}
			d := snapshot.Dump{Manifest: m}
			if !retired {
				d.Blocks = new(snapshot.Packed)
				d.Blocks.Add(index.Device, index.Stored{Locals: chain})
			}
			r.Dumps = append(r.Dumps, d)
		}
		if res, err := writer.Write(t.Context(), r); err != nil || len(res.Refused) > 0 {
			t.Fatal(res, err)
		}
	}
	write(10, false)
	topic.Put("chunk/1/0/a", []byte("gone"))
	overtaken := topic.Table()
	write(20, true)
	p := bare(t)
	if _, err := p.loadTable(overtaken, consumer.Bounds{Start: 5, End: 30}, func() error { topic.Read(overtaken); return nil }); err != nil {
		t.Fatal(err)
	}
	for rank := range int32(2) {
		if k := p.rank(snapshot.ID{Worker: "a", Rank: rank}); k == nil || k.restoredW != 20 || !k.retired {
			t.Errorf("rank %d is %+v, want it retired, of W 20", rank, k)
		}
	}
	if n := p.counts[restoresDamaged].Load(); n != 0 {
		t.Errorf("%d are damaged, want none", n)
	}
}
