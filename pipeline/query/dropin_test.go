package query

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"kvindex/index"
	"kvindex/index/indextest"
)

// dropinFleet is a stage with one model over a RunIndex, and the oracle that lived
// through the same events.
type dropinFleet struct {
	*fakeSource
	listed  []WorkerStatus
	dumpHas int // blocks that a dump is said to have
	model   Model
	oracle  *indextest.Fleet
	workers map[indextest.WorkerRank]*index.Worker
}

func newDropinFleet(model string, blockSize int, h index.Hasher) *dropinFleet {
	f := newFake()
	m := Model{Name: model, BlockSize: blockSize, Hasher: h, Index: index.New(index.NewRunIndex())}
	f.models = []Model{m}
	return &dropinFleet{fakeSource: f, model: m, oracle: indextest.NewFleet(), workers: map[indextest.WorkerRank]*index.Worker{}}
}

func (f *dropinFleet) Workers(model string) []WorkerStatus {
	return slices.DeleteFunc(slices.Clone(f.listed), func(w WorkerStatus) bool { return model != "" && w.Model != model })
}

func (f *dropinFleet) Status() Status {
	st := Status{Events: TopicStatus{Name: "kv-events"}}
	for _, m := range f.models {
		st.Models = append(st.Models, ModelStatus{Model: m.Name, BlockSize: m.BlockSize})
	}
	return st
}

func (f *dropinFleet) Dump(_ context.Context, filter DumpFilter) (all []Held, err error) {
	if filter.MaxBlocks < f.dumpHas {
		return nil, ErrDumpTooLarge
	}
	for w, worker := range f.workers {
		if filter.Model == f.model.Name && (filter.Worker == "" || filter.Worker == w.Worker) {
			worker.Dump(func(t index.Tier, s index.Stored) bool {
				s.Locals, s.Hashes = slices.Clone(s.Locals), slices.Clone(s.Hashes)
				all = append(all, Held{w.Worker, w.Rank, t, s})
				return true
			})
		}
	}
	return all, nil
}

func (f *dropinFleet) worker(w indextest.WorkerRank) *index.Worker {
	if f.workers[w] == nil {
		f.workers[w] = f.model.Index.AddWorker(w.Worker, w.Rank, nil)
	}
	return f.workers[w]
}

// store stores a prompt's blocks in device memory.
func (f *dropinFleet) store(t testing.TB, worker string, rank int32, locals ...index.LocalHash) {
	t.Helper()
	f.storeIn(t, index.Device, worker, rank, locals, 0, len(locals))
}

// storeIn stores the blocks [from, to) of a prompt in a tier.
func (f *dropinFleet) storeIn(t testing.TB, tier index.Tier, worker string, rank int32, locals []index.LocalHash, from, to int) {
	t.Helper()
	w := indextest.WorkerRank{Worker: worker, Rank: rank}
	s := index.Stored{Position: int32(from), Locals: locals[from:to]}
	if from > 0 {
		s.HasParent, s.Parent = true, index.Chain(nil, locals)[from-1]
	}
	if _, err := f.worker(w).Store(tier, s); err != nil {
		t.Fatal(err)
	}
	if _, err := f.oracle.Store(w, tier, s); err != nil {
		t.Fatal(err)
	}
}

func (f *dropinFleet) remove(tier index.Tier, worker string, rank int32, seqs ...index.SeqHash) {
	w := indextest.WorkerRank{Worker: worker, Rank: rank}
	f.worker(w).Remove(tier, seqs)
	f.oracle.Remove(w, tier, seqs)
}

func (f *dropinFleet) locals(tokens []uint32, x index.Extra) []index.LocalHash {
	return f.model.hasher().Append(nil, tokens, x)
}

// truth is the oracle's answer for a prompt, in tokens, by worker and rank.
func (f *dropinFleet) truth(locals []index.LocalHash) map[string]map[string]index.Depths {
	out := map[string]map[string]index.Depths{}
	for w, depths := range f.oracle.Find(locals) {
		if out[w.Worker] == nil {
			out[w.Worker] = map[string]index.Depths{}
		}
		for t := range depths {
			depths[t] *= f.model.BlockSize
		}
		out[w.Worker][strconv.Itoa(int(w.Rank))] = depths
	}
	return out
}

// instances writes it as both APIs do, under their names for the fields.
func (f *dropinFleet) instances(locals []index.LocalHash, gpu, dp, cpu, disk string) map[string]any {
	out := map[string]any{}
	for name, ranks := range f.truth(locals) {
		device := map[string]int{}
		var best index.Depths
		for rank, depths := range ranks {
			device[rank] = depths[index.Device]
			for t := range best {
				best[t] = max(best[t], depths[t])
			}
		}
		out[name] = map[string]any{"longest_matched": best[index.External],
			gpu: best[index.Device], dp: device, cpu: best[index.Host], disk: best[index.External]}
	}
	return out
}

// mooncakeTruth is Mooncake's whole answer.
func (f *dropinFleet) mooncakeTruth(tenant string, locals []index.LocalHash) string {
	return compact(map[string]any{tenant: f.instances(locals, "GPU", "DP", "CPU", "DISK")})
}

