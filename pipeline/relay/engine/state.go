// This file writes a Mapping's state and reads it back, for a checkpoint.

package engine

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"kvindex/index"
	"kvindex/pipeline/relay/fixed"
)

// Errors of Load. The Mapping is as it was.
var (
	ErrState   = errors.New("mapping state is damaged")
	ErrVersion = errors.New("mapping state is of an unknown version")
	ErrConfig  = errors.New("mapping state is of another engine, hasher, or block size")
)

const (
	stateMagic   = "KVEM"
	stateVersion = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Append appends m's state to dst: 32 bytes a block and 17 an engine hash, with
// a version and a checksum. Counts are not part of it.
func (m *Mapping) Append(dst []byte) []byte {
	start := len(dst)
	dst = append(dst, stateMagic...)
	dst = append(dst, stateVersion, byte(m.cfg.Engine), byte(m.cfg.Hasher.Scheme),
		flag(m.cfg.Hasher.Eagle), flag(m.chained), flag(m.hasGroup))
	dst = appendU64(dst, uint64(m.cfg.Hasher.BlockSize))
	dst = appendU64(dst, uint64(m.group))
	dst = appendU64(dst, uint64(m.window))

	dst = appendU64(dst, uint64(len(m.salts.ids)))
	for name, id := range m.salts.ids {
		dst = appendU32(dst, id)
		dst = appendText(dst, name)
	}
	dst = appendU64(dst, uint64(len(m.blocks)))
	for seq, b := range m.blocks {
		dst = appendU64(dst, uint64(seq))
		dst = appendU64(dst, uint64(b.parent))
		dst = appendU64(dst, uint64(b.local))
		dst = appendU32(dst, uint32(b.position))
		dst = appendU32(dst, b.salt)
	}
	dst = appendU64(dst, uint64(len(m.engine)))
	for h, en := range m.engine {
		dst = appendU64(dst, h)
		dst = appendU64(dst, uint64(en.seq))
		dst = append(dst, en.tiers)
	}
	dst = appendU64(dst, uint64(len(m.aside)))
	for h, a := range m.aside {
		dst = appendU64(dst, h)
		dst = append(dst, a.tiers, flag(a.content))
		if !a.content {
			continue
		}
		dst = appendU64(dst, a.parent)
		dst = appendU64(dst, uint64(len(a.tokens)))
		for _, t := range a.tokens {
			dst = appendU32(dst, t)
		}
		dst = appendText(dst, a.lora)
		dst = appendText(dst, a.salt)
		dst = appendU64(dst, uint64(len(a.mm)))
		for _, k := range a.mm {
			dst = appendU64(dst, k.Hash)
		}
	}
	return appendU32(dst, crc32.Checksum(dst[start:], castagnoli))
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func appendU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }

func appendText(b []byte, s string) []byte {
	return append(appendU64(b, uint64(len(s))), s...)
}

// Load makes m what Append wrote, all of p. It believes nothing that it can
// test. Errors: ErrState, ErrVersion, ErrConfig.
func (m *Mapping) Load(p []byte) error {
	const header = len(stateMagic) + 6
	if len(p) < header+4 || string(p[:len(stateMagic)]) != stateMagic {
		return ErrState
	}
	body, sum := p[:len(p)-4], binary.LittleEndian.Uint32(p[len(p)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return ErrState
	}
	if body[4] != stateVersion {
		return ErrVersion
	}
	n := Mapping{cfg: m.cfg}
	n.clear()
	h := m.cfg.Hasher
	r := stateReader{fixed.Reader{P: body[header:]}}
	if size := r.U64(); Engine(body[5]) != m.cfg.Engine || index.Hasher(body[6]) != h.Scheme || body[7] != flag(h.Eagle) ||
		!r.Bad && size != uint64(h.BlockSize) {
		return ErrConfig
	}
	n.chained, n.hasGroup = body[8] == 1, body[9] == 1
	n.group, n.window = int64(r.U64()), int64(r.U64())
	ids := n.loadSalts(&r)
	n.loadBlocks(&r, ids)
	n.loadEngine(&r)
	n.loadAside(&r)
	for _, b := range n.blocks {
		r.Bad = r.Bad || b.refs == [index.Tiers]uint32{}
		if p, ok := n.blocks[b.parent]; ok && b.position > 0 {
			r.Bad = r.Bad || p.position != b.position-1
		}
	}
	if r.Bad || len(r.P) > 0 {
		return ErrState
	}
	n.Counts = m.Counts
	*m = n
	return nil
}

// loadSalts returns the new numbers of salts by their old ones.
func (m *Mapping) loadSalts(r *stateReader) map[uint32]uint32 {
	ids := map[uint32]uint32{0: 0}
	for range r.count(12) {
		old, name := r.U32(), r.text()
		if _, ok := ids[old]; ok || name == "" {
			r.Bad = true
			break
		}
		ids[old] = m.salts.id(name)
	}
	return ids
}

func (m *Mapping) loadBlocks(r *stateReader, ids map[uint32]uint32) {
	n := r.count(32)
	m.blocks = make(map[index.SeqHash]block, n)
	for range n {
		seq := index.SeqHash(r.U64())
		b := block{parent: index.SeqHash(r.U64()), local: index.LocalHash(r.U64()), position: int32(r.U32())}
		salt, ok := ids[r.U32()]
		b.salt = salt
		_, twice := m.blocks[seq]
		// Any parent will do before position 0, which has none.
		before := prefix{seq: b.parent, position: b.position - 1}
		if after, fine := before.after(b.local); b.position < 0 || !fine || after != seq || !ok || twice {
			r.Bad = true
		}
		if r.Bad {
			break
		}
		m.salts.hold(salt)
		m.blocks[seq] = b
	}
	for _, id := range ids {
		r.Bad = r.Bad || id != 0 && m.salts.refs[id] == 0
	}
}

func (m *Mapping) loadEngine(r *stateReader) {
	n := r.count(17)
	m.engine = make(map[uint64]entry, n)
	for range n {
		h := r.U64()
		en := entry{seq: index.SeqHash(r.U64()), tiers: r.U8()}
		b, ok := m.blocks[en.seq]
		if _, twice := m.engine[h]; !ok || twice || en.tiers == 0 || en.tiers >= 1<<index.Tiers {
			r.Bad = true
		}
		if r.Bad {
			break
		}
		m.engine[h] = en
		for t := range b.refs {
			if en.tiers&(1<<t) != 0 {
				if b.refs[t]++; b.refs[t] == 1 {
					m.held[t]++
				}
			}
		}
		m.blocks[en.seq] = b
	}
}

func (m *Mapping) loadAside(r *stateReader) {
	want := m.cfg.Hasher.BlockSize
	if m.cfg.Hasher.Eagle {
		want++
	}
	for range r.count(10) {
		a := &aside{hash: r.U64(), tiers: r.U8(), content: r.U8() == 1}
		if a.content {
			a.parent = r.U64()
			for range r.count(4) {
				a.tokens = append(a.tokens, r.U32())
			}
			a.lora, a.salt = r.text(), r.text()
			for range r.count(8) {
				a.mm = append(a.mm, index.MMHash{Hash: r.U64(), End: m.cfg.Hasher.BlockSize})
			}
			r.Bad = r.Bad || len(a.tokens) != want
		}
		if m.has(a.hash) || a.tiers == 0 || a.tiers >= 1<<index.Tiers {
			r.Bad = true
		}
		if r.Bad {
			break
		}
		m.aside[a.hash] = a
		if a.content {
			m.await(a)
		}
	}
}

// stateReader reads a state.
type stateReader struct{ fixed.Reader }

// count reads how many items of at least that many bytes follow.
func (r *stateReader) count(size int) int {
	n := r.U64()
	if n > uint64(len(r.P)/size) {
		r.Bad = true
		return 0
	}
	return int(n)
}

func (r *stateReader) text() string {
	return string(r.Take(r.count(1)))
}
