package schemas

// Records of other writer schemas than the current one.

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/linkedin/goavro/v2"

	"kvindex/index"
)

// minimal has only what has no default, in another order and other integer
// types, and a field nobody here knows.
const minimal = `{"type": "record", "name": "Batch", "namespace": "other", "fields": [
	{"name": "events", "type": {"type": "array", "items": [
		{"type": "record", "name": "Removed", "fields": [
			{"name": "hashes", "type": {"type": "array", "items": {"type": "fixed", "name": "H", "size": 8}}}]},
		{"type": "record", "name": "Stored", "fields": [
			{"name": "locals", "type": {"type": "array", "items": "H"}},
			{"name": "colour", "type": "string"}]},
		{"type": "record", "name": "Cleared", "fields": []},
		{"type": "record", "name": "Moved", "fields": []}
	]}},
	{"name": "extra", "type": {"type": "map", "values": "string"}},
	{"name": "model", "type": "bytes"},
	{"name": "block_size", "type": "long"},
	{"name": "seq", "type": "int"},
	{"name": "epoch", "type": ["null", "long"]},
	{"name": "timestamp", "type": {"type": "long", "logicalType": "timestamp-millis"}},
	{"name": "worker", "type": "string"}
]}`

func minimalRecord(epoch any, events ...any) map[string]any {
	return map[string]any{
		"events": events, "extra": map[string]any{"a": "b"}, "model": []byte("m"), "block_size": int64(16), "seq": int32(3),
		"epoch": epoch, "timestamp": int64(1767225600123), "worker": "w",
	}
}

func TestOtherWriterSchema(t *testing.T) {
	c, err := goavro.NewCodec(minimal)
	if err != nil {
		t.Fatal(err)
	}
	s := newCompiled(c)
	long := func(v int64) any { return map[string]any{"long": v} }
	hash := nativeHash(index.SeqHash(7))
	good := goavroSingle(t, s, minimalRecord(long(9),
		map[string]any{"other.Removed": map[string]any{"hashes": []any{hash}}},
		map[string]any{"other.Stored": map[string]any{"locals": []any{hash, hash}, "colour": "red"}},
		map[string]any{"other.Cleared": map[string]any{}}))

	r := NewRegistry(Limits{})
	var b Batch
	if err := r.DecodeBatch(&b, good); !errors.Is(err, ErrUnknownSchema) {
		t.Errorf("before Add: %v", err)
	}
	if fp, err := r.Add(minimal); err != nil || fp != s.Rabin {
		t.Fatalf("Add: %#x, %v", fp, err)
	}
	if err := r.DecodeBatch(&b, good); err != nil {
		t.Fatal(err)
	}
	want := Batch{
		Worker: []byte("w"), Epoch: 9, Seq: 3, Timestamp: 1767225600123, Model: []byte("m"), BlockSize: 16,
		Events: []Event{
			{Kind: KindRemoved, Removed: []index.SeqHash{7}},
			{Kind: KindStored, Stored: index.Stored{Position: index.NoPosition, Locals: []index.LocalHash{7, 7}}},
			{Kind: KindCleared, AllTiers: true},
		},
	}
	if got, want := nativeBatch(&b), nativeBatch(&want); !reflect.DeepEqual(got, want) {
		t.Errorf("decoded\n%v\nwant\n%v", got, want)
	}

	for _, bad := range []struct {
		name  string
		value []byte
		want  error
	}{
		{"required field null", goavroSingle(t, s, minimalRecord(nil)), ErrInvalid},
		{"unknown kind of event", goavroSingle(t, s, minimalRecord(long(1), map[string]any{"other.Moved": map[string]any{}})), ErrInvalid},
		{"cut", good[:len(good)-1], ErrInvalid},
		{"longer", append(good[:len(good):len(good)], 0), ErrLeftover},
		{"2^31-1 events", raw(s.header[:]).long(1<<31 - 1), ErrInvalid},
	} {
		if err := r.DecodeBatch(&b, bad.value); !errors.Is(err, bad.want) || len(b.Events) != 0 {
			t.Errorf("%s: %v, %d events; want %v", bad.name, err, len(b.Events), bad.want)
		}
	}
}

// What goes through goavro as an other schema comes out as by the hot decoder:
// the current schema under another name.
func TestRenamedSchema(t *testing.T) {
	renamed := strings.Replace(kvEventBatchSchema, `"kvindex"`, `"renamed"`, 1)
	c, err := goavro.NewCodec(renamed)
	if err != nil {
		t.Fatal(err)
	}
	r := NewRegistry(Limits{})
	if _, err := r.Add(renamed); err != nil {
		t.Fatal(err)
	}
	header := newCompiled(c).header
	for _, b := range []*Batch{&goldenBatch, &goldenHeartbeat, &goldenOpaque, prefillBatch(10)} {
		value, err := AppendBatch(nil, b)
		if err != nil {
			t.Fatal(err)
		}
		copy(value, header[:])
		var got Batch
		if err := r.DecodeBatch(&got, value); err != nil {
			t.Fatal(err)
		}
		if got, want := nativeBatch(&got), nativeBatch(b); !reflect.DeepEqual(got, want) {
			t.Errorf("decoded\n%v\nwant\n%v", got, want)
		}
	}
}

func TestAddRefuses(t *testing.T) {
	array := func(items string) string {
		return `{"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": ` + items + `}}]}`
	}
	for name, schema := range map[string]string{
		"no JSON":                     `{`,
		"no schema":                   `{"type": "nonsense"}`,
		"array of nulls":              array(`"null"`),
		"array of empty records":      array(`{"type": "record", "name": "E", "fields": []}`),
		"array of records of nulls":   array(`{"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]}`),
		"array within a map in array": array(`{"type": "map", "values": {"type": "array", "items": "null"}}`),
		"recursive":                   array(`"R"`),
		"recursive through a union":   array(`["null", "R"]`),
	} {
		if _, err := NewRegistry(Limits{}).Add(schema); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
