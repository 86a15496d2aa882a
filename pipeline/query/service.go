// This file is the one implementation of the service, under both transports.

package query

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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
	now    time.Time
	locals []index.LocalHash
	mm     []index.MMHash
	done   []int64 // positions of the partitions before the search
	query  index.Query
	result index.Result
}

func (m *matcher) visible(w *index.Worker) bool { return !m.src.Worker(w, m.now).Hidden }

// Match finds how many leading blocks of a prompt each worker-rank holds.
func (s *Service) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	deadline := time.Now().Add(s.limits.Deadline)
	if err := s.check(req); err != nil {
		return nil, err
	}
	ready := s.src.Readiness()
	if !ready.Ready && !req.AllowPartial {
		return nil, notReady(ready)
	}
	model, err := s.src.Model(req.Model, int(req.BlockSize))
	if err != nil {
		return nil, modelError(err, ready)
	}
	if n := model.hasher().Blocks(len(req.Tokens)); n > s.limits.MaxBlocks {
		return nil, tooMany("tokens", n, "blocks", s.limits.MaxBlocks)
	}

	m := s.scratch.Get().(*matcher)
	defer s.scratch.Put(m)
	if err := m.hash(req, model); err != nil {
		return nil, err
	}
	if err := inTime(ctx, deadline); err != nil {
		return nil, err
	}
	m.find(req, model)
	if err := inTime(ctx, deadline); err != nil {
		return nil, err
	}
	resp := m.answer(model)
	if !ready.Ready {
		resp.Partial, resp.Missing = true, ready.Missing
	}
	if s.traced {
		describe(ctx, req, resp)
	}
	return resp, nil
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
	m.now = m.src.Now()
	m.done = m.src.Positions(m.done[:0])
	m.query.Locals = m.locals
	m.query.Workers = req.Workers
	m.query.TopK = int(req.TopK)
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
			row.Offset = m.done[p]
		}
		resp.Matches = append(resp.Matches, row)
	}
	return resp
}

// depth returns a depth in blocks and in tokens.
func (m *Model) depth(n int) (blocks, tokens uint32) {
	return uint32(n), uint32(n * m.BlockSize)
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

// inTime fails once the caller has gone or its time or ours is over. A query
// never waits, so looking between its steps is enough and needs no timer.
func inTime(ctx context.Context, deadline time.Time) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	if !time.Now().Before(deadline) {
		return status.Error(codes.DeadlineExceeded, "the query took longer than the limit deadline")
	}
	return nil
}

// modelError says why there is no model to ask. As long as partitions are
// missing, so may be the model.
func modelError(err error, ready Readiness) error {
	switch {
	case errors.Is(err, ErrAmbiguousModel):
		return status.Error(codes.FailedPrecondition, err.Error()+": give block_size")
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
