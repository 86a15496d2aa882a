// This file measures decoding and mapping.

package engine

import (
	"testing"

	"github.com/tinylib/msgp/msgp"
	"kvindex/index"
)

// blocksPayload is a batch of vLLM's newest shape: events of blocks each, 16
// tokens a block, hashes and tokens from seed on.
func blocksPayload(events, blocks int, seed uint64) []byte {
	const size = 16
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
		p = msgp.AppendArrayHeader(msgp.AppendString(p, "token_ids"), uint32(blocks*size))
		for i := range blocks * size {
			p = msgp.AppendUint64(p, (first*31+uint64(i)*(7919+first/4096))%150000)
		}
		p = msgp.AppendInt(msgp.AppendString(p, "block_size"), size)
		p = msgp.AppendNil(msgp.AppendString(p, "lora_id"))
		p = msgp.AppendString(msgp.AppendString(p, "medium"), "GPU")
		p = msgp.AppendInt(msgp.AppendString(p, "group_idx"), 0)
		p = msgp.AppendString(msgp.AppendString(p, "kv_cache_spec_kind"), "full_attention")
	}
	return msgp.AppendInt(p, 0)
}

// removedPayload removes the blocks of blocksPayload, one event each, as vLLM does.
func removedPayload(blocks int, seed uint64) []byte {
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
	return msgp.AppendInt(p, 0)
}

func BenchmarkDecode(b *testing.B) {
	for _, bench := range []struct {
		name    string
		blocks  int
		payload []byte
	}{
		{"one block", 1, blocksPayload(1, 1, 1)},
		{"8 events of 16 blocks", 128, blocksPayload(8, 16, 1)},
		{"64 removals", 64, removedPayload(64, 1)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var batch Batch
			b.SetBytes(int64(len(bench.payload)))
			b.ReportAllocs()
			for b.Loop() {
				if err := batch.Decode(bench.payload, Limits{}); err != nil {
					b.Fatal(err)
				}
			}
			report(b, 1, bench.blocks)
		})
	}
}

// report reports the rates of a loop that takes that many batches and blocks at a time.
func report(b *testing.B, batches, blocks int) {
	seconds := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(float64(batches)/seconds, "batches/s")
	b.ReportMetric(float64(blocks)/seconds, "blocks/s")
}

// BenchmarkRelay decodes and maps: 8 events of 16 blocks, and the removal of
// what came 1,024 batches before, so that 131,072 blocks are held.
func BenchmarkRelay(b *testing.B) {
	const batches, blocks = 1024, 128
	var stores, removals [batches][]byte
	for i := range stores {
		stores[i] = blocksPayload(8, 16, uint64(i*blocks))
		removals[i] = removedPayload(blocks, uint64(i*blocks))
	}
	m, err := New(Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 16}})
	if err != nil {
		b.Fatal(err)
	}
	var batch Batch
	var out Output
	apply := func(p []byte) {
		if err := batch.Decode(p, Limits{}); err != nil {
			b.Fatal(err)
		}
		out.Reset()
		for i := range batch.Events {
			m.Apply(&batch.Events[i], &out)
		}
	}
	for _, p := range stores {
		apply(p)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		apply(removals[i%batches])
		apply(stores[i%batches])
		i++
	}
	if n := m.Len(index.Device); n != batches*blocks {
		b.Fatalf("%d blocks are held, not %d: %s", n, batches*blocks, counted(&m.Counts))
	}
	report(b, 2, 2*blocks)
}

// TestDecodeAllocatesNothing holds the warm path to that, and Apply to it for
// events that change nothing.
func TestDecodeAllocatesNothing(t *testing.T) {
	var batch Batch
	var out Output
	m := newMapping(t, VLLM, 4)
	payloads, root := corpus(t, ".msgpack"), readFile(t, "vllm-0.33.0/stored_root.msgpack")
	run := func() {
		for _, p := range payloads {
			_ = batch.Decode(p, Limits{})
		}
		_ = batch.Decode(root, Limits{})
		out.Reset()
		for i := range batch.Events {
			m.Apply(&batch.Events[i], &out)
		}
	}
	run()
	if n := testing.AllocsPerRun(100, run); n > 0 {
		t.Errorf("%v allocations for %d payloads", n, len(payloads))
	}
}
