// This file says all that a Mapping holds, for a new epoch.

package engine

import (
	"cmp"
	"slices"

	"kvindex/index"
)

// Dump yields what kvindex is to hold, as chains, parents before their children
// within a tier, until yield returns false: what a new epoch begins with, if the
// old one's records were lost but m was kept true. A chain's slices are good
// during the call only. It takes some 60 bytes a block for a while.
func (m *Mapping) Dump(yield func(index.Tier, index.Stored) bool) {
	type item struct {
		seq      index.SeqHash
		local    index.LocalHash
		position int32
		parent   int32 // index of its item, or -1
		tiers    uint8 // bit by tier: held there and not yet said
	}
	items := make([]item, 0, len(m.blocks))
	for seq, b := range m.blocks {
		it := item{seq: seq, local: b.local, position: b.position}
		for t, n := range b.refs {
			if n > 0 {
				it.tiers |= 1 << t
			}
		}
		items = append(items, it)
	}
	// From the deepest on, each chain reaches up to what was said or isn't held.
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(cmp.Compare(b.position, a.position), cmp.Compare(a.seq, b.seq)) })
	at := make(map[index.SeqHash]int32, len(items))
	for i := len(items) - 1; i >= 0; i-- {
		it := &items[i]
		at[it.seq] = int32(i)
		it.parent = -1
		if b := m.blocks[it.seq]; b.position > 0 {
			if p, ok := at[b.parent]; ok {
				it.parent = p
			}
		}
	}
	var locals []index.LocalHash
	for t := range index.Tier(index.Tiers) {
		bit := uint8(1) << t
		for i := range items {
			locals = locals[:0]
			top := int32(i)
			for at := top; at >= 0 && items[at].tiers&bit != 0; at = items[at].parent {
				items[at].tiers &^= bit
				locals = append(locals, items[at].local)
				top = at
			}
			if len(locals) == 0 {
				continue
			}
			slices.Reverse(locals)
			b := m.blocks[items[top].seq]
			if !yield(t, m.prefixBefore(&b).stored(locals)) {
				return
			}
		}
	}
}
