// This file keeps the blocks whose prefix is not known yet.

package engine

import (
	"slices"
	"strings"
	"unsafe"

	"kvindex/index"
)

// aside is a block that the engine holds and kvindex can't be told of: its
// parent is not known, or nothing of it but its name.
type aside struct {
	hash    uint64
	tiers   uint8 // not 0
	content bool  // the next are known
	parent  uint64
	tokens  []uint32
	lora    string
	salt    string
	mm      []index.MMHash

	next, prev *aside // others waiting for parent
}

// adopted is an engine hash that became known and the tiers where it was aside.
type adopted struct {
	hash  uint64
	tiers uint8
}

// weight is what a block aside takes of MaxAside.
func weight(tokens []uint32, lora, salt string, mm []index.MMHash) int {
	return len(tokens) + (len(lora)+len(salt))/4 + len(mm)*int(unsafe.Sizeof(index.MMHash{}))/4
}

func (a *aside) weight() int { return weight(a.tokens, a.lora, a.salt, a.mm) }

// same reports whether the block's content is c, as far as events say it.
func (a *aside) same(c *content) bool {
	return a.lora == c.lora && (a.salt == c.salt || a.salt == "" || c.salt == "") &&
		slices.Equal(a.tokens, c.window) && slices.Equal(a.mm, c.mm)
}

// setAside keeps a block whose parent is not known.
func (m *Mapping) setAside(h, parent uint64, c *content, t index.Tier) Reason {
	bit := uint8(1) << t
	a := m.aside[h]
	if a != nil && a.content {
		if a.parent != parent || !a.same(c) {
			return Contradiction
		}
		if a.tiers&bit != 0 {
			m.Counts[Duplicate]++
		}
		a.tiers |= bit
		return reasonNone
	}
	if m.asideLen+weight(c.window, c.lora, c.salt, c.mm) > m.cfg.MaxAside {
		return Full
	}
	if a == nil {
		a = &aside{hash: h}
		m.aside[h] = a
		m.Counts[Orphan]++
	}
	a.tiers |= bit
	a.content, a.parent = true, parent
	a.tokens = slices.Clone(c.window)
	a.lora, a.salt = strings.Clone(c.lora), strings.Clone(c.salt)
	a.mm = slices.Clone(c.mm)
	m.await(a)
	return reasonNone
}

// await puts a block with content among those that wait for its parent.
func (m *Mapping) await(a *aside) {
	m.asideLen += a.weight()
	if a.next = m.waiting[a.parent]; a.next != nil {
		a.next.prev = a
	}
	m.waiting[a.parent] = a
}

// takeBack forgets a block that was aside.
func (m *Mapping) takeBack(a *aside) {
	delete(m.aside, a.hash)
	if !a.content {
		return
	}
	m.asideLen -= a.weight()
	if a.next != nil {
		a.next.prev = a.prev
	}
	switch {
	case a.prev != nil:
		a.prev.next = a.next
	case a.next != nil:
		m.waiting[a.parent] = a.next
	default:
		delete(m.waiting, a.parent)
	}
	a.next, a.prev = nil, nil
}

// dropAside takes a block out of the tiers of mask, and reports whether it was
// in any.
func (m *Mapping) dropAside(h uint64, mask uint8) bool {
	a := m.aside[h]
	if a == nil || a.tiers&mask == 0 {
		return false
	}
	if a.tiers &^= mask; a.tiers == 0 {
		m.takeBack(a)
	}
	return true
}

// placeholders maps a store without tokens: the engine hashes alone say what the
// blocks are, where they are known.
func (m *Mapping) placeholders(e *Event, t index.Tier, out *Output) {
	for _, h := range e.Hashes {
		if !m.has(h) {
			if len(m.engine)+len(m.aside) >= m.cfg.MaxBlocks {
				m.Counts[Full]++
				continue
			}
			m.Counts[Placeholder]++
			m.aside[h] = &aside{hash: h, tiers: 1 << t}
			continue
		}
		m.hold(h, t, out)
	}
}

// adopt brings in what waited for the fresh hashes, parents first.
func (m *Mapping) adopt(out *Output) {
	for _, a := range m.adopted {
		for t := range index.Tier(index.Tiers) {
			if a.tiers&(1<<t) != 0 && m.engine[a.hash].tiers&(1<<t) == 0 {
				m.hold(a.hash, t, out)
			}
		}
	}
	if len(m.waiting) == 0 {
		return
	}
	m.queue = append(m.queue[:0], m.fresh...)
	for len(m.queue) > 0 {
		h := m.queue[len(m.queue)-1]
		m.queue = m.queue[:len(m.queue)-1]
		for a := m.waiting[h]; a != nil; a = m.waiting[h] {
			m.takeBack(a)
			m.bringIn(a, m.prefixOf(m.engine[h].seq), out)
		}
	}
}

// bringIn makes known a block that was aside, now that its prefix is.
func (m *Mapping) bringIn(a *aside, prev prefix, out *Output) {
	c := content{window: a.tokens, lora: a.lora, salt: a.salt, mm: a.mm}
	first := true
	for t := range index.Tier(index.Tiers) {
		if a.tiers&(1<<t) == 0 {
			continue
		}
		if !first {
			m.hold(a.hash, t, out)
			continue
		}
		first = false
		now, news, why := m.know(a.hash, &c, prev, t, a.parent)
		if why != reasonNone {
			m.Counts[why]++
			return
		}
		m.Counts[Adopted]++
		if news {
			m.single(now.seq, t, out)
		}
	}
	m.queue = append(m.queue, a.hash)
}
