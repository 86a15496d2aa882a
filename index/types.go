// This file has the words of events: hashes, tiers, hashers, Stored.

package index

import (
	"fmt"
	"iter"
	"strings"
)

// LocalHash identifies the content of one block (tokens, LoRA name, multimodal
// hashes, cache salt), free of what precedes it.
type LocalHash uint64

// SeqHash identifies a whole prefix: the block and everything before it.
type SeqHash uint64

// NoPosition is the Position of a Stored event whose producer does not know it.
const NoPosition int32 = -1

// Tier is the kind of memory that a worker keeps a block in.
type Tier uint8

// The tiers, from the one an engine computes on to the one farthest from it.
const (
	Device Tier = iota
	Host
	Disk
	External
)

// Tiers is the number of tiers.
const Tiers = 4

var tierNames = [Tiers]string{"device", "host", "disk", "external"}

// String returns the tier's name as records and metrics spell it.
func (t Tier) String() string {
	if int(t) < len(tierNames) {
		return tierNames[t]
	}
	return fmt.Sprintf("Tier(%d)", uint8(t))
}

// Hasher is the scheme that a model's producers use for their hashes.
type Hasher uint8

// The schemes. Flash and Dynamo differ only in how a LoRA name enters a local
// hash; Opaque hashes are an engine's own and cannot be computed here.
const (
	Flash Hasher = iota
	Dynamo
	Opaque
)

var hasherNames = [...]string{"flash", "dynamo", "opaque"}

// String returns the scheme's name as records and settings spell it.
func (h Hasher) String() string {
	if int(h) < len(hasherNames) {
		return hasherNames[h]
	}
	return fmt.Sprintf("Hasher(%d)", uint8(h))
}

// ParseHasher returns the scheme of that name.
func ParseHasher(name string) (Hasher, error) {
	for i, n := range hasherNames {
		if n == name {
			return Hasher(i), nil
		}
	}
	return 0, fmt.Errorf("unknown hasher %.32q: want one of %s", name, strings.Join(hasherNames[:], ", "))
}

// Stored says that a worker-rank now holds a chain of consecutive blocks.
//
// The blocks' sequence hashes are computed from Parent and Locals, so a chain
// cannot contradict itself. Only the opaque hasher carries them, in Hashes, one
// for each of Locals.
type Stored struct {
	Parent    SeqHash // sequence hash of the block before the first; only if HasParent
	HasParent bool    // false: the first block is a root, at position 0
	Position  int32   // of the first block in its sequence, from 0, or NoPosition
	Locals    []LocalHash
	Hashes    []SeqHash // opaque hasher only, else empty
}

// Singles yields the chain's blocks as Storeds of one block each, each with its
// true parent and its own position. Their slices are parts of s's.
func (s Stored) Singles() iter.Seq[Stored] {
	return func(yield func(Stored) bool) {
		b := s
		for i, l := range s.Locals {
			b.Locals = s.Locals[i : i+1]
			if len(s.Hashes) > 0 {
				b.Hashes = s.Hashes[i : i+1]
			}
			if !yield(b) {
				return
			}
			switch {
			case len(s.Hashes) > 0:
				b.Parent = s.Hashes[i]
			case b.HasParent:
				b.Parent = Next(b.Parent, l)
			default:
				b.Parent = SeqHash(l)
			}
			b.HasParent = true
			if b.Position != NoPosition {
				b.Position++
			}
		}
	}
}
