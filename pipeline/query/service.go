// This file is the one implementation of the service, under both transports.

package query

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

// Service answers the queries. Its errors are gRPC statuses. It is safe for use
// by any number of goroutines, and a query costs its answer's memory only: the
// hashes and the index's result come from a pool.
type Service struct {
	pb.UnimplementedKVIndexServer
	src     Source
	limits  Limits
	traced  bool // spans are in the contexts; false saves looking for them
	scratch sync.Pool
	waiting atomic.Int64 // queries that wait for min_offsets
}

// NewService returns a Service over src.
func NewService(src Source, limits Limits) *Service {
	s := &Service{src: src, limits: limits.withDefaults()}
	s.scratch.New = func() any {
		m := &matcher{src: src}
		m.query.Keep = m.visible // once, so that a query makes no closure
		return m
	}
	return s
}

// matcher is what one query needs while it runs, kept for the next.
type matcher struct {
	src    Source
	ready  Readiness
	now    time.Time
	done   []Position // of the partitions before the search
	blocks int        // in the prompts so far
	rows   int        // in the answers so far
	turn   bool       // to search

	locals []index.LocalHash
	mm     []index.MMHash
	query  index.Query
	result index.Result
}

func (m *matcher) visible(w *index.Worker) bool { return !m.src.Worker(w, m.now).Hidden }

// Match finds how many leading blocks of a prompt each worker-rank holds.
func (s *Service) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	due := s.due(ctx, req.TimeoutMs, req.FailOpen)
	if err := s.check(req); err != nil {
		return nil, err
	}
	late, turn, err := s.await(ctx, req.MinOffsets, due, partialAllowed(req), req.FailOpen)
	if err != nil {
		return nil, err
	}
	m := s.scratch.Get().(*matcher)
	m.look(turn)
	resp, err := s.match(ctx, m, req, due, late)
	s.scratch.Put(m) // not after a panic: a search that was left half-way has depths in it
	if err == nil && s.traced {
		describe(ctx, req, resp)
	}
	return resp, err
}

// look reads what is ready and how far the partitions are, for the searches that
// follow if it is the query's turn.
func (m *matcher) look(turn bool) {
	m.turn = turn
	m.ready = m.src.Readiness()
	m.now = m.src.Now()
	m.done = m.src.Positions(m.done[:0])
	m.blocks, m.rows = 0, 0
}

// match answers one request that passed check. late has the records that it wants to
// be in the answer and that are not.
func (s *Service) match(ctx context.Context, m *matcher, req *pb.MatchRequest, due time.Time, late []string) (*pb.MatchResponse, error) {
	if err := m.whole(req); err != nil {
		return nil, err
	}
	if len(late) > 0 && !req.FailOpen {
		return nil, status.Error(codes.DeadlineExceeded, strings.Join(late, "; "))
	}
	if !m.turn {
		resp := &pb.MatchResponse{BlockSize: req.BlockSize}
		m.mark(resp, late)
		return resp, nil
	}
	model, err := s.src.Model(req.Model, int(req.BlockSize), req.Hasher)
	if err != nil {
		if req.FailOpen && !m.ready.Ready && errors.Is(err, ErrUnknownModel) {
			resp := &pb.MatchResponse{BlockSize: req.BlockSize}
			m.mark(resp, late, err.Error())
			return resp, nil
		}
		return nil, modelError(err, m.ready)
	}
	if err := s.count(m, req, model); err != nil {
		return nil, err
	}
	if err := m.hash(req, model); err != nil {
		return nil, err
	}
	if req.FailOpen {
		due = time.Time{} // which bounded the wait: the search is all that it waited for
	}
	if err := inTime(ctx, due); err != nil {
		return nil, err
	}
	m.find(req, model)
	if err := inTime(ctx, due); err != nil {
		return nil, err
	}
	// A partition may have been dropped under the search.
	if m.ready.Ready {
		m.ready = s.src.Readiness()
	}
	if err := m.whole(req); err != nil {
		return nil, err
	}
	if n := m.rows + len(m.result.Matches); m.rows > 0 && n > s.limits.MaxBatchMatches {
		return nil, status.Errorf(codes.ResourceExhausted,
			"with those of the requests before it %d matches are above the limit of %d: give top_k or min_depth_blocks", n, s.limits.MaxBatchMatches)
	}
	resp := m.answer(model)
	m.rows += len(resp.Matches)
	m.mark(resp, late)
	return resp, nil
}

