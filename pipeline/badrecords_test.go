package pipeline

// This file holds the stage to what it does with a record that is not as it
// should be, between others that are: it is counted once, logged with its place
// and changes nothing else, in memory and after a restart.

import (
	"encoding/binary"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// scene is where a bad record appears: p's worker has stored one chain and
// will store another.
type scene struct {
	p    *producer
	read func() // waits until the stage has read everything
}

// like returns a producer of p's worker-rank and sequence, to be altered.
func (s scene) like(change func(*schemas.Batch)) *producer {
	other := *s.p
	other.batch.Producer = append([]byte(nil), s.p.batch.Producer...)
	change(&other.batch)
	return &other
}

// onePartitionOn is like, on another partition.
func (s scene) onePartitionOn(change func(*schemas.Batch)) *producer {
	other := s.like(change)
	other.partition = (s.p.partition + 1) % 4
	return other
}

// worker returns a producer of another worker of the same partition.
func (s scene) worker(suffix string, change func(*schemas.Batch)) *producer {
	return s.like(func(b *schemas.Batch) {
		b.Worker = append(append([]byte(nil), b.Worker...), suffix...)
		b.Seq = -1
		change(b)
	})
}

// bytes sends what mangle makes of p's next record, which p itself never sends.
func (s scene) bytes(mangle func(value []byte) []byte) *kgo.Record {
	value := s.like(func(*schemas.Batch) {}).encode(stored(nil, locals(5, 6)...))
	return s.p.raw(s.p.batch.Worker, mangle(value))
}

// events sends a record of p whose events array is given in Avro.
func (s scene) events(avro ...byte) *kgo.Record {
	heartbeat := s.like(func(*schemas.Batch) {}).encode()
	return s.p.raw(s.p.batch.Worker, append(heartbeat[:len(heartbeat)-1], avro...)) // without the array's end
}

// long is Avro's encoding of numbers, one after the other.
func long(numbers ...int64) (out []byte) {
	for _, n := range numbers {
		out = binary.AppendVarint(out, n)
	}
	return out
}

// The counters that must change by nothing but what a case says.
var watched = []counter{
	recordsHeartbeat, recordsUndecodable, recordsKeyMismatch, recordsInvalid, recordsWrongPartition, recordsStaleEpoch,
	recordsRetired, recordsSecondProducer, recordsIdentityChange, recordsDuplicate, recordsRefusedModel, gaps, eventsRejected,
	eventsOpaque, blocksOrphan, blocksContradiction, removesUnknown, workersRetired, workersMoved,
}

// unlogged are those that are no fault of a record.
var unlogged = map[counter]bool{
	recordsHeartbeat: true, blocksOrphan: true, blocksContradiction: true, removesUnknown: true, workersRetired: true, workersMoved: true,
}

type counts map[counter]int64

func (in *instance) watched() counts {
	out := counts{}
	all := in.Status().Counters
	for _, k := range watched {
		out[k] = all[counterNames[k].name]
	}
	return out
}

func (c counts) minus(d counts) counts {
	out := counts{}
	for k, n := range c {
		if n != d[k] {
			out[k] = n - d[k]
		}
	}
	return out
}

func (c counts) String() string {
	named := map[string]int64{}
	for k, n := range c {
		named[counterNames[k].name] = n
	}
	return fmt.Sprint(named)
}

// badRecords are the cases. Each sends one record, which it returns, between
// two good ones of p.
var badRecords = []struct {
	name       string
	send       func(s scene) *kgo.Record
	want       counts
	incomplete bool // p's worker-rank afterwards
}{
	{"random bytes", func(s scene) *kgo.Record {
		return s.bytes(func([]byte) []byte { return []byte("nonsense of some length") })
	}, counts{recordsUndecodable: 1}, false},
	{"corrupt body", func(s scene) *kgo.Record {
		return s.bytes(func(v []byte) []byte { copy(v[10:], "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"); return v })
	}, counts{recordsUndecodable: 1}, false},
	{"wrong magic", func(s scene) *kgo.Record { return s.bytes(func(v []byte) []byte { v[0] = 0; return v }) }, counts{recordsUndecodable: 1}, false},
	{"unknown fingerprint", func(s scene) *kgo.Record { return s.bytes(func(v []byte) []byte { v[5] ^= 0x55; return v }) }, counts{recordsUndecodable: 1}, false},
	{"truncated", func(s scene) *kgo.Record { return s.bytes(func(v []byte) []byte { return v[:len(v)-5] }) }, counts{recordsUndecodable: 1}, false},
	{"truncated in its framing", func(s scene) *kgo.Record { return s.bytes(func(v []byte) []byte { return v[:7] }) }, counts{recordsUndecodable: 1}, false},
	{"bytes left over", func(s scene) *kgo.Record { return s.bytes(func(v []byte) []byte { return append(v, 0) }) }, counts{recordsUndecodable: 1}, false},
	{"null value", func(s scene) *kgo.Record { return s.bytes(func([]byte) []byte { return nil }) }, counts{recordsUndecodable: 1}, false},
	{"empty value", func(s scene) *kgo.Record { return s.bytes(func([]byte) []byte { return []byte{} }) }, counts{recordsUndecodable: 1}, false},
	{"2^31-1 events", func(s scene) *kgo.Record { return s.events(long(1<<31-1, 3)...) }, counts{recordsUndecodable: 1}, false},
	{"2^62 events", func(s scene) *kgo.Record { return s.events(long(1<<62, 3)...) }, counts{recordsUndecodable: 1}, false},
	{"-2^63 events", func(s scene) *kgo.Record { return s.events(long(-1<<63, 3)...) }, counts{recordsUndecodable: 1}, false},
	{"-2^31 events in -1 bytes", func(s scene) *kgo.Record { return s.events(long(-1<<31, -1, 3)...) }, counts{recordsUndecodable: 1}, false},
	{"2^31-1 hashes removed", func(s scene) *kgo.Record { return s.events(long(1, 1, 0, 1<<31-1)...) }, counts{recordsUndecodable: 1}, false},
	{"2^62 hashes removed", func(s scene) *kgo.Record { return s.events(long(1, 1, 0, 1<<62)...) }, counts{recordsUndecodable: 1}, false},
	{"event of no kind", func(s scene) *kgo.Record { return s.events(long(1, 9, 0, 0)...) }, counts{recordsUndecodable: 1}, false},

	{"key of another worker", func(s scene) *kgo.Record {
		return s.p.raw([]byte("another"), s.like(func(*schemas.Batch) {}).encode(stored(nil, 1)))
	}, counts{recordsKeyMismatch: 1}, false},
	{"no key", func(s scene) *kgo.Record { return s.p.raw(nil, s.like(func(*schemas.Batch) {}).encode(stored(nil, 1))) }, counts{recordsKeyMismatch: 1}, false},
	{"no worker", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.Worker = nil }).send(stored(nil, 1))
	}, counts{recordsInvalid: 1}, false},
	{"no model", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.Model = nil }).send(stored(nil, 1))
	}, counts{recordsInvalid: 1}, false},
	{"block size 0", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.BlockSize = 0 }).send(stored(nil, 1))
	}, counts{recordsInvalid: 1}, false},
	{"negative rank", func(s scene) *kgo.Record { return s.like(func(b *schemas.Batch) { b.Rank = -1 }).send(stored(nil, 1)) }, counts{recordsInvalid: 1}, false},
	{"negative seq", func(s scene) *kgo.Record { return s.like(func(b *schemas.Batch) { b.Seq = -3 }).send(stored(nil, 1)) }, counts{recordsInvalid: 1}, false},

	{"older epoch", func(s scene) *kgo.Record { return s.like(func(b *schemas.Batch) { b.Epoch-- }).send(cleared()) }, counts{recordsStaleEpoch: 1}, false},
	{"second producer", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.Producer = []byte("intruder") }).send(cleared())
	}, counts{recordsSecondProducer: 1}, true},
	{"other model in the epoch", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.Model = []byte("m2") }).send(cleared())
	}, counts{recordsIdentityChange: 1}, true},
	{"other block size in the epoch", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.BlockSize = 32 }).send(cleared())
	}, counts{recordsIdentityChange: 1}, true},
	{"other hasher in the epoch", func(s scene) *kgo.Record {
		return s.like(func(b *schemas.Batch) { b.Hasher = index.Dynamo }).send(cleared())
	}, counts{recordsIdentityChange: 1}, true},
	{"duplicate", func(s scene) *kgo.Record { return s.like(func(b *schemas.Batch) { b.Seq-- }).send(cleared()) }, counts{recordsDuplicate: 1}, false},
	{"gap", func(s scene) *kgo.Record {
		s.p.batch.Seq += 3
		return s.p.send(stored(nil, 1))
	}, counts{gaps: 1}, true},
	{"gap mended by a clear", func(s scene) *kgo.Record {
		s.p.batch.Seq += 3
		return s.p.send(cleared())
	}, counts{gaps: 1}, false},
	{"first record above 0", func(s scene) *kgo.Record {
		return s.worker("-late", func(b *schemas.Batch) { b.Seq = 6 }).send(stored(nil, 1))
	}, counts{gaps: 1}, false},
	{"heartbeat", func(s scene) *kgo.Record { return s.p.send() }, counts{recordsHeartbeat: 1}, false},
	{"heartbeat after lost records", func(s scene) *kgo.Record {
		s.p.batch.Seq += 2
		return s.p.send()
	}, counts{recordsHeartbeat: 1, gaps: 1}, true},
	{"late batch of a retired worker", func(s scene) *kgo.Record {
		s.p.send(retired())
		late := s.p.send(stored(nil, locals(5, 6)...))
		s.p.renew()
		return late
	}, counts{recordsRetired: 1, workersRetired: 1}, false},

	{"root of null hash", func(s scene) *kgo.Record { return s.p.send(stored(nil, 0)) }, counts{eventsRejected: 1}, true},
	{"parent of null hash", func(s scene) *kgo.Record { return s.p.send(stored(new(index.SeqHash), 1)) }, counts{eventsRejected: 1}, true},
	{"no blocks", func(s scene) *kgo.Record { return s.p.send(stored(nil)) }, counts{eventsRejected: 1}, true},
	{"position below any", func(s scene) *kgo.Record {
		e := stored(nil, 1)
		e.Stored.Position = -7
		return s.p.send(e)
	}, counts{eventsRejected: 1}, true},
	{"a rejected event between others", func(s scene) *kgo.Record {
		return s.p.send(stored(nil, locals(5, 6)...), stored(nil), removed(index.SeqHash(locals(5, 1)[0])))
	}, counts{eventsRejected: 1}, true},
	{"block that is its own parent", func(s scene) *kgo.Record {
		e := stored(nil, 1)
		e.Stored.HasParent, e.Stored.Parent, e.Stored.Hashes = true, 77, []index.SeqHash{77}
		return s.worker("-opaque", func(b *schemas.Batch) { b.Model, b.Hasher = []byte("o"), index.Opaque }).send(e)
	}, counts{eventsRejected: 1}, false},
	{"hashes of another hasher", func(s scene) *kgo.Record {
		e := stored(nil, 1)
		e.Stored.Hashes = []index.SeqHash{77}
		return s.p.send(e)
	}, counts{eventsOpaque: 1}, true},
	{"opaque hasher without hashes", func(s scene) *kgo.Record {
		return s.worker("-opaque", func(b *schemas.Batch) { b.Model, b.Hasher = []byte("o"), index.Opaque }).send(stored(nil, 1))
	}, counts{eventsRejected: 1}, false},

	{"orphan chain", func(s scene) *kgo.Record {
		chain := locals(6, 5)
		parent := index.Chain(nil, chain)[1]
		rec := s.p.send(stored(&parent, chain[2:]...))
		return rec
	}, counts{blocksOrphan: 1}, false},
	{"orphan chain whose parent arrives", func(s scene) *kgo.Record {
		chain := locals(6, 5)
		parent := index.Chain(nil, chain)[1]
		rec := s.p.send(stored(&parent, chain[2:]...))
		s.p.send(stored(nil, chain[:2]...))
		return rec
	}, counts{blocksOrphan: 1}, false},
	{"position that the parent contradicts", func(s scene) *kgo.Record {
		e := stored(nil, locals(6, 3)...)
		e.Stored.Position = 9
		return s.p.send(e)
	}, counts{blocksContradiction: 3}, false},
	{"removal of what is not held", func(s scene) *kgo.Record { return s.p.send(removed(1, 2)) }, counts{removesUnknown: 2}, false},

	{"wrong partition, same epoch", func(s scene) *kgo.Record {
		return s.onePartitionOn(func(*schemas.Batch) {}).send(cleared())
	}, counts{recordsWrongPartition: 1}, true},
	{"wrong partition, older epoch", func(s scene) *kgo.Record {
		return s.onePartitionOn(func(b *schemas.Batch) { b.Epoch-- }).send(cleared())
	}, counts{recordsWrongPartition: 1}, false},
	{"another partition, newer epoch", func(s scene) *kgo.Record {
		old := s.like(func(*schemas.Batch) {})
		s.p.partition = (s.p.partition + 1) % 4
		s.p.renew()
		s.p.send(stored(nil, locals(5, 6)...))
		s.read()
		return old.send(stored(nil, locals(7, 6)...))
	}, counts{workersMoved: 1, recordsWrongPartition: 1}, false},
}

