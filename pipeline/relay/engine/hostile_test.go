// This file tests the decoders with what no engine sends.

package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvindex/index"
)

// envelope is a batch with the given events and what follows them.
func envelope(events ...string) []byte {
	p := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1)
	p = msgp.AppendArrayHeader(p, uint32(len(events)))
	return msgp.AppendInt(append(p, strings.Join(events, "")...), 0)
}

// pack encodes arrays, maps (as a list of pairs behind "map"), and scalars.
func pack(v any) string {
	var p []byte
	switch v := v.(type) {
	case []any:
		if len(v) > 0 && v[0] == "map" {
			p = msgp.AppendMapHeader(p, uint32(len(v)/2))
			v = v[1:]
		} else {
			p = msgp.AppendArrayHeader(p, uint32(len(v)))
		}
		for _, e := range v {
			p = append(p, pack(e)...)
		}
	case json.RawMessage: // bytes as they are
		p = v
	case nil:
		p = msgp.AppendNil(p)
	case string:
		p = msgp.AppendString(p, v)
	case []byte:
		p = msgp.AppendBytes(p, v)
	case int:
		p = msgp.AppendInt(p, v)
	case float64:
		p = msgp.AppendFloat64(p, v)
	default:
		panic("BUG: pack of another type")
	}
	return string(p)
}

type list = []any

// TestOneBadEventCostsOnlyItself puts a bad event between two good ones.
func TestOneBadEventCostsOnlyItself(t *testing.T) {
	deep := list{}
	for range 2000 {
		deep = list{deep}
	}
	tests := []struct {
		name     string
		event    any
		why      Reason
		removals int
	}{
		{"nil", nil, BadShape, 1},
		{"number", 7, BadShape, 1},
		{"text", "BlockStored", BadShape, 1},
		{"empty array", list{}, BadShape, 1},
		{"empty map", list{"map"}, BadShape, 1},
		{"tag of another type", list{3, list{1}}, BadShape, 1},
		{"map without tag", list{"map", "block_hashes", list{1}}, BadShape, 1},
		{"map with a tag of another type", list{"map", "type", 3}, BadShape, 1},
		{"unknown kind", list{"BlockPinned", list{1}}, UnknownKind, 0},
		{"unknown kind as a map, with a field of another type", list{"map", "block_hashes", 3, "type", "BlockPinned"}, UnknownKind, 0},
		{"stored without anything", list{"BlockStored"}, MissingField, 0},
		{"removed without anything", list{"BlockRemoved"}, MissingField, 1},
		{"hashes nil", list{"BlockRemoved", nil}, MissingField, 1},
		{"hashes no list", list{"BlockRemoved", 3}, BadField, 1},
		{"a hash of another type", list{"BlockRemoved", list{1, 2.5}}, BadField, 1},
		{"a hash of few bytes", list{"BlockRemoved", list{[]byte{1, 2}}}, BadField, 1},
		{"a hash of text", list{"BlockRemoved", list{"hello hello hello"}}, BadField, 1},
		{"parent of another type", list{"BlockStored", list{1}, list{}}, BadField, 0},
		{"tokens of another type", list{"BlockStored", list{1}, nil, list{2.5}}, BadField, 0},
		{"a triple of tokens", list{"BlockStored", list{1}, nil, list{list{1, 2, 3}}}, BadField, 0},
		{"pairs and single tokens", list{"BlockStored", list{1}, nil, list{list{1, 2}, 3}}, BadField, 0},
		{"block size negative", list{"BlockStored", list{1}, nil, list{2}, -1}, BadField, 0},
		{"block size huge", list{"BlockStored", list{1}, nil, list{2}, 1 << 40}, BadField, 0},
		{"medium of another type", list{"BlockRemoved", list{1}, 3}, BadField, 1},
		{"keys no list", list{"map", "type", "BlockStored", "block_hashes", list{1}, "extra_keys", 3}, BadField, 0},
		{"deep hash", list{"BlockRemoved", list{deep}}, BadField, 1},
		{"deep kind", list{deep}, BadShape, 1},
	}
	good := pack(list{"BlockRemoved", list{1}, "GPU"})
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var b Batch
			if err := b.Decode(envelope(good, pack(test.event), good), Limits{}); err != nil {
				t.Fatal(err)
			}
			checkEvents(t, &b, "0 removed 1 medium GPU", "0 removed 1 medium GPU")
			if b.Counts[test.why] != 1 || b.LostRemovals != test.removals || !b.HasRank {
				t.Errorf("%s, %d removals lost, rank %v", counted(&b.Counts), b.LostRemovals, b.HasRank)
			}
		})
	}
}

