// This file holds the array shape to the map shape: every payload in maps is
// written again in arrays.

package engine

import (
	"reflect"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// arrayNames are the fields of arrays, in their order, by tag and engine.
func arrayNames(tag string, e Engine) []string {
	switch {
	case tag == "BlockRemoved":
		return []string{"block_hashes", "medium", "group_idx", "locality", "ownership"}
	case tag == "BlockStored" && e == SGLang:
		return []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "metadata"}
	case tag == "BlockStored":
		return []string{
			"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
			"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id", "lookahead_token_ids",
		}
	}
	return nil
}

// inArrays returns the payload with its events as arrays.
func inArrays(t *testing.T, p []byte, e Engine) []byte {
	t.Helper()
	v, _, err := msgp.ReadIntfBytes(p)
	if err != nil {
		t.Fatal(err)
	}
	batch := v.([]any)
	for i, v := range batch[1].([]any) {
		event, ok := v.(map[string]any)
		if !ok {
			continue
		}
		tag := event["type"].(string)
		if salt, ok := event["cache_salt"]; ok && salt != nil {
			event["metadata"] = map[string]any{"new": 1, "cache_salt": salt}
		}
		array := []any{tag}
		for _, name := range arrayNames(tag, e) {
			array = append(array, event[name])
		}
		batch[1].([]any)[i] = array
	}
	p, err = msgp.AppendIntf(nil, batch)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestArraysAndMapsAreTheSame(t *testing.T) {
	maps := 0
	for _, p := range payloads {
		if p.engine == TensorRTLLM {
			continue // always maps
		}
		t.Run(p.file, func(t *testing.T) {
			want := decodeFile(t, p.file)
			var got Batch
			if err := got.Decode(inArrays(t, readFile(t, p.file+".msgpack"), p.engine), Limits{}); err != nil {
				t.Fatal(err)
			}
			for i := range want.Events {
				e := &want.Events[i]
				if e.Fields == 0 {
					maps++
					got.Events[i].Fields = 0
					if p.engine == SGLang { // whose arrays never had these
						e.SessionID, e.LoRAName = nil, nil
					}
				}
			}
			if len(got.Events) != len(want.Events) || !reflect.DeepEqual(got.Events, want.Events) {
				t.Errorf("got  %+v\nwant %+v", got.Events, want.Events)
			}
			if got.Rank != want.Rank || got.HasRank != want.HasRank || got.Timestamp != want.Timestamp {
				t.Errorf("rank %d, time %v", got.Rank, got.Timestamp)
			}
		})
	}
	if maps < 30 {
		t.Errorf("only %d events were maps", maps)
	}
}
