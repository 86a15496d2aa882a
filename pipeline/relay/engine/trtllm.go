// This file decodes TensorRT-LLM's buffered events, which come as JSON.

package engine

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"strconv"
)

// DecodeJSON makes b what the JSON payload p says: an array of TensorRT-LLM's
// events. Each event has its own ID, Rank and Window. A stored event whose
// blocks differ in level or salt becomes several, one for each run of alike
// ones; they have the same ID. As Decode, it leaves out single events that
// cannot be read, and fails for what is not JSON. It allocates.
func (b *Batch) DecodeJSON(p []byte, l Limits) error {
	b.reset()
	l = l.withDefaults()
	if len(p) > l.MaxBytes {
		return ErrTooLarge
	}
	d := json.NewDecoder(bytes.NewReader(p))
	t, err := d.Token()
	if err != nil {
		return jsonErr(err)
	}
	if t != json.Delim('[') {
		return ErrEnvelope
	}
	for i := 0; d.More(); i++ {
		if i == l.MaxEvents || len(b.Events) >= l.MaxEvents {
			return ErrTooManyEvents
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return jsonErr(err)
		}
		b.jsonEvent(raw)
	}
	if _, err := d.Token(); err != nil {
		return jsonErr(err)
	}
	if _, err := d.Token(); err != io.EOF {
		b.Counts[TrailingData]++
	}
	return nil
}

func jsonErr(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return ErrTruncated
	}
	return ErrMalformed
}

// jsonHash is a block hash: a number of 64 bits or hexadecimal digits.
type jsonHash uint64

func (h *jsonHash) UnmarshalJSON(p []byte) error {
	if len(p) > 1 && p[0] == '"' {
		v, ok := hexHash(p[1 : len(p)-1])
		if !ok {
			return strconv.ErrSyntax
		}
		*h = jsonHash(v)
		return nil
	}
	if v, err := strconv.ParseUint(string(p), 10, 64); err == nil {
		*h = jsonHash(v)
		return nil
	}
	v, err := strconv.ParseInt(string(p), 10, 64)
	*h = jsonHash(v)
	return err
}

// jsonToken is a token with its extra id; a text is no usable token.
type jsonToken struct {
	ID    json.RawMessage `json:"token_id"`
	Extra json.RawMessage `json:"token_extra_id"`
}

// usable returns the token, if it is nothing but a number below 2^32.
func (t *jsonToken) usable() (uint32, bool) {
	v, err := strconv.ParseUint(string(t.ID), 10, 32)
	if err != nil || len(t.Extra) > 0 && string(t.Extra) != "0" && string(t.Extra) != "null" {
		return 0, false
	}
	return uint32(v), true
}

type jsonMMKey struct {
	Type   string `json:"type"`
	Hash   string `json:"hash"`
	Offset int64  `json:"start_offset"`
}

type jsonBlock struct {
	Hash   *jsonHash       `json:"block_hash"`
	Tokens []jsonToken     `json:"tokens"`
	Level  int             `json:"cache_level"`
	MMKeys []jsonMMKey     `json:"mm_keys"`
	Salt   json.RawMessage `json:"cache_salt"` // absent in versions that can't say it
}

type jsonDiff struct {
	New int `json:"new_value"`
	Old int `json:"old_value"`
}

type jsonEvent struct {
	ID   int64 `json:"event_id"`
	Data struct {
		Type   string      `json:"type"`
		Parent *jsonHash   `json:"parent_hash"`
		Blocks []jsonBlock `json:"blocks"`
		Hashes []jsonHash  `json:"block_hashes"`
		Hash   *jsonHash   `json:"block_hash"`
		Level  *jsonDiff   `json:"cache_level"`
	} `json:"data"`
	Window int64  `json:"window_size"`
	Group  *int64 `json:"layer_group_id"`
	Rank   *int32 `json:"attention_dp_rank"`
}

// Objects take up to 120 bytes of memory each and twice that while their list grows, for
// as little as 3 of JSON. The smallest that an engine could send has 14, {"token_id":1}
// with its comma. An event with more objects than one in jsonObject bytes is left out;
// jsonSpare are for braces in texts.
const (
	jsonObject = 12
	jsonSpare  = 64
)

