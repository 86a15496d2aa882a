package index

import "testing"

// A search goes past writers, whatever nodes they are at.
func TestTreeSearchTakesNoWritersLock(t *testing.T) {
	tree := NewConcurrentRadixTree()
	a := []LocalHash{1, 2, 3, 4}
	for slot, locals := range [][]LocalHash{a, {1, 2, 5}, {6}} {
		if _, err := tree.Store(Slot(slot), Stored{Locals: locals}); err != nil {
			t.Fatal(err)
		}
	}
	tree.root.mu.Lock()
	defer tree.root.mu.Unlock()
	n := &tree.root
	for _, l := range a {
		n = n.child(l)
		n.mu.Lock()
		defer n.mu.Unlock()
	}
	var m SlotMatches
	tree.Find(a, FindOptions{}, &m)
	if len(m.Matches) != 2 {
		t.Errorf("found %v, want two slots", m.Matches)
	}
	tree.FindBest(a, 1, FindOptions{}, &m)
	if len(m.Matches) != 1 || m.Matches[0] != (SlotMatch{0, 4}) {
		t.Errorf("best is %v, want slot 0 with all", m.Matches)
	}
}

// A slot that comes to a node as it dies, before its parent is rid of it, puts
// another one there, and the late goodbye to the first takes nothing else away.
func TestTreeReplacesDeadNodes(t *testing.T) {
	for _, first := range []bool{true, false} {
		tree := NewConcurrentRadixTree()
		if !first { // another child is the root's first
			_, _ = tree.Store(0, Stored{Locals: []LocalHash{9}})
		}
		_, _ = tree.Store(1, Stored{Locals: []LocalHash{1, 2}})
		dead := tree.root.child(1)
		if (tree.root.first.Load() == dead) != first {
			t.Fatal("not where it was meant to be")
		}
		dead.holders.Store(nil)
		if _, err := tree.Store(2, Stored{Locals: []LocalHash{1, 3}}); err != nil {
			t.Fatal(err)
		}
		tree.root.unlink(dead)
		var m SlotMatches
		tree.Find([]LocalHash{1, 3}, FindOptions{}, &m)
		if len(m.Matches) != 1 || m.Matches[0] != (SlotMatch{2, 2}) {
			t.Errorf("found %v, want slot 2 with both", m.Matches)
		}
	}
}
