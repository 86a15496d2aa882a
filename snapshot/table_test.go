package snapshot

import (
	"errors"
	"hash/crc32"
	"slices"
	"strings"
	"testing"

	"kvindex/index"
	"kvindex/schemas"
)

// values returns the records of one worker-rank's dump of n blocks.
func values(t testing.TB, id ID, generation, at int64, n int) (manifest []byte, chunks [][]byte) {
	t.Helper()
	d := dump(id, at, locals(int(generation), n))
	m := d.Manifest
	m.Format, m.Generation, m.Chunks = schemas.SnapshotFormat, generation, int32(d.Blocks.Chunks())
	for i := range m.Chunks {
		c := schemas.Chunk{Worker: id.Worker, Rank: id.Rank, Generation: generation, Index: i}
		d.Blocks.fill(&c, int(i))
		v, err := schemas.AppendChunk(nil, &c)
		if err != nil {
			t.Fatal(err)
		}
		m.Bytes += int64(len(v))
		m.CRC32C = append(m.CRC32C, crc32.Checksum(v, castagnoli))
		chunks = append(chunks, v)
	}
	manifest, err := schemas.AppendManifest(nil, &m)
	if err != nil {
		t.Fatal(err)
	}
	return manifest, chunks
}

// put folds records in that must be decodable.
func put(t testing.TB, table *Table, k key, value []byte) {
	t.Helper()
	if err := table.apply(k.bytes(), value); err != nil {
		t.Fatal(err)
	}
}

func putAll(t testing.TB, table *Table, id ID, manifest []byte, chunks [][]byte) {
	t.Helper()
	for n, v := range chunks {
		put(t, table, key{chunkKey, id, int32(n)}, v)
	}
	put(t, table, key{kind: manifestKey, id: id}, manifest)
}

// A damaged snapshot gives nothing, and says what is wrong.
func TestDamaged(t *testing.T) {
	otherManifest, otherChunks := values(t, idA, 2, 6, 200)
	for _, tc := range []struct {
		name   string
		damage func(t *testing.T, table *Table)
		want   string
	}{
		{"nothing", func(*testing.T, *Table) {}, ""},
		{"a flipped byte", func(_ *testing.T, table *Table) { table.entries[idA].chunks[2][100] ^= 4 }, "chunk 2 of 4 has CRC-32C"},
		{"a missing chunk", func(t *testing.T, table *Table) { put(t, table, key{chunkKey, idA, 3}, nil) }, "chunk 3 of 4 is missing"},
		{"a chunk of another generation", func(t *testing.T, table *Table) { put(t, table, key{chunkKey, idA, 1}, otherChunks[1]) }, "chunk 1 of 4 is of generation 2"},
		{"a manifest of another generation", func(t *testing.T, table *Table) { put(t, table, key{kind: manifestKey, id: idA}, otherManifest) }, "chunk 0 of 4 is of generation 1"},
		{"a truncated chunk", func(t *testing.T, table *Table) {
			put(t, table, key{chunkKey, idA, 0}, table.entries[idA].chunks[0][:50])
		}, "chunk 0 of 4 has CRC-32C"},
		{"chunks that changed places", func(_ *testing.T, table *Table) {
			c := table.entries[idA].chunks
			c[0], c[1] = c[1], c[0]
		}, "chunk 0 of 4 has CRC-32C"},
		{"a chunk too many", func(t *testing.T, table *Table) { put(t, table, key{chunkKey, idA, 4}, otherChunks[3]) }, ""},
		{"wrong bytes", func(_ *testing.T, table *Table) { table.entries[idA].manifest.Bytes++ }, "bytes instead of"},
		{"too few checksums", func(_ *testing.T, table *Table) {
			m := table.entries[idA].manifest
			m.CRC32C = m.CRC32C[1:]
		}, "names 4 chunks and 3 checksums"},
		{"a chunk that was made wrongly", func(_ *testing.T, table *Table) { remake(table, 1, func(c *schemas.Chunk) { c.Index = 2 }) }, "chunk 1 says it is chunk 2"},
		{"a chunk of another worker", func(_ *testing.T, table *Table) { remake(table, 0, func(c *schemas.Chunk) { c.Worker = "other" }) }, "of other rank 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			table := newTable()
			manifest, chunks := values(t, idA, 1, 5, 200)
			putAll(t, table, idA, manifest, chunks)
			tc.damage(t, table)
			chain, m, err := load(table, idA)
			if tc.want == "" {
				if err != nil || m.W != 5 || !slices.Equal(chain, locals(1, 200)) {
					t.Fatalf("load: %d blocks, %v", len(chain), err)
				}
				return
			}
			var damaged *DamagedError
			if !errors.As(err, &damaged) || !errors.Is(err, ErrDamaged) || damaged.ID != idA || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("load: %v, want a damaged snapshot: %s", err, tc.want)
			}
			if table.entries[idA].damaged == nil {
				t.Error("the table does not remember the damage")
			}
			// A whole round mends it.
			putAll(t, table, idA, otherManifest, otherChunks)
			if chain, m, err := load(table, idA); err != nil || m.W != 6 || !slices.Equal(chain, locals(2, 200)) {
				t.Errorf("load after the next round: %d blocks, %v", len(chain), err)
			}
		})
	}
}

// remake makes chunk n anew, changed, with a right checksum.
func remake(table *Table, n int32, change func(*schemas.Chunk)) {
	e := table.entries[idA]
	var c schemas.Chunk
	if err := schemas.DecodeChunk(&c, e.chunks[n]); err != nil {
		panic(err)
	}
	change(&c)
	v, err := schemas.AppendChunk(nil, &c)
	if err != nil {
		panic(err)
	}
	e.manifest.Bytes += int64(len(v) - len(e.chunks[n]))
	e.manifest.CRC32C[n] = crc32.Checksum(v, castagnoli)
	e.chunks[n] = v
}

