// This file is the process that is asked: a stage's query side over an index that is
// made up and written to, without Kafka.

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"kvindex/index"
	"kvindex/pipeline/query"
	pb "kvindex/pipeline/query/kvindexpb"
)

// ServerConfig is what the server holds.
type ServerConfig struct {
	Workers         int
	Blocks          []int   // of the prompts
	Held            int64   // blocks besides, of whole conversations
	BlocksPerSecond float64 // written
}

// addresses are host:port.
type addresses struct {
	GRPC string `json:"grpc"`
	HTTP string `json:"http,omitempty"`
}

// greeting is the first line that the server writes.
type greeting struct {
	Main addresses `json:"main"`
	Bare addresses `json:"bare"` // gRPC with the same messages and nothing behind it
}

// serverStats is what it writes for each line that it is sent.
type serverStats struct {
	CPU      float64 `json:"cpu"` // seconds so far
	GC       float64 `json:"gc"`  // of them for the collector
	Resident int64   `json:"resident"`
	Written  int64   `json:"written"` // blocks
}

// ServeQueries serves until its input ends.
func ServeQueries(ctx context.Context, c ServerConfig, in io.Reader, out io.Writer) (err error) {
	q := DefaultQueryConfig()
	q.Workers, q.Blocks, q.BlocksPerSecond, q.Held = []int{c.Workers}, c.Blocks, c.BlocksPerSecond, c.Held
	if err := q.Validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	src, bare, err := newQuerySource(c)
	if err != nil {
		return err
	}
	meters, _, err := query.SetupMetrics()
	if err != nil {
		return err
	}
	s, err := query.NewServer(src, query.Config{GRPCAddr: "127.0.0.1:0", HTTPAddr: "127.0.0.1:0", Meters: meters,
		Logger: slog.New(slog.DiscardHandler)}) // its refusals are counted by who is refused
	if err != nil {
		return err
	}
	if err := s.Start(ctx); err != nil {
		return err
	}
	defer func() {
		ended, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.Shutdown(ended) // who is still asking has gone
	}()
	echo := grpc.NewServer()
	pb.RegisterKVIndexServer(echo, bare)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go echo.Serve(lis)
	defer echo.Stop()

	var w writer
	written := make(chan error, 1)
	go func() { written <- w.run(ctx, src.model.Index, c) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-written)
	}()

	answer := json.NewEncoder(out)
	if err := answer.Encode(greeting{addresses{s.GRPCAddr().String(), s.HTTPAddr().String()}, addresses{GRPC: lis.Addr().String()}}); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if err := answer.Encode(serverStats{processTime().Seconds(), gcSeconds(), resident(), w.blocks.Load()}); err != nil {
			return err
		}
	}
	return nil // an error of its input is an end too
}

// gcSeconds is the collector's processor time, as of the last collection.
func gcSeconds() float64 {
	s := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}}
	metrics.Read(s)
	return s[0].Value.Float64()
}

// promptModel and promptBlock are those of all prompts.
const (
	promptModel = "bench"
	promptBlock = 16 // tokens a block
	// differing is how many prompts of a length there are.
	differing = 4
)

// promptTokens makes up a prompt: no two have a block in common.
func promptTokens(blocks, number int) []uint32 {
	tokens := make([]uint32, blocks*promptBlock)
	for i := range tokens {
		tokens[i] = uint32((i*7919 + number*104729 + blocks*31) % 150000)
	}
	tokens[0] = uint32(number)<<20 | uint32(blocks)
	return tokens
}

func promptLocals(tokens []uint32) []index.LocalHash {
	return index.BlockHasher{BlockSize: promptBlock}.Append(nil, tokens, index.Extra{})
}

// promptDepth is how many blocks of a prompt a worker holds: from one to all but one
// worker's share, and each prompt is held by others.
func promptDepth(worker, workers, blocks, number int) int {
	return 1 + (worker+number*7)%workers*blocks/workers
}

func workerName(i int) string { return fmt.Sprintf("worker-%05d", i) }

// querySource is the stage that the query side sees: one model, always ready.
type querySource struct{ model query.Model }

func (s *querySource) Readiness() query.Readiness { return query.Readiness{Ready: true} }
func (s *querySource) Model(string, int, string) (query.Model, error) {
	return s.model, nil
}
func (s *querySource) Now() time.Time { return time.Now() }
func (s *querySource) Positions(dst []query.Position) []query.Position {
	return append(dst, query.Position{Next: 1})
}
func (s *querySource) Applied(int32, int64) (bool, error)               { return true, nil }
func (s *querySource) AwaitApplied(context.Context, int32, int64) error { return nil }
func (s *querySource) Worker(*index.Worker, time.Time) query.WorkerState {
	return query.WorkerState{}
}
func (s *querySource) Dump(context.Context, query.DumpFilter) ([]query.Held, error) { return nil, nil }
func (s *querySource) Workers(string) []query.WorkerStatus                          { return nil }
func (s *querySource) Status() query.Status                                         { return query.Status{} }

