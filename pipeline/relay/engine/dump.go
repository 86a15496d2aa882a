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
// during the call only. It takes some 100 bytes a block for a while.
func (m *Mapping) Dump(yield func(index.Tier, index.Stored) bool) {
	type item struct {
		seq      index.SeqHash
		position int32
	}
	items := make([]item, 0, len(m.blocks))
	said := make(map[index.SeqHash]struct{}, len(m.blocks))
	var chain []index.SeqHash
	var locals []index.LocalHash
	for t := range index.Tier(index.Tiers) {
		items = items[:0]
		clear(said)
		for seq, b := range m.blocks {
			if b.refs[t] > 0 {
				items = append(items, item{seq, b.position})
			}
		}
		// From the deepest on, each chain reaches up to what was said or isn't held.
		slices.SortFunc(items, func(a, b item) int {
			return cmp.Or(cmp.Compare(b.position, a.position), cmp.Compare(a.seq, b.seq))
		})
		for _, it := range items {
			chain, locals = chain[:0], locals[:0]
			seq := it.seq
			for {
				b, ok := m.blocks[seq]
				if !ok || b.refs[t] == 0 {
					break
				}
				if _, ok := said[seq]; ok {
					break
				}
				said[seq] = struct{}{}
				chain = append(chain, seq)
				if b.position == 0 {
					break
				}
				seq = b.parent
			}
			if len(chain) == 0 {
				continue
			}
			for _, seq := range slices.Backward(chain) {
				locals = append(locals, m.blocks[seq].local)
			}
			top := m.blocks[chain[len(chain)-1]]
			if !yield(t, m.prefixBefore(&top).stored(locals)) {
				return
			}
		}
	}
}