func TestTableTombstones(t *testing.T) {
	table := newTable()
	manifest, chunks := values(t, idA, 1, 5, 100)
	putAll(t, table, idA, manifest, chunks)
	put(t, table, key{kind: floorKey}, schemas.AppendFloor(nil, &schemas.Floor{Format: schemas.SnapshotFormat, Offset: 5}))
	put(t, table, key{kind: manifestKey, id: idA}, nil)
	if ids := table.IDs(); !slices.Equal(ids, []ID{idA}) { // whoever removes it removes its chunks too
		t.Errorf("ids %v, want %v, which has lost its manifest", ids, idA)
	}
	if _, _, err := load(table, idA); !errors.Is(err, ErrDamaged) {
		t.Errorf("load: %v, want %v", err, ErrDamaged)
	}
	if got := table.chunksFrom(idA, 1); !slices.Equal(got, []int32{1}) {
		t.Errorf("chunks %v, want those still there", got)
	}
	for n := range chunks {
		put(t, table, key{chunkKey, idA, int32(n)}, nil)
	}
	put(t, table, key{kind: floorKey}, nil)
	if _, ok := table.Floor(); ok || len(table.entries) != 0 {
		t.Errorf("%d entries are left", len(table.entries))
	}
	if _, _, err := load(table, idA); !errors.Is(err, ErrNoManifest) {
		t.Errorf("load: %v, want %v", err, ErrNoManifest)
	}
}

func TestManifestRefused(t *testing.T) {
	manifest, _ := values(t, idA, 1, 5, 10)
	var m schemas.Manifest
	if err := schemas.DecodeManifest(&m, manifest); err != nil {
		t.Fatal(err)
	}
	m.Format++
	newer, err := schemas.AppendManifest(nil, &m)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string][]byte{"newer format": newer, "empty": {}, "truncated": manifest[:20]} {
		table := newTable()
		if err := table.apply(key{kind: manifestKey, id: idA}.bytes(), value); err == nil || table.Bad() != 1 {
			t.Errorf("%s: %v, counted %d", name, err, table.Bad())
		}
		if err := table.Check(idA); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: check %v, want %v", name, err, ErrDamaged)
		}
	}
	table := newTable()
	if err := table.apply(key{kind: manifestKey, id: idB}.bytes(), manifest); err == nil {
		t.Error("a manifest under another worker's key was taken")
	}
}

// An error of the caller's ends the load.
func TestLoadStops(t *testing.T) {
	table := newTable()
	manifest, chunks := values(t, idA, 1, 5, 200)
	putAll(t, table, idA, manifest, chunks)
	stop := errors.New("stop")
	var calls int
	if _, err := table.Load(idA, func(schemas.Chain) error { calls++; return stop }); !errors.Is(err, stop) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

func TestDropPayloads(t *testing.T) {
	table := newTable()
	for _, id := range []ID{idA, idB} {
		manifest, chunks := values(t, id, 1, 5, 100)
		putAll(t, table, id, manifest, chunks)
		table.DropPayloads()
		for n, v := range table.entries[id].chunks {
			if v != nil {
				t.Errorf("chunk %d of %v is held", n, id)
			}
		}
		if got := table.chunksFrom(id, 0); !slices.Equal(got, []int32{0, 1}) || table.Manifest(id).W != 5 {
			t.Errorf("chunks %v of %+v", got, table.Manifest(id))
		}
	}
}

// What a million blocks cost, as they are dumped block by block, to pack, to
// encode and to load.
func BenchmarkPack(b *testing.B) {
	blocks := dumpOf(1_000_000)
	var p Packed
	b.ReportAllocs()
	for b.Loop() {
		p.Reset()
		for i := range blocks {
			p.Add(index.Device, blocks[i])
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(blocks)), "ns/block")
}

func BenchmarkLoad(b *testing.B) {
	blocks := dumpOf(1_000_000)
	var p Packed
	for i := range blocks {
		p.Add(index.Device, blocks[i])
	}
	table := newTable()
	m := &schemas.Manifest{Worker: idA.Worker, Rank: idA.Rank, Generation: 1, Chunks: int32(p.Chunks())}
	for n := range p.Chunks() {
		c := schemas.Chunk{Worker: idA.Worker, Rank: idA.Rank, Generation: 1, Index: int32(n)}
		p.fill(&c, n)
		v, err := schemas.AppendChunk(nil, &c)
		if err != nil {
			b.Fatal(err)
		}
		m.Bytes += int64(len(v))
		m.CRC32C = append(m.CRC32C, crc32.Checksum(v, castagnoli))
		table.setChunk(idA, int32(n), v)
	}
	table.setManifest(idA, m, nil)
	b.ReportAllocs()
	b.SetBytes(m.Bytes)
	for b.Loop() {
		var n int
		if _, err := table.Load(idA, func(c schemas.Chain) error { n += len(c.Locals); return nil }); err != nil || n != len(blocks) {
			b.Fatal(n, err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(blocks)), "ns/block")
}

// dumpOf returns n blocks in chains of 50, one a Stored.
func dumpOf(n int) []index.Stored {
	blocks := make([]index.Stored, n)
	all := make([]index.LocalHash, n)
	var parent index.SeqHash
	for i := range blocks {
		all[i] = index.LocalHash(i + 1)
		blocks[i] = index.Stored{HasParent: i%50 > 0, Parent: parent, Position: int32(i % 50), Locals: all[i : i+1]}
		if i%50 == 0 {
			parent = index.SeqHash(all[i])
			blocks[i].Parent = 0
		} else {
			parent = index.Next(parent, all[i])
		}
	}
	return blocks
}
