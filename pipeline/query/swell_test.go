package query

import (
	"bytes"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	pb "kvindex/pipeline/query/kvindexpb"
)

func mustMarshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// appendMessage appends an encoded message as the value of a field.
func appendMessage(dst []byte, field protowire.Number, message []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(dst, field, protowire.BytesType), message)
}

// Lists whose elements are two or three bytes of a body and hundreds in memory are
// counted and refused, not made.
func TestSwellingBodies(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	const many = 1_300_000
	good := mustMarshal(t, &pb.MatchRequest{Model: "m", Tokens: prompt})
	crowded := append(bytes.Clone(good), bytes.Repeat(appendMessage(nil, fieldMM, nil), many)...)
	empties := "{}" + strings.Repeat(",{}", many-1)
	for _, c := range []struct {
		name, path string
		body       []byte
		want       answer
	}{
		{"requests of a batch", pb.KVIndex_MatchMany_FullMethodName, bytes.Repeat(appendMessage(nil, fieldRequests, nil), many),
			answer{"INVALID_ARGUMENT", "requests: 1300000 requests are above the limit of 256"}},
		{"mm of a request", pb.KVIndex_Match_FullMethodName, crowded,
			answer{"INVALID_ARGUMENT", "mm: 1300000 multimodal entries are above the limit of 256"}},
		{"mm in a batch", pb.KVIndex_MatchMany_FullMethodName, appendMessage(appendMessage(nil, fieldRequests, good), fieldRequests, crowded), answer{"OK", ""}},
		{"mm on a stream", pb.KVIndex_MatchStream_FullMethodName, appendMessage(nil, fieldStreamRequest, crowded), answer{"OK", ""}},
		{"requests of a batch in JSON", pathMatchMany, []byte(`{"requests":[` + empties + `]}`),
			answer{"400 INVALID_ARGUMENT", "requests: 1300000 requests are above the limit of 256"}},
		{"mm in JSON", pathMatch, []byte(`{"model":"m","tokens":[1],"mm":[` + empties + `]}`),
			answer{"400 INVALID_ARGUMENT", "mm: 1300000 multimodal entries are above the limit of 256"}},
		{"mm of a batch in JSON", pathMatchMany, []byte(`{"requests":[{"model":"m","tokens":[1],"mm":[` + empties + `]}]}`),
			answer{"400 INVALID_ARGUMENT", "requests[0]: mm: 1300000 multimodal entries are above the limit of 256"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var got answer
			if strings.HasPrefix(c.path, "/v1/") {
				code, text := do(t, s, http.MethodPost, c.path, "application/json", bytes.NewReader(c.body))
				name, message := errorOf(t, text)
				got = answer{http.StatusText(code), message}
				if code == http.StatusBadRequest {
					got.code = "400 " + name
				}
			} else {
				frame := framed(int64(len(c.body)), nil).head
				got = rawGRPCTo(t, s, c.path, "application/grpc", "", io.MultiReader(bytes.NewReader(frame), bytes.NewReader(c.body)))
			}
			runtime.ReadMemStats(&after)
			if got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
			if used := after.TotalAlloc - before.TotalAlloc; used > 96<<20 { // the body is copied a few times
				t.Errorf("%d MiB were allocated", used>>20)
			}
		})
	}
}

// The codec makes of every message what protobuf does, but for the elements of lists
// that are too long.
func TestCodec(t *testing.T) {
	c := newCodec(Limits{MaxMultimodal: 2, MaxBatch: 3})
	unmarshal := func(b []byte, m proto.Message) error { return c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, m) }
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string, most int) int { return rapid.IntRange(0, most).Draw(t, name) }
		request := func() *pb.MatchRequest {
			r := &pb.MatchRequest{Model: "m", Tokens: prompt[:n("tokens", 8)], TopK: 7, MinOffsets: map[int32]int64{1: 2}, FailOpen: true}
			for i := range n("mm", 4) {
				r.Mm = append(r.Mm, &pb.Multimodal{Hash: uint64(i), Tokens: 1})
			}
			return r
		}
		blank := func(r *pb.MatchRequest) {
			if len(r.Mm) > 2 {
				r.Mm = make([]*pb.Multimodal, len(r.Mm))
			}
		}
		batch := &pb.MatchManyRequest{TimeoutMs: 5, MinOffsets: map[int32]int64{3: 4}}
		for range n("requests", 5) {
			batch.Requests = append(batch.Requests, request())
		}
		one := request()
		streamed := &pb.MatchStreamRequest{Id: 9, Request: request(), Traceparent: "x"}
		batchBytes, oneBytes, streamedBytes := mustEncode(t, batch), mustEncode(t, one), mustEncode(t, streamed)
		blank(one)
		blank(streamed.Request)
		for _, r := range batch.Requests {
			blank(r)
		}
		if k := len(batch.Requests); k > 3 {
			batch.Requests = make([]*pb.MatchRequest, k)
		}
		for _, m := range []struct {
			bytes     []byte
			got, want proto.Message
		}{
			{batchBytes, new(pb.MatchManyRequest), batch},
			{oneBytes, new(pb.MatchRequest), one},
			{streamedBytes, new(pb.MatchStreamRequest), streamed},
		} {
			if err := unmarshal(m.bytes, m.got); err != nil || !proto.Equal(m.got, m.want) {
				t.Fatalf("got %v, %v, want %v", m.got, err, m.want)
			}
			if cut := m.bytes[:n("cut", len(m.bytes))]; len(cut) > 0 { // never better than protobuf
				a, b := m.got.ProtoReflect().New().Interface(), m.got.ProtoReflect().New().Interface()
				if x, y := unmarshal(cut, a), proto.Unmarshal(cut, b); (x == nil) != (y == nil) {
					t.Fatalf("%x: %v, protobuf says %v", cut, x, y)
				}
			}
		}
	})
}

func mustEncode(t *rapid.T, m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