// dynamoTruth is Dynamo's.
func (f *dropinFleet) dynamoTruth(locals []index.LocalHash) string {
	scores := map[string]map[string]int{}
	for name, ranks := range f.truth(locals) {
		for rank, depths := range ranks {
			if depths[index.Device] > 0 {
				if scores[name] == nil {
					scores[name] = map[string]int{}
				}
				scores[name][rank] = depths[index.Device]
			}
		}
	}
	return compact(map[string]any{"scores": scores, "frequencies": []int{}, "instances": f.instances(locals, "gpu", "dp", "cpu", "disk")})
}

// compact writes a value as JSON with sorted keys.
func compact(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// postTo posts a body and returns the answer with sorted keys.
func postTo(t testing.TB, s *Server, path, body string) (int, string) {
	t.Helper()
	code, answer := do(t, s, http.MethodPost, path, "application/json", strings.NewReader(body))
	var v any
	if err := json.Unmarshal([]byte(answer), &v); err != nil {
		t.Fatalf("%s answers what is no JSON: %v: %s", path, err, answer)
	}
	return code, compact(v)
}

func wantAnswer(t *testing.T, s *Server, path, body, want string) {
	t.Helper()
	if code, answer := postTo(t, s, path, body); code != http.StatusOK || answer != want {
		t.Errorf("%s %s\n  %d %s\nwant %s", path, body, code, answer, want)
	}
}

// flatErrorOf reads {"error": text, "code": name}.
func flatErrorOf(t testing.TB, body string) (code, message string) {
	t.Helper()
	var e struct{ Error, Code string }
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil || e.Error == "" || e.Code == "" {
		t.Fatalf("not an error: %v: %s", err, body)
	}
	return e.Code, e.Error
}

// The requests of Mooncake's documentation, as they are there: "Mooncake Conductor
// Indexer API" (docs/source/design/conductor/indexer-api-design.md of
// kvcache-ai/Mooncake at 02785988328c), and, with the block size of its example,
// the one of its first version (at 384393e699ec).
func TestMooncakeRecordedRequests(t *testing.T) {
	const (
		query = `{
  "model": "deepseek",
  "lora_name": "sql-adapter",
  "token_ids": [101, 15, 100, 55, 89],
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 64,
  "cache_salt": "w8a8"
}`
		byHash = `{
  "model": "deepseek",
  "lora_name": "sql-adapter",
  "seq_hashes": [1234567890, 9876543210],
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 64,
  "cache_salt": "w8a8"
}`
		first = `{
            "model": "deepseek-v3",
            "lora_name": "sql_adapter",
            "token_ids": [101, 15, 100, 55, 89, 63]
        }`
	)
	t.Run("64 tokens a block", func(t *testing.T) {
		f := newDropinFleet("deepseek", 64, index.Flash)
		f.store(t, "vllm-prefill-node1", 0, 1234567890, 7)
		f.store(t, "vllm-prefill-node1", 1, 1234567890)
		f.store(t, "vllm-prefill-node2", 0, 1234567890)
		s := serve(t, f, Config{})
		// Its prompt is shorter than a block.
		wantAnswer(t, s, "/mooncake/query", query, `{"default":{"vllm-prefill-node1":{"CPU":0,"DISK":0,"DP":{},"GPU":0,"longest_matched":0}}}`)
		wantAnswer(t, s, "/mooncake/query_by_hash", byHash,
			`{"default":{"vllm-prefill-node1":{"CPU":64,"DISK":64,"DP":{"0":64,"1":64},"GPU":64,"longest_matched":64}}}`)
		// All instances, of another tenant, under the list's earlier name.
		all := strings.NewReplacer(`"instance_id": "vllm-prefill-node1",`, "", `"default"`, `"acme"`, "seq_hashes", "block_hash").Replace(byHash)
		wantAnswer(t, s, "/mooncake/query_by_hash", all, f.mooncakeTruth("acme", []index.LocalHash{1234567890, 1}))
	})
	t.Run("2 tokens a block", func(t *testing.T) {
		f := newDropinFleet("deepseek-v3", 2, index.Flash)
		blocks := f.locals([]uint32{101, 15, 100, 55, 89, 63}, index.Extra{LoRA: "sql_adapter"})
		f.store(t, "vllm-1", 0, blocks[:2]...)
		f.store(t, "vllm-1", 1, blocks[:1]...)
		f.store(t, "vllm-2", 0, f.locals([]uint32{101, 15}, index.Extra{})...)
		s := serve(t, f, Config{})
		wantAnswer(t, s, "/mooncake/query", first,
			`{"default":{"vllm-1":{"CPU":4,"DISK":4,"DP":{"0":4,"1":2},"GPU":4,"longest_matched":4}}}`)
		wantAnswer(t, s, "/mooncake/query", first, f.mooncakeTruth("default", blocks))
	})
}

// The requests of Dynamo's documentation, as they are there: "Standalone KV Indexer"
// (docs/components/router/standalone-indexer.md of ai-dynamo/dynamo, version 1.3 and
// later).
func TestDynamoRecordedRequests(t *testing.T) {
	const (
		query  = `{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], "model_name": "llama-3-8b"}`
		byHash = `{"block_hashes": [123456, 789012], "model_name": "llama-3-8b"}`
	)
	for _, blockSize := range []int{16, 4} {
		t.Run(fmt.Sprint(blockSize), func(t *testing.T) {
			f := newDropinFleet("llama-3-8b", blockSize, index.Dynamo)
			tokens := make([]uint32, 16)
			for i := range tokens {
				tokens[i] = uint32(i + 1)
			}
			blocks := f.locals(tokens, index.Extra{})
			f.store(t, "1", 0, blocks...)
			f.store(t, "2", 1, blocks[:(len(blocks)+1)/2]...)
			f.store(t, "1", 0, 123456, 789012)
			f.store(t, "2", 0, 123456)
			s := serve(t, f, Config{})
			wantAnswer(t, s, "/dynamo/query", query, f.dynamoTruth(blocks))
			wantAnswer(t, s, "/dynamo/query_by_hash", byHash, f.dynamoTruth([]index.LocalHash{123456, 789012}))
		})
	}
	// Its vectors, which are the design's.
	f := newDropinFleet("m", 4, index.Dynamo)
	f.store(t, "9007199254740993", 0, locals...)
	s := serve(t, f, Config{})
	wantAnswer(t, s, "/dynamo/query", `{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13],"model_name":"m"}`,
		`{"frequencies":[],"instances":{"9007199254740993":{"cpu":12,"disk":12,"dp":{"0":12},"gpu":12,"longest_matched":12}},"scores":{"9007199254740993":{"0":12}}}`)
	wantAnswer(t, s, "/dynamo/query_by_hash", `{"block_hashes":[-3803038269031200164,-1669731304162740404,483935686894639516],"model_name":"m"}`,
		f.dynamoTruth(locals))
}

// Random prompts, stored, cut and evicted at random, have in both APIs, by tokens and
// by hashes, the depths that the oracle has.
func TestDropinAnswersAreTheOracles(t *testing.T) {
	for _, hasher := range []index.Hasher{index.Flash, index.Dynamo} {
		t.Run(hasher.String(), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(6, uint64(hasher)))
			f := newDropinFleet("m", 3, hasher)
			s := serve(t, f, Config{})
			prompt := func() (tokens []uint32, x index.Extra) {
				for range 3 * (1 + rng.IntN(40)) {
					tokens = append(tokens, uint32(rng.IntN(2))<<30)
				}
				if rng.IntN(4) == 0 {
					x.LoRA = "adapter"
				}
				if rng.IntN(4) == 0 {
					x.Salt = "acme"
				}
				return tokens, x
			}
			base, baseExtra := prompt()
			for i := range 300 {
				tokens, x := prompt()
				if rng.IntN(2) == 0 { // goes on from a common start
					x, tokens = baseExtra, append(slices.Clone(base[:rng.IntN(len(base))/3*3]), tokens...)
				}
				blocks := f.locals(tokens, x)
				seqs := index.Chain(nil, blocks)
				name, rank := strconv.Itoa(rng.IntN(4)), int32(rng.IntN(2))
				from := 0
				tier := index.Tier(max(0, rng.IntN(2*index.Tiers)-index.Tiers))
				if rng.IntN(3) == 0 {
					from = rng.IntN(len(blocks))
				}
				f.storeIn(t, tier, name, rank, blocks, from, from+1+rng.IntN(len(blocks)-from))
				if at := rng.IntN(len(seqs)); rng.IntN(2) == 0 {
					f.remove(tier, name, rank, seqs[at])
				}

				mooncake := f.mooncakeTruth("default", blocks)
				wantAnswer(t, s, "/mooncake/query", compact(map[string]any{
					"model": "m", "token_ids": tokens, "lora_name": x.LoRA, "cache_salt": x.Salt, "block_size": 3}), mooncake)
				wantAnswer(t, s, "/mooncake/query_by_hash", compact(map[string]any{"model": "m", "seq_hashes": seqs}), mooncake)
				f.listed = nil
				for w := range f.workers {
					f.listed = append(f.listed, WorkerStatus{Worker: w.Worker, Rank: w.Rank, Model: "m", BlockSize: 3})
				}
				wantPacked(t, s, "/mooncake/query", packedQuery("m", 3, tokens, x, i%2 == 0), f.conductorTruth(blocks, ""))
				dynamo := f.dynamoTruth(blocks)
				wantAnswer(t, s, "/dynamo/query", compact(map[string]any{
					"model_name": "m", "token_ids": tokens, "lora_name": x.LoRA, "cache_salt": x.Salt}), dynamo)
				signed := make([]int64, len(blocks))
				for i, h := range blocks {
					signed[i] = int64(h)
				}
				wantAnswer(t, s, "/dynamo/query_by_hash", compact(map[string]any{"model_name": "m", "block_hashes": signed}), dynamo)
			}
		})
	}
}

