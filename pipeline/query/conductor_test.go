package query

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvindex/index"
)

// postPacked posts a body in MessagePack and returns the answer, which must be in it
// too, as JSON with sorted keys.
func postPacked(t testing.TB, s *Server, path string, body []byte) (int, string) {
	t.Helper()
	resp, answer := exchange(t, s, http.MethodPost, path, "application/msgpack", bytes.NewReader(body))
	if media := resp.Header.Get("Content-Type"); media != "application/msgpack" {
		t.Fatalf("%s answers %q: %q", path, media, answer)
	}
	v, rest, err := msgp.ReadMapStrIntfBytes(answer, nil)
	if err != nil || len(rest) > 0 {
		t.Fatalf("%s answers what is no map: %v: %q", path, err, answer)
	}
	return resp.StatusCode, compact(v)
}

func wantPacked(t *testing.T, s *Server, path string, body []byte, want string) {
	t.Helper()
	if code, answer := postPacked(t, s, path, body); code != http.StatusOK || answer != want {
		t.Errorf("%s %q\n  %d %s\nwant %s", path, body, code, answer, want)
	}
}

// conductorTruth is the oracle's answer as the Conductor writes it, with the rows of
// all that are listed, or of one.
func (f *dropinFleet) conductorTruth(locals []index.LocalHash, only string) string {
	truth := f.truth(locals)
	for _, w := range f.listed {
		if truth[w.Worker] == nil {
			truth[w.Worker] = map[string]index.Depths{}
		}
		if rank := strconv.Itoa(int(w.Rank)); truth[w.Worker][rank] == (index.Depths{}) {
			truth[w.Worker][rank] = index.Depths{}
		}
	}
	tiers := func(d index.Depths) map[string]any {
		return map[string]any{"gpu": d[index.Device], "cpu": d[index.Host], "disk": d[index.External]}
	}
	instances := map[string]any{}
	for name, ranks := range truth {
		if only != "" && name != only {
			continue
		}
		var best index.Depths
		dp, matches := map[string]int{}, map[string]any{}
		for rank, depths := range ranks {
			dp[rank], matches[rank] = depths[index.Device], tiers(depths)
			for t := range best {
				best[t] = max(best[t], depths[t])
			}
		}
		row := tiers(best)
		row["longest_matched"], row["dp"], row["rank_matches"] = best[index.External], dp, matches
		instances[name] = row
	}
	return compact(map[string]any{"instances": instances})
}

