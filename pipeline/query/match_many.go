// This file answers several requests at once.

package query

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// MatchMany answers each request as Match does, or says why not, from one reading of
// what is ready and how far the partitions are. It fails as a whole only if the batch
// itself is refused or its caller has gone.
func (s *Service) MatchMany(ctx context.Context, batch *pb.MatchManyRequest) (*pb.MatchManyResponse, error) {
	switch n := len(batch.Requests); {
	case n == 0:
		return nil, invalid("requests is empty")
	case n > s.limits.MaxBatch:
		return nil, tooMany("requests", n, "requests", s.limits.MaxBatch)
	}
	open := slices.ContainsFunc(batch.Requests, (*pb.MatchRequest).GetFailOpen)
	due := s.due(ctx, batch.TimeoutMs, open)
	late, turn, err := s.await(ctx, batch.MinOffsets, due, slices.ContainsFunc(batch.Requests, partialAllowed), open)
	if err != nil {
		return nil, err
	}
	m := s.scratch.Get().(*matcher)
	m.look(turn)
	resp, err := s.matchEach(ctx, m, batch.Requests, due, late)
	s.scratch.Put(m) // not after a panic, as in Match
	return resp, err
}

// matchEach answers the requests of a batch.
func (s *Service) matchEach(ctx context.Context, m *matcher, requests []*pb.MatchRequest, due time.Time, late []string) (*pb.MatchManyResponse, error) {
	results := make([]pb.MatchResult, len(requests))
	resp := &pb.MatchManyResponse{Results: make([]*pb.MatchResult, len(results))}
	for i, req := range requests {
		resp.Results[i] = &results[i]
		err := s.checkInBatch(req)
		if err == nil {
			results[i].Answer, err = s.match(ctx, m, req, due, late)
		}
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		if err != nil {
			results[i].Error = errorMessage(err)
		}
	}
	return resp, nil
}

// checkInBatch is check of one request of several.
func (s *Service) checkInBatch(req *pb.MatchRequest) error {
	if len(req.MinOffsets) > 0 || req.TimeoutMs > 0 {
		return invalid("min_offsets and timeout_ms are of the batch, not of a request in it")
	}
	return s.check(req)
}

// errorMessage is an error as one of several results.
func errorMessage(err error) *pb.Error {
	st := status.Convert(err)
	return &pb.Error{Code: codeName(st.Code()), Message: st.Message()}
}
