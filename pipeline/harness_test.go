package pipeline

// This file is what the stage's tests stand on: a stage on a broker, producers
// that write records to it, and an oracle to compare it with.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

// patience bounds every wait of these tests. The longest of them restores 640,000 blocks,
// which under the race detector takes a machine that has other work minutes.
const patience = 5 * time.Minute

// rig is a pair of topics on a broker, and a log that tests can read.
type rig struct {
	t      *testing.T
	broker testcontainers.Broker
	cfg    Config
	oracle *verify.Oracle
	read   map[int32]int64 // the oracle's positions
	logged *logBook
}

// newRig makes topics of so many partitions and settings for tests: snapshots
// as soon as something changed, short pauses, silence as good as never.
func newRig(t *testing.T, b testcontainers.Broker, partitions int) *rig {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Brokers = b.Brokers()
	cfg.Topic = testcontainers.NewTopic(t, b, "events", partitions, map[string]string{"message.timestamp.type": "LogAppendTime"})
	cfg.SnapshotTopic = testcontainers.NewTopic(t, b, "snapshots", partitions, map[string]string{"cleanup.policy": "compact"})
	cfg.Group = testcontainers.Name("group")
	cfg.GRPCListen, cfg.HTTPListen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.SnapshotMaxAge = 200 * time.Millisecond
	cfg.SnapshotBudget = 0
	cfg.WorkerTTL, cfg.WorkerGrace = time.Hour, 2*time.Hour
	cfg.Tick, cfg.Watch = 20*time.Millisecond, 100*time.Millisecond
	cfg.ReadyLag = 0
	// Whatever else the tests' process and the machine do.
	cfg.Limits.MaxRunnable, cfg.Limits.QueueTimeout, cfg.Limits.Deadline = 1<<20, patience, patience
	// The duty's group learns as late as this that the snapshot topic grew.
	cfg.KafkaOptions = []kgo.Opt{kgo.MetadataMaxAge(time.Second)}
	r := &rig{t: t, broker: b, cfg: cfg, oracle: verify.New(cfg.WorkerGrace), read: map[int32]int64{}, logged: &logBook{}}
	r.cfg.Logger = slog.New(slog.NewTextHandler(r.logged, nil))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the stages:\n%s", r.logged.tail(200))
		}
	})
	return r
}

// logBook keeps what was logged.
type logBook struct {
	mu    sync.Mutex
	lines []string
}

func (l *logBook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, strings.TrimSpace(string(b)))
	return len(b), nil
}

func (l *logBook) tail(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines[max(0, len(l.lines)-n):], "\n")
}

// has reports whether one line holds all the parts.
func (l *logBook) has(parts ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.lines, func(line string) bool {
		for _, p := range parts {
			if !strings.Contains(line, p) {
				return false
			}
		}
		return true
	})
}

// instance is a running stage.
type instance struct {
	*Stage
	r      *rig
	cancel context.CancelFunc
	done   chan error
}

