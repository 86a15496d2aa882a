package schemas

// Random records, and the properties that all of them have.

import (
	"bytes"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
)

var (
	anyTier   = rapid.Map(rapid.IntRange(0, index.Tiers-1), func(i int) index.Tier { return index.Tier(i) })
	anyHasher = rapid.SampledFrom([]index.Hasher{index.Flash, index.Dynamo, index.Opaque})
	anyText   = rapid.Map(rapid.StringN(0, 12, 40), func(s string) []byte { return []byte(s) })
	anyLocals = rapid.SliceOfN(rapid.Map(rapid.Uint64(), func(u uint64) index.LocalHash { return index.LocalHash(u) }), 0, 40)
	anySeqs   = rapid.SliceOfN(rapid.Map(rapid.Uint64(), func(u uint64) index.SeqHash { return index.SeqHash(u) }), 0, 40)
	anyStored = rapid.Custom(func(t *rapid.T) index.Stored {
		s := index.Stored{
			HasParent: rapid.Bool().Draw(t, "hasParent"),
			Position:  rapid.OneOf(rapid.Just(index.NoPosition), rapid.Int32()).Draw(t, "position"),
			Locals:    anyLocals.Draw(t, "locals"),
			Hashes:    anySeqs.Draw(t, "hashes"),
		}
		if s.HasParent {
			s.Parent = index.SeqHash(rapid.Uint64().Draw(t, "parent"))
		}
		return s
	})
	anyEvent = rapid.Custom(func(t *rapid.T) Event {
		e := Event{Kind: EventKind(rapid.IntRange(0, kinds-1).Draw(t, "kind"))}
		switch e.Kind {
		case KindStored:
			e.Tier, e.Stored = anyTier.Draw(t, "tier"), anyStored.Draw(t, "stored")
		case KindRemoved:
			e.Tier, e.Removed = anyTier.Draw(t, "tier"), anySeqs.Draw(t, "removed")
		case KindCleared:
			if e.AllTiers = rapid.Bool().Draw(t, "all"); !e.AllTiers {
				e.Tier = anyTier.Draw(t, "tier")
			}
		}
		return e
	})
	anyBatch = rapid.Custom(func(t *rapid.T) *Batch {
		return &Batch{
			Producer:  anyText.Draw(t, "producer"),
			Worker:    anyText.Draw(t, "worker"),
			Rank:      rapid.Int32().Draw(t, "rank"),
			Epoch:     rapid.Int64().Draw(t, "epoch"),
			Seq:       rapid.Int64().Draw(t, "seq"),
			Timestamp: rapid.Int64().Draw(t, "timestamp"),
			Model:     anyText.Draw(t, "model"),
			BlockSize: rapid.Int32().Draw(t, "blockSize"),
			Hasher:    anyHasher.Draw(t, "hasher"),
			Events:    rapid.SliceOfN(anyEvent, 0, 8).Draw(t, "events"),
		}
	})
	anyChunk = rapid.Custom(func(t *rapid.T) *Chunk {
		return &Chunk{
			Worker:     string(anyText.Draw(t, "worker")),
			Rank:       rapid.Int32().Draw(t, "rank"),
			Generation: rapid.Int64().Draw(t, "generation"),
			Index:      rapid.Int32().Draw(t, "index"),
			Chains: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Chain {
				return Chain{Tier: anyTier.Draw(t, "tier"), Stored: anyStored.Draw(t, "stored")}
			}), 0, 8).Draw(t, "chains"),
		}
	})
	anyManifest = rapid.Custom(func(t *rapid.T) *Manifest {
		long, integer := rapid.Int64(), rapid.Int32()
		return &Manifest{
			Format: integer.Draw(t, "format"), Worker: string(anyText.Draw(t, "worker")), Rank: integer.Draw(t, "rank"),
			Generation: long.Draw(t, "generation"), W: long.Draw(t, "w"), LeaderEpoch: integer.Draw(t, "leaderEpoch"),
			TopicID: [16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "topicID")), Partitions: integer.Draw(t, "partitions"),
			Model: string(anyText.Draw(t, "model")), BlockSize: integer.Draw(t, "blockSize"), Hasher: anyHasher.Draw(t, "hasher"),
			Epoch: long.Draw(t, "epoch"), EpochStarted: long.Draw(t, "epochStarted"), Seq: long.Draw(t, "seq"),
			Producer: string(anyText.Draw(t, "producer")), LastHeard: long.Draw(t, "lastHeard"), LastOffset: long.Draw(t, "lastOffset"),
			Incomplete: rapid.Bool().Draw(t, "incomplete"),
			PastLostAt: long.Draw(t, "pastLostAt"), Disputed: rapid.Bool().Draw(t, "disputed"), Retired: rapid.Bool().Draw(t, "retired"), RetiredAt: long.Draw(t, "retiredAt"),
			Chunks: integer.Draw(t, "chunks"), Bytes: long.Draw(t, "bytes"), CRC32C: rapid.SliceOfN(rapid.Uint32(), 0, 9).Draw(t, "crcs"),
		}
	})
	anyFloor = rapid.Custom(func(t *rapid.T) *Floor {
		return &Floor{
			Format: rapid.Int32().Draw(t, "format"), Offset: rapid.Int64().Draw(t, "offset"),
			TopicID:    [16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "topicID")),
			Partitions: rapid.Int32().Draw(t, "partitions"), PastLostAt: rapid.Int64().Draw(t, "pastLostAt"), Written: rapid.Int64().Draw(t, "written"),
		}
	})
)

