package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
)

// TestVerifyTellsWhatItDoes: not at once, and no more after.
func TestVerifyTellsWhatItDoes(t *testing.T) {
	for long, want := range map[time.Duration]string{
		tellAfter - 1: "",
		tellAfter:     "reading topic kv-events (2s)\n",
	} {
		synctest.Test(t, func(t *testing.T) {
			var v verifier
			v.does.Store("reading topic kv-events")
			var said bytes.Buffer
			quiet := v.tell(&console{err: &said})
			time.Sleep(long)
			synctest.Wait()
			quiet()
			time.Sleep(time.Minute)
			if said.String() != want {
				t.Errorf("after %v: %q, want %q", long, said.String(), want)
			}
		})
	}
}

// TestVerifyFindsDifferences holds hand-made answers to a topic of two workers:
// a holds three blocks, b one.
func TestVerifyFindsDifferences(t *testing.T) {
	locals := []index.LocalHash{11, 22, 33}
	v := &verifier{oracle: verify.New(time.Hour)}
	for worker, n := range map[string]int{"a": 3, "b": 1} {
		value, err := schemas.AppendBatch(nil, &schemas.Batch{
			Producer: []byte("p"), Worker: []byte(worker), Epoch: 5, Model: []byte("m"), BlockSize: 64,
			Events: []schemas.Event{{Kind: schemas.KindStored, Stored: index.Stored{Locals: locals[:n]}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		v.oracle.Apply(0, 1000, []byte(worker), value)
	}
	q := verify.Query{Model: "m", BlockSize: 64, Locals: locals}
	listed := func(name string, blocks int64, change ...func(*pb.WorkerStatus)) *pb.WorkerStatus {
		w := &pb.WorkerStatus{Worker: name, Model: "m", BlockSize: 64, Hasher: "flash", Epoch: 5, Blocks: &pb.TierBlocks{Device: blocks}}
		for _, c := range change {
			c(w)
		}
		return w
	}
	silent := func(w *pb.WorkerStatus) { w.Silent = true }
	a, b := listed("a", 3), listed("b", 1)
	both := []*pb.WorkerStatus{a, b}
	type depths map[string]uint32
	for name, c := range map[string]struct {
		before, after []*pb.WorkerStatus
		answer        depths
		want          []string // what the differences say, in their order
	}{
		"exact":                 {both, both, depths{"a": 3, "b": 1}, nil},
		"too deep":              {both, both, depths{"a": 3, "b": 2}, []string{"worker b rank 0: the stage answers [2 2 2 2], the topic says [1 1 1 1]"}},
		"too shallow":           {both, both, depths{"a": 2, "b": 1}, []string{"worker a rank 0: the stage answers [2 2 2 2], the topic says [3 3 3 3]"}},
		"absent":                {both, both, depths{"a": 3}, []string{"worker b rank 0: the stage answers [0 0 0 0], the topic says [1 1 1 1]"}},
		"invented":              {both, both, depths{"a": 3, "b": 1, "c": 1}, []string{"worker c rank 0: the stage answers [1 1 1 1], the topic says [0 0 0 0]"}},
		"silent and absent":     {[]*pb.WorkerStatus{a, listed("b", 1, silent)}, []*pb.WorkerStatus{a, listed("b", 1, silent)}, depths{"a": 3}, nil},
		"silent and answered":   {[]*pb.WorkerStatus{a, listed("b", 1, silent)}, []*pb.WorkerStatus{a, listed("b", 1, silent)}, depths{"a": 3, "b": 1}, []string{"worker b rank 0: the stage answers [1 1 1 1], the topic says [0 0 0 0]"}},
		"fell silent meanwhile": {both, []*pb.WorkerStatus{a, listed("b", 1, silent)}, depths{"a": 3}, nil},
		"blocks miscounted":     {both, []*pb.WorkerStatus{a, listed("b", 2)}, depths{"a": 3, "b": 1}, []string{"worker b rank 0: the stage has"}},
		"wrongly incomplete":    {both, []*pb.WorkerStatus{a, listed("b", 1, func(w *pb.WorkerStatus) { w.Incomplete = true })}, depths{"a": 3, "b": 1}, []string{"worker b rank 0: the stage has"}},
		"a worker is not known": {both[:1], both[:1], depths{"a": 3}, []string{"worker b rank 0 is not known", "worker b rank 0: the stage answers [0 0 0 0]"}},
		"a worker of no record": {append(both, listed("c", 1)), append(both, listed("c", 1)), depths{"a": 3, "b": 1}, []string{"worker c rank 0: the topic knows no such worker"}},
		"retired, so left out":  {both, []*pb.WorkerStatus{a, listed("b", 0, func(w *pb.WorkerStatus) { w.Retired = true })}, depths{"a": 3}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			answer := &pb.MatchResponse{}
			for w, d := range c.answer {
				answer.Matches = append(answer.Matches, &pb.WorkerMatch{Worker: w, DepthBlocks: d, DepthHostBlocks: d, DepthDiskBlocks: d, DepthExternalBlocks: d})
			}
			known := byName(c.before, c.after)
			_, got := v.compareWorkers(known)
			got = append(got, v.compareAnswer(q, answer, known)...)
			if len(got) != len(c.want) {
				t.Fatalf("differences %q, want %q", got, c.want)
			}
			for i, want := range c.want {
				if !strings.Contains(got[i], want) {
					t.Errorf("difference %q, want %q", got[i], want)
				}
			}
		})
	}
}
