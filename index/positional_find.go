// This file is a PositionalIndex's search.

package index

// Find implements Structure, by a leapSearch. The query's sequence hashes are
// computed only as far as it gets.
func (p *PositionalIndex) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	m.Reset()
	if len(query) == 0 {
		return
	}
	m.seqs = append(m.seqs[:0], SeqHash(query[0]))
	h := p.find(place{query[0], 0}, m.seqs[0])
	if h == nil {
		return
	}
	s := leapSearch{p: p, jump: p.jump, query: query, m: m}
	s.run(h, 0, opt)
}

// FindBest implements Structure, at the cost of a Find: leaps give no depth before
// the last slot is bisected.
func (p *PositionalIndex) FindBest(query []LocalHash, k int, opt FindOptions, m *SlotMatches) {
	opt.EarlyExit = false
	p.Find(query, opt, m)
	m.cut(k)
}