// TestOddEvents are those that say something in an unusual way.
func TestOddEvents(t *testing.T) {
	tests := []struct {
		name   string
		event  any
		counts string
		want   string
	}{
		{"hash of hexadecimal digits", list{"BlockRemoved", list{"00ff00000000000000ff"}}, "", "0 removed 255"},
		{"negative hash", list{"BlockRemoved", list{-1, -1 << 62}}, "", "0 removed 18446744073709551615 13835058055282163712"},
		{"names as bytes", list{"map", []byte("type"), []byte("BlockRemoved"), []byte("block_hashes"), list{1}}, "", "0 removed 1"},
		{"a key of another type", list{"map", 3, 4, "type", "BlockRemoved", "block_hashes", list{1}}, "unknown_field=1", "0 removed 1"},
		{"more fields", list{"BlockRemoved", list{1}, "GPU", 0, nil, nil, "more"}, "unknown_field=1", "0 removed 1 medium GPU group 0"},
		{"a cleared with a field", list{"AllBlocksCleared", "GPU"}, "unknown_field=1", "0 cleared "},
		{"the tag last", list{"map", "block_hashes", list{1}, "type", "BlockRemoved"}, "", "0 removed 1"},
		{"tokens that are none", list{"BlockStored", list{1}, nil, list{7, -3, "x", 1 << 33}, 4}, "", "0 stored 1 tokens [7 0 0 0] usable 1 size 4"},
		{"a key that is no list", list{"BlockStored", list{1}, nil, list{7}, 1, nil, nil, nil, list{"salt"}}, "", "0 stored 1 tokens [7] usable 1 size 1 key 0:@0"},
		{"a digest", list{"BlockStored", list{1}, nil, list{7}, 1, nil, nil, nil, list{list{[]byte("xyz"), nil, 3}}}, "",
			"0 stored 1 tokens [7] usable 1 size 1 key 0:xyz@0 key 0:@0"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var b Batch
			if err := b.Decode(envelope(pack(test.event)), Limits{}); err != nil {
				t.Fatal(err)
			}
			checkEvents(t, &b, test.want)
			if got := counted(&b.Counts); got != test.counts {
				t.Errorf("counts %q, want %q", got, test.counts)
			}
		})
	}
}

// TestHostilePayloads promise much and hold little.
func TestHostilePayloads(t *testing.T) {
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	head := pack(list{1.0, 0})[1:10] // a time
	tests := []struct {
		name    string
		payload string
		limits  Limits
		err     error
	}{
		{"empty", "", Limits{}, ErrTruncated},
		{"no array", "\x80", Limits{}, ErrEnvelope},
		{"too short an array", "\x91\x01", Limits{}, ErrEnvelope},
		{"a time that is none", "\x93\xa1x\x90\x00", Limits{}, ErrEnvelope},
		{"events that are none", "\x93" + head + "\x01\x00", Limits{}, ErrEnvelope},
		{"four billion elements", "\xdd\xff\xff\xff\xff", Limits{}, ErrTruncated},
		{"four billion events", "\x93" + head + "\xdd\xff\xff\xff\xff", Limits{}, ErrTruncated},
		{"four billion fields", string(envelope("\xdd\xff\xff\xff\xff")), Limits{}, ErrTruncated},
		{"four billion keys", string(envelope("\xdf\xff\xff\xff\xff")), Limits{}, ErrTruncated},
		{"four billion hashes", string(envelope(pack(list{"BlockRemoved", raw("\xdd\xff\xff\xff\xff")}))), Limits{}, ErrTruncated},
		{"four billion tokens", string(envelope(pack(list{"BlockStored", list{1}, nil, raw("\xdd\xff\xff\xff\xff")}))), Limits{}, ErrTruncated},
		{"a text of four billion", string(envelope(pack(list{raw("\xdb\xff\xff\xff\xff")}))), Limits{}, ErrTruncated},
		{"bytes of four billion", string(envelope(pack(list{"BlockRemoved", list{raw("\xc6\xff\xff\xff\xff")}}))), Limits{}, ErrTruncated},
		{"arrays within arrays", string(envelope(strings.Repeat("\x91", 1<<20))), Limits{}, ErrTruncated},
		{"wide arrays within arrays", string(envelope(strings.Repeat("\xdd\xff\xff\xff\xff", 1<<18))), Limits{}, ErrTruncated},
		{"the byte that is none", string(envelope("\xc1")), Limits{}, ErrMalformed},
		{"the byte that is none as a hash", string(envelope(pack(list{"BlockRemoved", list{raw("\xc1")}}))), Limits{}, ErrMalformed},
		{"a rank that is none", "\x93" + head + "\x90\xa1x", Limits{}, ErrEnvelope},
		{"a rank below 0", "\x93" + head + "\x90\xff", Limits{}, ErrEnvelope},
		{"a rank too large", "\x93" + head + "\x90\xce\xff\xff\xff\xff", Limits{}, ErrEnvelope},
		{"too long", string(envelope()), Limits{MaxBytes: 10}, ErrTooLarge},
		{"too many events", string(envelope("\xc0", "\xc0", "\xc0")), Limits{MaxEvents: 2}, ErrTooManyEvents},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var b Batch
			var before, after runtime.MemStats
			payload := []byte(test.payload)
			runtime.ReadMemStats(&before)
			err := b.Decode(payload, test.limits)
			runtime.ReadMemStats(&after)
			if !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 1<<16 {
				t.Errorf("%d bytes were allocated", n)
			}
		})
	}
}

