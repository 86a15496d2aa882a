// This file plays relays, all of them but sockets and Kafka, against engines that
// it makes up, and holds the depths that the records mean to what the engines
// hold. Engines, what happens on the way to them, Kafka, and the relay's ends are
// all at random; a seed gives the same story again.

package relay

import (
	"context"
	"errors"
	flags "flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
)

var (
	depthsSeed    = flags.Uint64("depths.seed", 1, "seed of the first story of engines, a relay and depths")
	depthsStories = flags.Int("depths.stories", 30, "how many stories of engines, a relay and depths")
)

// depthsRank is a worker-rank.
type depthsRank struct {
	way
	story  *depthsStory
	number int32
	feed   *feed
	counts streamCounts // of all lives
	old    [][]byte     // checkpoints
	reader reader
}

// depthsStory is the world of one story. What the ranks' goroutines do in it is
// never at one moment of the bubble's clock, so that a seed gives one story.
type depthsStory struct {
	*testing.T
	*dialect
	dir   string
	ranks []*depthsRank
	room  int64 // of records in flight, bytes
	pace  int
	mix   []int // of what happens, more or less often
	stage *verify.Oracle
	read  int // records of the log that stage and readers have

	relays   int // that there were
	happened int // things

	mu    sync.Mutex // of what follows, and of what happens in worlds
	rng   *rand.Rand
	sent  float64
	kafka fakeKafka
	away  time.Time       // until then Kafka answers nothing
	full  bool            // the disk is
	late  []pendingRecord // of relays that are gone
	calm  bool            // nothing more happens
	dead  bool            // the relay is: nothing that it does has an effect
	dieIn int             // it dies with that effect, if not 0
	kill  context.CancelFunc
	lives sync.WaitGroup
}

var errDead = errors.New("the relay is dead")

// effect reports whether what the relay does now has one.
func (s *depthsStory) effect() bool {
	if s.dieIn > 0 && !s.dead {
		if s.dieIn--; s.dieIn == 0 {
			s.die()
		}
	}
	return !s.dead
}

func (s *depthsStory) die() {
	s.dead = true
	s.kill()
}

// TryProduce implements Producer.
func (s *depthsStory) TryProduce(ctx context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.effect() {
		s.kafka.direct = s.calm
		s.kafka.TryProduce(ctx, r, done)
	}
}

// kafkaActs has Kafka take or refuse some of what is on its way to it, and reports
// whether it did.
func (s *depthsStory) kafkaActs() bool {
	if n := len(s.late); n > 0 && s.rng.IntN(3) == 0 {
		s.kafka.write(s.late[0])
		s.late = s.late[1:]
	}
	n := len(s.kafka.pending)
	if n == 0 || s.dead || time.Now().Before(s.away) {
		return false
	}
	some := 1 + s.rng.IntN(n)
	if s.rng.IntN(20) == 0 {
		s.kafka.fail(some, s.rng.IntN(some+1), errRefused)
	} else {
		s.kafka.ack(some)
	}
	return true
}

// start starts a relay.
func (s *depthsStory) start() {
	s.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out := &outlet{to: s, topic: "t", name: fmt.Appendf(nil, "relay-a-%d", time.Now().UnixMilli()), limit: s.room * int64(len(s.ranks)) * 3 / 4}
	out.await = func(stop <-chan struct{}, seen int64, _ time.Duration) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for out.done.Load() == seen {
			if s.rng.IntN(10) == 0 || !s.kafkaActs() {
				return false
			}
		}
		return true
	}
	s.dead, s.dieIn, s.kill = false, 0, cancel
	s.relays++
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("STREAM_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for i, r := range s.ranks {
		c := testConfig(nil)
		c.rank, c.engine.Engine, c.engine.Hasher, c.stateDir, c.logger = r.number, s.kind, s.hasher, s.dir, log.With("rank", r.number)
		f, err := newFeed(c, out)
		if err != nil {
			s.Fatal(err)
		}
		f.split.maxBytes, f.split.maxEvents, f.flight.limit = 150, 3, s.room
		f.files.sync = func(*os.File) error { return nil }
		f.files.fault = func(step string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.full && step != "remove" || !s.effect() {
				return errDead
			}
			return nil
		}
		r.feed = f
		pos, ok := f.restore()
		if run := r.follow(c.logger, pos, ok); run != nil {
			s.lives.Go(func() {
				time.Sleep(time.Duration(i+1) * time.Millisecond)
				run(ctx)
			})
		}
	}
}