// start runs a stage; each of change may alter it first. It is stopped, if
// nothing did before, when the test ends.
func (r *rig) start(change ...func(*Stage)) *instance {
	r.t.Helper()
	cfg := r.cfg
	cfg.Instance = testcontainers.Name("instance")
	s, err := New(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	s.saveRetry, s.topicPause = 50*time.Millisecond, 10*time.Millisecond
	for _, f := range change {
		f(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	in := &instance{Stage: s, r: r, cancel: cancel, done: make(chan error, 1)}
	go func() { in.done <- s.Run(ctx) }()
	r.t.Cleanup(func() { in.stop() })
	// What New leaves to Run, such as the consumer, is there once it says so.
	testcontainers.Eventually(r.t, patience, func() error {
		select {
		case err := <-in.done:
			in.done <- err
			return fmt.Errorf("the stage has ended: %v", err)
		default:
		}
		if !r.logged.has("msg=serving", cfg.Instance) {
			return errors.New("the stage does not serve")
		}
		return nil
	})
	return in
}

// stop ends the stage as SIGTERM would, last snapshots included.
func (in *instance) stop() {
	in.cancel()
	select {
	case err := <-in.done:
		in.done <- err
		if err != nil {
			in.r.t.Errorf("stage ended with %v", err)
		}
	case <-time.After(patience):
		in.r.t.Error("the stage did not stop")
	}
}

// abandon ends the stage with nothing more written, as near to kill -9 as one
// process can get.
func (in *instance) abandon() {
	in.cfg.DrainTimeout = time.Nanosecond
	in.stop()
}

// caughtUp waits until the stage is ready and has applied everything there is.
func (in *instance) caughtUp() {
	in.r.t.Helper()
	ends := testcontainers.StableOffsets(in.r.t, in.r.broker, in.cfg.Topic)
	testcontainers.Eventually(in.r.t, patience, func() error {
		select {
		case err := <-in.done:
			in.done <- err
			return fmt.Errorf("the stage has ended: %v", err)
		default:
		}
		if ready := in.Readiness(); !ready.Ready {
			return fmt.Errorf("not ready: %v", ready.Missing)
		}
		for _, p := range in.Stage.consumer.Partitions() {
			if p.Position() < ends[p.Number] {
				return fmt.Errorf("partition %d: position %d of %d", p.Number, p.Position(), ends[p.Number])
			}
		}
		return nil
	})
}

// saved waits until the floors of all partitions are at their positions: every
// worker-rank is on the snapshot topic as it is.
func (in *instance) saved() {
	in.r.t.Helper()
	in.caughtUp()
	testcontainers.Eventually(in.r.t, patience, func() error {
		for _, p := range in.Status().Partitions {
			if p.Workers > 0 && p.Floor < p.Position {
				return fmt.Errorf("partition %d: floor %d, position %d", p.Partition, p.Floor, p.Position)
			}
		}
		return nil
	})
}

// nextMillisecond waits until the clock that brokers here share shows another one.
func (r *rig) nextMillisecond() {
	r.t.Helper()
	before := time.Now().UnixMilli()
	testcontainers.Eventually(r.t, patience, func() error {
		if time.Now().UnixMilli() <= before {
			return errors.New("the same millisecond")
		}
		return nil
	})
}

// counted returns a counter's sum over partitions.
func (in *instance) counted(k counter) int64 { return in.Status().Counters[counterNames[k].name] }

// follow brings the oracle to the end of the events topic.
func (r *rig) follow() {
	r.t.Helper()
	ends := map[int32]int64{}
	for p, end := range testcontainers.StableOffsets(r.t, r.broker, r.cfg.Topic) {
		ends[int32(p)] = end
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	if err := r.oracle.Read(ctx, []kgo.Opt{kgo.SeedBrokers(r.broker.Brokers()...)}, r.cfg.Topic, r.read, ends); err != nil {
		r.t.Fatal(err)
	}
	r.read = ends
}

// same asks the stage n random queries and compares the answers with the
// oracle's, both at the end of the events topic.
func (in *instance) same(seed uint64, n int) {
	in.r.t.Helper()
	in.r.follow()
	in.caughtUp()
	for i, q := range in.r.oracle.Queries(rand.New(rand.NewPCG(seed, 1)), n) {
		want := in.r.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		if got := in.depths(q); !maps.Equal(got, want) {
			in.r.t.Fatalf("query %d, %d blocks: depths %v, want %v", i, len(q.Locals), got, want)
		}
	}
	for _, w := range in.r.oracle.Workers() {
		in.sameWorker(w)
	}
}

// sameWorker compares what the listing says of a worker-rank.
func (in *instance) sameWorker(want verify.State) {
	in.r.t.Helper()
	for _, got := range in.Workers("") {
		if got.Worker != want.Worker || got.Rank != want.Rank || got.Partition != want.Partition {
			continue
		}
		if got.Epoch != want.Epoch || got.Seq != want.Seq || got.Retired != want.Retired || got.Incomplete != want.Incomplete || got.Blocks != want.Blocks {
			in.r.t.Fatalf("worker-rank is %+v, want %+v", got, want)
		}
		return
	}
	in.r.t.Fatalf("worker-rank %+v is not listed", want.WorkerRank)
}

// depths asks the index as the query side does.
func (in *instance) depths(q verify.Query) map[verify.WorkerRank]index.Depths {
	in.r.t.Helper()
	m, err := in.Model(q.Model, int(q.BlockSize), "")
	if err != nil {
		in.r.t.Fatal(err)
	}
	now := in.Now()
	var res index.Result
	m.Index.Find(&index.Query{Locals: q.Locals, Keep: func(w *index.Worker) bool { return !in.Worker(w, now).Hidden }}, &res)
	out := map[verify.WorkerRank]index.Depths{}
	for i, x := range res.Matches {
		out[verify.WorkerRank{Worker: x.Worker.Name, Rank: x.Worker.Rank}] = res.Depths(i)
	}
	return out
}

// producer writes the records of one worker-rank.
type producer struct {
	r         *rig
	cl        *kgo.Client
	partition int32 // -1: where the key's hash says
	batch     schemas.Batch
}

const (
	testModel     = "m"
	testBlockSize = 16
)

// produce returns a producer of a worker-rank, at its first epoch.
func (r *rig) produce(worker string, rank int32) *producer {
	return &producer{
		r: r, cl: r.client(), partition: -1,
		batch: schemas.Batch{
			Producer: []byte("producer-1"), Worker: []byte(worker), Rank: rank, Epoch: 1, Seq: -1,
			Model: []byte(testModel), BlockSize: testBlockSize,
		},
	}
}

// client returns a producing client that honours a record's own partition if
// it is not negative.
func (r *rig) client() *kgo.Client {
	keyed := kgo.StickyKeyPartitioner(nil)
	return testcontainers.Client(r.t, r.broker, kgo.RecordPartitioner(partitioner{keyed}), kgo.DefaultProduceTopic(r.cfg.Topic))
}

// partitioner takes a record's partition if it names one, else the key's.
type partitioner struct{ keyed kgo.Partitioner }

func (p partitioner) ForTopic(t string) kgo.TopicPartitioner {
	return topicPartitioner{p.keyed.ForTopic(t)}
}

type topicPartitioner struct{ kgo.TopicPartitioner }

func (p topicPartitioner) RequiresConsistency(*kgo.Record) bool { return true }

func (p topicPartitioner) Partition(r *kgo.Record, n int) int {
	if r.Partition >= 0 {
		return int(r.Partition)
	}
	return p.TopicPartitioner.Partition(r, n)
}

// send writes a record of the next seq with the events and returns where it went.
func (p *producer) send(events ...schemas.Event) *kgo.Record {
	p.r.t.Helper()
	return p.raw(p.batch.Worker, p.encode(events...))
}

// encode makes the value of the record of the next seq.
func (p *producer) encode(events ...schemas.Event) []byte {
	p.r.t.Helper()
	if len(events) > 0 {
		p.batch.Seq++
	}
	p.batch.Events = events
	value, err := schemas.AppendBatch(nil, &p.batch)
	if err != nil {
		p.r.t.Fatal(err)
	}
	return value
}

// raw writes any bytes.
func (p *producer) raw(key, value []byte) *kgo.Record {
	p.r.t.Helper()
	rec := &kgo.Record{Partition: p.partition, Key: slices.Clone(key), Value: value}
	if err := p.cl.ProduceSync(p.r.t.Context(), rec).FirstErr(); err != nil {
		p.r.t.Fatal(err)
	}
	return rec
}

// renew begins the next epoch with another producer.
func (p *producer) renew() {
	p.batch.Epoch = max(p.batch.Epoch+1, time.Now().UnixMilli())
	p.batch.Seq = -1
	p.batch.Producer = fmt.Appendf(nil, "producer-%d", p.batch.Epoch)
}

func stored(parent *index.SeqHash, locals ...index.LocalHash) schemas.Event {
	s := index.Stored{Position: index.NoPosition, Locals: locals}
	if parent != nil {
		s.Parent, s.HasParent = *parent, true
	}
	return schemas.Event{Kind: schemas.KindStored, Stored: s}
}

func removed(hashes ...index.SeqHash) schemas.Event {
	return schemas.Event{Kind: schemas.KindRemoved, Removed: hashes}
}

func cleared() schemas.Event { return schemas.Event{Kind: schemas.KindCleared, AllTiers: true} }

func retired() schemas.Event { return schemas.Event{Kind: schemas.KindRetired} }

// locals returns n local hashes that follow from a name.
func locals(name uint64, n int) []index.LocalHash {
	out := make([]index.LocalHash, n)
	for i := range out {
		out[i] = index.LocalHash(name<<32 | uint64(i+1))
	}
	return out
}

var _ query.Source = (*instance)(nil)
