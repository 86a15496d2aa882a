// This file decodes the msgpack batches of vLLM, SGLang and TensorRT-LLM's
// streaming form, in every version's shape.

package engine

import (
	"encoding/binary"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// Decode makes b what the msgpack payload p says. An event that cannot be read
// is left out and counted, and the others are still there. An error is about
// the payload from some byte on: see the errors.
func (b *Batch) Decode(p []byte, l Limits) error {
	b.reset()
	l = l.withDefaults()
	if len(p) > l.MaxBytes {
		return ErrTooLarge
	}
	n, p, f := arrayLen(p)
	if f.fatal() {
		return f.err()
	} else if f != faultNone || n < 2 {
		return ErrEnvelope
	}
	if b.Timestamp, p, f = number(p); f != faultNone {
		return envelopeErr(f)
	}
	events, p, f := arrayLen(p)
	if f != faultNone {
		return envelopeErr(f)
	}
	for i := range events {
		if i == l.MaxEvents {
			return ErrTooManyEvents
		}
		if p, f = b.event(p); f.fatal() {
			return f.err()
		}
	}
	if n > 2 {
		if rest, ok := nilValue(p); ok {
			p = rest
		} else {
			var rank int64
			if rank, p, f = integer(p); f != faultNone {
				return envelopeErr(f)
			}
			if rank < 0 || rank > math.MaxInt32 {
				return ErrEnvelope
			}
			b.Rank, b.HasRank = int32(rank), true
		}
	}
	for range n - min(n, 3) {
		b.Counts[UnknownField]++
		if p, f = skip(p); f != faultNone {
			return f.err()
		}
	}
	if len(p) > 0 {
		b.Counts[TrailingData]++
	}
	return nil
}

func envelopeErr(f fault) error {
	if f.fatal() {
		return f.err()
	}
	return ErrEnvelope
}

// field is one of the fields that events have.
type field uint8

const (
	fieldUnknown field = iota
	fieldType
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldSeventh // in arrays: vLLM's lora_name, SGLang's metadata
	fieldLoRAName
	fieldMetadata
	fieldExtraKeys
	fieldMMKeys
	fieldGroup
	fieldSpec
	fieldSlidingWindow
	fieldLocality
	fieldOwnership
	fieldSession
	fieldLookahead
	fieldSalt
)

// fieldOf returns the field of that name. Names mean the same in all engines.
func fieldOf(name []byte) field {
	switch string(name) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "metadata":
		return fieldMetadata
	case "extra_keys":
		return fieldExtraKeys
	case "mm_keys":
		return fieldMMKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpec
	case "kv_cache_spec_sliding_window":
		return fieldSlidingWindow
	case "locality":
		return fieldLocality
	case "ownership":
		return fieldOwnership
	case "session_id":
		return fieldSession
	case "lookahead_token_ids":
		return fieldLookahead
	case "cache_salt":
		return fieldSalt
	}
	return fieldUnknown
}

// The fields of arrays, after the tag. Versions differ in where they stop.
var (
	storedFields = [...]field{
		fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID, fieldMedium, fieldSeventh,
		fieldExtraKeys, fieldGroup, fieldSpec, fieldSlidingWindow, fieldLocality, fieldOwnership,
		fieldSession, fieldLookahead,
	}
	removedFields = [...]field{fieldHashes, fieldMedium, fieldGroup, fieldLocality, fieldOwnership}
)

func kindOf(tag []byte) Kind {
	switch string(tag) {
	case "BlockStored":
		return Stored
	case "BlockRemoved":
		return Removed
	case "AllBlocksCleared":
		return Cleared
	}
	return 0
}

