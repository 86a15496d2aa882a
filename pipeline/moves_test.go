package pipeline

// This file moves workers between partitions, whole or rank by rank, with newer epochs
// and without, and reads the partitions in every order, with restarts between. What is
// answered in the end is a function of the logs.

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
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
	movesSeed    = flag.Uint64("moves.seed", 0, "seed of the first story of workers between partitions, 0: a new one")
	movesStories = flag.Int("moves.stories", 150, "how many stories of workers between partitions")
)

// As long as no partition has forgotten anybody, all is as the oracle says. After that
// nothing is above it, and what is below says that it is incomplete.
func TestWorkersBetweenPartitions(t *testing.T) {
	first := cmp.Or(*movesSeed, rand.Uint64())
	synctest.Test(t, func(t *testing.T) { // time stands still
		seen := map[string]int{}
		for i := range uint64(*movesStories) {
			m := newMoves(t, first+i)
			for range 10 + m.rng.IntN(60) {
				m.happen()
			}
			for _, order := range []string{"the first one first", "the last one first", "as it comes"} {
				in, err := m.read(m.start(), order)
				if err == nil {
					err = m.check(in, seen)
				}
				if err != nil {
					t.Fatalf("-moves.seed=%d -moves.stories=1, %s: %v\n%s", first+i, order, err, strings.Join(m.said, "\n"))
				}
			}
		}
		t.Logf("%d stories, worker-ranks compared: %v", *movesStories, seen)
		for _, what := range []string{"exact", "rivalled", "beaten"} {
			if seen[what] == 0 && *movesStories >= 100 {
				t.Errorf("none was %s: the test tests little", what)
			}
		}
	})
}

// One that is restored while another partition answers for it, and counts again when that
// has forgotten the worker, has not loaded its blocks and says so.
func TestComesBackIncomplete(t *testing.T) {
	m := newMoves(t, 1)
	m.logs = make([][]*kgo.Record, 2)
	w := func(partition int32, epoch, seq int64) *producer {
		return &producer{r: &rig{t: t}, partition: partition, batch: schemas.Batch{
			Producer: []byte("p"), Worker: []byte("w"), Epoch: epoch, Seq: seq - 1, Model: []byte(testModel), BlockSize: testBlockSize,
		}}
	}
	bystander := w(0, 1, 0)
	bystander.batch.Worker = []byte("v")
	later := m.now.Add(2 * timedGrace)
	for _, r := range []*kgo.Record{
		w(0, 2, 0).at(m.now, stored(nil, prompts[2]...)),
		bystander.at(later, stored(nil, prompts[2]...)),
		w(1, 1, 0).at(m.now, stored(nil, prompts[0]...)),
		w(1, 1, 1).at(m.now, stored(nil, prompts[2][:1]...)),
		w(1, 1, 2).at(m.now, cleared(), stored(nil, prompts[0][:2]...)),
	} {
		r.Offset = int64(len(m.logs[r.Partition]))
		m.logs[r.Partition] = append(m.logs[r.Partition], r)
	}
	s := m.start()
	apply := func(partition int) {
		p := s.parts[partition]
		p.Apply(m.logs[partition][p.position:p.position+1], p.position+1, 0)
	}
	want := func(partition int32, blocks int, incomplete bool) {
		t.Helper()
		found := 0
		for _, row := range (&instance{Stage: s, r: &rig{t: t}}).Workers("") {
			if row.Worker != "w" {
				continue
			}
			if found++; row.Partition != partition || row.Blocks[index.Device] != blocks || row.Incomplete != incomplete {
				t.Errorf("known is %+v, want it on partition %d with %d blocks, incomplete %v", row, partition, blocks, incomplete)
			}
		}
		if found != 1 {
			t.Errorf("known %d times", found)
		}
	}
	apply(1)
	want(1, len(prompts[0]), false)
	if err := m.save(s.parts[1]); err != nil {
		t.Fatal(err)
	}
	s = m.stage()
	apply(0)
	m.load(s.parts[1])
	want(0, len(prompts[2]), false)
	apply(0)
	want(1, 0, true)
	apply(1)
	want(1, 1, true)
	apply(1)
	want(1, 2, false)
}

// moves is what happens on some partitions.
type moves struct {
	*story // for its events and what was said
	logs   [][]*kgo.Record
	topics []snapshot.Memory // of their snapshots
	starts []int64           // what is before is trimmed
	saved  []int64           // where their last writer was
	slow   bool              // worker-ranks may fall silent
}

