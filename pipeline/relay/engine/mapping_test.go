// This file tests what a Mapping makes of the engines' payloads, and its rules
// one by one.

package engine

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvindex/index"
	"kvindex/schemas"
)

// newMapping returns a Mapping of a plain model.
func newMapping(t testing.TB, e Engine, blockSize int) *Mapping {
	t.Helper()
	m, err := New(Config{Engine: e, Hasher: index.BlockHasher{BlockSize: blockSize}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// tb is what of a test both testing and rapid have.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// holding is what kvindex holds after events: sequence hashes by tier.
type holding [index.Tiers]map[index.SeqHash]bool

// apply applies events as the index would, and fails for one that it would refuse
// or that says something twice.
func (h *holding) apply(t tb, events []schemas.Event) {
	t.Helper()
	for _, e := range events {
		if h[e.Tier] == nil {
			h[e.Tier] = map[index.SeqHash]bool{}
		}
		switch e.Kind {
		case schemas.KindStored:
			if e.Stored.HasParent == (e.Stored.Position == 0) || len(e.Stored.Locals) == 0 {
				t.Fatalf("malformed store: %+v", e.Stored)
			}
			seq := e.Stored.Parent
			for i, l := range e.Stored.Locals {
				if i == 0 && !e.Stored.HasParent {
					seq = index.SeqHash(l)
				} else {
					seq = index.Next(seq, l)
				}
				h[e.Tier][seq] = true
			}
		case schemas.KindRemoved:
			for _, seq := range e.Removed {
				if !h[e.Tier][seq] {
					t.Fatalf("%s: removal of %d, which is not held", e.Tier, seq)
				}
				delete(h[e.Tier], seq)
			}
		case schemas.KindCleared:
			*h = holding{}
		}
	}
}

// depth is what a query for the locals finds in a tier.
func (h *holding) depth(t index.Tier, locals []index.LocalHash) int {
	for i, seq := range index.Chain(nil, locals) {
		if !h[t][seq] {
			return i
		}
	}
	return len(locals)
}

// counted returns the counts that are not 0, by name.
func counted(c *Counts) string {
	var s []string
	for r, n := range c {
		if n > 0 {
			s = append(s, fmt.Sprintf("%s=%d", Reason(r), n))
		}
	}
	return strings.Join(s, " ")
}

func span(from, to uint32) (s []uint32) {
	for ; from <= to; from++ {
		s = append(s, from)
	}
	return s
}

// query is a prompt and how deep it is to be found.
type query struct {
	tokens []uint32
	extra  index.Extra
	tier   index.Tier
	depth  int
}

// TestPayloadsAnswer sends payloads to a Mapping and asks for prompts. The prompts'
// hashes are made as a query's are, from the whole prompt.
func TestPayloadsAnswer(t *testing.T) {
	lora, salt := index.Extra{LoRA: "sql-adapter"}, index.Extra{Salt: "tenant-a"}
	image, _ := index.MMIdentifier("img-abc")
	plain16, plain12, plain8 := span(100, 115), span(100, 111), span(100, 107)
	legacy := []query{
		{tokens: []uint32{1, 2, 3, 4, 5, 6}, depth: 0}, // the last event clears
	}
	tests := []struct {
		name      string
		files     []string
		engine    Engine
		blockSize int
		eagle     bool
		counts    string
		queries   []query
	}{
		{name: "vllm root, child", files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_child"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain16, depth: 4}, {tokens: plain16, extra: lora}, {tokens: plain16, extra: salt}, {tokens: span(101, 116)}}},
		{name: "vllm bytes", files: []string{"vllm-0.33.0-bytes/stored_root", "vllm-0.33.0-bytes/stored_child"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain16, depth: 4}}},
		{name: "vllm bytes and integers are the same", files: []string{"vllm-0.33.0-bytes/stored_root", "vllm-0.33.0/stored_child", "vllm-0.33.0-bytes/removed"},
			engine: VLLM, blockSize: 4, queries: []query{{tokens: plain16}}},
		{name: "vllm child before root", files: []string{"vllm-0.33.0/stored_child", "vllm-0.33.0/stored_root"}, engine: VLLM, blockSize: 4,
			counts: "orphan=2 adopted=2", queries: []query{{tokens: plain16, depth: 4}}},
		{name: "vllm one copy of two removed", files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_child", "vllm-0.33.0/removed_duplicate"},
			engine: VLLM, blockSize: 4, queries: []query{{tokens: plain16, depth: 3}}},
		{name: "vllm all removed", files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_child", "vllm-0.33.0/removed_all_lru"},
			engine: VLLM, blockSize: 4, counts: "unknown_removed=3", queries: []query{{tokens: plain16}}},
		{name: "vllm mixed", files: []string{"vllm-0.33.0/batch_mixed"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain16, depth: 1}, {tokens: span(500, 507), depth: 2}}},
		{name: "vllm lora", files: []string{"vllm-0.33.0/stored_lora"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain12, extra: lora, depth: 3}, {tokens: plain12}}},
		{name: "vllm salt", files: []string{"vllm-0.33.0/stored_salt_session"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain12, extra: salt, depth: 3}, {tokens: plain12}}},
		{name: "vllm multimodal", files: []string{"vllm-0.33.0/stored_mm"}, engine: VLLM, blockSize: 4,
			queries: []query{{tokens: plain16, extra: index.Extra{MM: []index.MMHash{{Hash: image, Start: 5, End: 9}}}, depth: 4}, {tokens: plain16, depth: 1}}},
		{name: "vllm lookahead", files: []string{"vllm-0.33.0/stored_lookahead"}, engine: VLLM, blockSize: 4, eagle: true,
			queries: []query{{tokens: span(100, 112), depth: 3}, {tokens: plain12, depth: 2}}},
		{name: "vllm lookahead for a plain model", files: []string{"vllm-0.33.0/stored_lookahead"}, engine: VLLM, blockSize: 4,
			counts: "eagle_mismatch=3", queries: []query{{tokens: plain12}}},
		{name: "vllm plain for an EAGLE model", files: []string{"vllm-0.33.0/stored_root"}, engine: VLLM, blockSize: 4, eagle: true,
			counts: "eagle_mismatch=2", queries: []query{{tokens: plain12}}},
		{name: "vllm sliding window", files: []string{"vllm-0.33.0/stored_swa_masked"}, engine: VLLM, blockSize: 4,
			counts: "other_group=2", queries: []query{{tokens: plain16}}},
		{name: "vllm other group", files: []string{"vllm-0.33.0/stored_group_blocksize8"}, engine: VLLM, blockSize: 8,
			counts: "other_group=2", queries: []query{{tokens: plain16}}},
		{name: "vllm re-announced", files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_reannounce", "vllm-0.33.0/stored_reannounce"},
			engine: VLLM, blockSize: 4, counts: "duplicate=5", queries: []query{{tokens: plain12, depth: 3}}},
		{name: "vllm placeholder", files: []string{"vllm-0.33.0/offload_placeholder"}, engine: VLLM, blockSize: 4, counts: "placeholder=1"},
		{name: "vllm another block size", files: []string{"vllm-0.33.0/stored_root"}, engine: VLLM, blockSize: 16, counts: "other_block_size=2"},
		{name: "vllm edges", files: []string{"vllm-0.33.0/edge_u64"}, engine: VLLM, blockSize: 1, counts: "orphan=4"},
		{name: "vllm cleared", files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/cleared"}, engine: VLLM, blockSize: 4, queries: []query{{tokens: plain8}}},
		{name: "vllm 0.9.2", files: []string{"legacy/vllm-0.9.2"}, engine: VLLM, blockSize: 2, counts: "unnamed_lora=1 blind=2", queries: legacy},
		{name: "vllm 0.14.0", files: []string{"legacy/vllm-0.14.0"}, engine: VLLM, blockSize: 2, counts: "blind=3", queries: legacy},
		{name: "vllm 0.20.0", files: []string{"legacy/vllm-0.20.0"}, engine: VLLM, blockSize: 2, queries: legacy},
		{name: "vllm 0.29.0", files: []string{"legacy/vllm-0.29.0"}, engine: VLLM, blockSize: 2, queries: legacy},
		{name: "sglang root, child", files: []string{"sglang-0.5.23/stored_root", "sglang-0.5.23/stored_child"}, engine: SGLang, blockSize: 4,
			queries: []query{{tokens: plain16, depth: 4}}},
		{name: "sglang demoted", files: []string{"sglang-0.5.23/stored_root", "sglang-0.5.23/demote_cpu"}, engine: SGLang, blockSize: 4,
			queries: []query{{tokens: plain8}, {tokens: plain8, tier: index.Host, depth: 2}}},
		{name: "sglang removed", files: []string{"sglang-0.5.23/stored_root", "sglang-0.5.23/stored_child", "sglang-0.5.23/demote_cpu", "sglang-0.5.23/removed"},
			engine: SGLang, blockSize: 4, queries: []query{{tokens: plain16}, {tokens: plain16, tier: index.Host}}},
		{name: "sglang salt", files: []string{"sglang-0.5.23/stored_salt"}, engine: SGLang, blockSize: 4,
			queries: []query{{tokens: plain8, extra: salt, depth: 2}, {tokens: plain8}}},
		{name: "sglang lora", files: []string{"sglang-0.5.23/stored_lora"}, engine: SGLang, blockSize: 4,
			queries: []query{{tokens: plain8, extra: lora, depth: 2}, {tokens: plain8}}},
		{name: "sglang dynamo format", files: []string{"sglang-0.5.23/stored_dynamo_format"}, engine: SGLang, blockSize: 4,
			queries: []query{{tokens: plain8, extra: salt, depth: 2}}},
		{name: "sglang page 1", files: []string{"sglang-0.5.23/stored_page1"}, engine: SGLang, blockSize: 1,
			queries: []query{{tokens: span(100, 104), depth: 5}}},
		{name: "sglang 0.4.8", files: []string{"legacy/sglang-0.4.8"}, engine: SGLang, blockSize: 2, counts: "unchained=3 unknown_removed=1"},
		{name: "trtllm 1.2", files: []string{"trtllm/v1_json.json"}, engine: TensorRTLLM, blockSize: 4,
			counts: "partial=1 unknown_removed=2 blind=3", queries: []query{{tokens: span(100, 114), depth: 2}}},
		{name: "trtllm 1.3", files: []string{"trtllm/v2_json.json"}, engine: TensorRTLLM, blockSize: 4,
			counts: "other_group=2", queries: []query{{tokens: plain8, depth: 1}}},
		{name: "trtllm hex", files: []string{"trtllm/v2_sha256_hex.json"}, engine: TensorRTLLM, blockSize: 2, counts: "bad_token=1"},
		{name: "trtllm streaming", files: []string{"trtllm/streaming"}, engine: TensorRTLLM, blockSize: 2, counts: "bad_token=1 unknown_removed=1",
			queries: []query{{tokens: span(1, 4)}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			hasher := index.BlockHasher{BlockSize: test.blockSize, Eagle: test.eagle}
			m, err := New(Config{Engine: test.engine, Hasher: hasher})
			if err != nil {
				t.Fatal(err)
			}
			var h holding
			for _, f := range test.files {
				var b *Batch
				if strings.HasSuffix(f, ".json") {
					b = new(Batch)
					if err := b.DecodeJSON(readFile(t, f), Limits{}); err != nil {
						t.Fatal(err)
					}
				} else {
					b = decodeFile(t, f)
				}
				h.apply(t, applied(m, b))
			}
			if got := counted(&m.Counts); got != test.counts {
				t.Errorf("counts %q, want %q", got, test.counts)
			}
			for _, q := range test.queries {
				if got := h.depth(q.tier, hasher.Append(nil, q.tokens, q.extra)); got != q.depth {
					t.Errorf("%v %+v %s: depth %d, want %d", q.tokens, q.extra, q.tier, got, q.depth)
				}
			}
			checkDump(t, m, &h)
		})
	}
}

// applied returns what m makes of a batch.
func applied(m *Mapping, b *Batch) []schemas.Event {
	var out Output
	for i := range b.Events {
		m.Apply(&b.Events[i], &out)
	}
	return out.Events
}

// checkDump holds m.Dump to what the events gave, and a loaded m to m.
func checkDump(t tb, m *Mapping, want *holding) {
	t.Helper()
	var got holding
	for tier, s := range m.Dump {
		if s.HasParent && got[tier][s.Parent] != want[tier][s.Parent] {
			t.Fatalf("%s: a child is dumped before its parent", tier)
		}
		got.apply(t, []schemas.Event{{Kind: schemas.KindStored, Tier: tier, Stored: s}})
	}
	for tier := range got {
		if !maps.Equal(got[tier], want[tier]) {
			t.Fatalf("%s: dump has %d blocks, events gave %d", index.Tier(tier), len(got[tier]), len(want[tier]))
		}
	}
}

// TestUnchained proves SGLang's hashes before it believes events without medium.
func TestUnchained(t *testing.T) {
	m := newMapping(t, SGLang, 4)
	root := Event{Kind: Stored, Fields: 6, Tokens: span(100, 107), Usable: 8, BlockSize: 4}
	child := Event{Kind: Stored, Fields: 6, Hashes: []uint64{3}, HasParent: true, Parent: 13409171172843538451, Tokens: span(108, 111), Usable: 4, BlockSize: 4}
	var out Output
	m.Apply(&child, &out)
	root.Hashes = []uint64{11, 12}
	m.Apply(&root, &out)
	if got := counted(&m.Counts); got != "unchained=3" || len(out.Events) != 0 {
		t.Fatalf("before the proof: %s, %d events", got, len(out.Events))
	}
	root.Hashes = []uint64{11328591219852043936, 13409171172843538451} // sglang_hash_vectors.json
	m.Apply(&root, &out)
	m.Apply(&child, &out)
	if len(out.Events) != 1 || len(out.Events[0].Stored.Locals) != 3 {
		t.Fatalf("after the proof: %+v", out.Events)
	}
}

// TestProofTakesSGLangsHashes proves each of SGLang's own hashes.
func TestProofTakesSGLangsHashes(t *testing.T) {
	var vectors []struct {
		Tokens   []uint32 `json:"tokens"`
		PageSize int      `json:"page_size"`
		Bigram   bool     `json:"bigram"`
		SHA256   []string `json:"sha256"`
		Salt     *string  `json:"cache_salt"`
	}
	// One vector has a token that is no u32.
	data := bytes.ReplaceAll(readFile(t, "sglang_hash_vectors.json"), []byte("4294967301"), []byte("0"))
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	proven := 0
	for _, v := range vectors {
		if v.Salt != nil || v.Tokens[1] == 0 {
			continue
		}
		e := Event{Kind: Stored, Fields: 6, Tokens: v.Tokens, Usable: len(v.Tokens)}
		if v.Bigram {
			e.Tokens, e.Seconds = v.Tokens[:4], v.Tokens[1:]
		}
		digits, err := hex.DecodeString(v.SHA256[0])
		if err != nil {
			t.Fatal(err)
		}
		e.Hashes = []uint64{binary.BigEndian.Uint64(digits)}
		if !newMapping(t, SGLang, v.PageSize).proven(&e) {
			t.Errorf("%v is not proven", v)
		}
		proven++
	}
	if proven != 3 {
		t.Errorf("%d were proven", proven)
	}
}

func TestReasonsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for r := Reason(1); int(r) < Reasons; r++ {
		if r.String() == "" || seen[r.String()] {
			t.Errorf("reason %d: name %q", r, r)
		}
		seen[r.String()] = true
	}
}

// corpus returns every payload with that ending.
func corpus(t testing.TB, ending string) (files [][]byte) {
	t.Helper()
	names, err := filepath.Glob("testdata/*/*" + ending)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	for _, n := range names {
		p, err := os.ReadFile(n)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, p)
	}
	return files
}
