package schemas

// What decoding and encoding cost: no allocation once warm, and benchmarks
// beside goavro.

import (
	"testing"

	"kvindex/index"
)

// prefillBatch is what a worker sends after a prompt of n blocks pushed out as
// many others.
func prefillBatch(n int) *Batch {
	b := goldenBatch
	s := index.Stored{HasParent: true, Parent: 1, Position: 100}
	var removed []index.SeqHash
	for i := range n {
		s.Locals = append(s.Locals, index.LocalHash(i+1)*0x9E3779B97F4A7C15)
		removed = append(removed, index.SeqHash(i+1)*0xC2B2AE3D27D4EB4F)
	}
	b.Events = []Event{{Kind: KindStored, Stored: s}, {Kind: KindRemoved, Removed: removed}}
	return &b
}

func prefillChunk(n int) *Chunk {
	c := &Chunk{Worker: "worker-0", Generation: 1}
	for range n {
		c.Chains = append(c.Chains, Chain{Stored: prefillBatch(32).Events[0].Stored})
	}
	return c
}

func TestNoAllocationOnceWarm(t *testing.T) {
	in := prefillBatch(256)
	value, err := AppendBatch(nil, in)
	if err != nil {
		t.Fatal(err)
	}
	chunkIn := prefillChunk(100)
	chunkValue, err := AppendChunk(nil, chunkIn)
	if err != nil {
		t.Fatal(err)
	}
	var (
		batch Batch
		chunk Chunk
		dst   = make([]byte, 0, 1<<20)
		r     = NewRegistry(Limits{})
	)
	for name, f := range map[string]func() error{
		"Batch.Decode":         func() error { return batch.Decode(value) },
		"Registry.DecodeBatch": func() error { return r.DecodeBatch(&batch, value) },
		"AppendBatch":          func() error { _, err := AppendBatch(dst, in); return err },
		"DecodeChunk":          func() error { return DecodeChunk(&chunk, chunkValue) },
		"AppendChunk":          func() error { _, err := AppendChunk(dst, chunkIn); return err },
		"AppendManifest":       func() error { _, err := AppendManifest(dst, &goldenManifest); return err },
		"AppendFloor":          func() error { AppendFloor(dst, &goldenFloor); return nil },
	} {
		var err error
		if n := testing.AllocsPerRun(20, func() { err = f() }); n != 0 || err != nil {
			t.Errorf("%s: %v allocations, error %v", name, n, err)
		}
	}
}

// perBlock runs op, which handles one value of n blocks.
func perBlock(b *testing.B, bytes, n int, op func() error) {
	b.ReportAllocs()
	b.SetBytes(int64(bytes))
	for b.Loop() {
		if err := op(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}

func BenchmarkBatch(b *testing.B) {
	const n = 64
	in := prefillBatch(n)
	value, err := AppendBatch(nil, in)
	if err != nil {
		b.Fatal(err)
	}
	native := nativeBatch(in)
	var batch Batch
	dst := make([]byte, 0, len(value))
	b.Run("decode/hot", func(b *testing.B) {
		perBlock(b, len(value), 2*n, func() error { return batch.Decode(value) })
	})
	b.Run("decode/goavro", func(b *testing.B) {
		perBlock(b, len(value), 2*n, func() error { _, err := GoavroDecode(value); return err })
	})
	b.Run("encode/hot", func(b *testing.B) {
		perBlock(b, len(value), 2*n, func() error { _, err := AppendBatch(dst, in); return err })
	})
	b.Run("encode/goavro", func(b *testing.B) {
		perBlock(b, len(value), 2*n, func() error { _, err := batchSchema.SingleFromNative(dst, native); return err })
	})
}

func BenchmarkChunk(b *testing.B) {
	in := prefillChunk(2000)
	value, err := AppendChunk(nil, in)
	if err != nil {
		b.Fatal(err)
	}
	var c Chunk
	b.Run("decode", func(b *testing.B) {
		perBlock(b, len(value), 2000*32, func() error { return DecodeChunk(&c, value) })
	})
	b.Run("encode", func(b *testing.B) {
		dst := make([]byte, 0, len(value))
		perBlock(b, len(value), 2000*32, func() error { _, err := AppendChunk(dst, in); return err })
	})
}
