// This file names why something that an engine sent was not, or not wholly, used.

package engine

// Reason is why something was left out or is worth a count. Its String is for
// metrics' labels.
type Reason uint8

// Reasons of decoding.
const (
	reasonNone   Reason = iota
	UnknownKind         // events of a kind that is not known
	UnknownField        // fields, of an event or of a batch, that are not known
	BadShape            // events that are neither an array nor a map, or without a tag
	BadField            // events with a field of a wrong type or out of range
	MissingField        // events without a field that their kind must have
	TrailingData        // payloads with bytes after their end

	// Reasons of mapping that leave blocks out.
	OtherGroup     // blocks of another attention group than the main one
	OtherBlockSize // blocks of another size than the model's
	OtherMedium    // blocks in a kind of memory that is not known
	Partial        // blocks that are not full
	Masked         // blocks of events whose tokens are of more blocks than are named
	TooFewTokens   // blocks of events with too few tokens
	Placeholder    // blocks without tokens whose content is not known
	BadToken       // blocks with a token that is no number below 2^32
	UnnamedLoRA    // blocks of a LoRA adapter known by a number only
	UnknownKey     // blocks with a key in their hash whose meaning is not known
	EagleMismatch  // blocks hashed with lookahead or bigrams where the model's are not, or the other way round
	Unchained      // blocks whose hashes are not, or not proven to be, those of whole prefixes (SGLang up to 0.5.5)
	Contradiction  // blocks whose hash named other content before, and those after them
	NullHash       // blocks whose sequence hash would be 0 or their parent's
	Full           // blocks beyond the largest number that is kept

	// Reasons of mapping that leave nothing out.
	Duplicate      // blocks stored that were held already, as a re-announcement says again
	Orphan         // blocks kept aside until their parent is known
	Adopted        // blocks from aside whose content became known
	UnknownRemoved // blocks removed that were not held
	BlindBlocks    // blocks of engines too old to say salts and multimodal inputs
	WindowGrown    // times that a larger window showed the main group to be another, and all was cleared

	reasons
)

// Reasons is the number of values of Reason, the unused 0 among them.
const Reasons = int(reasons)

var reasonNames = [reasons]string{
	"", "unknown_kind", "unknown_field", "bad_shape", "bad_field", "missing_field", "trailing_data",
	"other_group", "other_block_size", "other_medium", "partial", "masked", "too_few_tokens",
	"placeholder", "bad_token", "unnamed_lora", "unknown_key", "eagle_mismatch", "unchained",
	"contradiction", "null_hash", "full",
	"duplicate", "orphan", "adopted", "unknown_removed", "blind", "window_grown",
}

// String returns the reason's name, empty for 0 and for no reason.
func (r Reason) String() string {
	if r < reasons {
		return reasonNames[r]
	}
	return ""
}

// Counts counts by Reason, in the unit that each Reason's comment says.
type Counts [Reasons]uint64

// Add adds o to c.
func (c *Counts) Add(o *Counts) {
	for i, n := range o {
		c[i] += n
	}
}