// Tiers add up: of Dynamo's own test of this answer, two blocks in device memory, one
// more in host memory, two more on disk or outside, of 16 tokens each.
func TestDropinTiers(t *testing.T) {
	f := newDropinFleet("m", 16, index.Dynamo)
	blocks := []index.LocalHash{11, 12, 13, 14, 15}
	f.store(t, "7", 0, blocks[:2]...)
	f.storeIn(t, index.Host, "7", 0, blocks, 2, 3)
	f.storeIn(t, index.Disk, "7", 0, blocks, 3, 4)
	f.storeIn(t, index.External, "7", 0, blocks, 4, 5)
	f.store(t, "7", 1, blocks[:1]...)
	f.storeIn(t, index.Host, "9", 0, blocks, 0, 4)
	s := serve(t, f, Config{})
	wantAnswer(t, s, "/dynamo/query_by_hash", `{"block_hashes":[11,12,13,14,15,16],"model_name":"m"}`,
		`{"frequencies":[],"instances":{"7":{"cpu":48,"disk":80,"dp":{"0":32,"1":16},"gpu":32,"longest_matched":80},`+
			`"9":{"cpu":64,"disk":64,"dp":{"0":0},"gpu":0,"longest_matched":64}},"scores":{"7":{"0":32,"1":16}}}`)
	wantAnswer(t, s, "/mooncake/query_by_hash", compact(map[string]any{"model": "m", "seq_hashes": index.Chain(nil, blocks)}),
		`{"default":{"7":{"CPU":48,"DISK":80,"DP":{"0":32,"1":16},"GPU":32,"longest_matched":80},`+
			`"9":{"CPU":64,"DISK":64,"DP":{"0":0},"GPU":0,"longest_matched":64}}}`)
}