// TestTruncated cuts every payload at every byte: what was decoded before the cut
// is there, and nothing else.
func TestTruncated(t *testing.T) {
	for _, p := range corpus(t, ".msgpack") {
		var whole, cut Batch
		if err := whole.Decode(p, Limits{}); err != nil {
			t.Fatal(err)
		}
		for n := range p {
			err := cut.Decode(bytes.Clone(p[:n]), Limits{})
			if !errors.Is(err, ErrTruncated) {
				t.Fatalf("%d of %d bytes: error %v", n, len(p), err)
			}
			for i := range cut.Events {
				if !reflect.DeepEqual(cut.Events[i], whole.Events[i]) {
					t.Fatalf("%d of %d bytes: event %d differs", n, len(p), i)
				}
			}
		}
	}
}

// TestBytesAreReadAsVLLMDoes holds the bit pattern of bytes to vLLM's own integers.
func TestBytesAreReadAsVLLMDoes(t *testing.T) {
	var vectors []struct {
		Hashes []string `json:"hashes"`
		Ints   []string `json:"event_ints"`
	}
	if err := json.Unmarshal(readFile(t, "vllm_hash_vectors.json"), &vectors); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, v := range vectors {
		for i, digits := range v.Hashes {
			h, ok := hexHash([]byte(digits))
			if want, err := strconv.ParseUint(v.Ints[i], 10, 64); err != nil || !ok || h != want {
				t.Errorf("%s: %d, want %s", digits, h, v.Ints[i])
			}
			n++
		}
	}
	if n == 0 {
		t.Error("no vectors")
	}
}

// TestMemoryOfPayload sends what takes most memory for its bytes.
func TestMemoryOfPayload(t *testing.T) {
	const n = 1 << 20
	many := func(value string) json.RawMessage {
		return json.RawMessage(string(msgp.AppendArrayHeader(nil, n)) + strings.Repeat(value, n))
	}
	stored := func(fields ...any) []byte {
		return envelope(pack(append(list{"map", "type", "BlockStored", "block_hashes", list{1}}, fields...)))
	}
	for name, payload := range map[string][]byte{
		"keys of one block":   stored("extra_keys", list{many("\x01")}),
		"texts of one block":  stored("extra_keys", list{many("\xa0")}),
		"keys of many blocks": stored("extra_keys", many("\x01")),
		"lookahead":           stored("lookahead_token_ids", list{many("\x01")}),
		"hashes":              stored("block_hashes", many("\x01")),
		"tokens":              stored("token_ids", many("\x01")),
		"pairs":               stored("token_ids", many("\x92\x01\x01")),
	} {
		t.Run(name, func(t *testing.T) {
			var b Batch
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			err := b.Decode(payload, Limits{})
			runtime.GC()
			runtime.ReadMemStats(&after)
			if err != nil {
				t.Fatal(err)
			}
			if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > int64(12*len(payload)) {
				t.Errorf("%d bytes are kept of a payload of %d", grown, len(payload))
			}
			runtime.KeepAlive(&b)
		})
	}
}

