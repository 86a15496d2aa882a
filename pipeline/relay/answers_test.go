// This file tests the whole way from engines to answers: payloads that engines'
// own code made, sent over libzmq and HTTP, the relay, Kafka, the stage, queries.

package relay

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"kvindex/index"
	"kvindex/pipeline"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/testcontainers"
)

// story is a worker of its own: what its engine publishes, and what the stage is
// to answer after each step.
type story struct {
	name      string
	kind      Kind // default VLLM
	blockSize int  // default 4
	eagle     bool
	rank      int // the first
	ranks     int // default 1
	steps     []step
}

// step is what is sent and the answers then. A file of testdata is one batch;
// "file 0:2" is one of the first two of its events.
type step struct {
	files   []string
	batches []batchTo
	answers []answer
}

// batchTo is a batch of a rank.
type batchTo struct {
	rank   int
	events []map[string]any
}

// answer is how deep a prompt is found, on the device and with the host.
type answer struct {
	tokens       []uint32
	extra        index.Extra
	rank         int
	device, host int         // host: default device
	also         map[int]int // other ranks' depths on the device
}

func span(from, to uint32) (s []uint32) {
	for ; from <= to; from++ {
		s = append(s, from)
	}
	return s
}

var (
	prompt8, prompt12, prompt16 = span(100, 107), span(100, 111), span(100, 115)

	withLoRA = index.Extra{LoRA: "sql-adapter"}
	withSalt = index.Extra{Salt: "tenant-a"}
)

func image(id string, start, end int) index.Extra {
	h, _ := index.MMIdentifier(id)
	return index.Extra{MM: []index.MMHash{{Hash: h, Start: start, End: end}}}
}

