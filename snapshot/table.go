package snapshot

// This file keeps what a snapshot partition says, and loads worker-ranks of it.

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"

	"kvindex/schemas"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Table is what a snapshot partition says at one offset: of each worker-rank
// the last manifest and chunks, and the floor. Chunk values are kept as they
// came and decoded only when loaded. One goroutine uses a Table at a time.
type Table struct {
	entries map[ID]*entry
	floor   *schemas.Floor
	meta    bool // keep no chunk values
	bad     int
}

// entry is one worker-rank of a Table.
type entry struct {
	manifest   *schemas.Manifest
	unreadable error            // of the last manifest record, then manifest is nil
	chunks     map[int32][]byte // values; nil ones if the table keeps metadata only
	damaged    error            // what Check or Load found, so that no refresh keeps the chunks
}

func newTable() *Table { return &Table{entries: make(map[ID]*entry)} }

// reset empties the table and keeps its counts and what it was told to keep.
func (t *Table) reset() {
	clear(t.entries)
	t.floor = nil
}

// IDs returns the worker-ranks of which there is anything, by worker and rank: a
// manifest, readable or not, or chunks that have lost theirs.
func (t *Table) IDs() []ID {
	ids := slices.Collect(maps.Keys(t.entries))
	slices.SortFunc(ids, ID.Compare)
	return ids
}

// Manifest returns the worker-rank's last manifest, or nil if there is none or
// it cannot be read. The caller must not change it.
func (t *Table) Manifest(id ID) *schemas.Manifest {
	if e := t.entries[id]; e != nil {
		return e.manifest
	}
	return nil
}

// Floor returns the partition's floor, if it has one.
func (t *Table) Floor() (schemas.Floor, bool) {
	if t.floor == nil {
		return schemas.Floor{}, false
	}
	return *t.floor, true
}

// Bad returns how many records could not be decoded so far.
func (t *Table) Bad() int { return t.bad }

// DropPayloads frees the chunk values and keeps none from now on. Manifests,
// the floor and which chunks exist stay: what a Writer needs.
func (t *Table) DropPayloads() {
	t.meta = true
	for _, e := range t.entries {
		for n := range e.chunks {
			e.chunks[n] = nil
		}
	}
}

// apply folds one committed record in. Only a nil value is a tombstone.
func (t *Table) apply(k []byte, value []byte) error {
	p, err := parseKey(k)
	if err != nil {
		t.bad++
		return err
	}
	switch p.kind {
	case manifestKey:
		return t.applyManifest(p.id, value)
	case chunkKey:
		t.setChunk(p.id, p.chunk, value)
		return nil
	default:
		return t.applyFloor(value)
	}
}

func (t *Table) applyManifest(id ID, value []byte) error {
	if value == nil {
		t.setManifest(id, nil, nil)
		return nil
	}
	m := new(schemas.Manifest)
	err := schemas.DecodeManifest(m, value)
	switch {
	case err != nil:
	case m.Format != schemas.SnapshotFormat:
		err = fmt.Errorf("manifest of format %d, this program reads %d", m.Format, schemas.SnapshotFormat)
	case m.Worker != id.Worker || m.Rank != id.Rank:
		err = fmt.Errorf("manifest of %v under the key of %v", ID{m.Worker, m.Rank}, id)
	}
	if err != nil {
		// The older manifest does not count any more: its chunks may be gone.
		t.setManifest(id, nil, err)
		t.bad++
		return err
	}
	t.setManifest(id, m, nil)
	return nil
}

func (t *Table) applyFloor(value []byte) error {
	if value == nil {
		t.floor = nil
		return nil
	}
	f := new(schemas.Floor)
	err := schemas.DecodeFloor(f, value)
	if err == nil && f.Format != schemas.SnapshotFormat {
		err = fmt.Errorf("floor of format %d, this program reads %d", f.Format, schemas.SnapshotFormat)
	}
	if err != nil {
		// No floor means replay from the log's start, which is always right.
		t.floor = nil
		t.bad++
		return err
	}
	t.floor = f
	return nil
}

// setManifest sets the manifest or what is wrong with it; neither removes it.
func (t *Table) setManifest(id ID, m *schemas.Manifest, unreadable error) {
	e := t.entry(id)
	e.manifest, e.unreadable, e.damaged = m, unreadable, nil
	t.prune(id, e)
}

