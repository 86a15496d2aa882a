package query

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	pb "kvindex/pipeline/query/kvindexpb"
)

// manyAsker asks a batch of either transport.
type manyAsker struct {
	name string
	ask  func(*pb.MatchManyRequest) (*pb.MatchManyResponse, error)
}

func manyAskers(t testing.TB, s *Server) []manyAsker {
	t.Helper()
	return []manyAsker{
		{"grpc", func(req *pb.MatchManyRequest) (*pb.MatchManyResponse, error) {
			return pb.NewKVIndexClient(connect(t, s)).MatchMany(t.Context(), req)
		}},
		{"http", func(req *pb.MatchManyRequest) (*pb.MatchManyResponse, error) {
			body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(req)
			if err != nil {
				t.Fatal(err)
			}
			code, answer := postMany(t, s, string(body))
			if code != http.StatusOK {
				return nil, httpToStatus(t, code, answer)
			}
			resp := new(pb.MatchManyResponse)
			if err := protojson.Unmarshal([]byte(answer), resp); err != nil {
				t.Fatalf("%v in %s", err, answer)
			}
			return resp, nil
		}},
	}
}

// showResult writes a result as a specification can state it.
func showResult(r *pb.MatchResult) string {
	switch {
	case r.Error != nil && r.Answer == nil:
		return r.Error.Code
	case r.Answer != nil && r.Error == nil:
		return show(r.Answer)
	}
	return fmt.Sprintf("neither answer nor error: %v", r)
}

// Each request of a batch has an answer or an error of its own.
func TestMatchMany(t *testing.T) {
	requests := []*pb.MatchRequest{
		{Model: "m", Tokens: prompt},
		{Model: "x", Tokens: prompt},
		{Model: "m", Tokens: prompt, TopK: 1},
		{Tokens: prompt},
		{Model: "two", Tokens: prompt},
		{Model: "m", LocalHashes: hashes(locals), Workers: []string{"lossy"}},
		{Model: "m", Tokens: prompt, TimeoutMs: 5},
		{Model: "m", Tokens: prompt, MinOffsets: map[int32]int64{0: 1}},
		{Model: "m", LocalHashes: []uint64{7}},
	}
	want := []string{"deep/0:3 deep/1:2 lossy/0:1!", "NOT_FOUND", "deep/0:3", "INVALID_ARGUMENT", "FAILED_PRECONDITION",
		"lossy/0:1!", "INVALID_ARGUMENT", "INVALID_ARGUMENT", ""}
	for _, a := range manyAskers(t, serve(t, fleet(t), Config{})) {
		resp, err := a.ask(&pb.MatchManyRequest{Requests: requests, MinOffsets: map[int32]int64{1: 10}, TimeoutMs: 500})
		if err != nil || len(resp.Results) != len(want) {
			t.Fatalf("%s: %v, %v", a.name, resp, err)
		}
		for i, r := range resp.Results {
			if got := showResult(r); got != want[i] {
				t.Errorf("%s: %d: got %q, want %q", a.name, i, got, want[i])
			}
		}
	}
}

func TestMatchManyRefusals(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxBatch: 3, MaxBlocks: 8, MaxBatchMatches: 4, MaxRequestBytes: 2000}})
	one := &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1}
	for _, a := range manyAskers(t, s) {
		for _, c := range []struct {
			name string
			req  *pb.MatchManyRequest
			code codes.Code
			text string
		}{
			{"empty", &pb.MatchManyRequest{}, codes.InvalidArgument, "requests is empty"},
			{"too many", &pb.MatchManyRequest{Requests: []*pb.MatchRequest{one, one, one, one}}, codes.InvalidArgument, "4 requests are above the limit of 3"},
			{"too many bytes", &pb.MatchManyRequest{Requests: []*pb.MatchRequest{{Model: strings.Repeat("x", 3000)}}}, codes.ResourceExhausted, "2000"},
			{"unknown partition", &pb.MatchManyRequest{Requests: []*pb.MatchRequest{one}, MinOffsets: map[int32]int64{9: 0}}, codes.InvalidArgument, "unknown partition 9"},
		} {
			resp, err := a.ask(c.req)
			if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.text) {
				t.Errorf("%s: %s: got %v, %v, want %v with %q", a.name, c.name, resp, err, c.code, c.text)
			}
		}
		// What is too much in all is refused from there on, one by one.
		for name, c := range map[string]struct {
			req  *pb.MatchRequest
			want string
		}{
			"blocks":  {one, "deep/0:3, deep/0:3, INVALID_ARGUMENT"},
			"matches": {&pb.MatchRequest{Model: "m", Tokens: prompt[:4]}, "deep/0:1 deep/1:1 lossy/0:1!, RESOURCE_EXHAUSTED, RESOURCE_EXHAUSTED"},
		} {
			resp, err := a.ask(&pb.MatchManyRequest{Requests: []*pb.MatchRequest{c.req, c.req, c.req}})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range resp.Results {
				got = append(got, showResult(r))
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s: %s: got %s, want %s", a.name, name, s, c.want)
			}
		}
	}
}

