package index

// DefaultJump is the usual jump size of a PositionalIndex, in blocks.
const DefaultJump = 32

// PositionalIndex is a Structure.
type PositionalIndex struct{}

// NewPositionalIndex returns an empty PositionalIndex. jump is how many blocks
// a search leaps over at a time; 0 means DefaultJump.
func NewPositionalIndex(jump int) *PositionalIndex { return &PositionalIndex{} }

func (p *PositionalIndex) Store(slot Slot, s Stored) (Effect, error) { panic("seam") }
func (p *PositionalIndex) Remove(slot Slot, hashes []SeqHash) Effect { panic("seam") }
func (p *PositionalIndex) Clear(slot Slot) int                       { panic("seam") }
func (p *PositionalIndex) Holds(slot Slot, h SeqHash) bool           { panic("seam") }
func (p *PositionalIndex) Len(slot Slot) int                         { panic("seam") }
func (p *PositionalIndex) Dump(slot Slot, yield func(Stored) bool)   { panic("seam") }
func (p *PositionalIndex) Find(query []LocalHash, opt FindOptions, m *SlotMatches) {
	panic("seam")
}
func (p *PositionalIndex) Stats() Stats { panic("seam") }
