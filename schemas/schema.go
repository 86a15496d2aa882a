package schemas

// This file holds the schemas themselves and their fingerprints.

import (
	_ "embed"
	"encoding/binary"

	"github.com/linkedin/goavro/v2"
)

// The schemas of the records written here, as the .avsc files spell them.
var (
	//go:embed kv_event_batch.avsc
	kvEventBatchSchema string
	//go:embed snapshot_chunk.avsc
	snapshotChunkSchema string
	//go:embed snapshot_manifest.avsc
	snapshotManifestSchema string
	//go:embed snapshot_floor.avsc
	snapshotFloorSchema string
)

var (
	batchSchema    = compile(kvEventBatchSchema)
	chunkSchema    = compile(snapshotChunkSchema)
	manifestSchema = compile(snapshotManifestSchema)
	floorSchema    = compile(snapshotFloorSchema)
)

// maxBlockCount caps what goavro allocates for one block of an array before it
// has seen any of its items: 16 bytes an item, so 8 MiB. It is as many hashes
// as fit a record of DefaultLimits.
const maxBlockCount = 4 << 20 / 8

func init() {
	// goavro knows these limits only as variables of its package, 2^31-1 each.
	// A five-byte count would otherwise make it allocate 32 GiB.
	goavro.MaxBlockCount = maxBlockCount
	goavro.MaxBlockSize = maxBlockCount * 8
}

// compiled is a schema that goavro accepted.
type compiled struct {
	*goavro.Codec
	header [headerBytes]byte // single-object framing of its records
}

func compile(schema string) compiled {
	c, err := goavro.NewCodec(schema)
	if err != nil {
		panic("BUG: embedded schema: " + err.Error())
	}
	return newCompiled(c)
}

func newCompiled(c *goavro.Codec) compiled {
	h := compiled{Codec: c, header: [headerBytes]byte{0xC3, 0x01}}
	binary.LittleEndian.PutUint64(h.header[2:], c.Rabin)
	return h
}
