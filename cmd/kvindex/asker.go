// This file asks a stage which workers of a fleet hold a prompt's blocks.

package main

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

// asker asks for the depths of one fleet's workers. One goroutine uses it.
type asker struct {
	stage   *client.Client
	timeout time.Duration
	worker  map[string]int
	request pb.MatchRequest

	failed  int
	lastErr error           // of the last query, nil if it was answered
	took    []time.Duration // of each answered query
}

func newAsker(stage *client.Client, cfg fleet.ProducerConfig, timeout time.Duration) *asker {
	a := &asker{stage: stage, timeout: timeout, worker: map[string]int{}}
	for i, name := range cfg.Workers {
		a.worker[name] = i
	}
	a.request.Model, a.request.BlockSize = cfg.Model, uint32(cfg.BlockSize)
	return a
}

// depths appends each worker's leading blocks of a prompt to dst. Without an
// answer it returns nil: the request is then routed without it.
func (a *asker) depths(ctx context.Context, dst []int, p fleet.Prompt) []int {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	a.request.LocalHashes = a.request.LocalHashes[:0]
	for _, l := range p.Locals {
		a.request.LocalHashes = append(a.request.LocalHashes, uint64(l))
	}
	start := time.Now()
	answer, err := a.stage.Match(ctx, &a.request)
	if status.Code(err) == codes.NotFound {
		answer, err = &pb.MatchResponse{}, nil // no worker of the model is known yet: nobody holds anything
	}
	a.lastErr = err
	if err != nil {
		a.failed++
		return nil
	}
	a.took = append(a.took, time.Since(start))
	for range a.worker {
		dst = append(dst, 0)
	}
	for _, m := range answer.Matches {
		if w, ok := a.worker[m.Worker]; ok {
			dst[w] = int(m.DepthBlocks)
		}
	}
	return dst
}

// quantile returns the q-quantile of durations, which it sorts; 0 if there are
// none.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(len(d)-1, int(q*float64(len(d))))]
}
