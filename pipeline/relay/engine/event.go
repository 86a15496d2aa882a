// This file has the common form of what engines send: Event and Batch.

package engine

// Kind tells what an Event says.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = iota + 1 // blocks are held now
	Removed                 // blocks are held no more
	Cleared                 // nothing is held any more, in any tier
	Moved                   // one block went from one tier to another (TensorRT-LLM's updated)
	Created                 // the cache was made (TensorRT-LLM); tells its window
)

var kindNames = [...]string{"", "stored", "removed", "cleared", "moved", "created"}

// String returns the kind's name.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return ""
}

// Event is one event of an engine, as the engine meant it: nothing is mapped or
// judged yet. A field that the engine left out or sent as nil has its zero value.
//
// Byte slices are parts of the payload that was decoded, the others parts of
// the Batch; all are good until the payload changes or the Batch decodes again.
type Event struct {
	Kind Kind

	// Hashes are the engine's own names of blocks as bit patterns: a signed
	// integer's two's complement, of bytes or hexadecimal digits the last 8
	// bytes as a big-endian number, which is what vLLM itself makes of them.
	Hashes    []uint64
	Parent    uint64 // of Hashes[0]; only if HasParent
	HasParent bool

	// Tokens are those of the blocks, in order. There may be none, fewer than
	// the blocks take (a partial last one) or more (blocks left out).
	Tokens []uint32
	// Seconds, if there are any, are the second tokens of bigrams, one for
	// each of Tokens, which are the first ones.
	Seconds   []uint32
	Usable    int     // how many leading tokens are numbers below 2^32; the others are 0 in Tokens
	BlockSize int     // tokens a block; 0: not said
	Keys      []Key   // what besides tokens went into the blocks' hashes, by block
	KeyBlocks int     // for how many blocks Keys speaks; 0: not said
	Ahead     []Ahead // tokens after a block that went into its hash, by block

	LoRAID    int64 // only if HasLoRAID
	HasLoRAID bool
	LoRAName  []byte
	Salt      []byte // cache salt of all the blocks, where the engine gives it a field of its own
	SessionID []byte

	Medium    []byte // kind of memory in the engine's words; nil: the device
	OldMedium []byte // of Moved: where the block was
	AllMedia  bool   // of Removed: the engine does not say where from, so from everywhere
	Locality  []byte // LOCAL or REMOTE
	Ownership []byte // a secondary tier's id

	Group         int64 // number of the attention group; only if HasGroup
	HasGroup      bool
	Spec          []byte // kind of the group's cache, as full_attention
	SlidingWindow int64  // tokens, of groups with a sliding window
	Window        int64  // tokens of attention (TensorRT-LLM); 0: not said

	// Blind says that this JSON is of a version that cannot say the cache salt at
	// all, so that its absence means nothing.
	Blind bool
	// Fields is the number of fields of an event sent as an array, tag
	// included; 0 for one sent as a map or in JSON.
	Fields int

	// The next are of TensorRT-LLM's JSON, where each event has its own.
	ID      int64 // event_id, from 0 without gaps unless events were lost
	Rank    int32 // attention-DP rank; only if HasRank
	HasRank bool
}

// KeyKind tells what a Key is.
type KeyKind uint8

// The kinds of keys.
const (
	KeyText  KeyKind = iota + 1 // a LoRA name, or on a sequence's first block a cache salt
	KeyMM                       // a multimodal input: ID, and Offset of its first token from the block's
	KeyOther                    // anything else, as the digest of prompt embeddings
)

// Key is one thing besides tokens that went into a block's hash.
type Key struct {
	Block  int32 // index into the event's Hashes
	Kind   KeyKind
	ID     []byte
	Offset int64
}

// Ahead is one token after a block that went into the block's hash.
type Ahead struct {
	Block int32 // index into the event's Hashes
	Token uint32
	Bad   bool // the token is no number below 2^32
}

// Batch is one decoded payload. The zero value is ready to use; it belongs to
// its caller and is reused from payload to payload, and after the first few a
// decode allocates nothing (a JSON one does).
type Batch struct {
	Timestamp float64 // seconds since 1970 by the engine's clock; 0: not said
	Rank      int32   // data parallel rank; only if HasRank
	HasRank   bool
	Events    []Event // in the engine's order, those that could not be decoded left out

	// LostRemovals counts the events left out that were, or may have been,
	// removals or clears. If it is not 0, the engine may hold less than the
	// events say.
	LostRemovals int
	Counts       Counts // of this payload

	hashes  []uint64
	tokens  []uint32
	seconds []uint32
	keys    []Key
	ahead   []Ahead
}

// reset empties b. What it held is zeroed, so that no payload is kept alive.
func (b *Batch) reset() {
	clear(b.Events)
	clear(b.keys)
	*b = Batch{
		Events: b.Events[:0],
		hashes: b.hashes[:0], tokens: b.tokens[:0], seconds: b.seconds[:0],
		keys: b.keys[:0], ahead: b.ahead[:0],
	}
}
