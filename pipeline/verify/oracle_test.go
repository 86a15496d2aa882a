package verify

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"kvindex/index"
	"kvindex/schemas"
)

const grace = 100 // milliseconds

// step is one record; what is not given has a default that is as good as any.
type step struct {
	partition int32
	at        int64 // timestamp
	worker    string
	key       string // worker's name unless given
	rank      int32
	epoch     int64
	seq       int64
	producer  string
	model     string
	blockSize int32
	hasher    index.Hasher
	events    []schemas.Event
	raw       []byte // in place of all but partition and at
}

func (s step) record(t testing.TB) (key, value []byte) {
	t.Helper()
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	def(&s.worker, "w")
	def(&s.key, s.worker)
	def(&s.producer, "p")
	def(&s.model, "m")
	if s.blockSize == 0 {
		s.blockSize = 16
	}
	if s.raw != nil {
		return []byte(s.key), s.raw
	}
	value, err := schemas.AppendBatch(nil, &schemas.Batch{
		Producer: []byte(s.producer), Worker: []byte(s.worker), Rank: s.rank, Epoch: s.epoch, Seq: s.seq,
		Model: []byte(s.model), BlockSize: s.blockSize, Hasher: s.hasher, Events: s.events,
	})
	if err != nil {
		t.Fatal(err)
	}
	return []byte(s.key), value
}

func apply(t testing.TB, o *Oracle, steps ...step) {
	t.Helper()
	for _, s := range steps {
		key, value := s.record(t)
		o.Apply(s.partition, s.at, key, value)
	}
}

var prompt = []index.LocalHash{11, 22, 33, 44}

// seqs are the prompt's sequence hashes.
var seqs = index.Chain(nil, prompt)

func root(n int) schemas.Event {
	return schemas.Event{Stored: index.Stored{Position: 0, Locals: prompt[:n]}}
}

// part stores the prompt's blocks from i to before n.
func part(i, n int) schemas.Event {
	return schemas.Event{Stored: index.Stored{HasParent: true, Parent: seqs[i-1], Position: index.NoPosition, Locals: prompt[i:n]}}
}

func removed(i ...int) schemas.Event {
	e := schemas.Event{Kind: schemas.KindRemoved}
	for _, i := range i {
		e.Removed = append(e.Removed, seqs[i])
	}
	return e
}

// opaque stores the prompt's blocks, from the first or those behind the block of that
// number, by these hashes. The hash of a block of number n is n, or 10 + n.
func opaque(parent index.SeqHash, hashes ...index.SeqHash) schemas.Event {
	s := index.Stored{HasParent: parent != 0, Parent: parent, Position: index.NoPosition, Hashes: hashes}
	for _, h := range hashes {
		s.Locals = append(s.Locals, prompt[(h-1)%10])
	}
	return stored(s)
}

// without removes blocks by their hashes.
func without(hashes ...index.SeqHash) schemas.Event {
	return schemas.Event{Kind: schemas.KindRemoved, Removed: hashes}
}

func on(t index.Tier, e schemas.Event) schemas.Event { e.Tier = t; return e }

var (
	cleared = schemas.Event{Kind: schemas.KindCleared, AllTiers: true}
	retired = schemas.Event{Kind: schemas.KindRetired}
)

func stored(s index.Stored) schemas.Event { return schemas.Event{Stored: s} }

func events(e ...schemas.Event) []schemas.Event { return e }

