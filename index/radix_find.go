// This file is a tree's search.

package index

// treeJump is how many blocks a tree's search leaps at a time.
const treeJump = 32

// Find implements Structure: it walks down the query's path and looks, by a
// leapSearch, at who holds the nodes. The only locks are of nodes with several
// children, and no writer keeps one for longer than it takes to put one child in, or
// to copy the children that are left when most are gone.
func (t *tree) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	m.Reset()
	if h := t.begin(query, m); h != nil {
		s := leapSearch{jump: treeJump, query: query, m: m}
		s.run(h, 0, opt)
	}
}

// begin makes the first node of the query's path known and returns its holders, nil
// if there are none.
func (t *tree) begin(query []LocalHash, m *SlotMatches) *holders {
	m.path = m.path[:0]
	if len(query) == 0 {
		return nil
	}
	n := t.root.child(query[0])
	if n == nil {
		return nil
	}
	m.path = append(m.path, n)
	return n.holders.Load()
}

// walk goes on with the path to the query's end, or as far as there are nodes.
func (m *SlotMatches) walk(query []LocalHash) {
	n := m.path[len(m.path)-1]
	for i := len(m.path); i < len(query); i++ {
		if n = n.child(query[i]); n == nil {
			return
		}
		m.path = append(m.path, n)
	}
}

// FindBest implements Structure. Its search begins at the deepest block that k slots
// hold, since a slot that does not hold it is not among the answer.
func (t *tree) FindBest(query []LocalHash, k int, opt FindOptions, m *SlotMatches) {
	opt.EarlyExit = false
	m.Reset()
	h := t.begin(query, m)
	if h == nil {
		return
	}
	m.walk(query)
	at := 0
	for end := len(m.path); end-at > 1; {
		mid := at + (end-at)/2
		if deep := m.path[mid].holders.Load(); deep.count(opt.Only) >= k {
			h, at = deep, mid
		} else {
			end = mid
		}
	}
	s := leapSearch{jump: treeJump, query: query, m: m}
	s.run(h, at, opt)
	if at > 0 && len(m.Matches) < k { // a writer took them away meanwhile
		t.Find(query, opt, m)
	}
	m.cut(k)
}