// checkCodec checks that value, which was encoded here, is byte for byte what
// goavro makes of native, and that got, which was decoded here, is native.
func checkCodec(t *rapid.T, s compiled, native, got map[string]any, value []byte) {
	want, err := s.SingleFromNative(nil, native)
	if err != nil {
		t.Fatalf("goavro refuses to encode: %v", err)
	}
	if !bytes.Equal(value, want) {
		t.Fatalf("encoded\n% x\ngoavro\n% x", value, want)
	}
	if !reflect.DeepEqual(got, native) {
		t.Fatalf("decoded\n%v\nwant\n%v", got, native)
	}
}

// One Batch and one Chunk are reused throughout, as a reader does.
func TestEveryRecordAsGoavro(t *testing.T) {
	var batch Batch
	var chunk Chunk
	var manifest Manifest
	rapid.Check(t, func(t *rapid.T) {
		fatal := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		b := anyBatch.Draw(t, "batch")
		value, err := AppendBatch(nil, b)
		fatal(err)
		fatal(batch.Decode(value))
		checkCodec(t, batchSchema, nativeBatch(b), nativeBatch(&batch), value)

		c := anyChunk.Draw(t, "chunk")
		value, err = AppendChunk(nil, c)
		fatal(err)
		fatal(DecodeChunk(&chunk, value))
		checkCodec(t, chunkSchema, nativeChunk(c), nativeChunk(&chunk), value)

		m := anyManifest.Draw(t, "manifest")
		value, err = AppendManifest(nil, m)
		fatal(err)
		fatal(DecodeManifest(&manifest, value))
		checkCodec(t, manifestSchema, nativeManifest(m), nativeManifest(&manifest), value)

		f := anyFloor.Draw(t, "floor")
		value = AppendFloor(nil, f)
		var floor Floor
		fatal(DecodeFloor(&floor, value))
		checkCodec(t, floorSchema, nativeFloor(f), nativeFloor(&floor), value)
	})
}

// Cut anywhere, a record is truncated; with a byte more, it has a leftover.
func TestEveryCutIsRefused(t *testing.T) {
	for _, g := range goldens {
		t.Run(g.file, func(t *testing.T) {
			value := goavroSingle(t, g.schema, g.native)
			for n := range value {
				if _, err := g.decode(value[:n]); !isTruncated(err) {
					t.Errorf("first %d of %d bytes: %v", n, len(value), err)
				}
			}
			if _, err := g.decode(append(value, 0)); !isLeftover(err) {
				t.Errorf("with a byte more: %v", err)
			}
		})
	}
}
