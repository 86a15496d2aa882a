package pipeline

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/testcontainers"
)

// A query that names the offset a producer was given finds what the producer wrote,
// each time and on every partition.
func TestReadYourWrites(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 4)
	in := r.start()
	in.caughtUp()
	client, err := client.Dial(in.GRPCAddr().String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })

	const rounds = 60
	var wg sync.WaitGroup
	for i := range 6 {
		p := r.produce(fmt.Sprintf("worker-%d", i), 0)
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(i)))
			chain := locals(uint64(i+1), rounds)
			for n := range rounds {
				ev := stored(nil, chain[:1]...)
				if n > 0 {
					parent := index.Chain(nil, chain[:n])[n-1]
					ev = stored(&parent, chain[n])
				}
				rec := p.send(ev)
				req := &pb.MatchRequest{Model: testModel, MinOffsets: map[int32]int64{rec.Partition: rec.Offset}}
				for _, l := range chain[:n+1] {
					req.LocalHashes = append(req.LocalHashes, uint64(l))
				}
				if rng.IntN(2) == 0 {
					req.FailOpen = true
				}
				resp, err := client.Match(t.Context(), req)
				if err != nil || resp.Partial || len(resp.Matches) != 1 || int(resp.Matches[0].DepthBlocks) != n+1 {
					t.Errorf("worker %d, record %d at %d/%d: %v, %v", i, n, rec.Partition, rec.Offset, resp, err)
					return
				}
				if resp.Matches[0].Offset <= rec.Offset {
					t.Errorf("the answer is of offset %d, %d was wanted", resp.Matches[0].Offset, rec.Offset)
				}
			}
		})
	}
	wg.Wait()

	req := &pb.MatchRequest{Model: testModel, LocalHashes: []uint64{uint64(locals(1, 1)[0])}, MinOffsets: map[int32]int64{0: 1 << 40}, TimeoutMs: 50}
	began := time.Now()
	if resp, err := client.Match(t.Context(), req); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "partition 0: offset 1099511627776 is not applied yet") {
		t.Errorf("an offset that is not there: %v, %v", resp, err)
	}
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("waited for %v", took)
	}
	req.FailOpen = true
	if resp, err := client.Match(t.Context(), req); err != nil || !resp.Partial || len(resp.Missing) != 1 || len(resp.Matches) != 1 {
		t.Errorf("the same, failing open: %v, %v", resp, err)
	}
	req.MinOffsets = map[int32]int64{4: 0}
	if resp, err := client.Match(t.Context(), req); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an unknown partition: %v, %v", resp, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := in.AwaitApplied(ctx, 0, 1<<40); err == nil {
		t.Error("waited for an offset that is not there")
	}
}
