package query

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

// errorOf reads {"error":{"code","message"}}.
func errorOf(t testing.TB, body string) (code, message string) {
	t.Helper()
	var e struct {
		Error struct{ Code, Message string }
	}
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil || e.Error.Code == "" {
		t.Fatalf("not an error: %v: %s", err, body)
	}
	return e.Error.Code, e.Error.Message
}

func TestJSONRequests(t *testing.T) {
	const big = "18446744073709551615" // 2^64-1, which a float64 would round
	f := newFake()
	f.holds(t, "w", 0, []index.LocalHash{1<<64 - 1, 1<<53 + 1}, WorkerState{})
	s := serve(t, f, Config{})
	cases := []struct {
		name string
		body string
		want string // within the answer
	}{
		{"numbers above 2^53 are exact", `{"model":"m","local_hashes":[` + big + `,9007199254740993]}`, `"depth_blocks":2`},
		{"and as strings", `{"model":"m","local_hashes":["` + big + `","9007199254740993"]}`, `"depth_blocks":2`},
		{"a neighbour is another hash", `{"model":"m","local_hashes":[` + big + `,9007199254740992]}`, `"depth_blocks":1`},
		{"white space", " {\n\"model\" : \"m\",\t\"local_hashes\" : [ " + big + " , \"9007199254740993\"\n] }\n", `"depth_blocks":2`},
		{"null is absent", `{"model":"m","local_hashes":[` + big + `],"tokens":null,"mm":null,"workers":null,"top_k":null}`, `"depth_blocks":1`},
		{"an answer has every field", `{"model":"m","local_hashes":[7]}`,
			`{"blocks":1,"block_size":4,"matches":[],"lower_bounds":false,"partial":false,"missing":[],"behind":[]}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			code, answer := post(t, s, c.body)
			if code != http.StatusOK || !strings.Contains(answer, c.want) {
				t.Errorf("%d %s, want %s", code, answer, c.want)
			}
		})
	}
}

func TestJSONRefusals(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxRequestBytes: 1000}})
	cases := []struct {
		name string
		body string
		want string // within the message
	}{
		{"empty body", ``, "ends before"},
		{"cut off", `{"model":"m"`, "ends before"},
		{"not JSON", `model=m`, "not JSON: "},
		{"an array", `[]`, "the body: array is not a struct"},
		{"two objects", `{"model":"m","tokens":[1]}{}`, "goes on after"},
		{"unknown field", `{"model":"m","tokens":[1],"topk":3}`, `unknown field "topk"`},
		{"camel case is unknown too", `{"model":"m","localHashes":[1]}`, `unknown field "localHashes"`},
		{"unknown field within mm", `{"model":"m","tokens":[1],"mm":[{"offset":3}]}`, `unknown field "offset"`},
		{"float token", `{"model":"m","tokens":[1,2.5]}`, "tokens[1]: 2.5 is not a whole number from 0 to 4294967295"},
		{"float that is whole", `{"model":"m","tokens":[1.0]}`, "tokens[0]: 1.0 is not"},
		{"exponent", `{"model":"m","local_hashes":[1e3]}`, "local_hashes[0]: 1e3 is not"},
		{"negative", `{"model":"m","local_hashes":[-1]}`, "local_hashes[0]: -1 is not"},
		{"token of 33 bits", `{"model":"m","tokens":[4294967296]}`, "tokens[0]: 4294967296 is not"},
		{"hash of 65 bits", `{"model":"m","local_hashes":[0,18446744073709551616]}`, "local_hashes[1]: 18446744073709551616 is not"},
		{"hexadecimal", `{"model":"m","local_hashes":["0xff"]}`, "local_hashes[0]"},
		{"empty string", `{"model":"m","local_hashes":[""]}`, "local_hashes[0]"},
		{"null element", `{"model":"m","tokens":[null]}`, "tokens[0]"},
		{"nested", `{"model":"m","tokens":[[1]]}`, "tokens[0]"},
		{"not a list", `{"model":"m","tokens":"1,2"}`, "tokens: \"1"},
		{"a list given twice", `{"model":"m","tokens":[1],"tokens":[2]}`, "tokens is there twice"},
		{"mm hash of 65 bits", `{"model":"m","tokens":[1],"mm":[{"hash":"18446744073709551616"}]}`, "mm: hash"},
		{"a number as name", `{"model":7,"tokens":[1]}`, "model: number is not a string"},
		{"top_k as string", `{"model":"m","tokens":[1],"top_k":"3"}`, "top_k: string is not a uint32"},
		{"not UTF-8", "{\"model\":\"m\xff\",\"tokens\":[1]}", "not UTF-8"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			code, answer := post(t, s, c.body)
			name, message := errorOf(t, answer)
			if code != http.StatusBadRequest || name != "INVALID_ARGUMENT" || !strings.Contains(message, c.want) {
				t.Errorf("%d %s, want 400 and %q", code, answer, c.want)
			}
		})
	}
}

func TestHTTPRefusals(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxRequestBytes: 1000}})
	cases := []struct {
		name, method, path, contentType, body string
		status                                int
		code                                  string
	}{
		{"wrong method", "GET", "/v1/match", "", "", 405, "METHOD_NOT_ALLOWED"},
		{"wrong method of a listing", "POST", "/v1/workers", "", "", 405, "METHOD_NOT_ALLOWED"},
		{"a form", "POST", "/v1/match", "application/x-www-form-urlencoded", "{}", 415, "UNSUPPORTED_MEDIA_TYPE"},
		{"no type", "POST", "/v1/match", "", `{"model":"x","tokens":[1]}`, 404, "NOT_FOUND"},
		{"type with parameter", "POST", "/v1/match", "application/json; charset=utf-8", `{"model":"x","tokens":[1]}`, 404, "NOT_FOUND"},
		{"huge body", "POST", "/v1/match", "application/json", strings.Repeat(" ", 1001), 413, "RESOURCE_EXHAUSTED"},
		{"unknown path", "GET", "/v1/nothing", "", "", 404, "NOT_FOUND"},
		{"unknown parameter", "GET", "/v1/workers?name=x", "", "", 400, "INVALID_ARGUMENT"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			code, answer := do(t, s, c.method, c.path, c.contentType, strings.NewReader(c.body))
			if name, _ := errorOf(t, answer); code != c.status || name != c.code {
				t.Errorf("%d %s, want %d %s", code, answer, c.status, c.code)
			}
		})
	}
	t.Run("a huge body without length", func(t *testing.T) {
		code, answer := do(t, s, "POST", "/v1/match", "application/json", io.MultiReader(strings.NewReader(strings.Repeat(" ", 1001))))
		if code != 413 || !strings.Contains(answer, "limit of 1000 bytes") {
			t.Errorf("%d %s", code, answer)
		}
	})
}

// 64-bit numbers that JavaScript would round are written as strings.
func TestJSONIntegersAreExact(t *testing.T) {
	f := newFake()
	f.workers = []WorkerStatus{{Worker: "w\"é", Epoch: 1<<53 - 1, Seq: 1 << 53}}
	s := serve(t, f, Config{})
	_, answer := get(t, s, "/v1/workers")
	for _, want := range []string{`"epoch":9007199254740991,`, `"seq":"9007199254740992",`, `"worker":"w\"é"`} {
		if !strings.Contains(answer, want) {
			t.Errorf("%s lacks %s", answer, want)
		}
	}
	if !json.Valid([]byte(answer)) {
		t.Errorf("not JSON: %s", answer)
	}
}

// The quick way of writing matches differs in nothing from the one that knows
// every message.
func TestMatchesAreWrittenAlike(t *testing.T) {
	for _, resp := range []*pb.MatchResponse{
		{},
		{Blocks: 1, BlockSize: 2, LowerBounds: true, Partial: true, Missing: []string{"a", `"b"`}, Behind: []*pb.Behind{{Partition: 3, Offsets: 1 << 60}, {}}, Matches: []*pb.WorkerMatch{
			{Worker: "w\n", DpRank: -1, DepthBlocks: 3, DepthTokens: 4, DepthHostBlocks: 5, DepthHostTokens: 6, DepthDiskBlocks: 7, DepthDiskTokens: 8, DepthExternalBlocks: 9, DepthExternalTokens: 10, AgeMs: 1 << 60, Incomplete: true, Partition: 5, Offset: -1 << 60},
			{Worker: "x"},
		}},
	} {
		if got, want := string(appendMatches(nil, resp)), string(appendJSON(nil, resp.ProtoReflect())); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// Lifting the lists out first changes nothing but the time it takes, and every
// number is exact.
func FuzzParseMatch(f *testing.F) {
	for _, body := range []string{
		`{"model":"m","tokens":[1, "2"],"local_hashes":["18446744073709551615"],"mm":[{"hash":1,"id":"","first_token":0,"tokens":1}]}`,
		`{"workers":["tokens\"",",\\"],"tokens" : [ 1 , 2 ] , "top_k":3}`,
		`{"mm":[{"tokens":1,"hash":"7"}],"local_hashes":[],"tokens":[3]}`,
		`{"tok\u0065ns":[1],"tokens":[2]}`,
		`{"min_offsets":{"3":"9223372036854775807", "0" : 5 , "2147483647":0},"hasher":"flash","min_depth_blocks":2,"fail_open":true,"timeout_ms":7}`,
		`{"min_offsets":{}}`, `{"min_offsets":{"1":1,"1":1}}`, `{"min_offsets":{"1":{}}}`, `{"min_offsets":{"a":1,"\u0031":2}}`,
		`{"x\":\"y,":1,"tokens":[5]}`,
		`{"tokens":[1],"tokens":[1]}`,
		`{"tokens":[1,]}`, `{"tokens":[01]}`, `{"tokens":[1] "model":"m"}`, `{"tokens":[`, `{"local_hashes":"`, `{"model"`, `{`, ``,
		`{"model":"\ud800"}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if !exactText(body) {
			return // refused, where encoding/json reads something else
		}
		got, err := parseMatch(body, Limits{}.withDefaults())
		want, wantErr := new(matchJSON).parse(body, Limits{}.withDefaults())
		if (err == nil) != (wantErr == nil) || !proto.Equal(got, want) {
			t.Fatalf("got %v, %v, want %v, %v", got, err, want, wantErr)
		}
		if err != nil {
			return
		}
		var raw struct {
			LocalHashes []json.RawMessage `json:"local_hashes"`
		}
		if err := json.Unmarshal(body, &raw); err != nil {
			t.Fatal(err)
		}
		for i, r := range raw.LocalHashes {
			if want, err := strconv.ParseUint(strings.Trim(string(r), `"`), 10, 64); err != nil || got.LocalHashes[i] != want {
				t.Fatalf("local_hashes[%d] = %d of %s", i, got.LocalHashes[i], r)
			}
		}
	})
}

// A request says the same within a batch as alone, and what is no request is refused
// in both.
func FuzzParseMatchMany(f *testing.F) {
	for _, body := range []string{
		`{"model":"m","tokens":[1, "2"],"min_offsets":{"1":2}}`, `{"tokens":[1,]}`, `{}`, `{"x":1}`, ` null`, `[]`, `{},{}`, `]`, ``,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		one, oneErr := parseMatch(body, Limits{}.withDefaults())
		batch, err := parseMatchMany(slices.Concat([]byte(`{"requests":[`), body, []byte(`]}`)), Limits{MaxBatch: 1}.withDefaults())
		if oneErr == nil && strings.HasPrefix(strings.TrimSpace(string(body)), "{") {
			if err != nil || len(batch.Requests) != 1 || !proto.Equal(batch.Requests[0], one) {
				t.Fatalf("in a batch %v, %v, alone %v", batch, err, one)
			}
		} else if err == nil && len(batch.Requests) > 0 {
			t.Fatalf("a batch of %v, alone %v", batch, oneErr)
		}
		if err != nil && status.Code(err) != codes.InvalidArgument {
			t.Fatalf("refused with %v", err)
		}
		if _, err := parseMatchMany(body, Limits{MaxBatch: 1}.withDefaults()); err != nil && status.Code(err) != codes.InvalidArgument {
			t.Fatalf("refused with %v", err)
		}
	})
}

// Nothing that a body says is lost in silence.
func TestFieldsThatAreThereTwice(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	for body, want := range map[string]string{
		`{"model":"m","tokens":[1,2,3,4],"salt":"a","salt":""}`:                                                        "salt is there twice",
		`{"model":"m","tokens":[1,2,3,4],"tokens":null}`:                                                               "tokens is there twice",
		`{"model":"m","tokens":[1,2,3,4],"s\u0061lt":"a","salt":"b"}`:                                                  "salt is there twice",
		`{"model":"m","tokens":[1,2,3,4],"Salt":"a"}`:                                                                  `unknown field "Salt": "salt" is meant, it seems`,
		`{"model":"m","TOKENS":[1,2,3,4]}`:                                                                             `unknown field "TOKENS": "tokens" is meant, it seems`,
		`{"model":"m","tokens":[1,2,3,4],"mm":[{"hash":1,"tokens":1},{"hash":1,"first_token":1,"tokens":1,"hash":2}]}`: "mm[1]: hash is there twice",
		`{"model":"m","tokens":[1,2,3,4],"mm":[{"Hash":1,"tokens":1}]}`:                                                `mm[0]: unknown field "Hash": "hash" is meant, it seems`,
	} {
		if code, text := post(t, s, body); code != http.StatusBadRequest || messageOf(t, text) != want {
			t.Errorf("%s: %d %s", body, code, text)
		}
		if code, text := postMany(t, s, `{"requests":[`+body+`]}`); code != http.StatusBadRequest || messageOf(t, text) != "requests[0]: "+want {
			t.Errorf("%s in a batch: %d %s", body, code, text)
		}
	}
	for body, want := range map[string]string{
		`{"requests":[{"model":"m","tokens":[1]}],"timeout_ms":1,"timeout_ms":2}`: "timeout_ms is there twice",
		`{"requests":[],"Requests":[{"model":"m","tokens":[1]}]}`:                 `unknown field "Requests": "requests" is meant, it seems`,
	} {
		if code, text := postMany(t, s, body); code != http.StatusBadRequest || messageOf(t, text) != want {
			t.Errorf("%s: %d %s", body, code, text)
		}
	}
}

func messageOf(t *testing.T, body string) string {
	t.Helper()
	_, message := errorOf(t, body)
	return message
}

// Half a character is no text: encoding/json would make one salt of all such.
func TestHalfACharacter(t *testing.T) {
	for text, ok := range map[string]bool{`\ud83d\ude00`: true, `\\ud800`: true, `\u00e4\n`: true, `\ud800`: false, `\udc00\ud800`: false, `\ud800\ud800`: false, `\ud800x`: false, `a\\\ud800`: false} {
		for _, body := range []string{`{"model":"m","tokens":[1],"salt":"` + text + `"}`, `{"model":"m","token_ids":[1],"cache_salt":"` + text + `"}`} {
			_, err := parseMatch([]byte(body), Limits{}.withDefaults())
			if strings.Contains(body, "token_ids") {
				_, err = new(dropinRequest).read([]byte(body), mooncakeQueryFields)
			}
			if (err == nil) != ok || err != nil && err != errNotUTF8 {
				t.Errorf("%s: %v", body, err)
			}
		}
	}
}