// Every spelling of 64 bits is exact, in both APIs.
func TestDropinNumbers(t *testing.T) {
	f := newDropinFleet("m", 1, index.Flash)
	blocks := []index.LocalHash{1<<64 - 1, 1<<53 + 1, 1 << 63}
	f.store(t, "w", 0, blocks...)
	s := serve(t, f, Config{})
	top := f.locals([]uint32{1<<32 - 1, 1 << 31}, index.Extra{})
	f.store(t, "w", 1, top...)
	for _, tokens := range []string{`4294967295,2147483648`, `"4294967295","2147483648"`} {
		wantAnswer(t, s, "/mooncake/query", `{"model":"m","token_ids":[`+tokens+`]}`, f.mooncakeTruth("default", top))
	}
	seqs := index.Chain(nil, blocks)
	spellings := map[string]func(uint64) string{
		"numbers":        func(h uint64) string { return strconv.FormatUint(h, 10) },
		"strings":        func(h uint64) string { return strconv.Quote(strconv.FormatUint(h, 10)) },
		"signed":         func(h uint64) string { return strconv.FormatInt(int64(h), 10) },
		"signed strings": func(h uint64) string { return strconv.Quote(strconv.FormatInt(int64(h), 10)) },
	}
	for name, spell := range spellings {
		t.Run(name, func(t *testing.T) {
			var local, seq []string
			for i := range blocks {
				local, seq = append(local, spell(uint64(blocks[i]))), append(seq, spell(uint64(seqs[i])))
			}
			wantAnswer(t, s, "/dynamo/query_by_hash", `{"model_name":"m","block_hashes":[`+strings.Join(local, " , ")+`]}`, f.dynamoTruth(blocks))
			wantAnswer(t, s, "/mooncake/query_by_hash", `{"model":"m","seq_hashes":[`+strings.Join(seq, ",")+`]}`, f.mooncakeTruth("default", blocks))
			// A neighbour is another hash, as a float64 would not tell.
			other := strings.Replace(strings.Join(local, ","), "9007199254740993", "9007199254740992", 1)
			wantAnswer(t, s, "/dynamo/query_by_hash", `{"model_name":"m","block_hashes":[`+other+`]}`, f.dynamoTruth([]index.LocalHash{1<<64 - 1, 1 << 53}))
		})
	}
}