// event reads one event into b.Events, or counts why not. Its fault is none or
// a fatal one.
func (b *Batch) event(p []byte) ([]byte, fault) {
	var e Event
	var tagged, hashed bool
	var bad fault
	switch typeOf(p) {
	case msgp.ArrayType:
		n, rest, f := arrayLen(p)
		if f != faultNone {
			return p, f
		}
		p = rest
		var fields []field
		for i := range n {
			id := fieldUnknown
			if i == 0 {
				tag, rest, f := text(p)
				if f.fatal() {
					return p, f
				}
				if f == faultNone {
					p, tagged = rest, true
					switch e.Kind = kindOf(tag); e.Kind {
					case Stored:
						fields = storedFields[:]
					case Removed:
						fields = removedFields[:]
					}
					continue
				}
			} else if i <= len(fields) {
				id = fields[i-1]
			}
			rest, f := b.field(&e, id, p, &hashed)
			if f == faultType {
				bad = f
				rest, f = skip(p)
			}
			if f != faultNone {
				return p, f
			}
			if id == fieldUnknown && e.Kind != 0 {
				b.Counts[UnknownField]++
			}
			p = rest
		}
		e.Fields = n
	case msgp.MapType:
		n, rest, f := mapLen(p)
		if f != faultNone {
			return p, f
		}
		p = rest
		unknown := uint64(0)
		for range n {
			id := fieldUnknown
			name, rest, f := text(p)
			if f == faultNone {
				id = fieldOf(name)
			} else if rest, f = skip(p); f != faultNone {
				return p, f
			}
			p = rest
			if id == fieldType {
				tag, _, f := text(p)
				if f.fatal() {
					return p, f
				}
				tagged = f == faultNone
				e.Kind = kindOf(tag)
			}
			rest, f = b.field(&e, id, p, &hashed)
			if f == faultType {
				bad = f
				rest, f = skip(p)
			}
			if f != faultNone {
				return p, f
			}
			if id == fieldUnknown {
				unknown++
			}
			p = rest
		}
		if e.Kind != 0 {
			b.Counts[UnknownField] += unknown
		}
	default:
		rest, f := skip(p)
		if f != faultNone {
			return p, f
		}
		p = rest
	}
	switch {
	case !tagged:
		b.lose(BadShape, true)
	case e.Kind == 0:
		b.lose(UnknownKind, false)
	case bad != faultNone:
		b.lose(BadField, e.Kind != Stored)
	case !hashed && e.Kind != Cleared:
		b.lose(MissingField, e.Kind != Stored)
	default:
		b.Events = append(b.Events, e)
	}
	return p, faultNone
}

// lose counts an event that is left out.
func (b *Batch) lose(why Reason, removal bool) {
	b.Counts[why]++
	if removal {
		b.LostRemovals++
	}
}

// field reads one field's value. With faultType the value is still to be passed over.
func (b *Batch) field(e *Event, id field, p []byte, hashed *bool) ([]byte, fault) {
	if id == fieldUnknown || id == fieldType {
		return skip(p)
	}
	if rest, ok := nilValue(p); ok {
		return rest, faultNone
	}
	var f fault
	rest := p
	switch id {
	case fieldHashes:
		e.Hashes, rest, f = b.readHashes(p)
		*hashed = f == faultNone
	case fieldParent:
		e.Parent, rest, f = hash(p)
		e.HasParent = f == faultNone
	case fieldTokens:
		rest, f = b.readTokens(e, p)
	case fieldBlockSize:
		var v int64
		if v, rest, f = integer(p); v < 0 || v > math.MaxInt32 {
			f = max(f, faultType)
		}
		e.BlockSize = int(v)
	case fieldLoRAID:
		e.LoRAID, rest, f = integer(p)
		e.HasLoRAID = f == faultNone
	case fieldMedium:
		e.Medium, rest, f = text(p)
	case fieldSeventh:
		if typeOf(p) == msgp.MapType {
			return metadata(e, p)
		}
		e.LoRAName, rest, f = text(p)
	case fieldLoRAName:
		e.LoRAName, rest, f = text(p)
	case fieldMetadata:
		return metadata(e, p)
	case fieldExtraKeys, fieldMMKeys:
		return b.readKeys(e, p)
	case fieldGroup:
		e.Group, rest, f = integer(p)
		e.HasGroup = f == faultNone
	case fieldSpec:
		e.Spec, rest, f = text(p)
	case fieldSlidingWindow:
		e.SlidingWindow, rest, f = integer(p)
	case fieldLocality:
		e.Locality, rest, f = text(p)
	case fieldOwnership:
		e.Ownership, rest, f = text(p)
	case fieldSession:
		e.SessionID, rest, f = text(p)
	case fieldLookahead:
		return b.readAhead(e, p)
	case fieldSalt:
		e.Salt, rest, f = text(p)
	}
	return rest, f
}