// whole fails if partitions are missing that the request cannot do without.
func (m *matcher) whole(req *pb.MatchRequest) error {
	if !m.ready.Ready && !partialAllowed(req) {
		return notReady(m.ready)
	}
	return nil
}

// partialAllowed reports whether a request wants what there is.
func partialAllowed(req *pb.MatchRequest) bool { return req.AllowPartial || req.FailOpen }

// count adds the prompt's blocks to those of the batch, which are bounded in all.
func (s *Service) count(m *matcher, req *pb.MatchRequest, model Model) error {
	n := len(req.LocalHashes)
	if n == 0 {
		n = model.hasher().Blocks(len(req.Tokens))
	}
	switch most := s.limits.MaxBlocks; {
	case n > most:
		return tooMany("tokens", n, "blocks", most)
	case m.blocks+n > most:
		return invalid("with those of the requests before it %d blocks are above the limit of %d", m.blocks+n, most)
	}
	m.blocks += n
	return nil
}

// mark says what is missing from an answer: partitions, records, and what else.
func (m *matcher) mark(resp *pb.MatchResponse, late []string, more ...string) {
	if !m.ready.Ready || len(late)+len(more) > 0 {
		resp.Partial, resp.Missing = true, slices.Concat(m.ready.Missing, late, more)
	}
	for i, p := range m.done {
		if p.Behind > 0 {
			resp.Behind = append(resp.Behind, &pb.Behind{Partition: int32(i), Offsets: p.Behind})
		}
	}
}

// check refuses what no index could answer.
func (s *Service) check(req *pb.MatchRequest) error {
	tokens, locals := len(req.Tokens), len(req.LocalHashes)
	switch {
	case req.Model == "":
		return invalid("model is empty")
	case (tokens == 0) == (locals == 0):
		return invalid("give either tokens or local_hashes, and at least one")
	case locals > 0 && (req.Lora != "" || req.Salt != "" || len(req.Mm) > 0):
		return invalid("lora, salt and mm go with tokens: local_hashes have them in already")
	case len(req.Lora) > s.limits.MaxNameBytes:
		return tooMany("lora", len(req.Lora), "bytes", s.limits.MaxNameBytes)
	case len(req.Salt) > s.limits.MaxNameBytes:
		return tooMany("salt", len(req.Salt), "bytes", s.limits.MaxNameBytes)
	case tokens > s.limits.MaxTokens:
		return tooMany("tokens", tokens, "tokens", s.limits.MaxTokens)
	case locals > s.limits.MaxBlocks:
		return tooMany("local_hashes", locals, "blocks", s.limits.MaxBlocks)
	case len(req.Mm) > s.limits.MaxMultimodal:
		return tooMany("mm", len(req.Mm), "multimodal entries", s.limits.MaxMultimodal)
	case len(req.Workers) > s.limits.MaxWorkersFilter:
		return tooMany("workers", len(req.Workers), "workers", s.limits.MaxWorkersFilter)
	case req.MinDepthBlocks > 0 && req.EarlyExit:
		return invalid("min_depth_blocks does not go with early_exit, whose depths are lower bounds")
	case req.Hasher != "":
		if _, err := index.ParseHasher(req.Hasher); err != nil {
			return invalid("hasher: %v", err)
		}
	}
	return nil
}

// hash fills m.locals with the prompt's blocks.
func (m *matcher) hash(req *pb.MatchRequest, model Model) error {
	m.locals = m.locals[:0]
	if len(req.LocalHashes) > 0 {
		m.locals = slices.Grow(m.locals, len(req.LocalHashes))
		for _, h := range req.LocalHashes {
			m.locals = append(m.locals, index.LocalHash(h))
		}
		return nil
	}
	if err := m.multimodal(req); err != nil {
		return err
	}
	m.locals = model.hasher().Append(m.locals, req.Tokens, index.Extra{LoRA: req.Lora, Salt: req.Salt, MM: m.mm})
	return nil
}

// find asks the index, as of now.
func (m *matcher) find(req *pb.MatchRequest, model Model) {
	m.result.Matches, m.result.LowerBounds = m.result.Matches[:0], false
	if len(m.locals) == 0 {
		return
	}
	m.query.Locals = m.locals
	m.query.Workers = req.Workers
	m.query.TopK = int(req.TopK)
	m.query.MinDepth = int(req.MinDepthBlocks)
	m.query.EarlyExit = req.EarlyExit
	model.Index.Find(&m.query, &m.result)
	m.query.Workers = nil // the request's, not the pool's
}