// mostHappenings bounds a story: what happens at each step of a replay may make it
// longer than it was.
const mostHappenings = 1000

// happenings is how many kinds of things happens knows.
const happenings = 19

// happens is called by a stream's goroutine at each of its steps.
func (s *depthsStory) happens(r *depthsRank) {
	if c := r.feed.saving; c != nil { // what the other goroutine does is not to depend on chance
		err := <-c
		c <- err
	}
	time.Sleep(time.Duration(1 + s.drawn(10_000))) // so that no two things are at one moment
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calm || s.dead {
		return
	}
	if s.rng.IntN(2) == 0 {
		s.kafkaActs()
	}
	if s.happened >= mostHappenings || s.rng.IntN(s.pace) > 0 {
		return
	}
	s.happened++
	n := s.rng.IntN(8)
	switch what := s.mix[s.rng.IntN(len(s.mix))]; what {
	case 0:
		r.publish(n / 2)
	case 1:
		r.restart()
		r.publish(n / 2)
	case 2:
		r.kill()
	case 3:
		r.way.start()
	case 16:
		s.away = time.Now().Add(time.Duration([]int{1, 5, 60, 2000, 4000}[s.rng.IntN(5)]) * time.Second)
	case 17:
		s.full = !s.full
	case 18:
		if s.dieIn == 0 {
			s.dieIn = 1 + s.rng.IntN(12)
		}
	default:
		r.way.happens(what, n)
	}
}

// end ends the relay, in order or not.
func (s *depthsStory) end(orderly bool) {
	if orderly {
		s.kill()
		s.lives.Wait()
		if s.rng.IntN(4) > 0 && !s.dead {
			s.kafka.ack(len(s.kafka.pending))
		}
		for _, r := range s.ranks {
			r.feed.out.await = func(<-chan struct{}, int64, time.Duration) bool { return false }
			r.feed.close(ended)
		}
	} else {
		s.mu.Lock()
		s.die()
		s.mu.Unlock()
		s.lives.Wait()
	}
	s.dead = true
	for _, r := range s.ranks {
		if c := r.feed.saving; c != nil {
			<-c
		}
		if p, err := os.ReadFile(r.feed.files.checkpoint); err == nil {
			r.old = append(r.old, p)
		}
	}
	// What is on its way gets there at some time, up to some record.
	s.late = append(s.late, s.kafka.pending[:s.rng.IntN(len(s.kafka.pending)+1)]...)
	s.kafka.pending = nil
}

// between is what happens while no relay is there.
func (s *depthsStory) between() {
	seconds := []int{1, 2, 40, 100, 2000}[s.rng.IntN(5)]
	s.full = s.full && s.rng.IntN(2) == 0
	for _, r := range s.ranks {
		switch s.rng.IntN(6) {
		case 0:
			r.restart()
		case 1:
			r.kill()
		case 2:
			r.way.start()
		}
		r.publish(s.rng.IntN(12))
		if s.rng.IntN(3) == 0 && !s.gentle {
			r.lie(1 + s.rng.IntN(5))
		}
		f := r.feed.files
		switch s.rng.IntN(10) {
		case 0:
			os.Remove(f.checkpoint)
			os.Remove(f.ledger)
		case 1:
			os.Remove(f.ledger)
		case 2:
			if n := len(r.old); n > 1 {
				s.write(f.checkpoint, r.old[s.rng.IntN(n-1)])
			}
		case 3:
			if n := len(r.old); n > 0 {
				p := slices.Clone(r.old[n-1])
				if s.rng.IntN(2) == 0 {
					p[s.rng.IntN(len(p))] ^= 4
				}
				s.write(f.checkpoint, p[:len(p)-s.rng.IntN(2)*s.rng.IntN(len(p))])
			}
		case 4:
			s.write(f.checkpoint+".tmp", []byte("torn"))
		case 5:
			if o := s.ranks[0]; o != r && len(o.old) > 0 {
				s.write(f.checkpoint, o.old[0])
			}
		}
	}
	time.Sleep(time.Duration(seconds) * time.Second)
}