func newMoves(t *testing.T, seed uint64) *moves {
	rng := rand.New(rand.NewPCG(seed, 4))
	n := 2 + rng.IntN(2)
	m := &moves{
		story: &story{t: t, rng: rng, oracle: verify.New(timedGrace), now: time.UnixMilli(1_000_000_000_000)},
		logs:  make([][]*kgo.Record, n),
		slow:  rng.IntN(2) == 0,
	}
	for worker, ranks := range []int32{3, 1, 2} {
		home := rng.Int32N(int32(n))
		for rank := range ranks {
			m.ranks = append(m.ranks, &producer{r: &rig{t: t}, partition: home, batch: schemas.Batch{
				Producer: []byte("p"), Worker: fmt.Appendf(nil, "%c", 'a'+worker), Rank: rank, Epoch: 1 + rng.Int64N(3), Seq: -1,
				Model: []byte(testModel), BlockSize: testBlockSize,
			}})
		}
	}
	return m
}

// happen writes a worker-rank's next record, or one that is not its next, or not where
// its last was.
func (m *moves) happen() {
	m.now = m.now.Add(time.Duration(m.rng.IntN(2)) * time.Millisecond)
	p := m.ranks[m.rng.IntN(len(m.ranks))]
	events := m.events()
	stay := func() { was := *p; m.zombies = append(m.zombies, &was) }
	move := func() { p.partition = m.rng.Int32N(int32(len(m.logs))) }
	switch x := m.rng.IntN(24); {
	case x < 5:
		stay()
		move()
		p.batch.Epoch, p.batch.Seq = p.batch.Epoch+1+m.rng.Int64N(3), -1
	case x < 6:
		stay()
		move()
	case x < 9 && len(m.zombies) > 0:
		p = m.zombies[m.rng.IntN(len(m.zombies))]
	case x == 9:
		events = append(events, retired())
	case x == 10:
		p.batch.Seq = max(-1, p.batch.Seq+m.rng.Int64N(3)-1)
	case x == 11:
		stay()
		m.zombies[len(m.zombies)-1].batch.Producer = []byte("q")
	case x == 12:
		stay()
		m.zombies[len(m.zombies)-1].batch.BlockSize *= 2
	case x == 13:
		events = nil
	case x < 16 && m.slow:
		m.now = m.now.Add(timedStep * time.Duration(1+m.rng.IntN(14)))
	}
	r := p.at(m.now, events...)
	r.Partition, r.Offset = p.partition, int64(len(m.logs[p.partition]))
	m.logs[p.partition] = append(m.logs[p.partition], r)
	m.oracle.Apply(r.Partition, r.Timestamp.UnixMilli(), r.Key, r.Value)
	b := &p.batch
	m.say("%d/%d at %s: %s/%d epoch %d seq %d of %s, %v", r.Partition, r.Offset, r.Timestamp.Format("15:04:05.000"), b.Worker, b.Rank, b.Epoch, b.Seq, b.Producer, events)
}

// start begins an instance from nothing.
func (m *moves) start() *Stage {
	m.topics, m.starts, m.saved = make([]snapshot.Memory, len(m.logs)), make([]int64, len(m.logs)), make([]int64, len(m.logs))
	m.say("begins")
	return m.stage()
}

func (m *moves) stage() *Stage {
	one := bare(m.t)
	s := one.stage
	s.parts = []*partition{one}
	for n := 1; n < len(m.logs); n++ {
		s.parts = append(s.parts, newPartition(s, int32(n)))
	}
	s.cfg.WorkerGrace, s.cfg.WorkerTTL = timedGrace, 1<<62
	s.budget = snapshot.NewBudget(0, 0)
	s.policy.MinBytes, s.policy.MaxAge = 1, 1
	for _, p := range s.parts {
		p.saver.results = make(chan roundResult, 100)
		p.save.passed = map[snapshot.ID]bool{}
	}
	return s
}

// read has an instance read everything, in that order, or those that come after it.
func (m *moves) read(s *Stage, order string) (*Stage, error) {
	for {
		var left []*partition
		for _, p := range s.parts {
			if p.position < int64(len(m.logs[p.number])) {
				left = append(left, p)
			}
		}
		if len(left) == 0 {
			return s, nil
		}
		var p *partition
		switch order {
		case "the first one first":
			p = left[0]
		case "the last one first":
			p = left[len(left)-1]
		default:
			p = left[m.rng.IntN(len(left))]
			if m.rng.IntN(4) == 0 {
				if err := m.save(p); err != nil {
					return nil, err
				}
			}
			switch m.rng.IntN(30) {
			case 0: // the partition is restored
				m.load(s.parts[m.rng.IntN(len(s.parts))])
				continue
			case 1: // the process ended
				s = m.stage()
				for _, i := range m.rng.Perm(len(s.parts)) {
					m.load(s.parts[i])
				}
				continue
			}
		}
		p.Apply(m.logs[p.number][p.position:p.position+1], p.position+1, 0)
	}
}

