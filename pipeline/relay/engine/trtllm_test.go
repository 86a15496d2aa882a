// This file tests the decoding of TensorRT-LLM's JSON.

package engine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// eventText is an event in a line, for tests to compare.
func eventText(e *Event) string {
	s := fmt.Sprintf("%d %s %s", e.ID, e.Kind, u64s(e.Hashes))
	if e.HasParent {
		s += fmt.Sprintf(" parent %d", e.Parent)
	}
	if len(e.Tokens) > 0 {
		s += fmt.Sprintf(" tokens %v usable %d size %d", e.Tokens, e.Usable, e.BlockSize)
	}
	for _, k := range e.Keys {
		s += fmt.Sprintf(" key %d:%s@%d", k.Block, k.ID, k.Offset)
	}
	for _, f := range []struct {
		name string
		text []byte
	}{{"medium", e.Medium}, {"old", e.OldMedium}, {"salt", e.Salt}} {
		if f.text != nil {
			s += " " + f.name + " " + string(f.text)
		}
	}
	if e.AllMedia {
		s += " everywhere"
	}
	if e.Window != 0 {
		s += fmt.Sprintf(" window %d", e.Window)
	}
	if e.HasGroup {
		s += fmt.Sprintf(" group %d", e.Group)
	}
	if e.HasRank {
		s += fmt.Sprintf(" rank %d", e.Rank)
	}
	if e.Blind {
		s += " blind"
	}
	return s
}

func checkEvents(t *testing.T, b *Batch, want ...string) {
	t.Helper()
	for i := range max(len(want), len(b.Events)) {
		var g, w string
		if i < len(b.Events) {
			g = eventText(&b.Events[i])
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w {
			t.Errorf("event %d:\n got %s\nwant %s", i, g, w)
		}
	}
}

func TestJSONPayloads(t *testing.T) {
	tests := []struct {
		file string
		want []string
	}{
		{"trtllm/v1_json", []string{
			"0 created  window 4096",
			"1 stored 1129369155989302 15923378101821673488 tokens [100 101 102 103 104 105 106 107] usable 8 size 4 window 4096 blind",
			"2 stored 49789196493716293 14139067582760148978 parent 15923378101821673488 tokens [108 109 110 111 112 113 114] usable 7 size 4 window 4096 blind",
			"3 moved 14139067582760148978 medium CPU window 4096",
			"4 removed 14139067582760148978 49789196493716293 everywhere window 4096",
		}},
		{"trtllm/v2_json", []string{
			"7 created  window 4096 group 0 rank 1",
			"8 created  window 128 group 1 rank 1",
			"9 stored 1129369155989302 tokens [100 101 102 103] usable 4 size 0 window 4096 group 0 rank 1",
			"10 stored 1129369155989302 tokens [100 101 102 103] usable 4 size 0 window 128 group 1 rank 1",
			"11 removed 1129369155989302 everywhere window 128 group 1 rank 1",
		}},
		{"trtllm/v2_sha256_hex", []string{
			"0 stored 12029517220337174963 tokens [5 0] usable 1 size 0" +
				" key 0:" + strings.Repeat("ab", 32) + "@0 salt tenant-a window 4096 group 0",
		}},
	}
	for _, test := range tests {
		t.Run(test.file, func(t *testing.T) {
			var b Batch
			if err := b.DecodeJSON(readFile(t, test.file+".json"), Limits{}); err != nil {
				t.Fatal(err)
			}
			checkEvents(t, &b, test.want...)
			if b.Counts != (Counts{}) {
				t.Errorf("counts %v", b.Counts)
			}
		})
	}
}

// storedJSON is a stored event with the given blocks.
func storedJSON(id int, blocks ...string) string {
	return fmt.Sprintf(`{"event_id":%d,"data":{"type":"stored","parent_hash":9,"blocks":[%s]}}`, id, strings.Join(blocks, ","))
}

func TestJSONOddities(t *testing.T) {
	const tokens = `"tokens":[{"token_id":1},{"token_id":2}]`
	level := func(h, level int) string {
		return fmt.Sprintf(`{"block_hash":%d,%s,"cache_level":%d,"cache_salt":null}`, h, tokens, level)
	}
	const removed = `{"event_id":3,"data":{"type":"removed","block_hashes":[-5]}}`
	tests := []struct {
		name, json string
		why        Reason
		removals   int
		err        error
		want       []string
	}{
		{name: "levels", json: "[" + storedJSON(1, level(1, 0), level(2, 0), level(3, 1), level(4, 7)) + "]", want: []string{
			"1 stored 1 2 parent 9 tokens [1 2 1 2] usable 4 size 2",
			"1 stored 3 parent 2 tokens [1 2] usable 2 size 2 medium CPU",
			"1 stored 4 parent 3 tokens [1 2] usable 2 size 2 medium level",
		}},
		{name: "extra id", json: "[" + storedJSON(1, `{"block_hash":1,"tokens":[{"token_id":1,"token_extra_id":0},{"token_id":2,"token_extra_id":7}]}`) + "]",
			want: []string{"1 stored 1 parent 9 tokens [1 0] usable 1 size 0 blind"}},
		{name: "bad event", json: `[7,` + removed + "]", why: BadShape, removals: 1, want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "no data", json: `[{"event_id":1},` + removed + "]", why: BadShape, removals: 1, want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "bad hash", json: `[{"data":{"type":"removed","block_hashes":["x"]}},` + removed + "]", why: BadField, removals: 1,
			want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "new kind", json: `[{"data":{"type":"pinned","block_hashes":[]}},` + removed + "]", why: UnknownKind,
			want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "short block in the middle", json: "[" + storedJSON(1, `{"block_hash":1,"tokens":[{"token_id":1}]}`, level(2, 0)) + "]", why: BadField},
		{name: "priority only", json: `[{"data":{"type":"updated","block_hash":1,"cache_level":null,"priority":{"new_value":1,"old_value":2}}}]`},
		{name: "truncated", json: "[" + removed + ",{", err: ErrTruncated, want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "broken", json: "[" + removed + ",}", err: ErrMalformed, want: []string{"3 removed 18446744073709551611 everywhere"}},
		{name: "empty", json: "", err: ErrTruncated},
		{name: "no array", json: "{}", err: ErrEnvelope},
		{name: "deep", json: strings.Repeat("[", 1<<20), err: ErrMalformed},
		{name: "trailing", json: "[" + removed + "]x", why: TrailingData, want: []string{"3 removed 18446744073709551611 everywhere"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var b Batch
			if err := b.DecodeJSON([]byte(test.json), Limits{}); !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			checkEvents(t, &b, test.want...)
			var counts Counts
			if test.why != reasonNone {
				counts[test.why] = 1
			}
			if b.Counts != counts || b.LostRemovals != test.removals {
				t.Errorf("counts %v, %d removals lost", b.Counts, b.LostRemovals)
			}
		})
	}
}
