package index

// Slot names one holder of blocks inside a Structure: a worker, a rank and a
// tier. Slots are small dense integers, handed out by an Index and reused.
type Slot uint32

// Effect counts, in blocks, what one event did. The zero Effect did nothing.
type Effect struct {
	Stored        int // blocks newly held
	Duplicate     int // blocks stored that were held already
	Orphan        int // blocks newly held whose parent is not
	Contradiction int // blocks whose given position disagrees with their held parent's
	Removed       int // blocks no longer held
	Unknown       int // hashes to remove that were not held
}

// Structure is what every index structure is: sets of sequence hashes by slot,
// searched by leading blocks.
//
// Calls that name a slot come from one goroutine at a time for that slot; calls
// for different slots, Find and Stats come from any goroutine at any moment.
type Structure interface {
	// Store adds a chain of blocks to the slot. It fails, and changes nothing,
	// with ErrOpaqueHash, ErrSelfParent, ErrNullHash or ErrEmptyStore.
	Store(slot Slot, s Stored) (Effect, error)
	// Remove takes each hash out of the slot's set, on its own.
	Remove(slot Slot, hashes []SeqHash) Effect
	// Clear empties the slot and returns how many blocks it held.
	Clear(slot Slot) int
	// Holds reports whether the hash is in the slot's set.
	Holds(slot Slot, h SeqHash) bool
	// Len returns how many blocks the slot holds, reachable or not.
	Len(slot Slot) int
	// Dump yields each block of the slot as a Stored of one block, parents
	// before children, until yield returns false. The Stored's slices are
	// good only during the call.
	Dump(slot Slot, yield func(Stored) bool)
	// Find appends to m every slot that holds at least the query's first block.
	Find(query []LocalHash, opt FindOptions, m *SlotMatches)
	// Stats returns the structure's size.
	Stats() Stats
}

// FindOptions are what a search can be told besides its blocks.
type FindOptions struct {
	Only      *SlotSet // if not nil, only these slots are searched
	EarlyExit bool     // stop once at most one slot still matches
}