// save writes what a partition holds to its snapshot topic, and may trim its log.
func (m *moves) save(p *partition) error {
	if p.position < m.saved[p.number] {
		return nil // nobody writes who is behind
	}
	m.saved[p.number] = p.position
	ctx := m.t.Context()
	w := m.topics[p.number].Take(snapshot.WriterConfig{})
	p.saver.turns++
	p.saver.turn.Store(p.saver.turns)
	p.saver.tell(ctx, w, p.position)
	for i := range 3 { // a worker-rank that has no snapshot yet is due at the next tick
		if err := p.saveTick(m.now.Add(time.Duration(i) * time.Millisecond)); err != nil {
			return err
		}
		select {
		case r := <-p.saver.rounds:
			res, err := p.saver.writeRound(ctx, w, &r.Round)
			if err != nil {
				return err
			}
			p.saver.floor.Store(res.Floor)
			p.saver.results <- roundResult{round: r, Result: res}
		default:
		}
	}
	if f, ok := m.topics[p.number].Table().Floor(); ok && m.rng.IntN(2) == 0 {
		m.starts[p.number] = max(m.starts[p.number], f.Offset)
	}
	m.say("%d is saved at %d", p.number, p.position)
	return p.saveTick(m.now)
}

// load restores a partition.
func (m *moves) load(p *partition) {
	p.Drop(nil)
	select { // a round that nobody will write
	case r := <-p.saver.rounds:
		p.saver.results <- roundResult{round: r, err: errDropped}
	default:
	}
	table := m.topics[p.number].Table()
	end := int64(len(m.logs[p.number]))
	start, err := p.loadTable(table, consumer.Bounds{Start: m.starts[p.number], End: end}, func() error { return nil })
	if err != nil {
		m.t.Fatal(err)
	}
	p.position, p.replayTo = start, end
	if f, ok := table.Floor(); ok {
		p.saver.floor.Store(f.Offset)
	}
	m.say("%d begins at %d with %v", p.number, start, p.known())
}

// check compares an instance at the end of all logs with the oracle.
func (m *moves) check(s *Stage, seen map[string]int) error {
	users := map[*query.Model]int{}
	for _, p := range s.parts {
		for _, w := range p.workers {
			w.takeNotice(p)
			for _, k := range w.ranks {
				if k.aside {
					seen["beaten"]++
				}
				if k.model.Index != nil {
					users[k.model]++
				}
			}
		}
	}
	if !maps.Equal(users, s.models.users) {
		return fmt.Errorf("worker-ranks of the models are %v, counted are %v", users, s.models.users)
	}
	exact := m.oracle.Counts()["forgotten"] == 0
	in := &instance{Stage: s, r: &rig{t: m.t}}
	got, want := in.Workers(""), m.oracle.Workers()
	if len(got) != len(want) {
		return fmt.Errorf("known are %+v, want %+v", got, want)
	}
	less := map[verify.WorkerRank]bool{} // may hold less than the oracle says
	for i, w := range want {
		g := got[i]
		if g.Worker != w.Worker || g.Rank != w.Rank || g.Partition != w.Partition || g.Epoch != w.Epoch || g.Seq != w.Seq || g.Retired != w.Retired ||
			w.Incomplete && !g.Incomplete {
			return fmt.Errorf("known is %+v, want %+v", g, w)
		}
		same := g.Blocks == w.Blocks && g.Incomplete == w.Incomplete
		if !same && (exact || !g.Incomplete) {
			return fmt.Errorf("known is %+v, want %+v", g, w)
		}
		if !same {
			less[w.WorkerRank] = true
			seen["below the oracle"]++
		} else {
			seen["exact"]++
		}
		for _, p := range s.parts {
			if k := p.rank(snapshot.ID{Worker: w.Worker, Rank: w.Rank}); p.number == w.Partition && k.rivalled.Load() {
				seen["rivalled"]++
			}
		}
	}
	for i := range 2 * len(prompts) {
		q := verify.Query{Model: testModel, BlockSize: testBlockSize << (i % 2), Locals: prompts[i/2]}
		want := m.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		var got map[verify.WorkerRank]index.Depths
		if _, err := in.Model(q.Model, int(q.BlockSize), ""); err == nil {
			got = in.depths(q)
		}
		for w, depths := range want {
			if less[w] {
				for tier := range depths {
					if got[w][tier] > depths[tier] {
						return fmt.Errorf("answers %v of %v to %v: the truth is %v", got[w], w, q, depths)
					}
				}
				delete(want, w)
				delete(got, w)
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("answers %v to %v, want %v", got, q, want)
		}
	}
	return nil
}