// TestMemoryAside: what is kept aside is bounded with all that belongs to it.
func TestMemoryAside(t *testing.T) {
	const bound = 1 << 20 // tokens of 4 bytes
	m, err := New(Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 1}, MaxAside: bound})
	if err != nil {
		t.Fatal(err)
	}
	e := Event{Kind: Stored, HasParent: true, Parent: 1, BlockSize: 1, Usable: 100}
	for i := range uint64(100) {
		e.Hashes, e.Tokens = append(e.Hashes, 10+i), append(e.Tokens, 7)
	}
	long := bytes.Repeat([]byte{'x'}, 1<<20)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var out Output
	m.Apply(&e, &out)
	for i := range e.Hashes {
		e.Hashes[i] += 1000
	}
	e.LoRAName, e.Salt = long, long
	m.Apply(&e, &out)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 8*bound {
		t.Errorf("%d bytes are kept aside, want no more than some %d", grown, 4*bound)
	}
	if _, aside := m.Hashes(); aside < 100 {
		t.Errorf("%d aside", aside)
	}
}

// TestMemoryOfSalts: a user may choose any salt, so what is kept of them is bounded.
func TestMemoryOfSalts(t *testing.T) {
	m := newMapping(t, VLLM, 1)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var out Output
	for i := range uint64(300) {
		salt := append(bytes.Repeat([]byte{'x'}, 1<<20), byte(i), byte(i>>8))
		m.Apply(&Event{Kind: Stored, BlockSize: 1, Hashes: []uint64{i + 1}, Tokens: []uint32{1}, Usable: 1, Salt: salt}, &out)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 100<<20 {
		t.Errorf("%d bytes are kept", grown)
	}
	if known, _ := m.Hashes(); known < 60 || m.Counts[Full] == 0 {
		t.Errorf("%d known: %s", known, counted(&m.Counts))
	}
}

// TestJSONMemory: an event of JSON that is all small things takes a bounded multiple of
// its bytes. How many events there may be is Limits'.
func TestJSONMemory(t *testing.T) {
	const size = 1 << 20
	stored := func(blocks string) string {
		return `[{"event_id":1,"data":{"type":"stored","parent_hash":null,"blocks":[` + blocks + `]}}]`
	}
	many := func(s string) string { return strings.Repeat(s+",", size/(len(s)+1)) + s }
	block := func(tokens, keys string) string {
		return stored(`{"block_hash":1,"tokens":[` + tokens + `],"mm_keys":[` + keys + `]}`)
	}
	for name, test := range map[string]struct {
		json    string
		decoded int // events
	}{
		"blocks of nothing":  {stored(many(`{}`)), 0},
		"tokens of nothing":  {block(many(`{}`), ``), 0},
		"keys of nothing":    {block(`{"token_id":1}`, many(`{}`)), 0},
		"small blocks":       {stored(many(`{"tokens":[]}`)), 0},
		"small tokens":       {block(many(`{"token_id":1}`), ``), 1},
		"small keys":         {block(`{"token_id":1}`, many(`{"hash":"abc"}`)), 1},
		"hashes":             {`[{"event_id":1,"data":{"type":"removed","block_hashes":[` + many(`1`) + `]}}]`, 1},
		"nested":             {block(`{"token_id":`+many(`[[[[[[[[0]]]]]]]]`)+`}`, ``), 0},
		"values not known":   {`[{"data":{"type":"removed","block_hashes":[1],"more":[` + many(`0`) + `]}}]`, 1},
		"as engines have it": {block(many(`{"type": "unique_token", "token_id": 100, "token_extra_id": 0}`), ``), 1},
	} {
		var before, after runtime.MemStats
		var b Batch
		runtime.ReadMemStats(&before)
		b.DecodeJSON([]byte(test.json), Limits{})
		runtime.ReadMemStats(&after)
		times := float64(after.TotalAlloc-before.TotalAlloc) / float64(len(test.json))
		if times > jsonTimes || len(b.Events) < test.decoded {
			t.Errorf("%s: %.1f times its bytes, %d events", name, times, len(b.Events))
		}
	}
}

// jsonTimes is what decoding an event may allocate, garbage and all, in times of its bytes.
const jsonTimes = 60