// stories is the table: a new version's payload is a new line.
var stories = []story{
	{name: "vllm", steps: []step{
		{files: []string{"vllm-0.33.0/stored_root"}, answers: []answer{{tokens: prompt16, device: 2}, {tokens: span(101, 116)}}},
		{files: []string{"vllm-0.33.0/stored_child"}, answers: []answer{{tokens: prompt16, device: 4}}},
		{files: []string{"vllm-0.33.0/removed_duplicate", "vllm-0.33.0/empty_events"}, answers: []answer{{tokens: prompt16, device: 3}}},
		{files: []string{"vllm-0.33.0/removed_all_lru"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "vllm-child-first", steps: []step{
		{files: []string{"vllm-0.33.0/stored_child"}, answers: []answer{{tokens: prompt16}}},
		{files: []string{"vllm-0.33.0/stored_root"}, answers: []answer{{tokens: prompt16, device: 4}}},
		{files: []string{"vllm-0.33.0/cleared"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "vllm-bytes", steps: []step{
		{files: []string{"vllm-0.33.0-bytes/stored_root"}, answers: []answer{{tokens: prompt16, device: 2}}},
		{files: []string{"vllm-0.33.0-bytes/stored_child"}, answers: []answer{{tokens: prompt16, device: 4}}},
		{files: []string{"vllm-0.33.0-bytes/removed"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "vllm-reannounced", steps: []step{
		{files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_reannounce", "vllm-0.33.0/stored_reannounce"}, answers: []answer{{tokens: prompt12, device: 3}}},
	}},
	{name: "vllm-mixed", rank: 3, steps: []step{
		{files: []string{"vllm-0.33.0/batch_mixed 0:1"}, answers: []answer{{tokens: prompt16, rank: 3, device: 4}}},
		{files: []string{"vllm-0.33.0/batch_mixed 1:5"}, answers: []answer{{tokens: prompt16, rank: 3, device: 1}, {tokens: span(500, 507), rank: 3, device: 2}}},
	}},
	{name: "vllm-mixed-whole", rank: 3, steps: []step{
		{files: []string{"vllm-0.33.0/batch_mixed"}, answers: []answer{{tokens: prompt16, rank: 3, device: 1}, {tokens: span(500, 507), rank: 3, device: 2}}},
	}},
	{name: "vllm-lora", steps: []step{
		{files: []string{"vllm-0.33.0/stored_lora"}, answers: []answer{{tokens: prompt12, extra: withLoRA, device: 3}, {tokens: prompt12}}},
	}},
	{name: "vllm-salt", steps: []step{
		{files: []string{"vllm-0.33.0/stored_salt_session"}, answers: []answer{{tokens: prompt12, extra: withSalt, device: 3}, {tokens: prompt12}}},
	}},
	{name: "vllm-image", steps: []step{
		{files: []string{"vllm-0.33.0/stored_mm"}, answers: []answer{
			{tokens: prompt16, extra: image("img-abc", 5, 9), device: 4}, {tokens: prompt16, device: 1},
			{tokens: prompt16, extra: image("img-abd", 5, 9), device: 1}, {tokens: prompt16, extra: image("img-abc", 5, 8), device: 2},
		}},
	}},
	{name: "vllm-all", steps: []step{ // of one engine
		{files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_lora", "vllm-0.33.0/stored_salt_session", "vllm-0.33.0/stored_mm"}, answers: []answer{
			{tokens: prompt16, device: 2}, {tokens: prompt16, extra: withLoRA, device: 3}, {tokens: prompt16, extra: withSalt, device: 3},
			{tokens: prompt16, extra: image("img-abc", 5, 9), device: 4}, {tokens: prompt16, extra: index.Extra{LoRA: "sql-adapter", Salt: "tenant-a"}},
		}},
		{files: []string{"vllm-0.33.0/cleared"}, answers: []answer{
			{tokens: prompt16}, {tokens: prompt16, extra: withLoRA}, {tokens: prompt16, extra: withSalt}, {tokens: prompt16, extra: image("img-abc", 5, 9)},
		}},
	}},
	{name: "vllm-lookahead", eagle: true, steps: []step{
		{files: []string{"vllm-0.33.0/stored_lookahead"}, answers: []answer{{tokens: span(100, 112), device: 3}, {tokens: prompt12, device: 2}, {tokens: append(span(100, 111), 7), device: 2}}},
	}},
	{name: "vllm-lookahead-unsaid", steps: []step{
		{files: []string{"vllm-0.33.0/stored_lookahead"}, answers: []answer{{tokens: prompt12}}},
	}},
	{name: "vllm-sliding-window", steps: []step{
		{files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/stored_swa_masked"}, answers: []answer{{tokens: prompt16, device: 2}}},
	}},
	{name: "vllm-other-group", blockSize: 8, steps: []step{
		{files: []string{"vllm-0.33.0/stored_group_blocksize8"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "vllm-placeholder", steps: []step{
		{files: []string{"vllm-0.33.0/stored_root", "vllm-0.33.0/offload_placeholder"}, answers: []answer{{tokens: prompt16, device: 2}}},
	}},
	{name: "vllm-edges", blockSize: 1, steps: []step{
		{files: []string{"vllm-0.33.0/edge_u64"}, answers: []answer{{tokens: []uint32{0, 1 << 31, 1<<32 - 1, 151936}}}},
	}},
	{name: "vllm-no-rank", steps: []step{
		{files: []string{"vllm-0.33.0/stored_root"}, answers: []answer{{tokens: prompt16, device: 2}}},
		{files: []string{"vllm-0.33.0/dp_rank_none"}, answers: []answer{{tokens: prompt16}}}, // it clears
	}},
	{name: "vllm-future", blockSize: 2, steps: []step{
		{files: []string{"vllm-0.33.0/future_unknown 0:2"}, answers: []answer{{tokens: []uint32{1, 2, 3}, device: 1}}},
		{files: []string{"vllm-0.33.0/future_unknown"}, answers: []answer{{tokens: []uint32{1, 2, 3}}}},
	}},
	legacy("vllm-0.9.0", VLLM, 0, 2, 2, 0), legacy("vllm-0.9.2", VLLM, 2, 2, 2, 0), legacy("vllm-0.10.2", VLLM, 2, 2, 2, 0),
	legacy("vllm-0.14.0", VLLM, 2, 2, 2, 0), legacy("vllm-0.17.0", VLLM, 2, 2, 2, 0), legacy("vllm-0.20.0", VLLM, 2, 2, 2, 0),
	legacy("vllm-0.24.0", VLLM, 2, 2, 2, 0), legacy("vllm-0.26.0", VLLM, 2, 2, 2, 0), legacy("vllm-0.29.0", VLLM, 2, 2, 2, 0),
	legacy("sglang-0.4.8", SGLang, 2, 0, 0, 0), // hashes that do not follow from the blocks before
	legacy("sglang-0.5.18", SGLang, 2, 2, 3, 0), legacy("sglang-0.5.20", SGLang, 2, 2, 3, 0),
	{name: "sglang", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_root"}, answers: []answer{{tokens: prompt16, device: 2}, {tokens: span(101, 116)}}},
		{files: []string{"sglang-0.5.23/stored_child"}, answers: []answer{{tokens: prompt16, device: 4}}},
		{files: []string{"sglang-0.5.23/demote_cpu"}, answers: []answer{{tokens: prompt16, device: 0, host: 4}}},
		{files: []string{"sglang-0.5.23/removed"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "sglang-cleared", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_root"}, answers: []answer{{tokens: prompt16, device: 2}}},
		{files: []string{"sglang-0.5.23/cleared"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "sglang-no-rank", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_root", "sglang-0.5.23/dp_rank_none"}, answers: []answer{{tokens: prompt16}}},
	}},
	{name: "sglang-rank3", kind: SGLang, rank: 3, steps: []step{
		{files: []string{"sglang-0.5.23/dp_rank3"}, answers: []answer{{tokens: prompt16, rank: 3}}},
	}},
	{name: "sglang-salt", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_salt"}, answers: []answer{{tokens: prompt16, extra: withSalt, device: 2}, {tokens: prompt16}}},
	}},
	{name: "sglang-lora", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_lora"}, answers: []answer{{tokens: prompt16, extra: withLoRA, device: 2}, {tokens: prompt16}}},
	}},
	{name: "sglang-dynamo", kind: SGLang, steps: []step{
		{files: []string{"sglang-0.5.23/stored_dynamo_format"}, answers: []answer{{tokens: prompt16, extra: withSalt, device: 2}, {tokens: prompt16}}},
	}},
	{name: "sglang-page1", kind: SGLang, blockSize: 1, steps: []step{
		{files: []string{"sglang-0.5.23/stored_page1"}, answers: []answer{{tokens: prompt8, device: 5}}},
	}},
	{name: "sglang-future", kind: SGLang, blockSize: 2, steps: []step{
		{files: []string{"sglang-0.5.23/future_unknown"}, answers: []answer{{tokens: []uint32{1, 2, 3}, device: 1}}},
	}},
	{name: "trtllm-stream", kind: TensorRTLLMStreaming, blockSize: 2, rank: 1, steps: []step{
		{files: []string{"trtllm/streaming 0:1"}, answers: []answer{{tokens: span(1, 4), rank: 1, device: 1}}}, // one of its blocks has a token that is none
		{files: []string{"trtllm/streaming"}, answers: []answer{{tokens: span(1, 4), rank: 1}}},
	}},
	{name: "trtllm-1.2", kind: TensorRTLLM, steps: []step{
		{files: []string{"trtllm/v1_json"}, answers: []answer{{tokens: span(100, 114), device: 2}}},
	}},
	{name: "trtllm-1.3", kind: TensorRTLLM, rank: 1, steps: []step{
		{files: []string{"trtllm/v2_json"}, answers: []answer{{tokens: prompt8, rank: 1, device: 1}}},
	}},
	{name: "trtllm-sha256", kind: TensorRTLLM, blockSize: 2, steps: []step{
		{files: []string{"trtllm/v2_sha256_hex"}, answers: []answer{{tokens: []uint32{5, 0}}}}, // a token that is none
	}},
}

// legacy is a story of the payloads of old releases: two chains, of which the
// second goes on from the first with a LoRA adapter in vLLM's, a removal of the
// first block, and a clear.
func legacy(release string, kind Kind, rank, root, both, removed int) story {
	file := "legacy/" + release
	prompt := span(1, 6)
	last := "2:3"
	if release == "sglang-0.5.18" {
		last = "3:4" // it has the first chain with a salt as well
	}
	return story{name: release, kind: kind, blockSize: 2, rank: rank, steps: []step{
		{files: []string{file + " 0:1"}, answers: []answer{{tokens: prompt, rank: rank, device: root}}},
		{files: []string{file + " 1:2"}, answers: []answer{{tokens: prompt, rank: rank, device: both}, {tokens: prompt, rank: rank, extra: withLoRA}}},
		{files: []string{file + " " + last}, answers: []answer{{tokens: prompt, rank: rank, device: removed}}},
		{files: []string{file}, answers: []answer{{tokens: prompt, rank: rank}, {tokens: prompt, rank: rank, extra: withLoRA}, {tokens: prompt, rank: rank, extra: withSalt}}},
	}}
}

// vllmVectors returns stories of what vLLM's own code hashed: for each algorithm
// and seed an engine whose ranks have a prompt each (plain, LoRA, salt, image), one
// of one rank that has them all, with hashes as bytes, and one with lookahead.
func vllmVectors(t *testing.T) (all []story) {
	var vectors []struct {
		Algorithm string   `json:"algo"`
		Seed      *string  `json:"pythonhashseed"`
		Case      string   `json:"case"`
		Tokens    []uint32 `json:"tokens"`
		BlockSize int      `json:"block_size"`
		Hashes    []string `json:"hashes"`
		Texts     []string `json:"event_ints"`
	}
	readJSON(t, "vllm_hash_vectors.json", &vectors)
	cases := []string{"plain", "lora", "salt", "mm"}
	extras := []index.Extra{{}, withLoRA, withSalt, image("img-abc", 5, 9)}
	for i, v := range vectors {
		if i%5 == 0 {
			name := "vllm-" + v.Algorithm
			if v.Seed != nil {
				name += "-seed"
			}
			all = append(all,
				story{name: name + "-ranks", blockSize: v.BlockSize, ranks: 4, steps: make([]step, 1)},
				story{name: name + "-bytes", blockSize: v.BlockSize, steps: make([]step, 1)},
				story{name: name + "-lookahead", blockSize: v.BlockSize, eagle: true, steps: make([]step, 1)})
		}
		ranks, one, ahead := &all[len(all)-3].steps[0], &all[len(all)-2].steps[0], &all[len(all)-1].steps[0]
		n := len(v.Hashes)
		event := map[string]any{
			"type": "BlockStored", "parent_block_hash": nil, "token_ids": v.Tokens[:n*v.BlockSize], "block_size": v.BlockSize,
			"lora_id": nil, "medium": "GPU", "lora_name": nil, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
		}
		keys := make([]any, n)
		switch v.Case {
		case "lora":
			event["lora_id"], event["lora_name"] = 7, "sql-adapter"
			for i := range keys {
				keys[i] = []any{"sql-adapter"}
			}
		case "salt":
			keys[0] = []any{"tenant-a"}
		case "mm":
			keys[1], keys[2] = []any{[]any{"img-abc", 1}}, []any{[]any{"img-abc", -3}}
		}
		event["extra_keys"] = keys
		var ints []uint64
		var digests []any
		for i := range n {
			h, err := strconv.ParseUint(v.Texts[i], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			ints, digests = append(ints, h), append(digests, map[string]string{"hex": v.Hashes[i]})
		}
		with := func(hashes any) []map[string]any {
			e := map[string]any{"block_hashes": hashes}
			for k, v := range event {
				e[k] = v
			}
			return []map[string]any{e}
		}
		if v.Case == "lookahead1" {
			var next [][]uint32
			for i := range n {
				next = append(next, v.Tokens[(i+1)*v.BlockSize:(i+1)*v.BlockSize+1])
			}
			event["lookahead_token_ids"] = next
			ahead.batches = append(ahead.batches, batchTo{0, with(ints)})
			ahead.answers = append(ahead.answers, answer{tokens: v.Tokens, device: n}, answer{tokens: v.Tokens[:n*v.BlockSize], device: n - 1})
			continue
		}
		rank := slices.Index(cases, v.Case)
		a := answer{tokens: v.Tokens, extra: extras[rank], device: n}
		ranks.batches = append(ranks.batches, batchTo{rank, with(ints)})
		one.batches = append(one.batches, batchTo{0, with(digests)})
		one.answers = append(one.answers, a)
		a.rank = rank
		switch v.Case { // both have the first block
		case "plain":
			a.also = map[int]int{slices.Index(cases, "mm"): 1}
		case "mm":
			a.also = map[int]int{slices.Index(cases, "plain"): 1}
		}
		ranks.answers = append(ranks.answers, a)
	}
	return all
}

// sglangVectors does so for SGLang, with one engine.
func sglangVectors(t *testing.T) []story {
	var vectors []struct {
		Key      *string           `json:"extra_key"`
		Salt     *string           `json:"cache_salt"`
		Tokens   []uint64          `json:"tokens"`
		PageSize int               `json:"page_size"`
		Ints     []json.RawMessage `json:"dynamo_int64"`
	}
	readJSON(t, "sglang_hash_vectors.json", &vectors)
	st := story{name: "sglang-vectors", kind: SGLang, blockSize: 4, steps: make([]step, 1)}
	for _, v := range vectors {
		if v.Ints == nil {
			continue
		}
		var hashes []int64
		for _, text := range v.Ints {
			h, err := strconv.ParseInt(strings.Trim(string(text), `"`), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			hashes = append(hashes, h)
		}
		a := answer{device: len(hashes)}
		for _, n := range v.Tokens {
			a.tokens = append(a.tokens, uint32(n))
		}
		event := map[string]any{
			"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": nil, "token_ids": v.Tokens, "block_size": v.PageSize,
			"lora_id": nil, "medium": "GPU",
		}
		if v.Key != nil {
			a.extra.LoRA, event["lora_name"] = *v.Key, *v.Key
		}
		if v.Salt != nil {
			a.extra.Salt, event["cache_salt"] = *v.Salt, *v.Salt
		}
		st.steps[0].batches = append(st.steps[0].batches, batchTo{0, []map[string]any{event}})
		st.steps[0].answers = append(st.steps[0].answers, a)
	}
	return []story{st}
}

const payloadDir = "engine/testdata"

func readJSON(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(payloadDir, name))
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestEveryPayloadHasAStory fails for a payload that no line names.
func TestEveryPayloadHasAStory(t *testing.T) {
	told := map[string]bool{}
	for _, st := range stories {
		for _, s := range st.steps {
			for _, f := range s.files {
				told[f] = true
			}
		}
	}
	found := 0
	err := filepath.WalkDir(payloadDir, func(path string, d fs.DirEntry, err error) error {
		file := strings.TrimPrefix(filepath.ToSlash(path), payloadDir+"/")
		ext := filepath.Ext(file)
		file = strings.TrimSuffix(file, ext)
		if ext != ".msgpack" && (ext != ".json" || !strings.HasPrefix(file, "trtllm/")) {
			return err
		}
		if found++; !told[file] {
			t.Errorf("%s is sent whole in no story", file)
		}
		return err
	})
	if err != nil || found < 40 {
		t.Fatalf("%d payloads: %v", found, err)
	}
}

// TestEnginesToAnswers tells all the stories at once, one worker each, on one
// relay and one stage.
func TestEnginesToAnswers(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		all := slices.Concat(stories, vllmVectors(t), sglangVectors(t))
		p := newPublishers(t, all)
		cfg := DefaultConfig()
		cfg.Topic = testcontainers.NewTopic(t, b, "events", 3, nil)
		cfg.Engines = p.engines
		cl := startStage(t, b, cfg.Topic)
		p.publish(t, all, 0) // so that the first step is read from replays
		r := startRelay(t, b, cfg)
		for n := 0; ; n++ {
			if n > 0 && !p.publish(t, all, n) {
				break
			}
			p.settled(t, r, b, cl, cfg.Topic)
			for _, st := range all {
				if n < len(st.steps) {
					for _, a := range st.steps[n].answers {
						check(t, cl, &st, n, &a)
					}
				}
			}
		}
	})
}

// publishers are the stories' engines.
type publishers struct {
	engines []Engine
	first   []int // by story, its first engine in the process
	next    map[string]int64
	polled  map[string]*handout
	in      io.Writer
	out     *bufio.Scanner
}

// handout is a TensorRT-LLM that gives what is in body away once.
type handout struct {
	mu   sync.Mutex
	body []byte
}

func (s *handout) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Write(s.body)
	s.body = []byte("[]")
}

func newPublishers(t *testing.T, all []story) *publishers {
	p := &publishers{next: map[string]int64{}, polled: map[string]*handout{}}
	args := []string{"testdata/payloads.py"}
	number := 0
	for i := range all {
		st := &all[i]
		st.kind, st.blockSize, st.ranks = cmp.Or(st.kind, VLLM), cmp.Or(st.blockSize, 4), cmp.Or(st.ranks, 1)
		e := Engine{Worker: st.name, Kind: st.kind, Model: "m", BlockSize: st.blockSize, Eagle: st.eagle, FirstRank: st.rank, Ranks: st.ranks}
		p.first = append(p.first, number)
		if st.kind == TensorRTLLM {
			s := &handout{body: []byte("[]")}
			server := httptest.NewServer(s)
			t.Cleanup(server.Close)
			p.polled[st.name] = s
			e.Events = server.URL + "/kv_cache_events"
			p.engines = append(p.engines, e)
			continue
		}
		// A rank's port is rank 0's and its number.
		row := st.rank + st.ranks
		e.Events, e.Replay = "tcp://"+testcontainers.FreeAddress(t, row), "tcp://"+testcontainers.FreeAddress(t, row)
		form := "new"
		if slices.ContainsFunc(st.steps, func(s step) bool { return len(s.files) > 0 && strings.HasPrefix(s.files[0], "legacy/") }) {
			form = "old"
		}
		for rank := st.rank; rank < row; rank++ {
			events, _ := endpointOf(e.Events, rank)
			replay, _ := endpointOf(e.Replay, rank)
			args = append(args, events, replay, form)
			number++
		}
		p.engines = append(p.engines, e)
	}
	cmd := exec.Command(testcontainers.Python(t, "pyzmq", "msgpack"), args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil || stderr.Len() > 0 {
			t.Errorf("payloads.py: %v\n%s", err, &stderr)
		}
	})
	p.in, p.out = in, bufio.NewScanner(out)
	p.said(t, "bound")
	return p
}

func (p *publishers) said(t *testing.T, want string) {
	t.Helper()
	if !p.out.Scan() || p.out.Text() != want {
		t.Fatalf("payloads.py says %q, want %q", p.out.Text(), want)
	}
}

// publish publishes what the stories' step n has, and reports whether there is any.
func (p *publishers) publish(t *testing.T, all []story, n int) (more bool) {
	t.Helper()
	send := func(i, rank int, command map[string]any) {
		st := &all[i]
		command["to"] = p.first[i] + rank - st.rank
		line, err := json.Marshal(command)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(p.in, "%s\n", line)
		p.said(t, "sent")
		p.next[fmt.Sprint(st.name, rank)]++
	}
	for i := range all {
		st := &all[i]
		if n >= len(st.steps) {
			continue
		}
		more = true
		for _, f := range st.steps[n].files {
			if s := p.polled[st.name]; s != nil {
				var events []struct {
					ID int64 `json:"event_id"`
				}
				readJSON(t, f+".json", &events)
				body, err := os.ReadFile(filepath.Join(payloadDir, f+".json"))
				if err != nil {
					t.Fatal(err)
				}
				s.mu.Lock()
				s.body = body
				s.mu.Unlock()
				p.next[fmt.Sprint(st.name, st.rank)] = events[len(events)-1].ID + 1
				continue
			}
			command := map[string]any{}
			name, part, cut := strings.Cut(f, " ")
			command["file"] = filepath.Join(payloadDir, name+".msgpack")
			if cut {
				var from, until int
				if _, err := fmt.Sscanf(part, "%d:%d", &from, &until); err != nil {
					t.Fatalf("%q: %v", f, err)
				}
				command["from"], command["until"] = from, until
			}
			send(i, st.rank, command)
		}
		for _, b := range st.steps[n].batches {
			send(i, b.rank, map[string]any{"batch": []any{1764500000.125, b.events, b.rank}})
		}
	}
	return more
}

// settled waits until the stage has all that was published.
func (p *publishers) settled(t *testing.T, r *running, b testcontainers.Broker, cl *client.Client, topic string) {
	t.Helper()
	testcontainers.Eventually(t, patience, func() error {
		for _, k := range r.Status().Ranks {
			if want := p.next[fmt.Sprint(k.Worker, k.Rank)]; k.EngineSeq != want || k.Source != string(stateLive) || k.State != stateNames[writing] || k.InFlight != 0 {
				return fmt.Errorf("%s/%d: next is %d, want %d: %+v", k.Worker, k.Rank, k.EngineSeq, want, k)
			}
		}
		ends := testcontainers.StableOffsets(t, b, topic)
		st, err := cl.Status(t.Context())
		if err != nil {
			return err
		}
		for _, row := range st.Partitions {
			if row.State != "live" || row.Position != ends[row.Partition] {
				return fmt.Errorf("partition %d ends at %d, the stage is %s at %d", row.Partition, ends[row.Partition], row.State, row.Position)
			}
		}
		if len(st.Partitions) != len(ends) {
			return fmt.Errorf("%d partitions", len(st.Partitions))
		}
		return nil
	})
}

// startStage runs a stage until the test ends.
func startStage(t *testing.T, b testcontainers.Broker, topic string) *client.Client {
	t.Helper()
	cfg := pipeline.DefaultConfig()
	cfg.Brokers, cfg.Topic, cfg.SnapshotTopic = b.Brokers(), topic, ""
	cfg.GRPCListen, cfg.HTTPListen = testcontainers.FreeAddress(t, 1), "127.0.0.1:0"
	cfg.Limits.MaxRunnable = 1 << 20 // whatever else the tests' process does
	cfg.Logger = silent
	s, err := pipeline.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stage: %v", err)
		}
	})
	cl, err := client.Dial(cfg.GRPCListen, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cl.Close() })
	return cl
}

// check asks for an answer's prompt, and for the same with what nobody stored: an
// adapter, a salt, an image.
func check(t *testing.T, cl *client.Client, st *story, n int, a *answer) {
	t.Helper()
	ask := func(extra index.Extra, want map[int]index.Depths) {
		t.Helper()
		req := &pb.MatchRequest{Model: "m", BlockSize: uint32(st.blockSize), Workers: []string{st.name}}
		if st.eagle { // of which queries' tokens know nothing
			h := index.BlockHasher{BlockSize: st.blockSize, Eagle: true}
			for _, l := range h.Append(nil, a.tokens, extra) {
				req.LocalHashes = append(req.LocalHashes, uint64(l))
			}
		} else {
			req.Tokens, req.Lora, req.Salt = a.tokens, extra.LoRA, extra.Salt
			for _, m := range extra.MM {
				req.Mm = append(req.Mm, &pb.Multimodal{Hash: m.Hash, FirstToken: uint32(m.Start), Tokens: uint32(m.End - m.Start)})
			}
		}
		resp, err := cl.Match(t.Context(), req)
		if err != nil {
			t.Fatalf("%s: %v", st.name, err)
		}
		got := map[int]index.Depths{}
		for _, m := range resp.Matches {
			if m.Worker != st.name {
				t.Errorf("%s: answer of %s", st.name, m.Worker)
			}
			got[int(m.DpRank)] = index.Depths{int(m.DepthBlocks), int(m.DepthHostBlocks), int(m.DepthDiskBlocks), int(m.DepthExternalBlocks)}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s, step %d: %v with %+v: depths by rank %v, want %v", st.name, n+1, a.tokens, extra, got, want)
		}
	}
	want := map[int]index.Depths{}
	if host := max(a.device, a.host); host > 0 {
		want[a.rank] = index.Depths{a.device, host, host, host}
	}
	for rank, n := range a.also {
		want[rank] = index.Depths{n, n, n, n}
	}
	ask(a.extra, want)
	for _, wrong := range []index.Extra{
		{LoRA: "nobody's", Salt: a.extra.Salt, MM: a.extra.MM},
		{LoRA: a.extra.LoRA, Salt: "nobody's", MM: a.extra.MM},
		{LoRA: a.extra.LoRA, Salt: a.extra.Salt, MM: append(image("nobody's", 0, 1).MM, a.extra.MM...)},
	} {
		ask(wrong, nil)
	}
}
