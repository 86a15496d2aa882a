package bench

import (
	"testing"

	pb "kvindex/pipeline/query/kvindexpb"
)

// A wrong answer is found: that is what every measurement of queries rests on.
func TestCheckAnswer(t *testing.T) {
	const workers, blocks, number = 5, 20, 1
	right := func() *pb.MatchResponse {
		r := &pb.MatchResponse{Blocks: blocks}
		for i := range workers {
			r.Matches = append(r.Matches, &pb.WorkerMatch{Worker: workerName(i), DepthBlocks: uint32(promptDepth(i, workers, blocks, number))})
		}
		return r
	}
	if err := checkAnswer(right(), workers, blocks, number); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*pb.MatchResponse){
		"too deep":          func(r *pb.MatchResponse) { r.Matches[3].DepthBlocks++ },
		"too shallow":       func(r *pb.MatchResponse) { r.Matches[3].DepthBlocks-- },
		"one missing":       func(r *pb.MatchResponse) { r.Matches = r.Matches[1:] },
		"one twice":         func(r *pb.MatchResponse) { r.Matches[0] = r.Matches[1] },
		"a stranger":        func(r *pb.MatchResponse) { r.Matches[0].Worker = workerName(workers) },
		"no name":           func(r *pb.MatchResponse) { r.Matches[0].Worker = "" },
		"of another prompt": func(r *pb.MatchResponse) { r.Blocks++ },
		"nothing in it":     func(r *pb.MatchResponse) { r.Reset() },
		"a negative worker": func(r *pb.MatchResponse) { r.Matches[0].Worker = "worker--1" },
		"two have exchanged": func(r *pb.MatchResponse) {
			r.Matches[0].Worker, r.Matches[1].Worker = r.Matches[1].Worker, r.Matches[0].Worker
		},
	} {
		r := right()
		spoil(r)
		if err := checkAnswer(r, workers, blocks, number); err == nil {
			t.Errorf("%s: taken for right", name)
		}
	}
}
