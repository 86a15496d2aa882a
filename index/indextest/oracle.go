// Package indextest says what an index structure must do, and checks it.
//
// Oracle answers by the contract's own words, as slowly as that takes. Run puts
// any structure through the conformance suite: deterministic cases for each point
// of the contract, random histories against the Oracle, concurrent writers and
// readers, and memory under churn. Fleet is an Oracle for a whole index, by worker
// and tier. Workload makes events and queries for benchmarks.
package indextest

// This file is the oracle of one structure.

import (
	"maps"
	"math"
	"slices"
	"sync"

	"kvindex/index"
)

// Oracle is a Structure that is obviously right: a set of sequence hashes a
// slot, and everything else computed from scratch at each call. Calls may come
// from any goroutine.
type Oracle struct {
	opaque bool
	mu     sync.Mutex
	slots  map[index.Slot]map[index.SeqHash]held
}

// held is what a slot knows of a block besides its sequence hash.
type held struct {
	parent    index.SeqHash
	hasParent bool
	local     index.LocalHash
	position  int32 // true if the block is in reach, else claimed
}

// NewOracle returns an empty Oracle, which refuses opaque hashes.
func NewOracle() *Oracle {
	return &Oracle{slots: make(map[index.Slot]map[index.SeqHash]held)}
}

// NewOpaqueOracle returns an empty Oracle, which takes opaque hashes: a query
// follows, from block to block, all that have its local hashes.
func NewOpaqueOracle() *Oracle {
	o := NewOracle()
	o.opaque = true
	return o
}

// depths returns the number of ancestors of each block that is in reach, and the
// blocks by their parent.
func depths(set map[index.SeqHash]held) (reach map[index.SeqHash]int32, children map[index.SeqHash][]index.SeqHash) {
	children = make(map[index.SeqHash][]index.SeqHash)
	var level []index.SeqHash
	for seq, b := range set {
		if b.hasParent {
			children[b.parent] = append(children[b.parent], seq)
		} else {
			level = append(level, seq)
		}
	}
	reach = make(map[index.SeqHash]int32)
	for depth := int32(0); len(level) > 0; depth++ {
		var next []index.SeqHash
		for _, seq := range level {
			reach[seq] = depth
			next = append(next, children[seq]...)
		}
		level = next
	}
	return reach, children
}

// Store implements index.Structure.
func (o *Oracle) Store(slot index.Slot, s index.Stored) (index.Effect, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	seqs, err := chain(s)
	if err == nil && len(s.Hashes) > 0 && !o.opaque {
		err = index.ErrOpaqueHash
	}
	if err != nil {
		return index.Effect{}, err
	}
	set := o.slots[slot]
	if set == nil {
		set = make(map[index.SeqHash]held)
		o.slots[slot] = set
	}
	reach, children := depths(set)
	first, known := int32(0), true
	if s.HasParent {
		if first, known = reach[s.Parent]; known {
			first++
		}
	}
	var e index.Effect
	wrong := s.Position >= 0 && known && s.Position != first
	if wrong {
		e.Contradiction += len(seqs)
	}
	for i, seq := range seqs {
		b := held{local: s.Locals[i], hasParent: i > 0 || s.HasParent, parent: s.Parent, position: index.NoPosition}
		if i > 0 {
			b.parent = seqs[i-1]
		}
		if s.Position >= 0 {
			b.position = s.Position + int32(i)
		}
		if is, ok := set[seq]; ok {
			e.Duplicate++
			if !wrong && (is.local != b.local || is.hasParent != b.hasParent || b.hasParent && is.parent != b.parent) {
				e.Contradiction++
			}
			continue
		}
		if _, ok := set[b.parent]; b.hasParent && !ok {
			e.Orphan++
		}
		set[seq] = b
		e.Stored++
		depth := int32(0)
		if b.hasParent {
			children[b.parent] = append(children[b.parent], seq)
			above, ok := reach[b.parent]
			if !ok {
				continue
			}
			depth = above + 1
		}
		// It comes into reach, with all that waited for it.
		for level := []index.SeqHash{seq}; len(level) > 0; depth++ {
			var next []index.SeqHash
			for _, in := range level {
				b := set[in]
				if in != seq && b.position >= 0 && b.position != depth {
					e.Contradiction++
				}
				b.position = depth
				set[in], reach[in] = b, depth
				next = append(next, children[in]...)
			}
			level = next
		}
	}
	return e, nil
}

// chain returns the sequence hashes of a stored event, or why it is refused.
func chain(s index.Stored) ([]index.SeqHash, error) {
	opaque := len(s.Hashes) > 0
	switch {
	case len(s.Locals) == 0:
		return nil, index.ErrEmptyStore
	case s.Position < -1 || int64(s.Position)+int64(len(s.Locals))-1 > math.MaxInt32:
		return nil, index.ErrBadPosition
	case opaque && len(s.Hashes) != len(s.Locals):
		return nil, index.ErrHashCount
	}
	seqs := s.Hashes
	if !opaque {
		if !s.HasParent {
			seqs = index.Chain(nil, s.Locals)
		} else {
			prev := s.Parent
			for _, l := range s.Locals {
				prev = index.Next(prev, l)
				seqs = append(seqs, prev)
			}
		}
	}
	if s.HasParent && s.Parent == 0 || slices.Contains(seqs, 0) {
		return nil, index.ErrNullHash
	}
	for i, seq := range seqs {
		if i == 0 && s.HasParent && seq == s.Parent || i > 0 && seq == seqs[i-1] {
			return nil, index.ErrSelfParent
		}
	}
	return seqs, nil
}

