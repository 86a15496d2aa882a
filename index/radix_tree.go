// This file is RadixTree: a tree that counts how often prompts were asked for.

package index

import "time"

// RadixTree is a Structure for one goroutine, Finds included: the tree of a
// ConcurrentRadixTree (with its locks, for which nobody waits) that can also tell how
// many recent queries reached each block of a prompt, which says what is worth keeping
// or copying. It has no clock of its own.
type RadixTree struct {
	tree
	window  int64 // nanoseconds
	now     int64 // the latest time it was told, Unix nanoseconds
	queries []useOf
	first   int // of queries, the oldest in the window
}

// uses is how many queries in the window reached a node. They are there only while
// there are some, and those of the node above then too: a query that reached a node
// reached that one.
type uses struct {
	n     int
	above *uses
	node  *treeNode // nil once it is dead
}

// useOf is a query in the window.
type useOf struct {
	at      int64
	deepest *uses
}

// NewRadixTree returns an empty RadixTree that counts queries for as long as window.
func NewRadixTree(window time.Duration) *RadixTree {
	t := &RadixTree{window: int64(window)}
	t.init(&t.tree)
	return t
}

// Use counts a query, and appends to dst, for each of its leading blocks that any
// slot holds, how many queries reached that block before, later than a window before
// now. Their number never grows from block to block. What was counted of a block is
// forgotten when its last holder loses it. A now that is before an earlier one counts
// as that.
//
// Find counts nothing, so that an Index over the tree can be asked and the tree told.
//
// Use costs a step for each block, and as many when the query leaves the window. It
// takes 16 bytes a query and up to 24 a block that was reached, until then.
func (t *RadixTree) Use(query []LocalHash, now time.Time, dst []int) []int {
	t.Expire(now)
	var deepest *uses
	n := &t.root
	for _, l := range query {
		if n = n.child(l); n == nil {
			break
		}
		if n.uses == nil {
			n.uses = &uses{above: deepest, node: n}
		}
		deepest = n.uses
		dst = append(dst, deepest.n)
		deepest.n++
	}
	if deepest != nil {
		t.queries = append(t.queries, useOf{t.now, deepest})
	}
	return dst
}

// Expire forgets the queries that are no longer in the window, as Use does before it
// counts one.
func (t *RadixTree) Expire(now time.Time) {
	t.now = max(t.now, now.UnixNano())
	for ; t.first < len(t.queries) && t.queries[t.first].at <= t.now-t.window; t.first++ {
		for u := t.queries[t.first].deepest; u != nil; u = u.above {
			if u.n--; u.n == 0 && u.node != nil {
				u.node.uses = nil
			}
		}
		t.queries[t.first].deepest = nil
	}
	if t.first > len(t.queries)/2 {
		left := t.queries[t.first:]
		if len(left) < cap(t.queries)/4 {
			t.queries = append([]useOf(nil), left...)
		} else {
			copy(t.queries, left)
			clear(t.queries[len(left):])
			t.queries = t.queries[:len(left)]
		}
		t.first = 0
	}
}
