// This file is the stage that somebody else runs, as what is asked.

package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"time"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
)

// Stage is one that runs already. Nothing is written to it.
type Stage struct {
	GRPC, HTTP string // host:port; HTTP may be empty
	Security   secure.Client
	Model      string
	BlockSize  int        // tokens; 0: the only one there is of the model
	Prompts    [][]uint32 // to ask for, in turn; nil: such as nobody holds
}

// What may be done to a stage that others use.
const (
	stageFirstRate = 100.0
	mostStageTime  = time.Minute // for each step and measurement
	mostPrompts    = 1024
	mostTokens     = 1 << 20         // of a prompt
	stageTimeout   = 5 * time.Second // for its status
)

// OfStage makes a configuration one of asking a stage: over the transports that it has
// an address for, with a rate that a stage in use can take.
func (c *QueryConfig) OfStage(s Stage) {
	c.Stage, c.Tokens, c.Workers, c.Held, c.BlocksPerSecond = &s, true, []int{0}, 0, 0
	if c.MostRate == 0 {
		c.MostRate = 10_000
	}
	if len(c.Transports) > 0 {
		return
	}
	for _, t := range QueryTransports() {
		if t != "json" || s.HTTP != "" {
			c.Transports = append(c.Transports, t)
		}
	}
}

func (c *QueryConfig) validateStage() error {
	s := c.Stage
	switch {
	case s.GRPC == "":
		return errors.New("no gRPC address of the stage")
	case s.Model == "":
		return errors.New("which model of the stage?")
	case s.HTTP == "" && slices.Contains(c.Transports, "json"):
		return errors.New("JSON needs the stage's HTTP address")
	case !c.Tokens:
		return errors.New("a stage is asked by tokens")
	case s.BlockSize < 0:
		return fmt.Errorf("%d tokens a block: want 1 or more, or 0", s.BlockSize)
	case max(c.Step, c.For, c.Overload) > mostStageTime:
		return fmt.Errorf("steps of %v, then %v, then %v: want %v at most of a stage that others may use", c.Step, c.For, c.Overload, mostStageTime)
	case len(s.Prompts) > mostPrompts:
		return fmt.Errorf("%d prompts: want %d at most", len(s.Prompts), mostPrompts)
	}
	for i, p := range s.Prompts {
		if len(p) == 0 || len(p) > mostTokens {
			return fmt.Errorf("prompt %d is of %d tokens: want 1 to %d", i+1, len(p), mostTokens)
		}
	}
	return nil
}

// stage measures all of a stage.
func (b *queryBench) stage() error {
	size, err := b.Stage.blockSize(b.ctx)
	if err != nil {
		return err
	}
	b.Stage.BlockSize = size
	if n := slices.Max(b.Blocks); b.Stage.Prompts == nil && n*size > mostTokens {
		return fmt.Errorf("prompts of %d blocks of %d tokens: a stage takes %d tokens at most", n, size, mostTokens)
	}
	if b.Stage.Prompts != nil {
		b.Blocks = []int{0} // of several lengths
		if len(b.Stage.Prompts) == 1 {
			b.Blocks[0] = len(b.Stage.Prompts[0]) / size
		}
	}
	return b.cases(&server{greeting: greeting{Main: addresses{b.Stage.GRPC, b.Stage.HTTP}}}, 0)
}

// blockSize asks the stage for that of the model.
func (s *Stage) blockSize(ctx context.Context) (int, error) {
	cl, err := client.Dial(s.GRPC, stageTimeout, s.Security.DialOptions()...)
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	st, err := cl.Status(ctx)
	if err != nil {
		return 0, fmt.Errorf("the stage at %s: %w", s.GRPC, err)
	}
	if !st.Ready {
		return 0, fmt.Errorf("the stage at %s is not ready: %s", s.GRPC, strings.Join(st.Missing, "; "))
	}
	var of []int
	for _, m := range st.Models {
		if m.Model == s.Model && (s.BlockSize == 0 || s.BlockSize == int(m.BlockSize)) && !slices.Contains(of, int(m.BlockSize)) {
			of = append(of, int(m.BlockSize))
		}
	}
	switch {
	case len(of) == 0:
		return 0, fmt.Errorf("the stage at %s has no model %q of that block size", s.GRPC, s.Model)
	case len(of) > 1:
		return 0, fmt.Errorf("the stage at %s has model %q of %v tokens a block: say which", s.GRPC, s.Model, of)
	}
	return of[0], nil
}

// requests are what a stage is asked for, and how many blocks each has.
func (s *Stage) requests(blocks int) (all []*pb.MatchRequest, of []int) {
	prompts := s.Prompts
	if prompts == nil {
		for number := range differing {
			prompts = append(prompts, madeUp(blocks*s.BlockSize, number))
		}
	}
	for _, tokens := range prompts {
		all = append(all, &pb.MatchRequest{Model: s.Model, BlockSize: uint32(s.BlockSize), Tokens: tokens})
		of = append(of, len(tokens)/s.BlockSize)
	}
	return all, of
}

// madeUp is a prompt that nobody holds: no two begin alike.
func madeUp(n, number int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32((i*7919 + number*104729) % 150000)
	}
	tokens[0] = math.MaxUint32 - uint32(number)
	return tokens
}

// checkWhole finds out that an answer is one to a prompt of so many blocks, and whole.
// What its depths should be only the stage knows.
func checkWhole(resp *pb.MatchResponse, blocks int) error {
	switch {
	case resp.GetPartial():
		return fmt.Errorf("an answer is partial: %s", strings.Join(resp.Missing, "; "))
	case int(resp.GetBlocks()) != blocks:
		return fmt.Errorf("a wrong answer: it is of a prompt of %d blocks, not %d", resp.GetBlocks(), blocks)
	}
	for _, m := range resp.Matches {
		if int(m.DepthExternalBlocks) > blocks || m.DepthBlocks > m.DepthExternalBlocks {
			return fmt.Errorf("a wrong answer: %q is said to hold %d and %d blocks of a prompt of %d", m.Worker, m.DepthBlocks, m.DepthExternalBlocks, blocks)
		}
	}
	return nil
}

// dialHTTP opens connections to the stage's HTTP port, and returns the header that its
// requests need besides, with its end of line.
func (s *Stage) dialHTTP() (dial func(context.Context, string) (net.Conn, error), header string, err error) {
	host, _, err := net.SplitHostPort(s.HTTP)
	if err != nil {
		return nil, "", err
	}
	cfg, authorization, err := s.Security.HTTP(host)
	if err != nil {
		return nil, "", err
	}
	if authorization != "" {
		header = "Authorization: " + authorization + "\r\n"
	}
	if cfg == nil {
		return dialPlain, header, nil
	}
	d := tls.Dialer{Config: cfg}
	return func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }, header, nil
}

func dialPlain(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}