// Remove implements index.Structure.
func (o *Oracle) Remove(slot index.Slot, hashes []index.SeqHash) (e index.Effect) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range hashes {
		if _, ok := o.slots[slot][h]; ok {
			delete(o.slots[slot], h)
			e.Removed++
		} else {
			e.Unknown++
		}
	}
	return e
}

// Clear implements index.Structure.
func (o *Oracle) Clear(slot index.Slot) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(o.slots[slot])
	delete(o.slots, slot)
	return n
}

// Holds implements index.Structure.
func (o *Oracle) Holds(slot index.Slot, h index.SeqHash) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ok := o.slots[slot][h]
	return ok
}

// Len implements index.Structure.
func (o *Oracle) Len(slot index.Slot) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.slots[slot])
}

// Dump implements index.Structure. Blocks that are each other's ancestors, and what
// is below them, come last.
func (o *Oracle) Dump(slot index.Slot, yield func(index.Stored) bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	set := o.slots[slot]
	done := make(map[index.SeqHash]bool)
	stuck := false
	for len(done) < len(set) {
		before := len(done)
		for seq, b := range set {
			if _, parentHeld := set[b.parent]; done[seq] || !stuck && b.hasParent && parentHeld && !done[b.parent] {
				continue
			}
			done[seq] = true
			s := index.Stored{Parent: b.parent, HasParent: b.hasParent, Position: b.position, Locals: []index.LocalHash{b.local}}
			if o.opaque {
				s.Hashes = []index.SeqHash{seq}
			}
			if !yield(s) {
				return
			}
		}
		stuck = len(done) == before
	}
}

// Find implements index.Structure. The order of the answer is that of the slots.
func (o *Oracle) Find(query []index.LocalHash, opt index.FindOptions, m *index.SlotMatches) {
	m.Reset()
	for slot, depth := range o.Depths(query) {
		if opt.Only == nil || opt.Only.Has(slot) {
			m.Matches = append(m.Matches, index.SlotMatch{Slot: slot, Depth: depth})
		}
	}
	slices.SortFunc(m.Matches, func(a, b index.SlotMatch) int { return int(a.Slot) - int(b.Slot) })
	if opt.EarlyExit {
		m.LowerBounds = exitEarly(m.Matches)
	}
}

// FindBest implements index.Structure.
func (o *Oracle) FindBest(query []index.LocalHash, k int, opt index.FindOptions, m *index.SlotMatches) {
	opt.EarlyExit = false
	o.Find(query, opt, m)
	slices.SortStableFunc(m.Matches, func(a, b index.SlotMatch) int { return b.Depth - a.Depth })
	if k < len(m.Matches) {
		last := m.Matches[k-1].Depth
		m.Matches = slices.DeleteFunc(m.Matches, func(match index.SlotMatch) bool { return match.Depth < last })
	}
}

// exitEarly cuts a whole answer down to what a search from block to block knows
// once at most one slot still matches, and returns whether that is less.
func exitEarly(matches []index.SlotMatch) bool {
	for i := range matches {
		next := 0 // deepest of the others
		for j, other := range matches {
			if j != i {
				next = max(next, other.Depth)
			}
		}
		if matches[i].Depth > next+1 {
			matches[i].Depth = next + 1
			return true
		}
	}
	return false
}

// Depths returns how many leading blocks of the query each slot holds, slots
// that hold none left out.
func (o *Oracle) Depths(query []index.LocalHash) map[index.Slot]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := make(map[index.Slot]int)
	seqs := index.Chain(nil, query)
	for slot, set := range o.slots {
		if n := o.leading(set, query, seqs); n > 0 {
			out[slot] = n
		}
	}
	return out
}

// depth returns how many leading blocks of the query one slot holds.
func (o *Oracle) depth(slot index.Slot, query []index.LocalHash) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.leading(o.slots[slot], query, index.Chain(nil, query))
}

// together returns how many leading blocks of the query are each in one or another
// of the slots.
func (o *Oracle) together(slots []index.Slot, query []index.LocalHash) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make(map[index.SeqHash]held)
	for _, slot := range slots {
		maps.Copy(all, o.slots[slot])
	}
	return o.leading(all, query, index.Chain(nil, query))
}

// leading returns how many leading blocks of the query, which have these sequence
// hashes, are in a set.
func (o *Oracle) leading(set map[index.SeqHash]held, query []index.LocalHash, seqs []index.SeqHash) (n int) {
	if o.opaque {
		return follow(set, query)
	}
	for n < len(seqs) {
		if _, ok := set[seqs[n]]; !ok {
			break
		}
		n++
	}
	return n
}

// follow returns how many leading blocks of the query can be gone through from a
// root to a child to its child and so on, by local hashes.
func follow(set map[index.SeqHash]held, query []index.LocalHash) int {
	_, children := depths(set)
	var at []index.SeqHash
	for seq, b := range set {
		if !b.hasParent {
			at = append(at, seq)
		}
	}
	for n, l := range query {
		at = slices.DeleteFunc(at, func(seq index.SeqHash) bool { return set[seq].local != l })
		if len(at) == 0 {
			return n
		}
		var next []index.SeqHash
		for _, seq := range at {
			next = append(next, children[seq]...)
		}
		at = next
	}
	return len(query)
}

// Stats implements index.Structure.
func (o *Oracle) Stats() index.Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	var st index.Stats
	distinct := make(map[index.SeqHash]bool)
	for _, set := range o.slots {
		st.Blocks += int64(len(set))
		reach, _ := depths(set)
		for seq := range reach {
			distinct[seq] = true
		}
	}
	st.Entries = int64(len(distinct))
	return st
}
