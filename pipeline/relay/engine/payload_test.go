// This file holds the decoders to the payloads of the engines' own code.

package engine

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// payloads are the files of testdata. A new version is a new line.
var payloads = []struct {
	file         string
	engine       Engine
	unknownKinds uint64
	unknownKeys  uint64
}{
	{file: "legacy/vllm-0.9.0", engine: VLLM},
	{file: "legacy/vllm-0.9.2", engine: VLLM},
	{file: "legacy/vllm-0.10.2", engine: VLLM},
	{file: "legacy/vllm-0.14.0", engine: VLLM},
	{file: "legacy/vllm-0.17.0", engine: VLLM},
	{file: "legacy/vllm-0.20.0", engine: VLLM},
	{file: "legacy/vllm-0.24.0", engine: VLLM},
	{file: "legacy/vllm-0.26.0", engine: VLLM},
	{file: "legacy/vllm-0.29.0", engine: VLLM},
	{file: "vllm-0.33.0/stored_root", engine: VLLM},
	{file: "vllm-0.33.0/stored_child", engine: VLLM},
	{file: "vllm-0.33.0/removed_duplicate", engine: VLLM},
	{file: "vllm-0.33.0/removed_all_lru", engine: VLLM},
	{file: "vllm-0.33.0/cleared", engine: VLLM},
	{file: "vllm-0.33.0/stored_lora", engine: VLLM},
	{file: "vllm-0.33.0/stored_salt_session", engine: VLLM},
	{file: "vllm-0.33.0/stored_mm", engine: VLLM},
	{file: "vllm-0.33.0/stored_lookahead", engine: VLLM},
	{file: "vllm-0.33.0/stored_swa_masked", engine: VLLM},
	{file: "vllm-0.33.0/stored_group_blocksize8", engine: VLLM},
	{file: "vllm-0.33.0/stored_reannounce", engine: VLLM},
	{file: "vllm-0.33.0/batch_mixed", engine: VLLM},
	{file: "vllm-0.33.0/offload_placeholder", engine: VLLM},
	{file: "vllm-0.33.0/edge_u64", engine: VLLM},
	{file: "vllm-0.33.0/dp_rank_none", engine: VLLM},
	{file: "vllm-0.33.0/empty_events", engine: VLLM},
	{file: "vllm-0.33.0/future_unknown", engine: VLLM, unknownKinds: 1, unknownKeys: 2}, // the batch has one too
	{file: "vllm-0.33.0-bytes/stored_root", engine: VLLM},
	{file: "vllm-0.33.0-bytes/stored_child", engine: VLLM},
	{file: "vllm-0.33.0-bytes/removed", engine: VLLM},
	{file: "legacy/sglang-0.4.8", engine: SGLang},
	{file: "legacy/sglang-0.5.18", engine: SGLang},
	{file: "legacy/sglang-0.5.20", engine: SGLang},
	{file: "sglang-0.5.23/stored_root", engine: SGLang},
	{file: "sglang-0.5.23/stored_child", engine: SGLang},
	{file: "sglang-0.5.23/demote_cpu", engine: SGLang},
	{file: "sglang-0.5.23/removed", engine: SGLang},
	{file: "sglang-0.5.23/cleared", engine: SGLang},
	{file: "sglang-0.5.23/stored_salt", engine: SGLang},
	{file: "sglang-0.5.23/stored_lora", engine: SGLang},
	{file: "sglang-0.5.23/stored_dynamo_format", engine: SGLang},
	{file: "sglang-0.5.23/stored_page1", engine: SGLang},
	{file: "sglang-0.5.23/dp_rank3", engine: SGLang},
	{file: "sglang-0.5.23/dp_rank_none", engine: SGLang},
	{file: "sglang-0.5.23/future_unknown", engine: SGLang, unknownKinds: 1, unknownKeys: 2}, // likewise,
	{file: "trtllm/streaming", engine: TensorRTLLM},
}