// A record that does not come in time: those that fail open are answered.
func TestMatchManyWaits(t *testing.T) {
	batch := &pb.MatchManyRequest{
		Requests: []*pb.MatchRequest{
			{Model: "m", Tokens: prompt, TopK: 1},
			{Model: "m", Tokens: prompt, TopK: 1, FailOpen: true},
		},
		MinOffsets: map[int32]int64{0: 10},
		TimeoutMs:  20,
	}
	f := fleet(t)
	s := serve(t, f, Config{})
	for _, a := range manyAskers(t, s) {
		resp, err := a.ask(batch)
		if err != nil || showResult(resp.Results[0]) != "DEADLINE_EXCEEDED" || showResult(resp.Results[1]) != "deep/0:3" || !resp.Results[1].Answer.Partial {
			t.Errorf("%s: got %v, %v", a.name, resp, err)
		}
	}
	f.apply(1)
	for _, a := range manyAskers(t, s) {
		resp, err := a.ask(batch)
		if err != nil || showResult(resp.Results[0]) != "deep/0:3" || resp.Results[1].Answer.Partial {
			t.Errorf("%s: got %v, %v", a.name, resp, err)
		}
	}
}

func TestMatchManyJSON(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	const req = `{"model":"m","tokens":[1,2,3,4,5,6,7,8,9,10,11,12],"top_k":1}`
	for _, c := range []struct{ body, want string }{
		{`{"requests":[` + req + `,{"model":"x","tokens":[1,2,3,4]}]}`,
			`{"results":[{"answer":{"blocks":3,"block_size":4,"matches":[{"worker":"deep",`},
		{`{"requests":[{"model":"x","tokens":[1,2,3,4]}]}`, `{"results":[{"error":{"code":"NOT_FOUND","message":"unknown model \"x\""}}]}`},
		{`{"requests":[` + req + `],"min_offsets":{"0":"9","3":1152921504606846975}}`, `{"results":[{"answer"`},
		{`{"requests":[` + req + `],"min_offsets":null}`, `{"results":[{"answer"`},
		{`{"requests":[` + req + `],"min_offset":{}}`, `unknown field \"min_offset\"`},
		{`{"requests":[{"model":"m","token":[1]}]}`, `requests[0]: unknown field \"token\"`},
		{`{"requests":[` + req + `,null]}`, `requests[1]: null is not an object`},
		{`{"requests":[` + req + `,[1]]}`, `requests[1]: [1 is not an object`},
		{`{"requests":[{"model":"m","tokens":[1.0]}]}`, `requests[0]: tokens[0]: 1.0 is not a whole number`},
		{`{"requests":[` + req + `],"min_offsets":{"0":1.5}}`, `1.5 is not an offset`},
		{`{"requests":[` + req + `],"min_offsets":{"0":-1}}`, `-1 is not an offset`},
		{`{"requests":[` + req + `],"min_offsets":{"0":9223372036854775808}}`, `is not an offset`},
		{`{"requests":[` + req + `],"min_offsets":{"x":1}}`, `is not the number of a partition`},
		{`{"requests":[` + req + `],"min_offsets":{"0":1, "0":2}}`, `partition 0 is there twice`},
		{`{"requests":[` + req + `],"min_offsets":[1]}`, `is not an object`},
		{`{"requests":[` + req + `]}]`, `goes on after`},
	} {
		if _, got := postMany(t, s, c.body); !strings.Contains(got, c.want) {
			t.Errorf("%s\ngot %s\nwant %s", c.body, got, c.want)
		}
	}
}

// A batch is as good as its requests one by one, and costs their answers.
func TestMatchManyAllocates(t *testing.T) {
	f := newFake()
	for i := range 64 {
		f.holds(t, fmt.Sprintf("w%02d", i), 0, locals[:1+i%3], WorkerState{})
	}
	svc := NewService(f, Limits{})
	batch := &pb.MatchManyRequest{}
	for range 16 {
		batch.Requests = append(batch.Requests, &pb.MatchRequest{Model: "m", Tokens: prompt})
	}
	const want = 3*16 + 3 // the results, their list, the message
	got := want + 1.0
	for range 50 {
		got = min(got, testing.AllocsPerRun(1, func() {
			if _, err := svc.MatchMany(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
		}))
	}
	if got > want {
		t.Errorf("%v allocations, want %v", got, want)
	}
	resp, err := svc.MatchMany(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	one, err := svc.Match(t.Context(), batch.Requests[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range resp.Results {
		if show(r.Answer) != show(one) || r.Answer.Blocks != one.Blocks {
			t.Errorf("got %v, want %v", r.Answer, one)
		}
	}
}