func TestDropinRefusals(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	f.addModel("twice", 4, index.Flash)
	f.addModel("twice", 8, index.Flash)
	f.addModel("scattered", 4, index.Flash) // over a PositionalIndex
	f.addModel("opaque", 4, index.Opaque)
	s := serve(t, f, Config{Limits: Limits{MaxRequestBytes: 2000, MaxBlocks: 3, MaxTokens: 20}})
	const (
		mq, mh = "/mooncake/query", "/mooncake/query_by_hash"
		dq, dh = "/dynamo/query", "/dynamo/query_by_hash"
	)
	many := strings.Repeat("1,", 20) + "1"
	for _, c := range []struct {
		path, body string
		status     int
		want       string // within the text
	}{
		{mq, ``, 400, "ends before"},
		{dq, ` `, 400, "ends before"},
		{dq, `{`, 400, "ends before"},
		{dq, `{}`, 400, "token_ids is empty"},
		{dh, `{}`, 400, "block_hashes is empty"},
		{mh, `{}`, 400, "seq_hashes is empty"},
		{mq, `[]`, 400, "not a JSON object"},
		{mq, `model=m`, 400, "not a JSON object"},
		{mq, `{"model":"m"`, 400, "ends before"},
		{mq, `{"model":"m",}`, 400, "no field's name"},
		{mq, `{,}`, 400, "no field's name"},
		{mq, `{"model" "m"}`, 400, "no colon"},
		{mq, `{"model":}`, 400, "is no value"},
		{mq, `{"model":"m" "token_ids":[1]}`, 400, "is no value"},
		{mq, `{"token_ids":[1] "model":"m"}`, 400, "follows the value"},
		{mq, `{"model":"m","token_ids":[1]}{}`, 400, "goes on after"},
		{mq, `{"model":"m","token_ids":[1],"new":{"a":[1,2}}`, 400, "is no value"},
		{mq, `{"model":"m","token_ids":[1],"new":` + strings.Repeat("[", 200), 400, "is no value"},
		{mq, `{"a":1` + strings.Repeat(`,"b":1`, 64) + `}`, 400, "more than 64 unknown fields"},
		{mq, "{\"model\":\"m\xff\",\"token_ids\":[1]}", 400, "not UTF-8"},
		{mq, `{"model":7,"token_ids":[1]}`, 400, "model: 7 is not a string"},
		{mq, `{"token_ids":[1]}`, 400, "model is empty"},
		{mh, `{"seq_hashes":[1]}`, 400, "model is empty"},
		{mq, `{"model":"m","token_ids":"1,2"}`, 400, "token_ids: \"1 is not an array"},
		{mq, `{"model":"m","token_ids":[1,2.5]}`, 400, "token_ids[1]: 2.5 is not a whole number from 0 to 4294967295"},
		{mq, `{"model":"m","token_ids":[1.0]}`, 400, "token_ids[0]"},
		{mq, `{"model":"m","token_ids":[-1]}`, 400, "token_ids[0]: -1 is not"},
		{mq, `{"model":"m","token_ids":[4294967296]}`, 400, "token_ids[0]"},
		{mq, `{"model":"m","token_ids":[null]}`, 400, "token_ids[0]"},
		{mq, `{"model":"m","token_ids":[1],"token_ids":[2]}`, 400, "token_ids is there twice"},
		{mq, `{"model":"m","model":"m","token_ids":[1]}`, 400, "model is there twice"},
		{mq, `{"model":"m","token_ids":[1],"block_size":4.0}`, 400, "block_size: 4.0 is not a whole number"},
		{mq, `{"model":"m","token_ids":[1],"block_size":-4}`, 400, "block_size: -4 is not a whole number"},
		{mq, `{"model":"m","token_ids":[1],"block_size":2147483648}`, 400, "block_size"},
		{mq, `{"model":"m","token_ids":[1],"instance_id":1.5}`, 400, "instance_id: 1.5 is neither"},
		{mq, `{"model":"m","token_ids":[1],"lora_id":3}`, 400, "lora_id: adapters are known by lora_name"},
		{mq, `{"model":"m","token_ids":[1],"cacheSalt":"x"}`, 400, `"cache_salt" is meant`},
		{mq, `{"model":"m","token_ids":[1],"additional_salt":"x"}`, 400, "additional_salt: unknown, and it may change"},
		{dq, `{"model_name":"m","token_ids":[1],"block_mm_infos":[{}]}`, 400, "block_mm_infos: unknown"},
		{mh, `{"model":"m","seq_hashes":[1e3]}`, 400, "seq_hashes[0]: 1e3 is not a whole number from -9223372036854775808 to 18446744073709551615"},
		{mh, `{"model":"m","seq_hashes":[18446744073709551616]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":[-9223372036854775809]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":["0xff"]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":["-"]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":["-1]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":[--1]}`, 400, "seq_hashes[0]"},
		{mh, `{"model":"m","seq_hashes":[1],"block_hash":[1]}`, 400, "block_hash is there twice"},
		{dh, `{"model_name":"m","block_hashes":[1],"cache_salt":""}`, 400, "cache_salt: it must be in the block_hashes already"},
		{dh, `{"model_name":"m","block_hashes":[1],"lora_name":"a"}`, 400, "lora_name: it must be in"},
		{mq, `{"model":"m","token_ids":[` + many + `]}`, 400, "above the limit of 20"},
		{dh, `{"model_name":"m","block_hashes":[` + many + `]}`, 400, "above the limit of 3"},
		{mh, `{"model":"m","seq_hashes":[` + many + `]}`, 400, "above the limit of 3"},
		{mq, strings.Repeat(" ", 2001), 413, "limit of 2000 bytes"},
		{mq, `{"model":"none","token_ids":[1]}`, 404, "unknown model"},
		{mh, `{"model":"none","seq_hashes":[1]}`, 404, "unknown model"},
		{mq, `{"model":"m","token_ids":[1],"block_size":8}`, 404, "unknown model"},
		{dq, `{"model_name":"m","token_ids":[1],"routing_group":"gold"}`, 404, "no indexer for model=m routing_group=gold"},
		{dq, `{"model_name":"twice","token_ids":[1]}`, 409, "give block_size"},
		{mh, `{"model":"twice","seq_hashes":[1]}`, 409, "give block_size"},
		{mh, `{"model":"scattered","seq_hashes":[1]}`, 501, "ask with token_ids"},
		{mh, `{"model":"opaque","seq_hashes":[1]}`, 501, "ask with token_ids"},
	} {
		t.Run(c.path+" "+c.want, func(t *testing.T) {
			code, answer := do(t, s, "POST", c.path, "application/json", strings.NewReader(c.body))
			if _, text := flatErrorOf(t, answer); code != c.status || !strings.Contains(text, c.want) {
				t.Errorf("%.200s\n  %d %s\nwant %d %q", c.body, code, answer, c.status, c.want)
			}
		})
	}
	for _, c := range []struct {
		method, path string
		status       int
		code         string
	}{
		{"GET", "/mooncake/query", 405, "METHOD_NOT_ALLOWED"},
		{"POST", "/dynamo/workers", 405, "METHOD_NOT_ALLOWED"},
		{"GET", "/dynamo/nothing", 404, "NOT_FOUND"},
		{"GET", "/mooncake/", 404, "NOT_FOUND"},
		{"POST", "/dynamo/dump", 405, "METHOD_NOT_ALLOWED"},
		{"GET", "/dynamo/dump?worker=x", 400, "INVALID_ARGUMENT"},
		{"GET", "/dynamo/dump?block_size=4.0", 400, "INVALID_ARGUMENT"},
		{"POST", "/dynamo/register_peer", 501, "UNIMPLEMENTED"},
		{"GET", "/dynamo/workers?name=x", 400, "INVALID_ARGUMENT"},
	} {
		code, answer := do(t, s, c.method, c.path, "", nil)
		if name, _ := flatErrorOf(t, answer); code != c.status || name != c.code {
			t.Errorf("%s %s: %d %s, want %d %s", c.method, c.path, code, answer, c.status, c.code)
		}
	}
	if code, answer := do(t, s, "POST", dq, "text/plain", strings.NewReader("{}")); code != 415 {
		t.Errorf("text: %d %s", code, answer)
	}
}