func readFile(t testing.TB, name string) []byte {
	t.Helper()
	p, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func decodeFile(t testing.TB, name string) *Batch {
	t.Helper()
	b := new(Batch)
	if err := b.Decode(readFile(t, name+".msgpack"), Limits{}); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestEveryPayloadIsInTheTable fails for a file of testdata that no line names.
func TestEveryPayloadIsInTheTable(t *testing.T) {
	named := map[string]bool{}
	for _, p := range payloads {
		named[p.file] = true
	}
	err := filepath.WalkDir("testdata", func(path string, d fs.DirEntry, err error) error {
		name, ok := strings.CutSuffix(filepath.ToSlash(path), ".msgpack")
		if name = strings.TrimPrefix(name, "testdata/"); ok && !named[name] {
			t.Errorf("%s is in no line of payloads", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// meaning is the JSON beside a payload.
type meaning struct {
	TS     float64          `json:"ts"`
	Rank   *int32           `json:"dp_rank"`
	Events []map[string]any `json:"events"`
}

func TestPayloadsMeanWhatTheirJSONSays(t *testing.T) {
	for _, p := range payloads {
		t.Run(p.file, func(t *testing.T) {
			var want meaning
			d := json.NewDecoder(bytes.NewReader(readFile(t, p.file+".json")))
			d.UseNumber()
			if err := d.Decode(&want); err != nil {
				t.Fatal(err)
			}
			b := decodeFile(t, p.file)
			if b.Timestamp != want.TS {
				t.Errorf("timestamp %v, want %v", b.Timestamp, want.TS)
			}
			if b.HasRank != (want.Rank != nil) || want.Rank != nil && b.Rank != *want.Rank {
				t.Errorf("rank %v %v, want %v", b.HasRank, b.Rank, want.Rank)
			}
			events := slices.DeleteFunc(want.Events, func(e map[string]any) bool { return e["kind"] == "unknown" })
			if len(b.Events) != len(events) {
				t.Fatalf("%d events, want %d", len(b.Events), len(events))
			}
			for i, e := range events {
				checkEvent(t, &b.Events[i], e)
			}
			var counts Counts
			counts[UnknownKind], counts[UnknownField] = p.unknownKinds, p.unknownKeys
			if b.Counts != counts || b.LostRemovals != 0 {
				t.Errorf("counts %v, want %v", b.Counts, counts)
			}
		})
	}
}

// checkEvent holds an event to its JSON form, field by field.
func checkEvent(t *testing.T, e *Event, want map[string]any) {
	t.Helper()
	for key, v := range want {
		var got any
		switch key {
		case "kind":
			got = e.Kind.String()
		case "block_hashes":
			got, v = u64s(e.Hashes), hashList(v)
		case "parent_block_hash":
			if e.HasParent {
				got = u64s([]uint64{e.Parent})
			}
			if v != nil {
				v = hashList([]any{v})
			}
		case "token_ids":
			checkTokens(t, e, v.([]any))
			continue
		case "block_size":
			got = number64(int64(e.BlockSize))
		case "lora_id":
			if e.HasLoRAID {
				got = number64(e.LoRAID)
			}
		case "group_idx":
			if e.HasGroup {
				got = number64(e.Group)
			}
		case "kv_cache_spec_sliding_window":
			if e.SlidingWindow != 0 {
				got = number64(e.SlidingWindow)
			}
		case "medium":
			got = optional(e.Medium)
		case "lora_name":
			got = optional(e.LoRAName)
		case "cache_salt":
			got = optional(e.Salt)
		case "session_id":
			got = optional(e.SessionID)
		case "kv_cache_spec_kind":
			got = optional(e.Spec)
		case "locality":
			got = optional(e.Locality)
		case "ownership":
			got = optional(e.Ownership)
		case "metadata":
			got, v = optional(e.Salt), v.(map[string]any)["cache_salt"]
		case "extra_keys", "mm_keys":
			got, v = keyText(e), wantKeys(v)
		case "lookahead_token_ids":
			got, v = aheadText(e), wantAhead(v)
		case "future_field":
			continue
		default:
			t.Errorf("nothing is known of %s", key)
			continue
		}
		if got != v {
			t.Errorf("%s: %v, want %v", key, got, v)
		}
	}
}

func number64(v int64) json.Number { return json.Number(strconv.FormatInt(v, 10)) }

func optional(b []byte) any {
	if b == nil {
		return nil
	}
	return string(b)
}

func u64s(hashes []uint64) string {
	var s []string
	for _, h := range hashes {
		s = append(s, strconv.FormatUint(h, 10))
	}
	return strings.Join(s, " ")
}

func hashList(v any) string {
	var s []string
	for _, h := range v.([]any) {
		s = append(s, h.(map[string]any)["u64"].(string))
	}
	return strings.Join(s, " ")
}

func checkTokens(t *testing.T, e *Event, want []any) {
	t.Helper()
	if len(e.Tokens) != len(want) {
		t.Fatalf("%d tokens, want %d", len(e.Tokens), len(want))
	}
	usable := len(want)
	for i, w := range want {
		n, ok := w.(json.Number)
		if !ok {
			usable = min(usable, i)
			continue
		}
		if v, _ := n.Int64(); v < 0 || v > math.MaxUint32 || e.Tokens[i] != uint32(v) {
			t.Errorf("token %d: %d, want %d", i, e.Tokens[i], v)
		}
	}
	if e.Usable != usable {
		t.Errorf("usable %d, want %d", e.Usable, usable)
	}
}

func keyText(e *Event) string {
	s := strconv.Itoa(e.KeyBlocks)
	for _, k := range e.Keys {
		s += " " + strconv.Itoa(int(k.Block)) + ":" + string(k.ID)
		if k.Kind == KeyMM {
			s += "@" + strconv.FormatInt(k.Offset, 10)
		}
	}
	return s
}

func wantKeys(v any) string {
	blocks, _ := v.([]any)
	s := strconv.Itoa(len(blocks))
	for i, block := range blocks {
		keys, _ := block.([]any)
		for _, k := range keys {
			s += " " + strconv.Itoa(i) + ":"
			switch k := k.(type) {
			case string:
				s += k
			case []any:
				s += k[0].(string) + "@" + k[1].(json.Number).String()
			case map[string]any:
				s += k["hash"].(string) + "@" + k["start_offset"].(json.Number).String()
			}
		}
	}
	return s
}

func aheadText(e *Event) (s string) {
	for _, a := range e.Ahead {
		s += strconv.Itoa(int(a.Block)) + ":" + strconv.Itoa(int(a.Token)) + " "
	}
	return s
}

func wantAhead(v any) (s string) {
	blocks, _ := v.([]any)
	for i, block := range blocks {
		for _, n := range block.([]any) {
			s += strconv.Itoa(i) + ":" + n.(json.Number).String() + " "
		}
	}
	return s
}
