// This file is ConcurrentRadixTree.

package index

// ConcurrentRadixTree is a Structure
type ConcurrentRadixTree struct {
	tree
}

// NewConcurrentRadixTree returns an empty ConcurrentRadixTree.
func NewConcurrentRadixTree() *ConcurrentRadixTree {
	t := new(ConcurrentRadixTree)
	t.init(&t.tree)
	return t
}

// Store implements Structure. It takes opaque hashes.
func (t *tree) Store(slot Slot, s Stored) (Effect, error) {
	if err := s.check(); err != nil {
		return Effect{}, err
	}
	return t.store(slot, &s), nil
}
