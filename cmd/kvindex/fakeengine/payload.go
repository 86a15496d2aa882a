// This file writes payloads in the engines' bytes.

package fakeengine

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// digest is an engine's name of a whole prefix.
type digest [sha256.Size]byte

// chain returns the name of the block of those tokens that follows parent; the
// one of a prompt's first block follows a root, which has the seed and class.
func (p *digest) chain(tokens []uint32, scratch []byte) digest {
	b := append(scratch[:0], p[:]...)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return sha256.Sum256(b)
}

// root returns what a class's first blocks follow.
func root(seed uint64, c class) digest {
	b := binary.LittleEndian.AppendUint64(nil, seed)
	b = append(append(b, c.lora...), 0)
	return sha256.Sum256(append(b, c.salt...))
}

// event is one event as it is written.
type event struct {
	kind   engine.Kind // Stored, Removed or Cleared
	tier   index.Tier
	hashes []digest

	// The next are of Stored.
	parent    digest
	hasParent bool
	tokens    []uint32 // none: a placeholder, which vLLM sends of the CPU's blocks
	blockSize int
	class     class
}

// format is how an engine of a kind and shape writes.
type format struct {
	kind, shape, hashes string
	// spoil makes removals unreadable.
	spoil bool
}

// media are the engines' words.
var media = map[string][tiers]string{
	VLLM:   {"GPU", "CPU"},
	SGLang: {"GPU", "CPU_PINNED"},
}

// payload appends a batch. The timestamp is in seconds since 1970.
func (f *format) payload(b []byte, timestamp float64, events []event, rank int) []byte {
	b = msgp.AppendArrayHeader(b, 3)
	b = msgp.AppendFloat64(b, timestamp)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		b = f.event(b, &events[i])
	}
	return msgp.AppendInt(b, rank)
}

// field is one field of an event; in arrays the name does not show.
type field struct {
	name    string
	write   func([]byte) []byte
	omitted bool // from maps, and nil in arrays: the value is the default
}

func (f *format) event(b []byte, e *event) []byte {
	var tag string
	var fields []field
	switch e.kind {
	case engine.Stored:
		tag, fields = "BlockStored", f.stored(e)
	case engine.Removed:
		tag, fields = "BlockRemoved", f.removed(e)
	case engine.Cleared:
		tag = "AllBlocksCleared"
	}
	if f.shape == Array {
		b = msgp.AppendArrayHeader(b, uint32(1+len(fields)))
		b = msgp.AppendString(b, tag)
		for _, x := range fields {
			if x.omitted {
				b = msgp.AppendNil(b)
			} else {
				b = x.write(b)
			}
		}
		return b
	}
	n := 1
	for _, x := range fields {
		if !x.omitted {
			n++
		}
	}
	if f.kind == VLLM && e.kind == engine.Stored {
		// vLLM's encoder sets the header's size aside for all fields, omitted or not.
		b = binary.BigEndian.AppendUint16(append(b, 0xde), uint16(n))
	} else {
		b = msgp.AppendMapHeader(b, uint32(n))
	}
	b = msgp.AppendString(msgp.AppendString(b, "type"), tag)
	for _, x := range fields {
		if !x.omitted {
			b = x.write(msgp.AppendString(b, x.name))
		}
	}
	return b
}

// stored returns the fields of a store, in the engine's order.
func (f *format) stored(e *event) []field {
	c := &e.class
	parent := msgp.AppendNil
	if e.hasParent {
		parent = func(b []byte) []byte { return f.hash(b, &e.parent) }
	}
	fields := []field{
		{name: "block_hashes", write: func(b []byte) []byte { return f.list(b, e.hashes) }},
		{name: "parent_block_hash", write: parent},
		{name: "token_ids", write: func(b []byte) []byte {
			b = msgp.AppendArrayHeader(b, uint32(len(e.tokens)))
			for _, t := range e.tokens {
				b = msgp.AppendUint32(b, t)
			}
			return b
		}},
		{name: "block_size", write: func(b []byte) []byte { return msgp.AppendInt(b, e.blockSize) }},
		{name: "lora_id", write: func(b []byte) []byte {
			if f.kind == SGLang || c.lora == "" {
				return msgp.AppendNil(b)
			}
			return msgp.AppendInt(b, c.id)
		}},
		{name: "medium", write: f.medium(e.tier)},
	}
	switch {
	case f.kind == VLLM:
		return append(fields,
			field{name: "lora_name", write: func(b []byte) []byte { return textOrNil(b, c.lora) }},
			field{name: "extra_keys", write: e.extraKeys, omitted: len(e.tokens) == 0},
			field{name: "group_idx", write: zero},
			field{name: "kv_cache_spec_kind", write: text("full_attention"), omitted: len(e.tokens) == 0},
			field{name: "kv_cache_spec_sliding_window", omitted: true})
	case f.shape == Map:
		return append(fields,
			field{name: "cache_salt", write: text(c.salt), omitted: c.salt == ""},
			field{name: "lora_name", write: text(c.lora), omitted: c.lora == ""})
	case c.salt != "": // SGLang's arrays are longer then
		return append(fields, field{write: func(b []byte) []byte {
			b = msgp.AppendMapHeader(b, 1)
			return msgp.AppendString(msgp.AppendString(b, "cache_salt"), c.salt)
		}})
	}
	return fields
}

// removed returns the fields of a removal.
func (f *format) removed(e *event) []field {
	fields := []field{
		{name: "block_hashes", write: func(b []byte) []byte { return f.list(b, e.hashes) }},
		{name: "medium", write: f.medium(e.tier)},
	}
	if f.spoil {
		fields[0].write = func(b []byte) []byte { return msgp.AppendBool(msgp.AppendArrayHeader(b, 1), true) }
	}
	if f.kind == VLLM {
		fields = append(fields, field{name: "group_idx", write: zero})
	}
	return fields
}

// extraKeys writes for each block what besides tokens is in its hash, as vLLM has it.
func (e *event) extraKeys(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(e.hashes)))
	for i := range e.hashes {
		var keys []string
		if e.class.lora != "" {
			keys = append(keys, e.class.lora)
		}
		if e.class.salt != "" && i == 0 && !e.hasParent {
			keys = append(keys, e.class.salt)
		}
		if len(keys) == 0 {
			b = msgp.AppendNil(b)
			continue
		}
		b = msgp.AppendArrayHeader(b, uint32(len(keys)))
		for _, k := range keys {
			b = msgp.AppendString(b, k)
		}
	}
	return b
}

func (f *format) list(b []byte, hashes []digest) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for i := range hashes {
		b = f.hash(b, &hashes[i])
	}
	return b
}

// hash writes a name: SGLang's are the first 8 bytes with a sign, vLLM's the
// last 8 without, or all of it.
func (f *format) hash(b []byte, d *digest) []byte {
	switch {
	case f.hashes == Bytes:
		return msgp.AppendBytes(b, d[:])
	case f.kind == VLLM:
		return msgp.AppendUint64(b, binary.BigEndian.Uint64(d[len(d)-8:]))
	}
	v := int64(binary.BigEndian.Uint64(d[:]))
	if v >= 0 { // msgpack's libraries differ here
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt64(b, v)
}

func (f *format) medium(t index.Tier) func([]byte) []byte { return text(media[f.kind][t]) }

func text(s string) func([]byte) []byte {
	return func(b []byte) []byte { return msgp.AppendString(b, s) }
}

func textOrNil(b []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, s)
}

func zero(b []byte) []byte { return msgp.AppendInt(b, 0) }