// Not ready, both refuse as Match does: there is no place for "partial" in answers.
func TestDropinNotReady(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	f.setReady(Readiness{Missing: []string{"kv-events/3: restoring"}})
	s := serve(t, f, Config{})
	for path, body := range map[string]string{
		"/mooncake/query":         `{"model":"m","token_ids":[1]}`,
		"/mooncake/query_by_hash": `{"model":"m","seq_hashes":[1]}`,
		"/dynamo/query":           `{"model_name":"m","token_ids":[1]}`,
		"/dynamo/query_by_hash":   `{"model_name":"m","block_hashes":[1]}`,
	} {
		code, answer := do(t, s, "POST", path, "application/json", strings.NewReader(body))
		if name, text := flatErrorOf(t, answer); code != 503 || name != "UNAVAILABLE" || !strings.Contains(text, "kv-events/3: restoring") {
			t.Errorf("%s: %d %s", path, code, answer)
		}
	}
}

// Queries pass the same gate and the same limits as Match; the rest does not wait.
func TestDropinOverload(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	goOn := make(chan struct{})
	f.onModel = func() { <-goOn }
	cfg := measured(t)
	cfg.Limits = Limits{MaxConcurrent: 1, MaxQueue: 1, QueueTimeout: time.Minute, Deadline: time.Minute}
	s := serve(t, f, cfg)
	bodies := map[string]string{
		"/mooncake/query":         `{"model":"m","token_ids":[1]}`,
		"/mooncake/query_by_hash": `{"model":"m","seq_hashes":[1]}`,
		"/dynamo/query":           `{"model_name":"m","token_ids":[1]}`,
		"/dynamo/query_by_hash":   `{"model_name":"m","block_hashes":[1]}`,
	}
	answers := make(chan int, 2)
	for _, path := range []string{"/mooncake/query_by_hash", "/dynamo/query"} {
		go func() {
			code, _ := do(t, s, "POST", path, "", strings.NewReader(bodies[path]))
			answers <- code
		}()
	}
	eventually(t, "one works and one waits", func() bool {
		return metricOf(t, s, "kvindex_query_working") == "1" && metricOf(t, s, "kvindex_query_queued") == "1"
	})
	for path, body := range bodies {
		code, answer := do(t, s, "POST", path, "", strings.NewReader(body))
		if name, text := flatErrorOf(t, answer); code != http.StatusTooManyRequests || name != "RESOURCE_EXHAUSTED" || !strings.Contains(text, "busy: all places for 1 queries") {
			t.Errorf("%s: %d %s", path, code, answer)
		}
	}
	if n := metricOf(t, s, refusedMetric("http", "queue_full")); n != "4" {
		t.Errorf("%s refusals", n)
	}
	for _, path := range []string{"/dynamo/workers", "/dynamo/health", "/mooncake/health"} {
		if code, answer := get(t, s, path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, answer)
		}
	}
	close(goOn)
	for range 2 {
		if code := <-answers; code != http.StatusOK {
			t.Errorf("one that waited: %d", code)
		}
	}
}

// What is too large costs no memory beyond the limit of bytes, and without a token
// nothing is read.
func TestDropinAbuse(t *testing.T) {
	s := serve(t, newDropinFleet("m", 4, index.Flash), Config{TokenFile: tokenFile(t)})
	const tenMillion = 10_000_000
	for _, c := range []struct {
		path, head, token string
		status            int
		want              string
	}{
		{"/mooncake/query_by_hash", `{"model":"m","seq_hashes":[1`, goodToken, 413, "above the limit of 4194304 bytes"},
		{"/dynamo/query_by_hash", `{"model_name":"m","block_hashes":[1`, goodToken, 413, "above the limit of 4194304 bytes"},
		{"/dynamo/query_by_hash", `{"model_name":"m","block_hashes":[1`, oldToken, 401, "expired"},
		{"/dynamo/dump", ``, oldToken, 401, "expired"},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		body := &endless{head: []byte(c.head), piece: []byte(`,18446744073709551615`), left: 21 * tenMillion}
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+s.HTTPAddr().String()+c.path, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+c.token)
		resp, err := (&http.Client{Transport: &http.Transport{}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		runtime.ReadMemStats(&after)
		if err != nil || resp.StatusCode != c.status || !strings.Contains(string(answer), c.want) {
			t.Errorf("%s: %d %s, %v, want %d %s", c.path, resp.StatusCode, answer, err, c.status, c.want)
		}
		if used, taken := after.TotalAlloc-before.TotalAlloc, body.taken.Load(); used > 64<<20 || taken > 32<<20 {
			t.Errorf("%s: %d MiB were allocated, %d bytes taken", c.path, used>>20, taken)
		}
	}
}

// Fields of newer clients are passed over, and counted; null is absent.
func TestDropinUnknownFields(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	f.store(t, "w", 0, locals...)
	reader := metric.NewManualReader()
	s := serve(t, f, Config{Meters: metric.NewMeterProvider(metric.WithReader(reader))})
	want := f.mooncakeTruth("default", locals[:1])
	for _, body := range []string{
		`{"priority":{"a":[1,"]}"],"token_ids":[9]},"model":"m","to\u006ben_ids":["1",2, 3,4],"trace":null}`,
		`{"token_ids":[1,2,3,4],"model":"m","lora_name":null,"lora_id":-1,"cache_salt":null,"block_size":null,"instance_id":null,"medium":["L1"],"new_salt":null}`,
		` { "token_ids" : [ 1 , 2 , 3 , 4 ] , "model" : "m" , "tenant_id" : "default" } `,
	} {
		wantAnswer(t, s, "/mooncake/query", body, want)
	}
	var got metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &got); err != nil {
		t.Fatal(err)
	}
	counts := map[string]int64{}
	for _, scope := range got.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name == "kvindex_query_ignored_fields" {
				for _, p := range m.Data.(metricdata.Sum[int64]).DataPoints {
					api, _ := p.Attributes.Value("api")
					counts[api.AsString()] = p.Value
				}
			}
		}
	}
	if fmt.Sprint(counts) != "map[dynamo:0 mooncake:2]" {
		t.Errorf("counted %v", counts)
	}
}

