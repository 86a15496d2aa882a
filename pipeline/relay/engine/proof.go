// This file tells SGLang's chained hashes from those that it had before.

package engine

import (
	"crypto/sha256"
	"encoding/binary"
)

// proven reports whether the event's hashes are those of whole prefixes. SGLang
// up to 0.5.5 hashed a page by itself, so that one hash stood for many
// prefixes. Its events look like those of 0.5.6 to 0.5.8, in arrays without a
// medium, but from 0.5.6 on a first page's hash is that of its SHA-256, which
// anyone can compute. Until one was seen nothing of that shape is believed.
func (m *Mapping) proven(e *Event) bool {
	const withMedium = 7
	if m.cfg.Engine != SGLang || m.chained || e.Fields == 0 || e.Fields >= withMedium {
		return true
	}
	bs := m.cfg.Hasher.BlockSize
	if e.HasParent || e.Usable < bs {
		return false
	}
	m.sum = m.sum[:0]
	for i, t := range e.Tokens[:bs] {
		m.sum = binary.LittleEndian.AppendUint32(m.sum, t)
		if len(e.Seconds) > 0 {
			m.sum = binary.LittleEndian.AppendUint32(m.sum, e.Seconds[i])
		}
	}
	sum := sha256.Sum256(m.sum)
	m.chained = binary.BigEndian.Uint64(sum[:]) == e.Hashes[0]
	return m.chained
}