// newQuerySource fills an index with the prompts, and returns with it what a server
// with nothing behind it answers.
func newQuerySource(c ServerConfig) (*querySource, *bareServer, error) {
	x := index.New(index.NewRunIndex())
	src := &querySource{query.Model{Name: promptModel, BlockSize: promptBlock, Index: x}}
	workers := make([]*index.Worker, c.Workers)
	for i := range workers {
		workers[i] = x.AddWorker(workerName(i), 0, nil)
	}
	locals := make([]index.LocalHash, scaleConversation)
	for held := 0; int64(held) < c.Held; held += scaleConversation {
		i, conversation := held/scaleConversation%c.Workers, 1+held/scaleConversation/c.Workers
		for b := range locals {
			locals[b] = scaleLocal(i, conversation, b)
		}
		s := index.Stored{Position: index.NoPosition, Locals: locals}
		if _, err := workers[i].Store(index.Device, s); err != nil {
			return nil, nil, err
		}
	}
	bare := &bareServer{answers: map[int]*pb.MatchResponse{}}
	service := query.NewService(src, query.Limits{})
	for _, blocks := range c.Blocks {
		for number := range differing {
			locals := promptLocals(promptTokens(blocks, number))
			for i, w := range workers {
				n := promptDepth(i, c.Workers, blocks, number)
				if _, err := w.Store(index.Device, index.Stored{Position: index.NoPosition, Locals: locals[:n]}); err != nil {
					return nil, nil, err
				}
			}
		}
		resp, err := service.Match(context.Background(), &pb.MatchRequest{Model: promptModel, Tokens: promptTokens(blocks, 0)})
		if err != nil {
			return nil, nil, err
		}
		bare.answers[blocks] = resp
	}
	return src, bare, nil
}

// bareServer answers a prompt of a length with what it has for that.
type bareServer struct {
	pb.UnimplementedKVIndexServer
	answers map[int]*pb.MatchResponse
}

func (s *bareServer) answer(req *pb.MatchRequest) *pb.MatchResponse {
	return s.answers[max(len(req.GetLocalHashes()), len(req.GetTokens())/promptBlock)]
}

func (s *bareServer) Match(_ context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	return s.answer(req), nil
}

func (s *bareServer) MatchStream(stream grpc.BidiStreamingServer[pb.MatchStreamRequest, pb.MatchStreamResponse]) error {
	for {
		in, err := stream.Recv()
		if err != nil {
			return nil // the caller has gone
		}
		if err := stream.Send(&pb.MatchStreamResponse{Id: in.Id, Answer: s.answer(in.Request)}); err != nil {
			return nil
		}
	}
}

// writer stores and removes, as the fleet's events do. Each worker's conversation is a
// ring: it is stored turn by turn, then removed from its end, and so on.
type writer struct{ blocks atomic.Int64 }

func (w *writer) run(ctx context.Context, x *index.Index, c ServerConfig) error {
	if c.BlocksPerSecond == 0 {
		<-ctx.Done()
		return nil
	}
	const turns = scaleConversation / scaleTurn
	type ring struct {
		w      *index.Worker
		locals []index.LocalHash
		seqs   []index.SeqHash
	}
	rings := make([]ring, c.Workers)
	for i := range rings {
		r := &rings[i]
		r.w = x.AddWorker(fmt.Sprintf("writer-%05d", i), 0, nil)
		for b := range scaleConversation {
			r.locals = append(r.locals, scaleLocal(i, 0, b))
		}
		r.seqs = index.Chain(nil, r.locals)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	begun, done := time.Now(), 0.0
	for step := 0; ; step++ {
		for i := range rings {
			for done >= time.Since(begun).Seconds()*c.BlocksPerSecond {
				select {
				case <-ctx.Done():
					return nil
				case <-tick.C:
				}
			}
			// Half a ring apart, so that the index stays about as full.
			at := (step + i%2*turns) % (2 * turns)
			if r := &rings[i]; at < turns {
				s := index.Stored{Position: index.NoPosition, Locals: r.locals[at*scaleTurn : (at+1)*scaleTurn]}
				if at > 0 {
					s.Parent, s.HasParent = r.seqs[at*scaleTurn-1], true
				}
				if _, err := r.w.Store(index.Device, s); err != nil {
					return err
				}
			} else {
				at = 2*turns - 1 - at
				r.w.Remove(index.Device, r.seqs[at*scaleTurn:(at+1)*scaleTurn])
			}
			done += scaleTurn
			w.blocks.Add(scaleTurn)
		}
		if ctx.Err() != nil {
			return nil
		}
		if behind := time.Since(begun).Seconds()*c.BlocksPerSecond - done; behind > c.BlocksPerSecond {
			begun, done = time.Now(), 0 // a second behind: it is not made good
		}
	}
}