// Registering says whether the worker is known, since nothing else makes it so.
func TestDropinRegistration(t *testing.T) {
	f := newDropinFleet("m", 4, index.Flash)
	f.listed = []WorkerStatus{
		{Worker: "42", Rank: 1, Model: "m", BlockSize: 4, Partition: 3},
		{Worker: "42", Rank: 0, Model: "m", BlockSize: 4, Partition: 3, Silent: true, Incomplete: true},
		{Worker: "gone", Model: "m", BlockSize: 4, Retired: true},
		{Worker: "gpu-1", Model: "m", BlockSize: 4, Silent: true},
		{Worker: "007", Model: "other", BlockSize: 8},
	}
	s := serve(t, f, Config{})
	for _, c := range []struct {
		path, body string
		status     int
		want       string
	}{
		// From the documents that the recorded requests are from.
		{"/mooncake/register", `{"endpoint":"tcp://1.1.1.1:5557","replay_endpoint":"tcp://1.1.1.1:5558","type":"vLLM","modelname":"m","lora_name":"sql-adapter",
			"tenant_id":"default","instance_id":"gpu-1","block_size":128,"dp_rank":0,"additionalsalt":"w8a8"}`, 200,
			`{"instance_id":"gpu-1","status":"registered successfully"}`},
		{"/mooncake/register", `{"modelname":"m","instance_id":"gpu-2"}`, 409, "no events of \"gpu-2\" have come"},
		{"/mooncake/register", `{"modelname":"m","instance_id":"gone"}`, 409, "no events of"},
		{"/mooncake/register", `{"modelname":"m"}`, 400, "instance_id is empty"},
		{"/mooncake/unregister", `{"instance_id":"gpu-1","tenant_id":"default","dp_rank":0}`, 501, "stays known until"},
		{"/mooncake/unregister", `{"instance_id":"gpu-2","tenant_id":"default","dp_rank":0}`, 200, `{"removed_instances":[],"status":"unregistered successfully"}`},
		{"/dynamo/register", `{"instance_id":42,"endpoint":"tcp://127.0.0.1:5557","model_name":"m","block_size":16}`, 201, `{"status":"ok"}`},
		{"/dynamo/register", `{"instance_id":43,"endpoint":"tcp://127.0.0.1:5557","model_name":"m","block_size":16}`, 409, "no events of"},
		{"/dynamo/unregister", `{"instance_id":42,"model_name":"m"}`, 501, "stays known until"},
		{"/dynamo/unregister", `{"instance_id":43,"model_name":"m"}`, 404, "instance 43 not found"},
		{"/dynamo/reopen_logs", ``, 200, `{"status":"ok"}`},
	} {
		code, answer := do(t, s, "POST", c.path, "application/json", strings.NewReader(c.body))
		if code >= 300 {
			_, answer = flatErrorOf(t, answer)
		} else {
			var v any
			if err := json.Unmarshal([]byte(answer), &v); err != nil {
				t.Fatal(err)
			}
			answer = compact(v)
		}
		if code != c.status || !strings.Contains(answer, c.want) {
			t.Errorf("%s %s: %d %s, want %d %s", c.path, c.body, code, answer, c.status, c.want)
		}
	}

	const row42 = `{"block_size":4,"endpoints":{"0":"kafka:kv-events/3","1":"kafka:kv-events/3"},"instance_id":42,"listeners":{` +
		`"0":{"endpoint":"kafka:kv-events/3","last_error":"events were lost: it may hold more or less","status":"paused"},` +
		`"1":{"endpoint":"kafka:kv-events/3","status":"active"}},"model_name":"m","routing_group":"default","source":"kafka","status":"active"}`
	const row007 = `{"block_size":8,"endpoints":{"0":"kafka:kv-events/0"},"instance_id":"007","listeners":{"0":{"endpoint":"kafka:kv-events/0","status":"active"}},` +
		`"model_name":"other","routing_group":"default","source":"kafka","status":"active"}`
	const rowGPU = `{"block_size":4,"endpoints":{"0":"kafka:kv-events/0"},"instance_id":"gpu-1","listeners":{"0":{"endpoint":"kafka:kv-events/0","status":"paused"}},` +
		`"model_name":"m","routing_group":"default","source":"kafka","status":"paused"}`
	for path, want := range map[string]string{
		"/dynamo/workers": "[" + row007 + "," + row42 + "," + rowGPU + "]",
		"/dynamo/workers?model_name=m&tenant_id=acme&routing_group=default": "[" + row42 + "," + rowGPU + "]",
		"/dynamo/workers?routing_group=acme":                                "[]",
		"/dynamo/peers":                                                     "[]",
		"/dynamo/health":                                                    `{"alive":true}`,
		"/mooncake/health":                                                  `{"alive":true}`,
	} {
		code, answer := get(t, s, path)
		var v any
		if err := json.Unmarshal([]byte(answer), &v); err != nil {
			t.Fatalf("%s: %v: %s", path, err, answer)
		}
		if got := compact(v); code != http.StatusOK || got != want {
			t.Errorf("%s: %d %s\nwant %s", path, code, got, want)
		}
	}
}