// metadata reads SGLang's map of further fields.
func metadata(e *Event, p []byte) ([]byte, fault) {
	n, p, f := mapLen(p)
	if f != faultNone {
		return p, f
	}
	for range n {
		name, rest, f := text(p)
		if f != faultNone {
			return p, f
		}
		p = rest
		if rest, ok := nilValue(p); ok {
			p = rest
		} else if string(name) == "cache_salt" {
			e.Salt, p, f = text(p)
		} else {
			p, f = skip(p)
		}
		if f != faultNone {
			return p, f
		}
	}
	return p, faultNone
}

// part is what of s was appended from start on, nil if nothing was.
func part[T any](s []T, start int) []T {
	if start == len(s) {
		return nil
	}
	return s[start:len(s):len(s)]
}

func (b *Batch) readHashes(p []byte) ([]uint64, []byte, fault) {
	n, p, f := arrayLen(p)
	if f != faultNone {
		return nil, p, f
	}
	start := len(b.hashes)
	for range n {
		var h uint64
		if h, p, f = hash(p); f != faultNone {
			return nil, p, f
		}
		b.hashes = append(b.hashes, h)
	}
	return part(b.hashes, start), p, faultNone
}

// readTokens reads numbers, strings (which are not usable), or pairs of them.
// Most of a payload is tokens, hence the short ways.
func (b *Batch) readTokens(e *Event, p []byte) ([]byte, fault) {
	n, p, f := arrayLen(p)
	if f != faultNone {
		return p, f
	}
	start, seconds := len(b.tokens), len(b.seconds)
	usable := n
	for i := range n {
		if len(p) == 0 {
			return p, faultShort
		}
		var first, second uint32
		var ok bool
		switch c := p[0]; {
		case c < 0x80:
			first, p = uint32(c), p[1:]
		case c == 0xcd && len(p) >= 3:
			first, p = uint32(binary.BigEndian.Uint16(p[1:])), p[3:]
		case c == 0xce && len(p) >= 5:
			first, p = binary.BigEndian.Uint32(p[1:]), p[5:]
		case c == 0x92:
			if first, ok, p, f = token(p[1:]); f != faultNone {
				return p, f
			}
			usable = limit(usable, i, ok)
			if second, ok, p, f = token(p); f != faultNone {
				return p, f
			}
			usable = limit(usable, i, ok)
			b.seconds = append(b.seconds, second)
		default:
			if first, ok, p, f = token(p); f != faultNone {
				return p, f
			}
			usable = limit(usable, i, ok)
		}
		b.tokens = append(b.tokens, first)
	}
	pairs := len(b.seconds) - seconds
	if pairs != 0 && pairs != n {
		return p, faultType
	}
	e.Tokens, e.Seconds = part(b.tokens, start), part(b.seconds, seconds)
	e.Usable = usable
	return p, faultNone
}

// limit lowers usable to i if the token there is not ok.
func limit(usable, i int, ok bool) int {
	if !ok {
		return min(usable, i)
	}
	return usable
}

// token reads one token and whether it is a number below 2^32.
func token(p []byte) (v uint32, ok bool, rest []byte, f fault) {
	switch t := typeOf(p); t {
	case msgp.UintType, msgp.IntType:
		w, rest, f := word(p)
		if f != faultNone || w > math.MaxUint32 {
			return 0, false, rest, f
		}
		return uint32(w), true, rest, faultNone
	case msgp.StrType, msgp.BinType:
		_, rest, f := text(p)
		return 0, false, rest, f
	}
	return 0, false, p, wrongType(p)
}

