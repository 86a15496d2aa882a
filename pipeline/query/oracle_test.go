package query

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
	pb "kvindex/pipeline/query/kvindexpb"
)

// Random requests have the oracle's answers, whichever way they are asked.
func TestOracle(t *testing.T) {
	const (
		blockSize = 4
		rounds    = 20
		batch     = 25
	)
	rng := rand.New(rand.NewPCG(1, 2))
	f, oracle := newFake(), indextest.NewFleet()
	var prompts [][]uint32 // that share beginnings
	for range 12 {
		p := []uint32{}
		if len(prompts) > 0 && rng.IntN(4) > 0 {
			from := prompts[rng.IntN(len(prompts))]
			p = append(p, from[:rng.IntN(len(from)+1)]...)
		}
		for range 1 + rng.IntN(60) {
			p = append(p, uint32(rng.IntN(9)))
		}
		prompts = append(prompts, p)
	}
	blocks := func(p []uint32) []index.LocalHash {
		return index.BlockHasher{BlockSize: blockSize}.Append(nil, p, index.Extra{})
	}
	var names []string
	for i := range 20 {
		names = append(names, fmt.Sprintf("w%02d", i))
		for rank := range int32(1 + i%2) {
			w, id := f.models[0].Index.AddWorker(names[i], rank, nil), indextest.WorkerRank{Worker: names[i], Rank: rank}
			for range 6 {
				tier := index.Device
				if i%3 == 0 {
					tier = index.Tier(rng.IntN(index.Tiers))
				}
				l := blocks(prompts[rng.IntN(len(prompts))])
				l = l[:rng.IntN(len(l)+1)]
				if len(l) == 0 {
					continue
				}
				ev := index.Stored{Locals: l, Position: index.NoPosition}
				if from := rng.IntN(len(l)); from > 0 && rng.IntN(2) == 0 {
					ev.Parent, ev.HasParent, ev.Locals = index.Chain(nil, l)[from-1], true, l[from:]
				}
				if _, err := w.Store(tier, ev); err != nil {
					t.Fatal(err)
				}
				if _, err := oracle.Store(id, tier, ev); err != nil {
					t.Fatal(err)
				}
			}
		}
	}

	s := serve(t, f, Config{})
	singles, many, stream := askers(t, s), manyAskers(t, s), openStream(t, t.Context(), s)
	for range rounds {
		var reqs []*pb.MatchRequest
		for range batch {
			p := prompts[rng.IntN(len(prompts))]
			p = p[:rng.IntN(len(p)+1)]
			if len(p) == 0 {
				p = []uint32{1}
			}
			req := &pb.MatchRequest{Model: "m", Tokens: p}
			if l := blocks(p); len(l) > 0 && rng.IntN(2) == 0 {
				req.Tokens, req.LocalHashes = nil, hashes(l)
			}
			if rng.IntN(3) == 0 {
				req.TopK = uint32(1 + rng.IntN(6))
			}
			if rng.IntN(3) == 0 {
				req.MinDepthBlocks = uint32(rng.IntN(8))
			}
			if rng.IntN(3) == 0 {
				for range 1 + rng.IntN(6) {
					req.Workers = append(req.Workers, names[rng.IntN(len(names))])
				}
			}
			reqs = append(reqs, req)
		}
		check := func(way string, i int, got *pb.MatchResponse) {
			t.Helper()
			l := blocks(reqs[i].Tokens)
			for _, h := range reqs[i].LocalHashes {
				l = append(l, index.LocalHash(h))
			}
			if problem := differs(got, reqs[i], oracle.Find(l)); problem != "" {
				t.Fatalf("%s: %v: %s", way, reqs[i], problem)
			}
		}
		for i, req := range reqs {
			for _, a := range singles {
				resp, err := a.ask(req)
				if err != nil {
					t.Fatal(err)
				}
				check(a.name, i, resp)
			}
			sendOn(t, stream, uint64(i), req)
		}
		for i := range reqs {
			resp, err := stream.Recv()
			if err != nil || resp.Id != uint64(i) {
				t.Fatal(resp, err)
			}
			check("stream", i, resp.Answer)
		}
		for _, a := range many {
			resp, err := a.ask(&pb.MatchManyRequest{Requests: reqs})
			if err != nil {
				t.Fatal(err)
			}
			for i, r := range resp.Results {
				check(a.name+" batch", i, r.Answer)
			}
		}
	}
}

// differs says how an answer is not what the oracle knows of all workers, or "".
func differs(got *pb.MatchResponse, req *pb.MatchRequest, truth map[indextest.WorkerRank]index.Depths) string {
	maps.DeleteFunc(truth, func(w indextest.WorkerRank, d index.Depths) bool {
		return len(req.Workers) > 0 && !slices.Contains(req.Workers, w.Worker) || d[index.External] < int(req.MinDepthBlocks)
	})
	var depths []index.Depths
	for _, m := range got.GetMatches() {
		d := index.Depths{int(m.DepthBlocks), int(m.DepthHostBlocks), int(m.DepthDiskBlocks), int(m.DepthExternalBlocks)}
		if want := truth[indextest.WorkerRank{Worker: m.Worker, Rank: m.DpRank}]; d != want {
			return fmt.Sprintf("%v, want %v", m, want)
		}
		depths = append(depths, d)
	}
	deepest := func(a, b index.Depths) int { return slices.Compare(b[:], a[:]) }
	want := slices.SortedFunc(maps.Values(truth), deepest)
	if k := int(req.TopK); k > 0 {
		want = want[:min(k, len(want))]
	} else {
		slices.SortFunc(depths, deepest)
	}
	if !slices.Equal(depths, want) {
		return fmt.Sprintf("depths %v, want %v", depths, want)
	}
	return ""
}
