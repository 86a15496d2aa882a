package schemas

// Golden records: bytes that goavro made, which every later version must still
// read and write.

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"kvindex/index"
)

var update = flag.Bool("update", false, "write testdata anew, with goavro")

var (
	goldenBatch = Batch{
		Producer: []byte("engine-7f"), Worker: []byte("worker-0"), Rank: 3,
		Epoch: 1767225600000, Seq: 41, Timestamp: 1767225600123,
		Model: []byte("llama"), BlockSize: 16, Hasher: index.Dynamo,
		Events: []Event{
			{Kind: KindStored, Stored: index.Stored{Position: 0, Locals: []index.LocalHash{11, 22, 1<<64 - 1}}},
			{Kind: KindStored, Tier: index.Host, Stored: index.Stored{
				HasParent: true, Parent: 3257565445809651757, Position: index.NoPosition, Locals: []index.LocalHash{33}}},
			{Kind: KindRemoved, Tier: index.Disk, Removed: []index.SeqHash{1 << 63, 7}},
			{Kind: KindCleared, Tier: index.External},
			{Kind: KindCleared, AllTiers: true},
			{Kind: KindRetired},
		},
	}
	goldenHeartbeat = Batch{Producer: []byte("p"), Worker: []byte("wörker"), Epoch: 1, Seq: -1, Model: []byte("m"), BlockSize: 64}
	goldenOpaque    = Batch{
		Producer: []byte("p"), Worker: []byte("w"), Epoch: 2, Model: []byte("m"), BlockSize: 1, Hasher: index.Opaque,
		Events: []Event{{Kind: KindStored, Stored: index.Stored{
			HasParent: true, Parent: 9, Position: 5, Locals: []index.LocalHash{1, 2}, Hashes: []index.SeqHash{3, 4}}}},
	}
	goldenChunk = Chunk{Worker: "worker-0", Rank: 1, Generation: 1767225600000, Index: 2, Chains: []Chain{
		{Stored: index.Stored{Position: 0, Locals: []index.LocalHash{11, 22}}},
		{Tier: index.Host, Stored: index.Stored{HasParent: true, Parent: 750553365844651409, Position: 2, Locals: []index.LocalHash{33}}},
	}}
	goldenManifest = Manifest{
		Format: SnapshotFormat, Worker: "worker-0", Rank: 1, Generation: 1767225600000, W: 1 << 40, LeaderEpoch: -1,
		TopicID: [16]byte{0xde, 0xad, 0xbe, 0xef, 15: 1}, Partitions: 8, Model: "llama", BlockSize: 16, Hasher: index.Flash,
		Epoch: 1767225600000, EpochStarted: 1767225600001, Seq: 99, Producer: "engine-7f", LastHeard: 1767225600002,
		LastOffset: 1<<40 - 1, Incomplete: true, PastLostAt: 1767225600004, Disputed: true, Retired: true, RetiredAt: 1767225600003, Chunks: 2, Bytes: 1234,
		CRC32C: []uint32{0, 1<<32 - 1},
	}
	goldenFloor = Floor{Format: SnapshotFormat, Offset: 1 << 40, TopicID: [16]byte{1, 2, 3}, Partitions: 8, PastLostAt: 1767225600001, Written: 1767225600000}
)

// golden is one record in all of its forms.
type golden struct {
	file   string
	schema compiled
	native map[string]any
	encode func() ([]byte, error)
	decode func(value []byte) (map[string]any, error) // to native
}

func goldenOfBatch(file string, b *Batch) golden {
	return golden{file, batchSchema, nativeBatch(b),
		func() ([]byte, error) { return AppendBatch(nil, b) },
		func(value []byte) (map[string]any, error) {
			var d Batch
			err := d.Decode(value)
			return nativeBatch(&d), err
		}}
}

var goldens = []golden{
	goldenOfBatch("batch.avro", &goldenBatch),
	goldenOfBatch("heartbeat.avro", &goldenHeartbeat),
	goldenOfBatch("opaque.avro", &goldenOpaque),
	{"chunk.avro", chunkSchema, nativeChunk(&goldenChunk),
		func() ([]byte, error) { return AppendChunk(nil, &goldenChunk) },
		func(value []byte) (map[string]any, error) {
			var c Chunk
			err := DecodeChunk(&c, value)
			return nativeChunk(&c), err
		}},
	{"manifest.avro", manifestSchema, nativeManifest(&goldenManifest),
		func() ([]byte, error) { return AppendManifest(nil, &goldenManifest) },
		func(value []byte) (map[string]any, error) {
			var m Manifest
			err := DecodeManifest(&m, value)
			return nativeManifest(&m), err
		}},
	{"floor.avro", floorSchema, nativeFloor(&goldenFloor),
		func() ([]byte, error) { return AppendFloor(nil, &goldenFloor), nil },
		func(value []byte) (map[string]any, error) {
			var f Floor
			err := DecodeFloor(&f, value)
			return nativeFloor(&f), err
		}},
}

func TestGolden(t *testing.T) {
	for _, g := range goldens {
		t.Run(g.file, func(t *testing.T) {
			path := filepath.Join("testdata", g.file)
			if *update {
				if err := os.WriteFile(path, goavroSingle(t, g.schema, g.native), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got := goavroSingle(t, g.schema, g.native); !bytes.Equal(got, want) {
				t.Errorf("goavro encodes\n% x\nwant\n% x", got, want)
			}
			if got, err := g.encode(); err != nil || !bytes.Equal(got, want) {
				t.Errorf("encoded (%v)\n% x\nwant\n% x", err, got, want)
			}
			got, err := g.decode(want)
			if err != nil || !reflect.DeepEqual(got, g.native) {
				t.Errorf("decoded (%v)\n%v\nwant\n%v", err, got, g.native)
			}
		})
	}
}

// A schema's fingerprint changes with its canonical form. A new one for the
// same file means that readers of the old records need the old schema in their
// Registry: change it knowingly.
func TestFingerprints(t *testing.T) {
	for _, c := range []struct {
		name   string
		schema compiled
		want   uint64
	}{
		{"kv_event_batch", batchSchema, 0xccb0d27a726aa0c5},
		{"snapshot_chunk", chunkSchema, 0xa59f07bc8e9c4288},
		{"snapshot_manifest", manifestSchema, 0x4a5c25f5ce82266b},
		{"snapshot_floor", floorSchema, 0xa1e76cc2388085d2},
	} {
		if c.schema.Rabin != c.want {
			t.Errorf("%s: fingerprint %#016x, want %#016x", c.name, c.schema.Rabin, c.want)
		}
	}
}