func (s *depthsStory) write(file string, p []byte) {
	s.Helper()
	if err := os.WriteFile(file, p, 0o600); err != nil {
		s.Fatal(err)
	}
}

// quiet lets all that goes wrong end, and all that is known be said.
func (s *depthsStory) quiet() {
	s.Helper()
	s.mu.Lock()
	dead := s.dead
	s.calm, s.away, s.full, s.dieIn = true, time.Time{}, false, 0
	s.mu.Unlock()
	if dead {
		s.end(false)
		s.between()
		s.start()
	}
	s.mu.Lock()
	for _, r := range s.ranks {
		r.heal()
		if s.rng.IntN(5) > 0 {
			r.way.start()
		}
	}
	for _, p := range s.late {
		s.kafka.write(p)
	}
	s.late = nil
	s.kafka.ack(len(s.kafka.pending))
	s.mu.Unlock()
	time.Sleep(7 * time.Minute) // a replay endpoint that did not answer is asked seldom
	for range 2 {
		s.mu.Lock()
		for _, r := range s.ranks {
			r.publish(1)
		}
		s.mu.Unlock()
		settled()
	}
	s.compare()
	s.mu.Lock()
	s.calm = false
	s.mu.Unlock()
}

// compare holds what the records mean to what the engines hold.
func (s *depthsStory) compare() {
	s.Helper()
	for _, w := range s.kafka.log[s.read:] {
		var b schemas.Batch
		if err := b.Decode(w.value); err != nil {
			s.Fatal(err)
		}
		s.stage.Apply(0, w.at.UnixMilli(), b.Worker, w.value)
		s.ranks[b.Rank].reader.read(s, w)
	}
	s.read = len(s.kafka.log)
	counts := s.stage.Counts()
	for _, never := range []string{"undecodable", "wrong_key", "invalid", "rejected", "identity_change", "second_producer", "duplicate"} {
		if counts[never] > 0 {
			s.Fatalf("%d: %s", counts[never], never)
		}
	}
	for _, r := range s.ranks {
		s.compareRank(r)
	}
}

