// This file measures a feed.

package relay

import (
	"context"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"github.com/twmb/franz-go/pkg/kgo"
)

// discard takes every record at once.
type discard struct{ bytes int64 }

func (d *discard) TryProduce(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	d.bytes += int64(len(r.Value))
	done(r, nil)
}

const benchTokens = 16 // a block

// benchStores is a payload of vLLM's newest shape: events of blocks each, hashes
// and tokens from seed on.
func benchStores(events, blocks int, seed uint64) []byte {
	p := msgp.AppendArrayHeader(nil, 3)
	p = msgp.AppendFloat64(p, 1.7e9)
	p = msgp.AppendArrayHeader(p, uint32(events))
	for range events {
		p = msgp.AppendMapHeader(p, 9)
		p = msgp.AppendString(msgp.AppendString(p, "type"), "BlockStored")
		p = msgp.AppendArrayHeader(msgp.AppendString(p, "block_hashes"), uint32(blocks))
		first := seed
		for range blocks {
			seed++
			p = msgp.AppendUint64(p, seed*0x9e3779b97f4a7c15)
		}
		p = msgp.AppendNil(msgp.AppendString(p, "parent_block_hash"))
		p = msgp.AppendArrayHeader(msgp.AppendString(p, "token_ids"), uint32(blocks*benchTokens))
		for i := range blocks * benchTokens {
			p = msgp.AppendUint64(p, (first*31+uint64(i)*(7919+first/4096))%150000)
		}
		p = msgp.AppendInt(msgp.AppendString(p, "block_size"), benchTokens)
		p = msgp.AppendNil(msgp.AppendString(p, "lora_id"))
		p = msgp.AppendString(msgp.AppendString(p, "medium"), "GPU")
		p = msgp.AppendInt(msgp.AppendString(p, "group_idx"), 0)
		p = msgp.AppendString(msgp.AppendString(p, "kv_cache_spec_kind"), "full_attention")
	}
	return msgp.AppendInt(p, 3)
}

// benchRemovals removes the blocks of benchStores, one event each, leaf first.
func benchRemovals(blocks int, seed uint64) []byte {
	p := msgp.AppendArrayHeader(nil, 3)
	p = msgp.AppendFloat64(p, 1.7e9)
	p = msgp.AppendArrayHeader(p, uint32(blocks))
	for i := range uint64(blocks) {
		p = msgp.AppendMapHeader(p, 4)
		p = msgp.AppendString(msgp.AppendString(p, "type"), "BlockRemoved")
		p = msgp.AppendArrayHeader(msgp.AppendString(p, "block_hashes"), 1)
		p = msgp.AppendUint64(p, (seed+uint64(blocks)-i)*0x9e3779b97f4a7c15)
		p = msgp.AppendString(msgp.AppendString(p, "medium"), "GPU")
		p = msgp.AppendInt(msgp.AppendString(p, "group_idx"), 0)
	}
	return msgp.AppendInt(p, 3)
}

// benchFeed returns a feed that writes to nowhere.
func benchFeed(b *testing.B) *feed {
	c := testConfig(time.Now)
	c.engine.Hasher.BlockSize = benchTokens
	f := newTestFeed(b, &discard{}, c)
	f.empty(true, causeStart)
	return f
}

// BenchmarkFeed takes in payloads, of stores and, after 131,072 blocks, of as
// many removals, and writes their records to nowhere.
func BenchmarkFeed(b *testing.B) {
	for _, bench := range []struct {
		name           string
		events, blocks int // of a payload of stores; blocks of an event
	}{
		{"1 event of 1 block", 1, 1},
		{"8 events of 16 blocks", 8, 16},
	} {
		b.Run(bench.name, func(b *testing.B) {
			blocks := bench.events * bench.blocks
			batches := 131_072 / blocks
			stores, removals := make([][]byte, batches), make([][]byte, batches)
			for i := range stores {
				stores[i] = benchStores(bench.events, bench.blocks, uint64(i*blocks))
				removals[i] = benchRemovals(blocks, uint64(i*blocks))
			}
			f := benchFeed(b)
			for _, p := range stores {
				f.apply(p)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				f.apply(removals[i%batches])
				f.apply(stores[i%batches])
				i++
			}
			if f.counts.payloads.Load() > 0 || f.state != writing || f.mapping.Len(0) != 131_072 {
				b.Fatalf("%s, %d blocks", f.state, f.mapping.Len(0))
			}
			seconds := b.Elapsed().Seconds() / float64(b.N)
			b.ReportMetric(2/seconds, "batches/s")
			b.ReportMetric(float64(2*blocks)/seconds, "blocks/s")
		})
	}
}

// BenchmarkEpoch begins an epoch with 131,072 blocks in chains of 16, written to
// nowhere.
func BenchmarkEpoch(b *testing.B) {
	f := benchFeed(b)
	for i := range uint64(1024) {
		f.apply(benchStores(8, 16, i*128))
	}
	b.ReportAllocs()
	for b.Loop() {
		f.hold()
		f.release()
	}
	if f.mapping.Len(0) != 131_072 {
		b.Fatal(f.mapping.Len(0))
	}
	b.ReportMetric(131_072*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}

// BenchmarkCheckpoint makes and reads a checkpoint of 131,072 blocks, without the
// disk.
func BenchmarkCheckpoint(b *testing.B) {
	f := benchFeed(b)
	for i := range uint64(1024) {
		f.apply(benchStores(8, 16, i*128))
	}
	f.at(position{next: 1024})
	p := f.appendCheckpoint(nil)
	b.Run("append", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			p = f.appendCheckpoint(p[:0])
		}
	})
	b.Run("load", func(b *testing.B) {
		b.SetBytes(int64(len(p)))
		for b.Loop() {
			c, err := parseCheckpoint(p, f.cfg.identity())
			if err == nil {
				err = f.mapping.Load(c.mapping)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestFeedAllocates little: a batch that was taken in before costs a map's growth
// now and then.
func TestFeedAllocatesLittle(t *testing.T) {
	f := newTestFeed(t, &discard{}, testConfig(time.Now))
	f.empty(true, causeStart)
	stored, removed := storedBatch(64, 1), removedBatch(64, 1)
	round := func() {
		f.applyBatch(stored)
		f.applyBatch(removed)
	}
	round()
	if n := testing.AllocsPerRun(200, round); n > 4 {
		t.Errorf("%v allocations for two batches and their records", n)
	}
	if f.state != writing || f.record.Seq < 400 {
		t.Errorf("%s, seq %d", f.state, f.record.Seq)
	}
}