func TestRecords(t *testing.T) {
	type want struct {
		depth      int
		incomplete bool
		count      string // counted once
	}
	for _, c := range []struct {
		name  string
		steps []step
		want  want
	}{
		{"a chain from its root", []step{{events: events(root(4))}}, want{depth: 4}},
		{"a chain in two parts", []step{{events: events(root(2), part(2, 4))}}, want{depth: 4}},
		{"an orphan is out of reach", []step{{events: events(part(2, 4))}}, want{}},
		{"an orphan comes into reach", []step{{events: events(part(2, 4), root(2))}}, want{depth: 4}},
		{"nothing counts past a hole", []step{{events: events(root(4), removed(1))}}, want{depth: 1}},
		{"a hole is filled", []step{{events: events(root(4), removed(1), part(1, 2))}}, want{depth: 4}},
		{"only the device tier counts", []step{{events: events(on(index.Host, root(4)), root(1))}}, want{depth: 1}},
		{"removal in another tier", []step{{events: events(root(4), on(index.Host, removed(0)))}}, want{depth: 4}},
		{"all tiers cleared", []step{{events: events(root(4), cleared)}}, want{}},
		{"another tier cleared", []step{{events: events(root(4), schemas.Event{Kind: schemas.KindCleared, Tier: index.Disk})}}, want{depth: 4}},
		{"the tier cleared", []step{{events: events(root(4), schemas.Event{Kind: schemas.KindCleared})}}, want{}},
		{"retired", []step{{events: events(root(4), retired, root(2))}}, want{}},
		{"retired by another rank", []step{{events: events(root(4))}, {rank: 1, events: events(retired)}}, want{}},
		{"a late record after retirement", []step{{events: events(retired)}, {seq: 1, events: events(root(4))}}, want{count: "retired"}},
		{"a newer epoch after retirement", []step{{events: events(retired)}, {epoch: 1, events: events(root(4))}}, want{depth: 4}},

		{"wrong key", []step{{key: "v", events: events(root(4))}}, want{count: "wrong_key"}},
		{"block size of none", []step{{blockSize: -1, events: events(root(4))}}, want{count: "invalid"}},
		{"negative rank", []step{{rank: -1, events: events(root(4))}}, want{count: "invalid"}},
		{"negative seq", []step{{seq: -1, events: events(root(4))}}, want{count: "invalid"}},
		{"an invalid record is not heard", []step{{events: events(root(4))}, {at: grace - 1, seq: -2}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"undecodable", []step{{events: events(root(4))}, {raw: []byte("nonsense")}}, want{depth: 4, count: "undecodable"}},

		{"next seq", []step{{events: events(root(1))}, {seq: 1, events: events(part(1, 4))}}, want{depth: 4}},
		{"duplicate", []step{{events: events(root(1))}, {events: events(part(1, 4))}}, want{depth: 1, count: "duplicate"}},
		{"gap", []step{{events: events(root(1))}, {seq: 2, events: events(part(1, 4))}}, want{depth: 4, incomplete: true, count: "gap"}},
		{"first record above 0", []step{{seq: 1, events: events(root(4))}}, want{depth: 4, incomplete: true, count: "gap"}},
		{"gap healed by a clear", []step{{seq: 1, events: events(cleared, root(4))}}, want{depth: 4, count: "gap"}},
		{"gap not healed by clearing a tier", []step{{seq: 1, events: events(schemas.Event{Kind: schemas.KindCleared}, root(4))}}, want{depth: 4, incomplete: true}},
		{"gap healed by a newer epoch", []step{{seq: 1, events: events(root(4))}, {epoch: 1, events: events(root(2))}}, want{depth: 2}},
		{"heartbeat before any", []step{{seq: -1}}, want{count: "heartbeat"}},
		{"heartbeat with the last seq", []step{{events: events(root(4))}, {seq: 0}}, want{depth: 4, count: "heartbeat"}},
		{"heartbeat with an older seq", []step{{events: events(root(4))}, {seq: -1}}, want{depth: 4, count: "heartbeat"}},
		{"heartbeat tells of lost records", []step{{events: events(root(1))}, {seq: 1}, {seq: 2, events: events(part(1, 4))}}, want{depth: 4, incomplete: true, count: "gap"}},
		{"first heartbeat tells of lost records", []step{{seq: 0}}, want{incomplete: true, count: "gap"}},

		{"older epoch", []step{{epoch: 5, events: events(root(1))}, {epoch: 4, seq: 1, events: events(part(1, 4))}}, want{depth: 1, count: "stale_epoch"}},
		{"newer epoch begins empty", []step{{events: events(root(4))}, {epoch: 1, events: events(part(1, 4))}}, want{}},
		{"newer epoch begins its own seq", []step{{seq: 0, events: events(root(4))}, {epoch: 1, seq: 0, events: events(root(2))}}, want{depth: 2}},
		{"ranks have their own epochs", []step{{epoch: 5, events: events(root(4))}, {rank: 1, epoch: 6, events: events(cleared)}}, want{depth: 4}},

		{"second producer", []step{{events: events(root(1))}, {seq: 1, producer: "q", events: events(part(1, 4))}}, want{depth: 1, incomplete: true, count: "second_producer"}},
		{"another producer in a newer epoch", []step{{events: events(root(1))}, {epoch: 1, producer: "q", events: events(root(4))}}, want{depth: 4}},
		{"model changes", []step{{events: events(root(1))}, {seq: 1, model: "n", events: events(part(1, 4))}}, want{depth: 1, incomplete: true, count: "identity_change"}},
		{"block size changes", []step{{events: events(root(1))}, {seq: 1, blockSize: 32, events: events(part(1, 4))}}, want{depth: 1, incomplete: true, count: "identity_change"}},
		{"hasher changes", []step{{events: events(root(1))}, {seq: 1, hasher: index.Dynamo, events: events(part(1, 4))}}, want{depth: 1, incomplete: true, count: "identity_change"}},
		{"a refused heartbeat", []step{{events: events(root(1))}, {producer: "q"}}, want{depth: 1, incomplete: true, count: "second_producer"}},

		{"no blocks stored", []step{{events: events(stored(index.Stored{}), root(4))}}, want{depth: 4, incomplete: true, count: "rejected"}},
		{"null root", []step{{events: events(stored(index.Stored{Locals: []index.LocalHash{0}}), root(4))}}, want{depth: 4, incomplete: true, count: "rejected"}},
		{"null parent", []step{{events: events(stored(index.Stored{HasParent: true, Locals: prompt}), root(4))}}, want{depth: 4, incomplete: true, count: "rejected"}},
		{"position below any", []step{{events: events(stored(index.Stored{Position: -2, Locals: prompt}), root(1))}}, want{depth: 1, incomplete: true, count: "rejected"}},
		{"position beyond 32 bits", []step{{events: events(stored(index.Stored{Position: 1<<31 - 2, Locals: prompt}), root(1))}}, want{depth: 1, incomplete: true, count: "rejected"}},
		{"opaque", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2), opaque(2, 3, 4))}}, want{depth: 4}},
		{"an opaque orphan comes into reach", []step{{hasher: index.Opaque, events: events(opaque(2, 3, 4), opaque(0, 1, 2))}}, want{depth: 4}},
		{"an opaque hole", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2, 3), without(2))}}, want{depth: 1}},
		{"opaque hashes that go round", []step{{hasher: index.Opaque, events: events(opaque(0, 1), opaque(3, 2, 3))}}, want{depth: 1}},
		{"an opaque hash stays where it was stored first", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2), opaque(4, 3, 2), opaque(2, 3))}}, want{depth: 2}},
		{"and comes elsewhere after its removal", []step{{hasher: index.Opaque, events: events(opaque(0, 1), opaque(4, 2), without(2), opaque(1, 2))}}, want{depth: 2}},
		{"two opaque hashes of one block", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2), opaque(0, 11, 12, 13), without(1))}}, want{depth: 3}},
		{"an opaque chain has to hang together", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2, 3), opaque(0, 11, 12), without(1))}}, want{depth: 2}},
		{"opaque hashes, cleared", []step{{hasher: index.Opaque, events: events(opaque(0, 1, 2), cleared, opaque(1, 2))}}, want{}},
		{"too few opaque hashes", []step{{hasher: index.Opaque, events: events(stored(index.Stored{Locals: prompt, Hashes: seqs[:1]}))}}, want{incomplete: true, count: "rejected"}},
		{"an opaque block is its own parent", []step{{hasher: index.Opaque, events: events(opaque(3, 3))}}, want{incomplete: true, count: "rejected"}},
		{"hashes of another hasher", []step{{events: events(stored(index.Stored{Locals: prompt[:1], Hashes: seqs[:1]}))}}, want{incomplete: true, count: "rejected"}},
		{"opaque hasher without hashes", []step{{hasher: index.Opaque, events: events(root(1))}}, want{incomplete: true, count: "rejected"}},

		{"not yet silent", []step{{events: events(root(4))}, {worker: "v", at: grace - 1, events: events(cleared)}}, want{depth: 4}},
		{"silent for the grace", []step{{events: events(root(4))}, {worker: "v", at: grace, events: events(cleared)}}, want{count: "silent"}},
		{"silent on a partition where nothing happens", []step{{events: events(root(4))}, {partition: 1, worker: "v", at: grace, events: events(cleared)}}, want{depth: 4}},
		{"kept by a heartbeat", []step{{events: events(root(4))}, {at: grace - 1}, {worker: "v", at: grace, events: events(cleared)}}, want{depth: 4}},
		{"not kept by a stale record", []step{{events: events(root(4))}, {at: grace - 1, epoch: -1}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"not kept by another producer", []step{{events: events(root(4))}, {at: grace - 1, producer: "q", seq: 1, events: events(cleared)}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"not kept by another model", []step{{events: events(root(4))}, {at: grace - 1, model: "n", seq: 1, events: events(cleared)}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"not kept by a duplicate", []step{{events: events(root(4))}, {at: grace - 1, events: events(cleared)}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"not kept by an old heartbeat", []step{{events: events(root(4))}, {at: grace - 1, seq: -1}, {worker: "v", at: grace}}, want{count: "silent"}},
		{"back in the epoch after silence", []step{{events: events(root(4))}, {at: grace, seq: 1, events: events(root(4))}}, want{count: "retired"}},
		{"back in the epoch once forgotten", []step{{events: events(root(4))}, {at: 2 * grace, seq: 1, events: events(root(4))}}, want{depth: 4, incomplete: true, count: "forgotten"}},

		{"moves with a newer epoch", []step{{events: events(root(4))}, {partition: 1, epoch: 1, events: events(root(2))}}, want{depth: 2}},
		{"moves whichever partition is read first", []step{{partition: 1, epoch: 1, events: events(root(2))}, {events: events(root(4))}}, want{depth: 2}},
		{"refused on a second partition", []step{{at: 1, events: events(root(2))}, {partition: 1, at: 2, seq: 1, events: events(root(4))}}, want{depth: 2, incomplete: true}},
		{"older on the second partition", []step{{at: 2, events: events(root(2))}, {partition: 1, at: 1, events: events(root(4))}}, want{depth: 4, incomplete: true}},
		{"of equal age, the lower partition", []step{{partition: 1, events: events(root(2))}, {events: events(root(4))}}, want{depth: 4, incomplete: true}},
		{"a clear does not end a rivalry", []step{{at: 1, events: events(root(2))}, {partition: 1, at: 2, events: events(root(4))}, {at: 3, seq: 1, events: events(cleared, root(3))}}, want{depth: 3, incomplete: true}},
		{"a newer epoch does", []step{{at: 1, events: events(root(2))}, {partition: 1, at: 2, events: events(root(4))}, {at: 3, epoch: 1, events: events(root(3))}}, want{depth: 3}},
		{"and so does its being forgotten", []step{{partition: 1, events: events(root(4))}, {at: 1, events: events(root(2))}, {worker: "v", at: 2*grace + 1}}, want{depth: 4, count: "forgotten"}},
		{"an older epoch elsewhere harms nobody", []step{{epoch: 1, events: events(root(2))}, {partition: 1, events: events(root(4))}}, want{depth: 2}},
		{"a sibling's newer epoch does not bring it along", []step{{partition: 1, at: 1, rank: 1, epoch: 4}, {at: 2, epoch: 3, events: events(root(4))}, {at: 3, rank: 1, epoch: 5}}, want{}},
		{"one that begins anew elsewhere is nowhere while a sibling holds the worker", []step{{at: 1, epoch: 4, events: events(root(4))}, {at: 2, rank: 1, epoch: 5}, {partition: 1, at: 3, epoch: 5, events: events(root(2))}}, want{}},
		{"moves back once forgotten", []step{{epoch: 1, events: events(root(4))}, {worker: "v", at: 2 * grace, events: events(cleared)}, {partition: 1, at: 3 * grace, events: events(root(2))}}, want{depth: 2, count: "forgotten"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := New(grace * time.Millisecond)
			apply(t, o, c.steps...)
			w := WorkerRank{"w", 0}
			if got := o.Depths("m", 16, prompt)[w][index.Device]; got != c.want.depth {
				t.Errorf("depth %d, want %d", got, c.want.depth)
			}
			for _, s := range o.Workers() {
				if s.WorkerRank == w && s.Incomplete != c.want.incomplete {
					t.Errorf("incomplete %v, want %v", s.Incomplete, c.want.incomplete)
				}
			}
			if c.want.count != "" && o.Counts()[c.want.count] != 1 {
				t.Errorf("counts %v, want one %s", o.Counts(), c.want.count)
			}
		})
	}
}

func TestDepthsAreOfTheModel(t *testing.T) {
	o := New(time.Hour)
	apply(t, o,
		step{worker: "a", events: events(root(1))},
		step{worker: "b", rank: 3, events: events(root(2))},
		step{worker: "c", model: "n", events: events(root(3))},
		step{worker: "d", blockSize: 32, events: events(root(4))})
	want := map[WorkerRank]index.Depths{{"a", 0}: {1, 1, 1, 1}, {"b", 3}: {2, 2, 2, 2}}
	if got := o.Depths("m", 16, prompt); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := o.Depths("m", 16, nil); len(got) != 0 {
		t.Errorf("depths of no blocks: %v", got)
	}
}

func TestDepthsByTier(t *testing.T) {
	o := New(time.Hour)
	apply(t, o,
		step{worker: "a", events: events(root(1), on(index.Host, part(1, 2)), on(index.External, part(2, 4)))},
		step{worker: "b", events: events(root(4), on(index.Host, root(4)), removed(1), on(index.Host, removed(2)))},
		step{worker: "c", events: events(on(index.Disk, root(3)), on(index.Disk, removed(0)))},
		step{worker: "d", events: events(on(index.Disk, root(3)))},
		step{worker: "e", hasher: index.Opaque, events: events(opaque(0, 1), on(index.Host, opaque(1, 2, 3)), on(index.External, opaque(3, 4)))})
	want := map[WorkerRank]index.Depths{{"a", 0}: {1, 2, 2, 4}, {"b", 0}: {1, 4, 4, 4}, {"d", 0}: {0, 0, 3, 3}, {"e", 0}: {1, 3, 3, 4}}
	if got := o.Depths("m", 16, prompt); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestWorkers(t *testing.T) {
	o := New(time.Hour)
	apply(t, o,
		step{worker: "b", partition: 2, at: 7, rank: 1, epoch: 5, events: events(root(3), on(index.Disk, root(2)), removed(0))},
		step{worker: "a", at: 9, hasher: index.Dynamo, events: events(root(1), retired)})
	want := []State{
		{WorkerRank: WorkerRank{"a", 0}, Model: "m", BlockSize: 16, Hasher: "dynamo", Producer: "p", Heard: 9, Retired: true},
		{WorkerRank: WorkerRank{"b", 1}, Partition: 2, Model: "m", BlockSize: 16, Hasher: "flash", Producer: "p", Epoch: 5, Heard: 7, Blocks: [index.Tiers]int{2, 0, 2, 0}},
	}
	if got := o.Workers(); !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

// The order in which partitions are read does not matter.
func TestPartitionsInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		partitions := make([][]step, 3)
		for p := range partitions {
			at := int64(0)
			for range rng.IntN(12) {
				at += rng.Int64N(60)
				s := step{partition: int32(p), at: at, worker: string(rune('a' + rng.IntN(2))), rank: rng.Int32N(2), epoch: rng.Int64N(3), seq: rng.Int64N(3)}
				s.events = [][]schemas.Event{nil, {root(1 + rng.IntN(4))}, {part(1, 3)}, {removed(rng.IntN(4))}, {cleared}, {retired}}[rng.IntN(6)]
				partitions[p] = append(partitions[p], s)
			}
		}
		read := func(pick func(left []int) int) ([]State, map[WorkerRank]index.Depths) {
			o := New(grace * time.Millisecond)
			at := make([]int, len(partitions))
			for {
				var left []int
				for p := range partitions {
					if at[p] < len(partitions[p]) {
						left = append(left, p)
					}
				}
				if left == nil {
					return o.Workers(), o.Depths("m", 16, prompt)
				}
				p := pick(left)
				apply(t, o, partitions[p][at[p]])
				at[p]++
			}
		}
		first, firstDepths := read(func(left []int) int { return left[0] })
		for _, pick := range []func([]int) int{
			func(left []int) int { return left[len(left)-1] },
			func(left []int) int { return left[rng.IntN(len(left))] },
		} {
			if other, depths := read(pick); !reflect.DeepEqual(other, first) || !reflect.DeepEqual(depths, firstDepths) {
				t.Fatalf("seed %d: in one order\n%+v\n%v\nin another\n%+v\n%v", seed, first, firstDepths, other, depths)
			}
		}
	}
}

func TestChains(t *testing.T) {
	o := New(time.Hour)
	fork := schemas.Event{Stored: index.Stored{HasParent: true, Parent: seqs[0], Locals: []index.LocalHash{99}}}
	orphan := schemas.Event{Stored: index.Stored{HasParent: true, Parent: 12345, Locals: []index.LocalHash{7}}}
	apply(t, o,
		step{worker: "a", events: events(root(4), fork, orphan, removed(1))},
		step{worker: "b", events: events(root(2), on(index.Host, root(4)))})
	got := make(map[string][][]index.LocalHash)
	for _, l := range o.leaves() {
		if l.model != "m" || l.blockSize != 16 {
			t.Errorf("leaf of model %s of %d", l.model, l.blockSize)
		}
		if locals := o.chain(l); locals != nil {
			got[l.Worker] = append(got[l.Worker], locals)
		}
	}
	for _, chains := range got {
		slices.SortFunc(chains, slices.Compare)
	}
	want := map[string][][]index.LocalHash{"a": {{11, 22, 33, 44}, {11, 99}}, "b": {{11, 22, 33, 44}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestQueries(t *testing.T) {
	o := New(time.Hour)
	if q := o.Queries(rand.New(rand.NewPCG(1, 2)), 10); len(q) != 0 {
		t.Errorf("queries of nothing: %v", q)
	}
	apply(t, o, step{worker: "a", events: events(root(4))}, step{worker: "b", events: events(root(2))})
	queries := o.Queries(rand.New(rand.NewPCG(1, 2)), 100)
	if len(queries) != 100 {
		t.Fatalf("%d queries", len(queries))
	}
	if again := o.Queries(rand.New(rand.NewPCG(1, 2)), 100); !reflect.DeepEqual(again, queries) {
		t.Error("the same seed gives other queries")
	}
	seen := make(map[int]int)
	for _, q := range queries {
		seen[o.Depths(q.Model, q.BlockSize, q.Locals)[WorkerRank{"a", 0}][index.Device]]++
	}
	for depth := range 5 {
		if seen[depth] == 0 {
			t.Errorf("no query of depth %d: %v", depth, seen)
		}
	}
}
