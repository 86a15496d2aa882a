// This file holds the payloads to those that the engines' own code made.

package fakeengine

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// read returns a payload of an engine, and its parts.
func read(t *testing.T, name string) (payload []byte, timestamp float64, events []any, rank int) {
	t.Helper()
	payload, err := os.ReadFile(filepath.Join("../../../pipeline/relay/engine/testdata", name+".msgpack"))
	if err != nil {
		t.Fatal(err)
	}
	v, _, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		t.Fatal(err)
	}
	batch := v.([]any)
	return payload, batch[0].(float64), batch[1].([]any), int(number(batch[2]))
}

func number(v any) uint64 {
	if i, ok := v.(int64); ok {
		return uint64(i)
	}
	return v.(uint64)
}

// named returns the names of blocks that are written as v is.
func (f *format) named(v any) (names []digest) {
	for _, h := range v.([]any) {
		var d digest
		switch h := h.(type) {
		case []byte:
			copy(d[:], h)
		default:
			if f.kind == VLLM {
				binary.BigEndian.PutUint64(d[len(d)-8:], number(h))
			} else {
				binary.BigEndian.PutUint64(d[:], number(h))
			}
		}
		names = append(names, d)
	}
	return names
}

// mapped returns an event as a map, whatever its shape.
func mapped(v any) map[string]any {
	if m, ok := v.(map[string]any); ok {
		return m
	}
	a := v.([]any)
	m := map[string]any{"type": a[0]}
	names := []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "metadata"}
	if a[0] == "BlockRemoved" {
		names = []string{"block_hashes", "medium"}
	}
	for i, v := range a[1:] {
		m[names[i]] = v
	}
	return m
}

// parse returns what is written as v is.
func (f *format) parse(t *testing.T, v any) (e event) {
	t.Helper()
	m := mapped(v)
	e.kind = map[string]engine.Kind{"BlockStored": engine.Stored, "BlockRemoved": engine.Removed, "AllBlocksCleared": engine.Cleared}[m["type"].(string)]
	if e.kind == engine.Cleared {
		return e
	}
	e.hashes = f.named(m["block_hashes"])
	if strings.HasPrefix(m["medium"].(string), "CPU") {
		e.tier = index.Host
	}
	if e.kind == engine.Removed {
		return e
	}
	if p := m["parent_block_hash"]; p != nil {
		e.parent, e.hasParent = f.named([]any{p})[0], true
	}
	for _, token := range m["token_ids"].([]any) {
		e.tokens = append(e.tokens, uint32(number(token)))
	}
	e.blockSize = int(number(m["block_size"]))
	if id := m["lora_id"]; id != nil {
		e.class.id = int(number(id))
	}
	e.class.lora, _ = m["lora_name"].(string)
	e.class.salt, _ = m["cache_salt"].(string)
	if more, ok := m["metadata"].(map[string]any); ok {
		e.class.salt = more["cache_salt"].(string)
	}
	return e
}

// Every byte is as the engines wrote it.
func TestPayloadsAreTheEngines(t *testing.T) {
	for _, c := range []struct {
		format format
		files  string
	}{
		{format{kind: VLLM, shape: Map, hashes: Int}, "stored_root stored_child stored_lora removed_all_lru removed_duplicate batch_mixed cleared offload_placeholder"},
		{format{kind: VLLM, shape: Map, hashes: Bytes}, "stored_root stored_child removed"},
		{format{kind: SGLang, shape: Map, hashes: Int}, "stored_root demote_cpu removed cleared stored_salt stored_lora stored_page1 dp_rank3"},
		{format{kind: SGLang, shape: Array, hashes: Int}, "sglang-0.5.18"},
	} {
		dir := map[string]string{VLLM: "vllm-0.33.0", SGLang: "sglang-0.5.23"}[c.format.kind]
		switch {
		case c.format.hashes == Bytes:
			dir += "-bytes"
		case c.format.shape == Array:
			dir = "legacy"
		}
		for name := range strings.FieldsSeq(c.files) {
			want, timestamp, recorded, rank := read(t, dir+"/"+name)
			var events []event
			for _, v := range recorded {
				events = append(events, c.format.parse(t, v))
			}
			if got := c.format.payload(nil, timestamp, events, rank); !bytes.Equal(got, want) {
				t.Errorf("%s/%s:\n%x, want\n%x", dir, name, got, want)
			}
		}
	}
}

// vLLM's salt, of which the recorded payload has a session too, and its arrays,
// of which there is one of a version with fewer fields.
func TestPayloadsLikeTheEngines(t *testing.T) {
	f := format{kind: VLLM, shape: Map, hashes: Int}
	_, timestamp, recorded, rank := read(t, "vllm-0.33.0/stored_salt_session")
	e := f.parse(t, recorded[0])
	e.class.salt = "tenant-a"
	v, _, err := msgp.ReadIntfBytes(f.payload(nil, timestamp, []event{e}, rank))
	if err != nil {
		t.Fatal(err)
	}
	got, want := v.([]any)[1].([]any)[0].(map[string]any), recorded[0].(map[string]any)
	delete(want, "session_id")
	if g, w := canonical(t, got), canonical(t, want); !bytes.Equal(g, w) {
		t.Errorf("salt: %x, want %x", g, w)
	}

	arrays := format{kind: VLLM, shape: Array, hashes: Int}
	_, _, recorded, _ = read(t, "legacy/vllm-0.20.0")
	older := recorded[1].([]any) // with a LoRA adapter
	_, timestamp, recorded, rank = read(t, "vllm-0.33.0/stored_lora")
	e = f.parse(t, recorded[0])
	removal := event{kind: engine.Removed, hashes: e.hashes[:1]}
	v, _, err = msgp.ReadIntfBytes(arrays.payload(nil, timestamp, []event{e, removal, {kind: engine.Cleared}}, rank))
	if err != nil {
		t.Fatal(err)
	}
	events := v.([]any)[1].([]any)
	stored := events[0].([]any)
	if len(stored) != 12 || len(older) != 10 { // two fields were new in 0.22
		t.Fatalf("%d and %d fields", len(stored), len(older))
	}
	for i, o := range older {
		if (o == nil) != (stored[i] == nil) && i != 2 { // the older one has a parent
			t.Errorf("field %d: %v, in the older version %v", i, stored[i], o)
		}
	}
	if stored[10] != "full_attention" || stored[11] != nil {
		t.Errorf("the last fields: %v", stored[10:])
	}
	if r := events[1].([]any); len(r) != 4 || r[0] != "BlockRemoved" || r[2] != "GPU" || number(r[3]) != 0 {
		t.Errorf("removal %v", r)
	}
	if c := events[2].([]any); len(c) != 1 || c[0] != "AllBlocksCleared" {
		t.Errorf("clear %v", c)
	}
}

// canonical is a map in one form, its keys sorted.
func canonical(t *testing.T, m map[string]any) []byte {
	t.Helper()
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