// answer turns the result into the message: three allocations, whatever its length.
func (m *matcher) answer(model Model) *pb.MatchResponse {
	resp := &pb.MatchResponse{
		Blocks:      uint32(len(m.locals)),
		BlockSize:   uint32(model.BlockSize),
		LowerBounds: m.result.LowerBounds,
	}
	if len(m.result.Matches) == 0 {
		return resp
	}
	rows := make([]pb.WorkerMatch, len(m.result.Matches))
	resp.Matches = make([]*pb.WorkerMatch, 0, len(rows))
	for i, match := range m.result.Matches {
		state := m.src.Worker(match.Worker, m.now)
		if state.Hidden { // since Find asked
			continue
		}
		row := &rows[len(resp.Matches)]
		row.Worker = match.Worker.Name
		row.DpRank = match.Worker.Rank
		depths := m.result.Depths(i)
		row.DepthBlocks, row.DepthTokens = model.depth(depths[index.Device])
		row.DepthHostBlocks, row.DepthHostTokens = model.depth(depths[index.Host])
		row.DepthDiskBlocks, row.DepthDiskTokens = model.depth(depths[index.Disk])
		row.DepthExternalBlocks, row.DepthExternalTokens = model.depth(depths[index.External])
		row.AgeMs = state.Age.Milliseconds()
		row.Incomplete = state.Incomplete
		row.Partition = state.Partition
		if p := int(state.Partition); p < len(m.done) { // else it is newer than the search
			row.Offset = m.done[p].Next
		}
		resp.Matches = append(resp.Matches, row)
	}
	return resp
}

// depth returns a depth in blocks and in tokens, of which there are no more than fit:
// workers may say that their blocks are of any size.
func (m *Model) depth(n int) (blocks, tokens uint32) {
	return uint32(n), uint32(min(n*m.BlockSize, math.MaxUint32))
}

// describe puts the query on its span.
func describe(ctx context.Context, req *pb.MatchRequest, resp *pb.MatchResponse) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	var best, bestAnywhere uint32
	var oldest int64
	incomplete := 0
	for _, m := range resp.Matches {
		best = max(best, m.DepthBlocks)
		bestAnywhere = max(bestAnywhere, m.DepthExternalBlocks)
		oldest = max(oldest, m.AgeMs)
		if m.Incomplete {
			incomplete++
		}
	}
	span.SetAttributes(
		attribute.String("kvindex.model", req.Model),
		attribute.Int("kvindex.blocks", int(resp.Blocks)),
		attribute.Int("kvindex.workers", len(resp.Matches)),
		attribute.Int("kvindex.depth", int(best)),
		attribute.Int("kvindex.depth_external", int(bestAnywhere)),
		attribute.Bool("kvindex.partial", resp.Partial),
		attribute.Int64("kvindex.age_ms", oldest),
		attribute.Int("kvindex.incomplete", incomplete),
	)
}

// inTime fails once the caller has gone or its time or ours is over. The work of a
// query never waits, so looking between its steps is enough and needs no timer.
// No deadline is the zero time.
func inTime(ctx context.Context, deadline time.Time) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	if !deadline.IsZero() && !time.Now().Before(deadline) {
		return status.Error(codes.DeadlineExceeded, "the time for the query was over before its answer")
	}
	return nil
}

// modelError says why there is no model to ask. As long as partitions are
// missing, so may be the model.
func modelError(err error, ready Readiness) error {
	switch {
	case errors.Is(err, ErrAmbiguousModel):
		return status.Error(codes.FailedPrecondition, err.Error()+": give block_size or hasher")
	case errors.Is(err, ErrUnknownModel) && !ready.Ready:
		return status.Error(codes.Unavailable, err.Error()+"; "+missingText(ready))
	case errors.Is(err, ErrUnknownModel):
		return status.Error(codes.NotFound, err.Error())
	}
	return status.Error(codes.Internal, err.Error())
}

func notReady(r Readiness) error { return status.Error(codes.Unavailable, missingText(r)) }

// missingText names what is missing, but not hundreds of partitions: the text
// travels in a header.
func missingText(r Readiness) string {
	const show = 8
	if n := len(r.Missing); n > show {
		return fmt.Sprintf("not ready: %s; and %d more", strings.Join(r.Missing[:show], "; "), n-show)
	}
	return "not ready: " + strings.Join(r.Missing, "; ")
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func tooMany(field string, n int, limit string, most int) error {
	return invalid("%s: %d %s are above the limit of %d", field, n, limit, most)
}