func TestBadRecordsBetweenGoodOnes(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 4)
		one := r.start()
		cl := r.client()
		var others []*producer // one a partition
		for p := range int32(4) {
			o := r.produce(fmt.Sprintf("bystander-%d", p), 0)
			o.partition = p
			o.send(stored(nil, locals(1, 4)...))
			others = append(others, o)
		}
		for i, c := range badRecords {
			t.Run(c.name, func(t *testing.T) {
				r.t = t
				p := &producer{r: r, cl: cl, partition: int32(i % 4), batch: schemas.Batch{
					Producer: []byte("producer-5"), Worker: fmt.Appendf(nil, "case-%d", i), Epoch: 5, Seq: -1,
					Model: []byte(testModel), BlockSize: testBlockSize,
				}}
				p.send(stored(nil, locals(2, 4)...))
				one.caughtUp()
				r.nextMillisecond() // of two equally old claims to a worker the lower partition's wins
				before := one.watched()
				bad := c.send(scene{p, one.caughtUp})
				others[bad.Partition].send(stored(nil, locals(uint64(1000+i), 3)...))
				chain := locals(uint64(2000+i), 8)
				p.send(stored(nil, chain...))
				one.same(uint64(i), 20)
				one.eventually(func() error {
					if got := one.watched().minus(before); !maps.Equal(got, c.want) {
						return fmt.Errorf("counted %v, want %v", got, c.want)
					}
					return nil
				})
				for k := range c.want {
					place := []string{"level=WARN", "reason=" + counterNames[k].name, "topic=" + r.cfg.Topic,
						fmt.Sprintf("partition=%d ", bad.Partition), fmt.Sprintf("offset=%d ", bad.Offset)}
					if got := r.logged.has(place...); got == unlogged[k] {
						t.Errorf("a log line with %q: %v, want %v", place, got, !got)
					}
				}
				for _, w := range one.Workers("") {
					if w.Worker == string(p.batch.Worker) && w.Partition == p.partition && w.Incomplete != c.incomplete {
						t.Errorf("%+v, want incomplete %v", w, c.incomplete)
					}
				}
			})
		}
		r.t = t
		one.same(1000, 200)
		counted := one.watched()

		// From snapshots nothing is read again; from the log alone everything
		// is, and counted alike but for what partitions say of each other.
		one.saved()
		two := one.restart()
		two.same(1001, 200)
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none", n)
		}
		two.abandon()
		r.cfg.SnapshotTopic = ""
		three := r.start()
		three.same(1002, 200)
		again := three.watched()
		for _, c := range []counts{counted, again} {
			for _, k := range []counter{recordsWrongPartition, workersMoved, recordsStaleEpoch, gaps} {
				delete(c, k)
			}
		}
		if diff := again.minus(counted); len(diff) > 0 {
			t.Errorf("a replay counts otherwise, by %v", diff)
		}
	})
}

