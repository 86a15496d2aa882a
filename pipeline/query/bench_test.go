package query

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

// workload is a prompt of that many blocks of 16 tokens, held to different
// depths by that many workers.
func workload(b *testing.B, blocks, workers int) (*fakeSource, map[string]*pb.MatchRequest) {
	f := newFake()
	f.models[0].BlockSize = 16
	tokens := make([]uint32, 16*blocks)
	for i := range tokens {
		tokens[i] = uint32(i * 7919 % 150000)
	}
	locals := index.BlockHasher{BlockSize: 16}.Append(nil, tokens, index.Extra{})
	for i := range workers {
		f.holds(b, fmt.Sprintf("worker-%04d", i), 0, locals[:1+i*blocks/workers], WorkerState{Partition: 3})
	}
	return f, map[string]*pb.MatchRequest{
		"hashes": {Model: "m", LocalHashes: hashes(locals)},
		"tokens": {Model: "m", Tokens: tokens},
	}
}

var sizes = []struct{ blocks, workers int }{{192, 64}, {3750, 1000}}

// BenchmarkService is a query without its transport.
func BenchmarkService(b *testing.B) {
	for _, size := range sizes {
		f, reqs := workload(b, size.blocks, size.workers)
		svc := NewService(f, Limits{})
		for _, kind := range []string{"hashes", "tokens"} {
			b.Run(fmt.Sprintf("%d blocks by %s, %d workers", size.blocks, kind, size.workers), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := svc.Match(context.Background(), reqs[kind]); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkLoopback is a query with both ends of its transport, 16 at a time.
func BenchmarkLoopback(b *testing.B) {
	for _, size := range sizes {
		f, reqs := workload(b, size.blocks, size.workers)
		provider, _, err := SetupMetrics()
		if err != nil {
			b.Fatal(err)
		}
		s := serve(b, f, Config{Meters: provider})
		name := func(transport string) string {
			return fmt.Sprintf("%s, %d blocks by hashes, %d workers", transport, size.blocks, size.workers)
		}
		b.Run(name("grpc"), func(b *testing.B) {
			client := dial(b, s)
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if _, err := client.Match(context.Background(), reqs["hashes"]); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
		b.Run(name("streams"), func(b *testing.B) {
			client, err := client.New(client.Config{Replicas: []string{s.GRPCAddr().String()}, Streams: 2})
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if _, err := client.Match(context.Background(), reqs["hashes"]); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
		b.Run(name("grpc, 16 in a batch"), func(b *testing.B) {
			client := dial(b, s)
			batch := &pb.MatchManyRequest{}
			for range 16 {
				batch.Requests = append(batch.Requests, reqs["hashes"])
			}
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if _, err := client.MatchMany(context.Background(), batch); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
		b.Run(name("http"), func(b *testing.B) {
			body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(reqs["hashes"])
			if err != nil {
				b.Fatal(err)
			}
			client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
			url := "http://" + s.HTTPAddr().String() + "/v1/match"
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					resp, err := client.Post(url, "application/json", bytes.NewReader(body))
					if err != nil || resp.StatusCode != http.StatusOK {
						b.Error(resp, err)
						return
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			})
		})
	}
}

// BenchmarkJSON is what HTTP adds to the service.
func BenchmarkJSON(b *testing.B) {
	for _, size := range sizes {
		f, reqs := workload(b, size.blocks, size.workers)
		resp, err := NewService(f, Limits{}).Match(context.Background(), reqs["hashes"])
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("write %d matches", size.workers), func(b *testing.B) {
			b.ReportAllocs()
			var buf []byte
			for b.Loop() {
				buf = appendMatches(buf[:0], resp)
			}
		})
		for _, kind := range []string{"hashes", "tokens"} {
			body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(reqs[kind])
			if err != nil {
				b.Fatal(err)
			}
			b.Run(fmt.Sprintf("read %d blocks by %s", size.blocks, kind), func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := parseMatch(body, Limits{}.withDefaults()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
