// This file defines what an index structure is.

package index

import "errors"

// What a Structure's Store refuses. An event that is refused changes nothing.
var (
	ErrEmptyStore  = errors.New("stored event without blocks")
	ErrBadPosition = errors.New("position out of range")
	ErrHashCount   = errors.New("opaque hashes and local hashes differ in number")
	ErrNullHash    = errors.New("null sequence hash")
	ErrSelfParent  = errors.New("block is its own parent")
	ErrOpaqueHash  = errors.New("opaque hashes need a structure that follows paths")
)

// Slot names one holder of blocks inside a Structure: a worker, a rank and a
// tier. Slots are small dense integers, handed out by an Index and reused.
type Slot uint32

// Effect counts, in blocks, what one event did. The zero Effect did nothing.
//
// A block is in reach when it and all its ancestors are held. Its position is
// known then: the number of its ancestors. Out of reach it has only the
// position that its event claimed for it.
type Effect struct {
	Stored        int // blocks newly held
	Duplicate     int // blocks stored that were held already
	Orphan        int // blocks newly held whose parent is not; the first of an event at most
	Contradiction int // blocks whose claimed position was found wrong: all of an event whose parent is in reach or null, and blocks held from before that the event brought into reach; else blocks held already whose opaque hash came with another parent or local hash
	Removed       int // blocks no longer held
	Unknown       int // hashes to remove that were not held
}

// Structure is an index structure: sets of sequence hashes by slot, searched by
// leading blocks. No slot is special and there is no largest one.
//
// Calls that name a slot come from one goroutine at a time for that slot; calls
// for different slots, Find and Stats come from any goroutine at any moment.
// Find never waits for the whole of another call, and each block that it counts
// for a slot was held by it at some moment during the Find.
type Structure interface {
	// Store adds a chain of blocks to the slot. It fails, and changes nothing,
	// with ErrEmptyStore, ErrBadPosition (below NoPosition, or the last
	// block's is beyond an int32), ErrHashCount, ErrNullHash (of the parent or
	// of a block), ErrSelfParent or ErrOpaqueHash, looked for in that order.
	Store(slot Slot, s Stored) (Effect, error)
	// Remove takes each hash out of the slot's set, on its own.
	Remove(slot Slot, hashes []SeqHash) Effect
	// Clear empties the slot and returns how many blocks it held. When it
	// returns, a Find that begins sees none of them and the slot's memory is
	// free, so that the slot can be given to another holder.
	Clear(slot Slot) int
	// Holds reports whether the hash is in the slot's set.
	Holds(slot Slot, h SeqHash) bool
	// Len returns how many blocks the slot holds, in reach or not.
	Len(slot Slot) int
	// Dump yields the blocks of the slot, each once, as chains of one or more,
	// parents before children, until yield returns false. A chain's position is
	// the true one if it is in reach, else the claimed one of each of its
	// blocks. The Stored's slices are good only during the call, and must not be
	// written to. yield must not change the slot.
	Dump(slot Slot, yield func(Stored) bool)
	// Find makes m the answer: every slot that holds at least the query's first
	// block, and how many leading blocks it holds.
	Find(query []LocalHash, opt FindOptions, m *SlotMatches)
	// FindBest makes m that part of Find's answer which is at least as deep as
	// its k-th deepest slot, so that all ties at the last depth are in; all of it
	// if it has no k slots. k is at least 1. It does not look at opt.EarlyExit:
	// all depths are whole.
	FindBest(query []LocalHash, k int, opt FindOptions, m *SlotMatches)
	// Stats returns the structure's size. It costs no more than some thousand
	// loads. Workers is left 0.
	Stats() Stats
}

// FindOptions are what a search can be told besides its blocks.
type FindOptions struct {
	Only      *SlotSet // if not nil, only these slots are searched
	EarlyExit bool     // stop once at most one slot still matches
}

// check refuses what no structure takes; ErrOpaqueHash is not among it.
func (s *Stored) check() error {
	if len(s.Locals) == 0 {
		return ErrEmptyStore
	}
	if s.Position < NoPosition || int64(s.Position)+int64(len(s.Locals))-1 > 1<<31-1 {
		return ErrBadPosition
	}
	opaque := len(s.Hashes) > 0
	if opaque && len(s.Hashes) != len(s.Locals) {
		return ErrHashCount
	}
	if s.HasParent && s.Parent == 0 {
		return ErrNullHash
	}
	prev, self := s.Parent, false
	for i, l := range s.Locals {
		seq := SeqHash(l)
		switch hasPrev := i > 0 || s.HasParent; {
		case opaque:
			seq = s.Hashes[i]
			self = self || hasPrev && seq == prev
		case hasPrev:
			seq = Next(prev, l)
			self = self || seq == prev
		}
		if seq == 0 {
			return ErrNullHash
		}
		prev = seq
	}
	if self {
		return ErrSelfParent
	}
	return nil
}