// packedQuery is a query as the Conductor's clients write it, tokens as bytes or as an array.
func packedQuery(model string, blockSize int, tokens []uint32, x index.Extra, asBytes bool) []byte {
	b := msgp.AppendMapHeader(nil, 5)
	b = msgp.AppendString(msgp.AppendString(b, "model"), model)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), blockSize)
	b = msgp.AppendString(msgp.AppendString(b, "lora_name"), x.LoRA)
	b = msgp.AppendString(msgp.AppendString(b, "cache_salt"), x.Salt)
	b = msgp.AppendString(b, "token_ids")
	if asBytes {
		var raw []byte
		for _, token := range tokens {
			raw = binary.LittleEndian.AppendUint32(raw, token)
		}
		return msgp.AppendBytes(b, raw)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, token := range tokens {
		b = msgp.AppendUint32(b, token)
	}
	return b
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What Python's msgpack 1.2.4 makes, with use_bin_type, of the requests of the
// Conductor's documentation (docs/source/design/conductor/indexer-api-design.md and
// usage.md of kvcache-ai/Mooncake at 1d9dff9ad984) and of its example of a client
// (mooncake-conductor/example/cache_aware_disagg_proxy.py).
const (
	recordedTokens = `c440 00000000 01000000 02000000 03000000 04000000 05000000 06000000 07000000
		08000000 09000000 0a000000 0b000000 0c000000 0d000000 0e000000 0f000000`
	recordedQuery = `83a56d6f64656caa746573742d6d6f64656caa626c6f636b5f73697a6510a9746f6b656e5f696473` + recordedTokens
	recordedUsage = `85a56d6f64656caa746573742d6d6f64656ca96c6f72615f6e616d65a0a974656e616e745f6964a764656661756c74
		aa626c6f636b5f73697a6510a9746f6b656e5f696473` + recordedTokens
	recordedArray = `83a56d6f64656caa746573742d6d6f64656caa626c6f636b5f73697a6510a9746f6b656e5f696473
		dc0010 000102030405060708090a0b0c0d0e0f`
	recordedProxy = `86a56d6f64656caa746573742d6d6f64656caa626c6f636b5f73697a6510a9746f6b656e5f696473` + recordedTokens + `
		a974656e616e745f6964a874656e616e742d61a96c6f72615f6e616d65a9616461707465722d61aa63616368655f73616c74a673616c742d61`
	recordedRegister = `8ba8656e64706f696e74b47463703a2f2f3132372e302e302e313a35353537af7265706c61795f656e64706f696e74
		b47463703a2f2f3132372e302e302e313a35353538a474797065a4764c4c4da96d6f64656c6e616d65aa746573742d6d6f64656c
		a96c6f72615f6e616d65a0a974656e616e745f6964a764656661756c74ab696e7374616e63655f6964a8656e67696e652d61
		aa626c6f636b5f73697a6510a764705f72616e6b00ab63616368655f67726f757000ac686173685f70726f66696c65
		84a87374726174656779a7766c6c6d5f7631a9616c676f726974686dab7368613235365f63626f72
		b0707974686f6e5f686173685f73656564a130b0696e6465785f70726f6a656374696f6ea86c6f7736345f6265`
	recordedUnregister = `83ab696e7374616e63655f6964a8656e67696e652d61a974656e616e745f6964a764656661756c74a764705f72616e6b00`
)

func TestConductorRecordedRequests(t *testing.T) {
	f := newDropinFleet("test-model", 16, index.Flash)
	tokens := make([]uint32, 16)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	s := serve(t, f, Config{})

	// Nobody is known yet, and nobody is of that model.
	wantPacked(t, s, "/mooncake/query", unhex(t, recordedQuery), `{"instances":{}}`)
	f.models = nil
	wantPacked(t, s, "/mooncake/query", unhex(t, recordedQuery), `{"instances":{}}`)
	f.models = []Model{f.model}
	if code, answer := postPacked(t, s, "/mooncake/register", unhex(t, recordedRegister)); code != http.StatusConflict || !strings.Contains(answer, "run a relay") {
		t.Errorf("%d %s", code, answer)
	}
	if code, answer := postPacked(t, s, "/mooncake/unregister", unhex(t, recordedUnregister)); code != http.StatusNotFound || answer != `{"code":"NOT_FOUND","error":"service not found: engine-a|default|0"}` {
		t.Errorf("%d %s", code, answer)
	}

	f.listed = []WorkerStatus{
		{Worker: "engine-a", Rank: 0, Model: "test-model", BlockSize: 16},
		{Worker: "engine-a", Rank: 1, Model: "test-model", BlockSize: 16},
		{Worker: "engine-b", Rank: 0, Model: "test-model", BlockSize: 16},
	}
	listed := f.listed
	// These have no rows.
	f.listed = append(slices.Clone(listed),
		WorkerStatus{Worker: "silent", Model: "test-model", BlockSize: 16, Silent: true},
		WorkerStatus{Worker: "retired", Model: "test-model", BlockSize: 16, Retired: true},
		WorkerStatus{Worker: "other size", Model: "test-model", BlockSize: 8},
		WorkerStatus{Worker: "other model", Model: "m", BlockSize: 16})
	const nothing = `{"instances":{` +
		`"engine-a":{"cpu":0,"disk":0,"dp":{"0":0,"1":0},"gpu":0,"longest_matched":0,"rank_matches":{"0":{"cpu":0,"disk":0,"gpu":0},"1":{"cpu":0,"disk":0,"gpu":0}}},` +
		`"engine-b":{"cpu":0,"disk":0,"dp":{"0":0},"gpu":0,"longest_matched":0,"rank_matches":{"0":{"cpu":0,"disk":0,"gpu":0}}}}}`
	wantPacked(t, s, "/mooncake/query", unhex(t, recordedUsage), nothing)
	wantPacked(t, s, "/mooncake/query", packedQuery("test-model", 16, nil, index.Extra{}, true), nothing)
	wantPacked(t, s, "/mooncake/query", packedQuery("test-model", 16, nil, index.Extra{}, false), nothing)

	plain, salted := f.locals(tokens, index.Extra{}), f.locals(tokens, index.Extra{LoRA: "adapter-a", Salt: "salt-a"})
	f.store(t, "engine-a", 1, plain...)
	f.storeIn(t, index.Host, "engine-b", 0, salted, 0, 1)
	now := f.listed
	f.listed = listed
	wantPlain, wantSalted := f.conductorTruth(plain, ""), f.conductorTruth(salted, "")
	one := f.conductorTruth(plain, "engine-b")
	f.listed = now
	for _, body := range []string{recordedQuery, recordedUsage, recordedArray} {
		wantPacked(t, s, "/mooncake/query", unhex(t, body), wantPlain)
	}
	wantPacked(t, s, "/mooncake/query", unhex(t, recordedProxy), wantSalted)
	if !strings.Contains(wantPlain, `"engine-a":{"cpu":16,"disk":16,"dp":{"0":0,"1":16}`) || !strings.Contains(wantSalted, `"engine-b":{"cpu":16,"disk":16,"dp":{"0":0},"gpu":0`) {
		t.Errorf("%s\n%s", wantPlain, wantSalted)
	}
	filtered := func(instance string) []byte {
		b := unhex(t, recordedQuery)
		b[0]++
		return msgp.AppendString(msgp.AppendString(b, "instance_id"), instance)
	}
	wantPacked(t, s, "/mooncake/query", filtered("engine-b"), one)
	wantPacked(t, s, "/mooncake/query", filtered("engine-c"), `{"instances":{}}`)

	wantPacked(t, s, "/mooncake/register", unhex(t, recordedRegister), `{"instance_id":"engine-a","status":"registered successfully"}`)
	if code, answer := postPacked(t, s, "/mooncake/unregister", unhex(t, recordedUnregister)); code != http.StatusNotImplemented || !strings.Contains(answer, "stays known") {
		t.Errorf("%d %s", code, answer)
	}
}

// The answer of one instance, byte by byte as the Conductor packs it.
func TestConductorAnswerBytes(t *testing.T) {
	f := newDropinFleet("m", 100, index.Flash)
	blocks := f.locals(make([]uint32, 700), index.Extra{})
	f.storeIn(t, index.Device, "w", 0, blocks, 0, 1)
	f.storeIn(t, index.Host, "w", 0, blocks, 1, 3)
	f.storeIn(t, index.Disk, "w", 0, blocks, 3, 7)
	s := serve(t, f, Config{})
	_, got := do(t, s, "POST", "/mooncake/query", "application/msgpack; charset=utf-8", bytes.NewReader(packedQuery("m", 100, make([]uint32, 799), index.Extra{}, true)))
	want := "\x81\xa9instances\x81\xa1w\x86\xaflongest_matched\xcd\x02\xbc\xa2dp\x81\xa10\x64" +
		"\xacrank_matches\x81\xa10\x83\xa3gpu\x64\xa3cpu\xcd\x01\x2c\xa4disk\xcd\x02\xbc" + "\xa3gpu\x64\xa3cpu\xcd\x01\x2c\xa4disk\xcd\x02\xbc"
	if got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
}

func TestConductorRefusals(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	f.addModel("twice", 4, index.Flash)
	f.addModel("twice", 4, index.Dynamo)
	s := serve(t, f, Config{Limits: Limits{MaxRequestBytes: 2000, MaxTokens: 20}})
	// field appends a name and what is its value.
	type field struct {
		name  string
		value any
	}
	pack := func(fields ...field) []byte {
		b := msgp.AppendMapHeader(nil, uint32(len(fields)))
		for _, f := range fields {
			b = msgp.AppendString(b, f.name)
			if raw, ok := f.value.(msgp.Raw); ok {
				b = append(b, raw...)
				continue
			}
			var err error
			if b, err = msgp.AppendIntf(b, f.value); err != nil {
				t.Fatal(err)
			}
		}
		return b
	}
	model, size, tokens := field{"model", "m"}, field{"block_size", 4}, field{"token_ids", make([]byte, 16)}
	good := pack(model, size, tokens)
	text := func(reason, field, text string) string {
		return compact(map[string]any{"error": text, "code": "INVALID_ARGUMENT", "reason": reason, "field": field})
	}
	whole := func(reason, text string) string {
		return compact(map[string]any{"error": text, "code": "INVALID_ARGUMENT", "reason": reason})
	}
	element := func(reason string, index int, text string) string {
		return compact(map[string]any{"error": text, "code": "INVALID_ARGUMENT", "reason": reason, "field": "token_ids", "index": index})
	}
	const short, query, register, unregister = "the body ends before its map does", "/mooncake/query", "/mooncake/register", "/mooncake/unregister"
	instance, rank := field{"instance_id", "w"}, field{"dp_rank", 0}
	for _, c := range []struct {
		path string
		body []byte
		code int
		want string
	}{
		{query, nil, 400, whole("invalid_msgpack", short)},
		{query, good[:len(good)-1], 400, whole("invalid_msgpack", short)},
		{query, good[:3], 400, whole("invalid_msgpack", short)},
		{query, []byte(`{"model":"m"}`), 400, whole("invalid_msgpack", "the body is not a map in MessagePack")},
		{query, []byte{0xc1}, 400, whole("invalid_msgpack", "the body is not a map in MessagePack")},
		{query, []byte{0x90}, 400, whole("invalid_msgpack", "the body is not a map in MessagePack")},
		{query, []byte{0xdf, 0xff, 0xff, 0xff, 0xff}, 400, whole("invalid_msgpack", short)},
		{query, append(slices.Clone(good), 0), 400, whole("invalid_msgpack", "the body goes on after its map")},
		{query, []byte{0x81, 0x01, 0x01}, 400, whole("invalid_msgpack", "the body's map has a key that is not a string")},
		{query, pack(field{"root_digest", "x"}, model), 400, text("unknown_field", "root_digest", `unknown field "root_digest"`)},
		{query, pack(field{"\xff", "x"}), 400, whole("unknown_field", `unknown field "\xff"`)},
		{query, pack(field{strings.Repeat("x", 1000), "x"}), 400, text("unknown_field", strings.Repeat("x", 40)+"...", `unknown field "`+strings.Repeat("x", 40)+`..."`)},
		{query, pack(model, size), 400, text("missing", "token_ids", "token_ids is required")},
		{query, pack(model, tokens), 400, text("missing", "block_size", "block_size is required")},
		{query, pack(size, tokens), 400, text("missing", "model", "model is required")},
		{query, pack(model, model), 400, text("invalid_value", "model", "model is there twice")},
		{query, pack(field{"model", ""}), 400, text("invalid_value", "model", "model must not be empty")},
		{query, pack(field{"model", "m\xff"}), 400, text("invalid_value", "model", "model is not UTF-8")},
		{query, pack(field{"model", 7}), 400, text("invalid_type", "model", "model must be a string")},
		{query, pack(field{"model", []byte("m")}), 400, text("invalid_type", "model", "model must be a string")},
		{query, pack(field{"block_size", 0}), 400, text("out_of_range", "block_size", "block_size must be from 1 to 2147483647")},
		{query, pack(field{"block_size", -4}), 400, text("out_of_range", "block_size", "block_size must be from 1 to 2147483647")},
		{query, pack(field{"block_size", uint64(math.MaxUint64)}), 400, text("out_of_range", "block_size", "block_size must be from 1 to 2147483647")},
		{query, pack(field{"block_size", 4.0}), 400, text("invalid_type", "block_size", "block_size must be an integer")},
		{query, pack(field{"block_size", "4"}), 400, text("invalid_type", "block_size", "block_size must be an integer")},
		{query, pack(field{"block_size", msgp.Raw{0xc1}}), 400, `"reason":"invalid_msgpack"`},
		{query, pack(field{"token_ids", make([]byte, 15)}), 400, text("invalid_value", "token_ids", "token_ids must be a bin of a multiple of 4 bytes")},
		{query, pack(field{"token_ids", "abcd"}), 400, text("invalid_type", "token_ids", "token_ids must be a bin or an array")},
		{query, pack(field{"token_ids", nil}), 400, text("invalid_type", "token_ids", "token_ids must be a bin or an array")},
		{query, pack(field{"token_ids", []byte{0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}}), 400, element("out_of_range", 1, "token_ids[1] is not from 0 to 2147483647")},
		{query, pack(field{"token_ids", []any{1, -1}}), 400, element("out_of_range", 1, "token_ids[1] is not from 0 to 2147483647")},
		{query, pack(field{"token_ids", []any{int64(1) << 31}}), 400, element("out_of_range", 0, "token_ids[0] is not from 0 to 2147483647")},
		{query, pack(field{"token_ids", []any{uint64(math.MaxUint64)}}), 400, element("out_of_range", 0, "token_ids[0] is not from 0 to 2147483647")},
		{query, pack(field{"token_ids", []any{"1"}}), 400, element("invalid_type", 0, "token_ids must be a list of integers")},
		{query, pack(field{"token_ids", []any{1, 2.0}}), 400, element("invalid_type", 1, "token_ids must be a list of integers")},
		{query, pack(field{"token_ids", []any{[]any{}}}), 400, element("invalid_type", 0, "token_ids must be a list of integers")},
		{query, pack(field{"token_ids", msgp.Raw{0xdd, 0, 0, 0, 20, 1}}), 400, whole("invalid_msgpack", short)},
		{query, pack(field{"token_ids", msgp.Raw{0xdd, 0xff, 0xff, 0xff, 0xff}}), 400, "token_ids: 4294967295 tokens are above the limit of 20"},
		{query, pack(field{"token_ids", msgp.Raw{0xc6, 0xff, 0xff, 0xff, 0xff, 0}}), 400, whole("invalid_msgpack", short)},
		{query, pack(model, size, field{"token_ids", make([]byte, 84)}), 400, "token_ids: 21 tokens are above the limit of 20"},
		{query, pack(model, size, tokens, field{"tenant_id", nil}), 400, text("invalid_type", "tenant_id", "tenant_id must be a string")},
		{query, pack(model, size, tokens, field{"cache_salt", 1}), 400, text("invalid_type", "cache_salt", "cache_salt must be a string")},
		{query, pack(model, size, tokens, field{"cache_salt", strings.Repeat("s", 1025)}), 400, "above the limit of 1024"},
		{query, pack(model, size, tokens, field{"instance_id", ""}), 400, text("invalid_value", "instance_id", "instance_id must not be empty")},
		{query, pack(model, size, field{"token_ids", bytes.Repeat([]byte{0}, 2000)}), 413, "limit of 2000 bytes"},
		{query, pack(field{"model", "twice"}, size, tokens), 409, "give block_size or hasher"},
		{register, pack(instance), 400, text("missing", "modelname", "modelname is required")},
		{register, pack(instance, field{"cache_group", 1}), 400, text("out_of_range", "cache_group", "cache_group must be from 0 to 0")},
		{register, pack(field{"hash_profile", "x"}), 400, text("invalid_type", "hash_profile", "hash_profile must be a map")},
		{register, pack(field{"hash_profile", map[string]any{"strategy": 1}}), 400, text("invalid_type", "hash_profile", "hash_profile must be a map of strings")},
		{register, pack(field{"hash_profile", map[string]any{"root_digest": ""}}), 400, text("unknown_field", "root_digest", `unknown field "root_digest"`)},
		{register, pack(field{"hash_profile", msgp.Raw{0xdf, 0xff, 0xff, 0xff, 0xff}}), 400, whole("invalid_msgpack", short)},
		{unregister, pack(instance), 400, text("missing", "dp_rank", "dp_rank is required")},
		{unregister, pack(instance, field{"dp_rank", -1}), 400, text("out_of_range", "dp_rank", "dp_rank must be from 0 to 2147483647")},
		{unregister, pack(instance, rank, field{"modelname", "m"}), 400, text("unknown_field", "modelname", `unknown field "modelname"`)},
		{unregister, pack(instance, field{"dp_rank", 3}, field{"tenant_id", ""}), 404, compact(map[string]any{"error": "service not found: w|default|3", "code": "NOT_FOUND"})},
	} {
		if code, answer := postPacked(t, s, c.path, c.body); code != c.code || !strings.Contains(answer, c.want) {
			t.Errorf("%s %q\n  %d %s\nwant %d %s", c.path, c.body, code, answer, c.code, c.want)
		}
	}

	// What those revisions do not have is not there in MessagePack.
	for path, want := range map[string]int{"/mooncake/query_by_hash": 415, "/dynamo/query": 415, "/v1/match": 415} {
		if code, answer := do(t, s, "POST", path, "application/msgpack", bytes.NewReader(good)); code != want {
			t.Errorf("%s: %d %s", path, code, answer)
		}
	}
	f.setReady(Readiness{Missing: []string{"kv-events/3: restoring"}})
	for _, body := range [][]byte{good, pack(model, size, field{"token_ids", []byte{}}), pack(field{"model", "none"}, size, tokens)} {
		if code, answer := postPacked(t, s, query, body); code != http.StatusServiceUnavailable || !strings.Contains(answer, "kv-events/3: restoring") {
			t.Errorf("not ready: %d %s", code, answer)
		}
	}
}

// A hostile body takes no more memory than a good one of its size.
func TestConductorAbuse(t *testing.T) {
	fields := conductorQueryFields(Limits{}.withDefaults())
	head := msgp.AppendString(msgp.AppendMapHeader(nil, 7), "token_ids")
	for name, body := range map[string][]byte{
		"a promise of an array": append(slices.Clone(head), 0xdd, 0, 0x0f, 0xff, 0xff),
		"a promise of bytes":    append(slices.Clone(head), 0xc6, 0xff, 0xff, 0xff, 0xff),
		"nested":                append(slices.Clone(head), bytes.Repeat([]byte{0x91}, 4<<20)...),
		"a map of maps":         bytes.Repeat([]byte{0x81, 0xa1, 'a'}, 1<<20),
		"a long key":            append([]byte{0x81, 0xdb, 0, 0x3f, 0, 0}, make([]byte, 0x3f0000)...),
	} {
		least := uint64(math.MaxUint64) // what servers of other tests allocate meanwhile is not meant
		for range 5 {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := new(dropinRequest).readPacked(body, fields)
			runtime.ReadMemStats(&after)
			if err == nil {
				t.Errorf("%s is taken", name)
			}
			least = min(least, after.TotalAlloc-before.TotalAlloc)
		}
		if least > 1<<20 {
			t.Errorf("%s: %d bytes", name, least)
		}
	}
}

// What is read, a reader of any MessagePack reads too, and alike.
func FuzzConductorRead(f *testing.F) {
	for _, body := range []string{recordedQuery, recordedUsage, recordedArray, recordedProxy, recordedRegister, recordedUnregister} {
		f.Add(unhex(f, body))
	}
	f.Add([]byte("\x83\xa5model\xd9\x01m\xaablock_size\xd3\x00\x00\x00\x00\x00\x00\x00\x04\xa9token_ids\x92\x01\xce\x00\x00\x00\x02"))
	f.Add([]byte("\xdf\xff\xff\xff\xff"))
	f.Add([]byte("\x81\xa9token_ids\xdd\xff\xff\xff\xff"))
	query := conductorQueryFields(Limits{MaxTokens: 1 << 10}.withDefaults())
	f.Fuzz(func(t *testing.T, body []byte) {
		var tokens []uint32
		for _, fields := range []packedFields{conductorRegisterFields, conductorUnregisterFields, query} {
			var in dropinRequest
			if err := in.readPacked(body, fields); err != nil {
				continue
			}
			all, rest, err := msgp.ReadMapStrIntfBytes(body, nil)
			if err != nil || len(rest) > 0 {
				t.Fatalf("%q was read: %v, %d bytes follow", body, err, len(rest))
			}
			for _, field := range fields {
				if _, ok := all[field.name]; !ok && field.required {
					t.Fatalf("%q has no %s", body, field.name)
				}
			}
			if text, _ := all["instance_id"].(string); text != in.instance {
				t.Fatalf("%q: read %+v", body, in)
			}
			tokens = in.tokens
		}
		if tokens == nil {
			return
		}
		all, _, _ := msgp.ReadMapStrIntfBytes(body, nil)
		if len(tokens) > 1<<10 {
			t.Fatalf("%d tokens were read", len(tokens))
		}
		var want []uint32
		switch list := all["token_ids"].(type) {
		case []byte:
			for i := 0; i+4 <= len(list); i += 4 {
				want = append(want, binary.LittleEndian.Uint32(list[i:]))
			}
		case []any:
			for _, token := range list {
				switch v := token.(type) {
				case int64:
					want = append(want, uint32(v))
				case uint64:
					want = append(want, uint32(v))
				}
			}
		}
		if !slices.Equal(tokens, want) {
			t.Fatalf("%q: read %v, want %v", body, tokens, want)
		}
	})
}