func (s *depthsStory) compareRank(r *depthsRank) {
	s.Helper()
	e := r.engine()
	if e == nil { // none runs, so nothing is held
		e = newMadeUp(s.dialect, s.rng, r.number, &s.sent)
	}
	mind := heldBy(r.feed.mapping)
	switch whole := r.feed.whole; {
	case r.feed.state != writing:
		s.Fatalf("rank %d: still %s for %s", r.number, r.feed.state, r.feed.why)
	case r.reader.refused > 0:
		s.Fatalf("rank %d: %d records of the epoch are refused", r.number, r.reader.refused)
	case r.reader.incomplete == whole && !r.reader.retired:
		s.Fatalf("rank %d: incomplete: %t, whole: %t", r.number, r.reader.incomplete, whole)
	case !r.reader.held.equal(&mind):
		s.Fatalf("rank %d: the records say %v, the feed %v", r.number, r.reader.held, mind)
	case !whole && s.gentle && r.counts[replaysDistrusted].Load() == 0 && !(s.polled && s.relays > 1):
		s.Errorf("rank %d: incomplete, though nothing is lost", r.number)
	}
	exact := r.feed.whole && !s.collide
	for _, f := range s.families {
		for _, leaf := range treeLeaves {
			blocks := path(leaf)
			locals := s.hasher.Append(nil, prompt(leaf), f.extra())
			got := s.stage.Depths("m", depthsBlockSize, locals)[verify.WorkerRank{Worker: "wörker", Rank: r.number}]
			for t := range index.Tier(index.Tiers) {
				most, want := e.depths(&f, blocks, t)
				if got[t] > most || exact && got[t] != want {
					s.Errorf("rank %d, %q to block %d: depth to tier %s is %d; the engine holds %d, of which its events told %d (whole: %t)",
						r.number, f.hash, leaf, t, got[t], most, want, r.feed.whole)
				}
			}
		}
	}
	if s.collide {
		return
	}
	var holds, told heldBlocks = newHeld(), newHeld()
	for i, f := range s.families {
		for at := range treeParents {
			b := treeBlock{i, at}
			chain := index.Chain(nil, s.hasher.Append(nil, prompt(at), f.extra()))
			seq := chain[len(chain)-1]
			for t := range e.held {
				if e.held[t][b] > 0 {
					holds[t][seq] = true
				}
				if e.told[t][b] && e.known[b] {
					told[t][seq] = true
				}
			}
		}
	}
	if !r.reader.held.within(&holds) || exact && !r.reader.held.equal(&told) {
		s.Errorf("rank %d: the records say %v; the engine holds %v, of which its events told %v (whole: %t)", r.number, r.reader.held, holds, told, r.feed.whole)
	}
}

func playDepths(t *testing.T, dir string, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	s := &depthsStory{
		T: t, dialect: newDialect(rng), dir: dir, rng: rng, stage: verify.New(testGrace),
		room: 1200 + rng.Int64N(5000), pace: 4 << rng.IntN(6),
	}
	s.mix = []int{0, 0, 0, 0}
	for what := range happenings {
		for range rng.IntN(3) * rng.IntN(2) {
			s.mix = append(s.mix, what)
		}
	}
	s.kafka.now = time.Now
	kept := &buffer{story: s, keep: 1 << 20}
	if !s.gentle && rng.IntN(3) == 0 {
		kept.keep = 1 + rng.IntN(30)
	}
	for n := range 1 + rng.IntN(2) {
		r := &depthsRank{story: s, number: int32(n), reader: reader{grace: testGrace, held: newHeld()}}
		if s.polled {
			r.way = &buffered{buffer: kept, r: r}
		} else {
			r.way = newPublished(r)
		}
		s.ranks = append(s.ranks, r)
	}
	for _, r := range s.ranks {
		if r.way.start(); rng.IntN(2) == 0 {
			r.publish(rng.IntN(20))
		}
	}
	s.start()
	defer func() {
		s.kill()
		s.lives.Wait()
	}()
	for range 1 + rng.IntN(8) {
		time.Sleep(time.Duration([]int{1, 3, 10, 10, 40, 40, 40, 100, 100, 3000}[s.drawn(10)]) * time.Second)
		switch s.drawn(4) {
		case 0:
			s.quiet()
		case 1:
			s.end(true)
			s.between()
			s.start()
		case 2:
			s.end(false)
			s.between()
			s.start()
		}
		if t.Failed() {
			break
		}
	}
	if !t.Failed() {
		s.quiet()
	}
	s.end(true)
}

// drawn returns a number below n.
func (s *depthsStory) drawn(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n)
}

// TestDepths: whatever happens to engines, their messages, the relay and Kafka, the
// index credits a worker-rank with no block more than its engine holds, and if it
// calls it complete, with none less than the engine's events told.
func TestDepths(t *testing.T) {
	for i := range uint64(*depthsStories) {
		seed := *depthsSeed + i
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) { playDepths(t, dir, seed) })
		})
		if !ok {
			t.Fatalf("again: go test -run TestDepths ./pipeline/relay -depths.seed %d -depths.stories 1", seed)
		}
	}
}