// readKeys reads a list, by block, of lists of keys.
func (b *Batch) readKeys(e *Event, p []byte) ([]byte, fault) {
	n, p, f := arrayLen(p)
	if f != faultNone {
		return p, f
	}
	if n == 0 {
		return p, faultNone
	}
	if e.KeyBlocks != 0 {
		return p, faultType // two such lists: no engine sends them
	}
	e.KeyBlocks = n
	start := len(b.keys)
	for i := range n {
		if rest, ok := nilValue(p); ok {
			p = rest
			continue
		}
		if len(b.keys) >= maxKeys {
			return p, faultType
		}
		if typeOf(p) != msgp.ArrayType {
			b.keys = append(b.keys, Key{Block: int32(i), Kind: KeyOther})
			if p, f = skip(p); f != faultNone {
				return p, f
			}
			continue
		}
		var keys int
		if keys, p, f = arrayLen(p); f != faultNone {
			return p, f
		}
		for range keys {
			if rest, ok := nilValue(p); ok {
				p = rest
				continue
			}
			if len(b.keys) >= maxKeys {
				return p, faultType
			}
			k := Key{Block: int32(i)}
			if p, f = readKey(&k, p); f != faultNone {
				return p, f
			}
			b.keys = append(b.keys, k)
		}
	}
	e.Keys = part(b.keys, start)
	return p, faultNone
}

// readKey reads one key: a text, bytes, [id, offset], or TensorRT-LLM's map.
func readKey(k *Key, p []byte) (rest []byte, f fault) {
	switch typeOf(p) {
	case msgp.StrType:
		k.Kind = KeyText
		k.ID, rest, f = text(p)
		return rest, f
	case msgp.BinType:
		k.Kind = KeyOther
		k.ID, rest, f = text(p)
		return rest, f
	case msgp.ArrayType:
		if p[0] == 0x92 {
			id, rest, f := text(p[1:])
			if f == faultNone {
				var offset int64
				if offset, rest, f = integer(rest); f == faultNone {
					k.Kind, k.ID, k.Offset = KeyMM, id, offset
					return rest, faultNone
				}
			}
		}
	case msgp.MapType:
		n, rest, f := mapLen(p)
		if f != faultNone {
			return p, f
		}
		k.Kind = KeyOther
		for range n {
			name, value, f := text(rest)
			if f != faultNone {
				return p, f
			}
			switch string(name) {
			case "hash":
				if id, _, f := text(value); f == faultNone {
					k.Kind, k.ID = KeyMM, id
				}
			case "start_offset":
				if offset, _, f := integer(value); f == faultNone {
					k.Offset = offset
				}
			}
			if rest, f = skip(value); f != faultNone {
				return p, f
			}
		}
		return rest, faultNone
	}
	k.Kind = KeyOther
	return skip(p)
}

// readAhead reads a list, by block, of lists of tokens.
func (b *Batch) readAhead(e *Event, p []byte) ([]byte, fault) {
	n, p, f := arrayLen(p)
	if f != faultNone {
		return p, f
	}
	start := len(b.ahead)
	for i := range n {
		if rest, ok := nilValue(p); ok {
			p = rest
			continue
		}
		var tokens int
		if tokens, p, f = arrayLen(p); f != faultNone {
			return p, f
		}
		for range tokens {
			if len(b.ahead) >= maxAhead {
				return p, faultType
			}
			a := Ahead{Block: int32(i)}
			var ok bool
			if a.Token, ok, p, f = token(p); f != faultNone {
				return p, f
			}
			a.Bad = !ok
			b.ahead = append(b.ahead, a)
		}
	}
	e.Ahead = part(b.ahead, start)
	return p, faultNone
}