// A record that is refused leaves no trace in what can be asked about: were the
// model it names made known, every query of that name would be ambiguous.
func TestRefusedRecordsMakeNoModelKnown(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 2)
	in := r.start()
	p := r.produce("w", 0)
	p.partition = 0
	p.batch.Epoch = 5
	p.send(stored(nil, locals(1, 4)...))
	in.caughtUp()
	s := scene{p, in.caughtUp}
	s.like(func(b *schemas.Batch) { b.Hasher = index.Dynamo }).send(stored(nil, 1))
	s.like(func(b *schemas.Batch) { b.BlockSize, b.Epoch = 32, 4 }).send(stored(nil, 1))
	s.onePartitionOn(func(b *schemas.Batch) { b.Hasher = index.Opaque }).send(stored(nil, 1))
	in.caughtUp()
	if _, err := in.Model(testModel, 0, ""); err != nil {
		t.Errorf("asking for the one model: %v", err)
	}
	if got := in.Status().Models; len(got) != 1 {
		t.Errorf("models %+v, want the one that has a worker", got)
	}
}

func TestModelsThatAreNotServed(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	r.cfg.Models = []ModelConfig{{testModel, testBlockSize, index.Flash}}
	in := r.start()
	p := r.produce("w", 0)
	for _, c := range []struct {
		name   string
		change func(*schemas.Batch)
	}{
		{"model", func(b *schemas.Batch) { b.Model = []byte("n") }},
		{"block size", func(b *schemas.Batch) { b.BlockSize = 32 }},
		{"hasher", func(b *schemas.Batch) { b.Hasher = index.Dynamo }},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := in.watched()
			rec := scene{p, in.caughtUp}.worker("-"+c.name, c.change).send(stored(nil, 1))
			in.caughtUp()
			if got := in.watched().minus(before); !maps.Equal(got, counts{recordsRefusedModel: 1}) {
				t.Errorf("counted %v, want one refused model", got)
			}
			r.mustSay("level=WARN", "reason=records_refused_model_total", "topic="+r.cfg.Topic, "partition=0", fmt.Sprintf("offset=%d ", rec.Offset))
		})
	}
	p.send(stored(nil, locals(1, 4)...))
	in.caughtUp()
	if all := in.Workers(""); len(all) != 1 || all[0].Worker != "w" || all[0].Blocks[index.Device] != 4 {
		t.Errorf("workers %+v, want the one whose model is served", all)
	}
}

