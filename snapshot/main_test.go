package snapshot

// This file is the harness of the tests: brokers, topics, writers, states.

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

// world is a pair of topics on a broker.
type world struct {
	b      testcontainers.Broker
	group  string
	source consumer.Topic
	topic  string // of the snapshots
	cl     *kgo.Client
}

func newWorld(t testing.TB, b testcontainers.Broker, partitions int) *world {
	t.Helper()
	w := &world{b: b, group: testcontainers.Name("group"), cl: testcontainers.Client(t, b)}
	events := testcontainers.NewTopic(t, b, "events", partitions, nil)
	w.topic = testcontainers.NewTopic(t, b, "snapshots", partitions, map[string]string{"cleanup.policy": "compact,delete"}) // "delete" so that tests may trim it
	var err error
	if w.source, err = consumer.DescribeTopic(deadline(t), w.cl, events); err != nil {
		t.Fatal(err)
	}
	return w
}

func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func (w *world) reader(partition int32) *Reader {
	return NewReader(ReaderConfig{Client: w.cl, Topic: w.topic, Partition: partition})
}

// read returns a fresh reader at the partition's end.
func (w *world) read(t testing.TB, partition int32) *Reader {
	t.Helper()
	r := w.reader(partition)
	if err := r.ReadToEnd(deadline(t)); err != nil {
		t.Fatal(err)
	}
	return r
}

func (w *world) writer(t testing.TB, partition int32, change ...func(*WriterConfig)) *Writer {
	t.Helper()
	cfg := WriterConfig{
		Group: w.group, Source: w.source, Topic: w.topic, Partition: partition, Client: w.cl,
		Opts:   []kgo.Opt{kgo.SeedBrokers(w.b.Brokers()...), kgo.MetadataMinAge(50 * time.Millisecond)},
		Reader: w.reader(partition),
	}
	for _, f := range change {
		f(&cfg)
	}
	wr, err := NewWriter(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(wr.Close)
	return wr
}

func hook(f func(Step) error) func(*WriterConfig) {
	return func(cfg *WriterConfig) { cfg.Hook = f }
}

// write writes a round that must be written whole.
func write(t testing.TB, w *Writer, r Round) Result {
	t.Helper()
	res, err := w.Write(deadline(t), r)
	if err != nil {
		t.Fatal(err)
	}
	for _, refused := range res.Refused {
		t.Fatalf("refused %v: %v", refused.ID, refused.Err)
	}
	if res.CommitErr != nil {
		t.Fatal(res.CommitErr)
	}
	settled(t, testcontainers.NewExternal(w.cfg.Client.OptValue(kgo.SeedBrokers).([]string)...), w.cfg.Topic, w.cfg.Partition)
	return res
}

// settled waits for the markers of transactions that have ended: a real broker
// acknowledges the end before it has written them to the partition.
func settled(t testing.TB, b testcontainers.Broker, topic string, p int32) {
	t.Helper()
	testcontainers.Eventually(t, longWait, func() error {
		stable, end := testcontainers.StableOffsets(t, b, topic), testcontainers.EndOffsets(t, b, topic)
		if stable[p] != end[p] {
			return fmt.Errorf("partition %d is stable up to %d, its end is %d", p, stable[p], end[p])
		}
		return nil
	})
}

// locals returns n local hashes that no other seed has.
func locals(seed, n int) []index.LocalHash {
	l := make([]index.LocalHash, n)
	for i := range l {
		l[i] = index.LocalHash(seed*1_000_000 + i + 1)
	}
	return l
}

// smallChunk makes chunks of some 60 blocks.

const smallChunk = 512

// pack packs a root chain as an index dumps it, block by block.
func pack(chain []index.LocalHash) *Packed {
	p := &Packed{ChunkBytes: smallChunk}
	var parent index.SeqHash
	for i, seq := range index.Chain(nil, chain) {
		p.Add(index.Device, index.Stored{Parent: parent, HasParent: i > 0, Position: int32(i), Locals: chain[i : i+1]})
		parent = seq
	}
	return p
}

func dump(id ID, at int64, chain []index.LocalHash) Dump {
	return Dump{
		Manifest: schemas.Manifest{Worker: id.Worker, Rank: id.Rank, W: at, LeaderEpoch: -1, Model: "m", BlockSize: 16, Seq: at, Producer: "p"},
		Blocks:   pack(chain),
	}
}

func refresh(id ID, at, changed int64) Refresh {
	return Refresh{Manifest: dump(id, at, nil).Manifest, Changed: changed}
}

// saved is what a restore gets of one worker-rank.
type saved struct {
	W     int64
	chain string // its blocks, as text
}

// state loads everything that the table has, which must be whole.
func state(t testing.TB, table *Table) map[ID]saved {
	t.Helper()
	all := make(map[ID]saved)
	for _, id := range table.IDs() {
		chain, m, err := load(table, id)
		if err != nil {
			t.Fatal(err)
		}
		all[id] = saved{m.W, fmt.Sprint(chain)}
	}
	return all
}

// load returns the worker-rank's blocks, in order.
func load(table *Table, id ID) ([]index.LocalHash, *schemas.Manifest, error) {
	var chain []index.LocalHash
	m, err := table.Load(id, func(c schemas.Chain) error {
		chain = append(chain, c.Locals...)
		return nil
	})
	return chain, m, err
}

func savedAs(d Dump, chain []index.LocalHash) saved {
	return saved{d.Manifest.W, fmt.Sprint(chain)}
}

func wantState(t testing.TB, got, want map[ID]saved) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Fatalf("state is\n%v\nwant\n%v", brief(got), brief(want))
	}
}

func brief(m map[ID]saved) []string {
	var out []string
	for id, s := range m {
		out = append(out, fmt.Sprintf("%v: W %d, %.40s... (%d)", id, s.W, s.chain, len(s.chain)))
	}
	slices.Sort(out)
	return out
}

// groupOffset returns what the group has committed for the source partition, -1 if nothing.
func (w *world) groupOffset(t testing.TB, partition int32) int64 {
	t.Helper()
	offsets, err := kadm.NewClient(w.cl).FetchOffsets(deadline(t), w.group)
	if err != nil {
		t.Fatal(err)
	}
	if o, ok := offsets.Lookup(w.source.Name, partition); ok {
		return o.At
	}
	return -1
}

// longWait bounds what a broker needs a moment for.
const longWait = 2 * time.Minute