// A dump is of events as Dynamo writes them, numbers of 64 bits as they are.
func TestDynamoDump(t *testing.T) {
	f := newDropinFleet("m", 4, index.Dynamo)
	f.storeIn(t, index.Host, "9007199254740993", 2, locals, 0, 3)
	f.addModel("other", 8, index.Flash)
	s := serve(t, f, Config{})
	want := `{"m:default":{"block_size":4,"events":[{"worker_id":9007199254740993,"storage_tier":"host_pinned","event":{"event_id":0,"data":{"stored":{` +
		`"parent_hash":null,"start_position":0,"blocks":[{"block_hash":14643705804678351452,"tokens_hash":14643705804678351452},` +
		`{"block_hash":4945711292740353085,"tokens_hash":16777012769546811212},{"block_hash":12583592247330656132,"tokens_hash":483935686894639516}]}},"dp_rank":2}}]}`
	for path, want := range map[string]string{
		"/dynamo/dump":                            want + `,"other:default":{"block_size":8,"events":[]}}`,
		"/dynamo/dump?model_name=m":               want + "}",
		"/dynamo/dump?block_size=8":               `{"other:default":{"block_size":8,"events":[]}}`,
		"/dynamo/dump?model_name=none":            `{}`,
		"/dynamo/dump?model_name=m&instance_id=7": `{"m:default":{"block_size":4,"events":[]}}`,
	} {
		if code, answer := get(t, s, path); code != http.StatusOK || answer != want+"\n" {
			t.Errorf("%s: %d %s\nwant %s", path, code, answer, want)
		}
	}
	f.addModel("other", 4, index.Flash)
	if code, answer := get(t, s, "/dynamo/dump"); code != http.StatusConflict || !strings.Contains(answer, "give block_size") {
		t.Errorf("two models of a name: %d %s", code, answer)
	}
	f.dumpHas = maxDumpBlocks + 1
	if code, answer := get(t, s, "/dynamo/dump?model_name=m"); code != http.StatusConflict || !strings.Contains(answer, "262144 blocks at most") {
		t.Errorf("a large dump: %d %s", code, answer)
	}
	f.setReady(Readiness{Missing: []string{"kv-events/3: restoring"}})
	if code, answer := get(t, s, "/dynamo/dump"); code != http.StatusServiceUnavailable {
		t.Errorf("not ready: %d %s", code, answer)
	}
}

func FuzzDropinRead(f *testing.F) {
	for _, body := range []string{
		`{"model":"m","token_ids":[1,"2"],"block_size":4,"instance_id":7,"new":{"a":[1,2,"}"]},"lora_id":-1}`,
		`{"tok\u0065n_ids":[1],"medium":["a"]}`, `{"a":1,}`, `{"a":}`, `{}`, `{`, ``, `{"a":1}}`, `{"x":"\"","model":"\u00e9"}`, `{"token_ids":null}`, `{"token_ids":`,
		`{"a":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`, // as deep as encoding/json goes for a's value, and deeper than for all
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var in dropinRequest
		unknown, err := in.read(body, mooncakeQueryFields)
		if err != nil || bytes.Count(body, []byte("["))+bytes.Count(body, []byte("{")) >= 10_000 {
			return // encoding/json goes so deep for one field's value, and no deeper for all
		}
		// What was read, encoding/json reads too, and alike.
		var all map[string]json.RawMessage
		if err := json.Unmarshal(body, &all); err != nil {
			t.Fatalf("%q was read: %v", body, err)
		}
		for _, name := range unknown {
			if _, ok := all[name]; !ok {
				t.Fatalf("%q has no %q", body, name)
			}
		}
		var want struct {
			Model  string            `json:"model"`
			Tokens []json.RawMessage `json:"token_ids"`
		}
		for name := range all { // encoding/json ignores case
			if name != "model" && name != "token_ids" {
				delete(all, name)
			}
		}
		again, _ := json.Marshal(all)
		if err := json.Unmarshal(again, &want); err != nil {
			t.Fatal(err)
		}
		if in.model != want.Model || len(in.tokens) != len(want.Tokens) {
			t.Fatalf("%q: read %+v, want %+v", body, in, want)
		}
		for i, raw := range want.Tokens {
			if v, err := strconv.ParseUint(strings.Trim(string(raw), `"`), 10, 32); err != nil || uint32(v) != in.tokens[i] {
				t.Fatalf("%q: token %d is %d, want %s", body, i, in.tokens[i], raw)
			}
		}
	})
}