// Only what a worker-rank says next shows that it is alive: a zombie's records
// do not keep a dead one.
func TestRefusedRecordsKeepNobodyAlive(t *testing.T) {
	for name, zombie := range map[string]func(*producer, []index.SeqHash) []byte{
		"older epoch": func(p *producer, _ []index.SeqHash) []byte { p.batch.Epoch--; return p.encode(cleared()) },
		"another producer": func(p *producer, _ []index.SeqHash) []byte {
			p.batch.Producer = []byte("q")
			return p.encode(cleared())
		},
		"another model": func(p *producer, _ []index.SeqHash) []byte { p.batch.Model = []byte("n"); return p.encode(cleared()) },
		"duplicate": func(p *producer, h []index.SeqHash) []byte {
			p.batch.Seq--
			return p.encode(removed(h...))
		},
		"old heartbeat": func(p *producer, _ []index.SeqHash) []byte { p.batch.Seq--; return p.encode() },
	} {
		t.Run(name, func(t *testing.T) {
			b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
			r := newTimedRig(t, b, 1)
			one := r.start()
			now := time.Now().Add(-100 * timedGrace).Truncate(time.Millisecond)
			chain := locals(3, 12)
			send := func(p *producer, value []byte) {
				t.Helper()
				rec := &kgo.Record{Timestamp: now, Key: p.batch.Worker, Value: value}
				if err := p.cl.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
					t.Fatal(err)
				}
			}
			dead, alive := r.produce("dead", 0), r.produce("alive", 0)
			for _, p := range []*producer{dead, alive} {
				p.partition = 0
				send(p, p.encode(stored(nil, chain...)))
				send(p, p.encode(stored(nil, locals(4, 3)...)))
			}
			for range 7 {
				now = now.Add(timedStep)
				again := *dead
				send(&again, zombie(&again, index.Chain(nil, chain)))
				send(alive, alive.encode())
			}
			one.same(1, 50)
			for _, w := range one.Workers("") {
				if w.Retired != (w.Worker == "dead") {
					t.Errorf("retired is wrong: %+v", w)
				}
			}
			one.saved()
			one.restart().same(2, 50)
		})
	}
}