// jsonEvent reads one event into b.Events, or counts why not.
func (b *Batch) jsonEvent(raw []byte) {
	var head struct {
		Data *struct {
			Type *string `json:"type"`
		} `json:"data"`
	}
	if json.Unmarshal(raw, &head) != nil || head.Data == nil || head.Data.Type == nil {
		b.lose(BadShape, true)
		return
	}
	kind := *head.Data.Type
	switch kind {
	case "created", "stored", "removed", "updated":
	default:
		b.lose(UnknownKind, false)
		return
	}
	removal := kind == "removed" || kind == "updated"
	var j jsonEvent
	if bytes.Count(raw, []byte("{")) > len(raw)/jsonObject+jsonSpare || json.Unmarshal(raw, &j) != nil || j.Window < 0 || j.Rank != nil && *j.Rank < 0 {
		b.lose(BadField, removal)
		return
	}
	e := Event{ID: j.ID, Window: j.Window}
	if j.Group != nil {
		e.Group, e.HasGroup = *j.Group, true
	}
	if j.Rank != nil {
		e.Rank, e.HasRank = *j.Rank, true
	}
	switch kind {
	case "created":
		e.Kind = Created
		b.Events = append(b.Events, e)
	case "removed":
		e.Kind, e.AllMedia = Removed, true
		start := len(b.hashes)
		for _, h := range j.Data.Hashes {
			b.hashes = append(b.hashes, uint64(h))
		}
		if e.Hashes = part(b.hashes, start); len(e.Hashes) == 0 {
			b.lose(MissingField, true)
			return
		}
		b.Events = append(b.Events, e)
	case "updated":
		if j.Data.Hash == nil {
			b.lose(MissingField, true)
			return
		}
		if j.Data.Level == nil || j.Data.Level.New == j.Data.Level.Old {
			return // of the priority only
		}
		e.Kind = Moved
		b.hashes = append(b.hashes, uint64(*j.Data.Hash))
		e.Hashes = part(b.hashes, len(b.hashes)-1)
		e.Medium, e.OldMedium = levelMedium(j.Data.Level.New), levelMedium(j.Data.Level.Old)
		b.Events = append(b.Events, e)
	case "stored":
		b.jsonStored(e, &j)
	}
}

// jsonStored appends a stored event for each run of blocks of one level and salt.
func (b *Batch) jsonStored(e Event, j *jsonEvent) {
	e.Kind = Stored
	blocks := j.Data.Blocks
	for i := range blocks {
		// All but the last are full, so of one size. Where there is but one,
		// it is for who knows the model's block size to say whether it is.
		if blocks[i].Hash == nil || i > 0 && len(blocks[i].Tokens) > len(blocks[0].Tokens) ||
			i < len(blocks)-1 && len(blocks[i].Tokens) != len(blocks[0].Tokens) || len(blocks[i].Tokens) == 0 {
			b.lose(BadField, false)
			return
		}
	}
	if len(blocks) == 0 {
		b.lose(MissingField, false)
		return
	}
	if len(blocks) > 1 {
		e.BlockSize = len(blocks[0].Tokens)
	}
	if j.Data.Parent != nil {
		e.Parent, e.HasParent = uint64(*j.Data.Parent), true
	}
	for first := 0; first < len(blocks); {
		next := first + 1
		for next < len(blocks) && blocks[next].Level == blocks[first].Level &&
			bytes.Equal(blocks[next].Salt, blocks[first].Salt) {
			next++
		}
		if !b.jsonRun(e, blocks[first:next]) {
			b.lose(BadField, false)
			return
		}
		e.Parent, e.HasParent = uint64(*blocks[next-1].Hash), true
		first = next
	}
}

// jsonRun appends a stored event for blocks of one level and salt.
func (b *Batch) jsonRun(e Event, run []jsonBlock) bool {
	e.Medium = levelMedium(run[0].Level)
	if len(run[0].Salt) == 0 {
		e.Blind = true
	} else {
		var salt *string
		if json.Unmarshal(run[0].Salt, &salt) != nil {
			return false
		}
		if salt != nil {
			e.Salt = []byte(*salt)
		}
	}
	hashes, tokens, keys := len(b.hashes), len(b.tokens), len(b.keys)
	e.Usable = math.MaxInt
	for i := range run {
		b.hashes = append(b.hashes, uint64(*run[i].Hash))
		for _, t := range run[i].Tokens {
			v, ok := t.usable()
			e.Usable = limit(e.Usable, len(b.tokens)-tokens, ok)
			b.tokens = append(b.tokens, v)
		}
		for _, k := range run[i].MMKeys {
			key := Key{Block: int32(i), Kind: KeyMM, ID: []byte(k.Hash), Offset: k.Offset}
			if k.Hash == "" {
				key.Kind = KeyOther
			}
			b.keys = append(b.keys, key)
		}
	}
	e.Hashes, e.Tokens = part(b.hashes, hashes), part(b.tokens, tokens)
	e.Usable = min(e.Usable, len(e.Tokens))
	if len(b.keys) > keys {
		e.Keys, e.KeyBlocks = part(b.keys, keys), len(run)
	}
	b.Events = append(b.Events, e)
	return true
}

// The media of TensorRT-LLM's cache levels, in the words of the other engines.
var levelMedia = [...][]byte{nil, []byte("CPU"), []byte("DISK")}

// otherLevel is the medium of a level that is not known.
var otherLevel = []byte("level")

func levelMedium(level int) []byte {
	if level >= 0 && level < len(levelMedia) {
		return levelMedia[level]
	}
	return otherLevel
}