// setChunk sets a chunk's value, of which it keeps a copy so as not to pin a
// whole fetch response; nil removes the chunk.
func (t *Table) setChunk(id ID, n int32, value []byte) {
	e := t.entry(id)
	e.damaged = nil
	switch {
	case value == nil:
		delete(e.chunks, n)
	case t.meta:
		e.chunks[n] = nil
	default:
		e.chunks[n] = bytes.Clone(value)
	}
	t.prune(id, e)
}

func (t *Table) entry(id ID) *entry {
	e := t.entries[id]
	if e == nil {
		e = &entry{chunks: make(map[int32][]byte)}
		t.entries[id] = e
	}
	return e
}

func (t *Table) prune(id ID, e *entry) {
	if e.manifest == nil && e.unreadable == nil && len(e.chunks) == 0 {
		delete(t.entries, id)
	}
}

// chunksFrom returns the chunks that exist at or past n, in order.
func (t *Table) chunksFrom(id ID, n int32) []int32 {
	e := t.entries[id]
	if e == nil {
		return nil
	}
	past := make([]int32, 0, len(e.chunks))
	for c := range maps.Keys(e.chunks) {
		if c >= n {
			past = append(past, c)
		}
	}
	slices.Sort(past)
	return past
}

// Check reports whether the worker-rank's snapshot is whole, by the number of
// its chunks, their CRC-32C and bytes. It returns nil, ErrNoManifest or a
// *DamagedError. It costs one pass over the values.
func (t *Table) Check(id ID) error {
	e := t.entries[id]
	switch {
	case e == nil:
		return fmt.Errorf("%v: %w", id, ErrNoManifest)
	case e.unreadable != nil:
		return &DamagedError{ID: id, What: "manifest cannot be read", Err: e.unreadable}
	case e.manifest == nil: // whoever removes it removes them too
		return &DamagedError{ID: id, What: "manifest is missing, its chunks are not"}
	}
	m := e.manifest
	damaged := func(format string, args ...any) error {
		e.damaged = &DamagedError{ID: id, What: fmt.Sprintf("generation %d: ", m.Generation) + fmt.Sprintf(format, args...)}
		return e.damaged
	}
	if len(m.CRC32C) != int(m.Chunks) {
		return damaged("manifest names %d chunks and %d checksums", m.Chunks, len(m.CRC32C))
	}
	var total int64
	for n := range m.Chunks {
		v, ok := e.chunks[n]
		switch {
		case !ok:
			return damaged("chunk %d of %d is missing", n, m.Chunks)
		case v == nil:
			panic("BUG: loading from a table whose payloads were dropped")
		}
		if crc := crc32.Checksum(v, castagnoli); crc != m.CRC32C[n] {
			var c schemas.Chunk
			if err := schemas.DecodeChunk(&c, v); err == nil && c.Generation != m.Generation {
				return damaged("chunk %d of %d is of generation %d", n, m.Chunks, c.Generation)
			}
			return damaged("chunk %d of %d has CRC-32C %08x instead of %08x", n, m.Chunks, crc, m.CRC32C[n])
		}
		total += int64(len(v))
	}
	if total != m.Bytes {
		return damaged("chunks are %d bytes instead of %d", total, m.Bytes)
	}
	return nil
}

// Load gives each every chain of the worker-rank's snapshot, parents before
// their children, and returns its manifest. A chain is good only during the
// call. Everything is checked before the first chain, so that a damaged
// snapshot, a *DamagedError, loads nothing; only a chunk that its writer made
// wrongly fails later, as does an error of each, which Load returns: whoever
// gets an error clears the worker-rank.
func (t *Table) Load(id ID, each func(schemas.Chain) error) (*schemas.Manifest, error) {
	if err := t.Check(id); err != nil {
		return nil, err
	}
	e := t.entries[id]
	var c schemas.Chunk
	for n := range e.manifest.Chunks {
		if err := schemas.DecodeChunk(&c, e.chunks[n]); err != nil {
			e.damaged = &DamagedError{ID: id, What: fmt.Sprintf("chunk %d", n), Err: err}
			return nil, e.damaged
		}
		if c.Worker != id.Worker || c.Rank != id.Rank || c.Index != n || c.Generation != e.manifest.Generation {
			e.damaged = &DamagedError{ID: id, What: fmt.Sprintf("chunk %d says it is chunk %d of %v, generation %d instead of %d",
				n, c.Index, ID{c.Worker, c.Rank}, c.Generation, e.manifest.Generation)}
			return nil, e.damaged
		}
		for _, chain := range c.Chains {
			if err := each(chain); err != nil {
				return nil, fmt.Errorf("%v: load chunk %d: %w", id, n, err)
			}
		}
	}
	return e.manifest, nil
}
