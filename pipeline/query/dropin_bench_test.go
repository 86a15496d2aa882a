package query

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"kvindex/index"
)

// BenchmarkDropin is what the server does for a request of each HTTP API, from its
// parsed header to its answer: the prompt of BenchmarkLoopback over a RunIndex.
func BenchmarkDropin(b *testing.B) {
	for _, size := range sizes {
		f, reqs := workload(b, size.blocks, size.workers)
		locals := f.models[0].hasher().Append(nil, reqs["tokens"].Tokens, index.Extra{})
		f.models[0].Index = index.New(index.NewRunIndex())
		for i := range size.workers {
			f.holds(b, fmt.Sprintf("worker-%04d", i), 0, locals[:1+i*size.blocks/size.workers], WorkerState{Partition: 3})
		}
		s := serve(b, f, Config{})
		seqs := index.Chain(nil, locals)
		for _, c := range []struct{ path, body string }{
			{"/v1/match", compact(map[string]any{"model": "m", "local_hashes": locals})},
			{"/dynamo/query_by_hash", compact(map[string]any{"model_name": "m", "block_hashes": locals})},
			{"/mooncake/query_by_hash", compact(map[string]any{"model": "m", "seq_hashes": seqs})},
			{"/v1/match", compact(map[string]any{"model": "m", "tokens": reqs["tokens"].Tokens})},
			{"/dynamo/query", compact(map[string]any{"model_name": "m", "token_ids": reqs["tokens"].Tokens})},
			{"/mooncake/query", compact(map[string]any{"model": "m", "token_ids": reqs["tokens"].Tokens})},
		} {
			b.Run(fmt.Sprintf("%d blocks, %d workers, %d bytes to %s", size.blocks, size.workers, len(c.body), c.path[1:]), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					w := httptest.NewRecorder()
					s.http.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, c.path, bytes.NewReader([]byte(c.body))))
					if w.Code != http.StatusOK {
						b.Fatal(w.Code, w.Body)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("%d blocks, locals of sequence hashes", size.blocks), func(b *testing.B) {
			b.ReportAllocs()
			buf := make([]index.LocalHash, 0, len(seqs))
			for b.Loop() {
				got, err := f.models[0].Index.Locals(buf, seqs)
				if err != nil || len(got) == 0 {
					b.Fatal(len(got), err)
				}
			}
		})
	}
}
