// This file is ConcurrentRadixTree.

package index

// ConcurrentRadixTree is a Structure that takes opaque hashes: a query follows local
// hashes from block to block, and each slot's sequence hashes are its own. A slot may
// hold computed hashes too; a query then goes through both kinds as their parents
// say. A hash that a slot holds stays where it was first stored.
//
// Costs: a block stored or removed is a look-up in the slot's memory and a step in
// the tree, and so is each block behind a hole that is made or filled; a query is a
// step for each block, and a look at who is there at one in 32. doc.go has figures.
type ConcurrentRadixTree struct {
	tree
}

// NewConcurrentRadixTree returns an empty ConcurrentRadixTree.
func NewConcurrentRadixTree() *ConcurrentRadixTree {
	t := new(ConcurrentRadixTree)
	t.init(&t.tree)
	return t
}
