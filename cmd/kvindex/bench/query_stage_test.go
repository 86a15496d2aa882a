package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvindex/pipeline/query"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
)

// toldSource is a stage that tells of its models.
type toldSource struct {
	*querySource
	models []query.ModelStatus
	ready  query.Readiness
}

func (s *toldSource) Status() query.Status       { return query.Status{Models: s.models} }
func (s *toldSource) Readiness() query.Readiness { return s.ready }

// startStage is a stage with TLS, of callers' certificates too, and a token.
func startStage(t *testing.T) (*toldSource, Stage) {
	t.Helper()
	src, _, err := newQuerySource(ServerConfig{Workers: 3, Blocks: []int{12}})
	if err != nil {
		t.Fatal(err)
	}
	told := &toldSource{src, []query.ModelStatus{{Model: promptModel, BlockSize: promptBlock}, {Model: "two", BlockSize: 16}, {Model: "two", BlockSize: 64}}, query.Readiness{Ready: true}}
	ca := securetest.NewCA(t)
	pair, own := ca.Issue(t, "server"), ca.Issue(t, "client")
	token := filepath.Join(t.TempDir(), "token")
	securetest.WriteFile(t, token, "a-token-of-some-length\n")
	s, err := query.NewServer(told, query.Config{GRPCAddr: "127.0.0.1:0", HTTPAddr: "127.0.0.1:0", TokenFile: token,
		TLS: secure.Server{CertFile: pair.Cert, KeyFile: pair.Key, ClientCAFile: ca.File}, Logger: slog.New(slog.DiscardHandler),
		Limits: query.Limits{MaxRunnable: 1 << 20, Deadline: time.Minute, QueueTimeout: time.Minute, MaxQueue: 10_000}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.Shutdown(ctx) // who is still asking has gone
	})
	return told, Stage{GRPC: s.GRPCAddr().String(), HTTP: s.HTTPAddr().String(), Model: promptModel,
		Security: secure.Client{TLS: true, CAFile: ca.File, CertFile: own.Cert, KeyFile: own.Key, TokenFile: token}}
}

// ofStage asks next to nothing of a stage.
func ofStage(s Stage) QueryConfig {
	c := DefaultQueryConfig()
	c.Transports, c.MostRate, c.Slowest = nil, 200, time.Minute
	c.Step, c.For = 30*time.Millisecond, 50*time.Millisecond
	c.OfStage(s)
	return c
}

// A stage is asked over each transport, within the rate, and nothing else is started.
func TestQueryOfStage(t *testing.T) {
	_, stage := startStage(t)
	for name, prompts := range map[string][][]uint32{"made up": nil, "of a file": {promptTokens(12, 0), promptTokens(12, 1)[:100]}} {
		stage.Prompts = prompts
		c := ofStage(stage)
		c.Blocks, c.Overload = []int{12}, 50*time.Millisecond
		start := func(context.Context, ServerConfig) (io.WriteCloser, io.Reader, func() error, error) {
			panic("a server is started")
		}
		var out, table bytes.Buffer
		if err := RunQuery(t.Context(), c, start, &out, &table, noProgress{}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		seen, checked := map[string]bool{}, map[string]int64{}
		for text := range strings.Lines(out.String()) {
			var l struct {
				What, Transport, By       string
				Requests, Failed, Checked int64
				Blocks, Workers           int
				Offered                   float64  `json:"offered_per_s"`
				Cores                     *float64 `json:"server_cores"`
				Written                   *float64 `json:"written_blocks_per_s"`
			}
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				t.Fatal(err)
			}
			seen[l.Transport+" "+l.What] = true
			if l.Requests == 0 || l.Failed != 0 || l.By != "tokens" || l.Workers != 0 || l.Cores != nil || l.Written != nil || l.Blocks != map[bool]int{true: 12}[prompts == nil] {
				t.Errorf("%s: %s", name, text)
			}
			if most := map[bool]float64{false: 200, true: 800}[l.What == "overload"]; l.Offered > most {
				t.Errorf("%s: %v a second are offered: %s", name, l.Offered, text)
			}
			checked[l.Transport] += l.Checked
		}
		for _, transport := range QueryTransports() {
			for _, what := range strings.Fields("step saturation half empty overload after") {
				if !seen[transport+" "+what] {
					t.Errorf("%s: no %s over %s", name, what, transport)
				}
			}
			if seen[transport+" bare"] || checked[transport] == 0 {
				t.Errorf("%s over %s: a bare echo is %t, %d answers were looked at", name, transport, seen[transport+" bare"], checked[transport])
			}
		}
		if !strings.Contains(table.String(), "-") || strings.Contains(table.String(), "NaN") {
			t.Errorf("%s: the table is\n%s", name, &table)
		}
	}
}

func TestQueryOfStageFails(t *testing.T) {
	told, stage := startStage(t)
	for want, change := range map[string]func(*QueryConfig){
		`no model "x" of that`:        func(c *QueryConfig) { c.Stage.Model = "x" },
		"of [16 64] tokens a block":   func(c *QueryConfig) { c.Stage.Model = "two" },
		"is not ready: kv-events":     func(*QueryConfig) { told.ready = query.Readiness{Missing: []string{"kv-events: restoring"}} },
		"no bearer token":             func(c *QueryConfig) { c.Stage.Security.TokenFile = "" },
		"the stage at 127.0.0.1:":     func(c *QueryConfig) { c.Stage.Security = secure.Client{} },
		"no gRPC address":             func(c *QueryConfig) { c.Stage.GRPC = "" },
		"which model":                 func(c *QueryConfig) { c.Stage.Model = "" },
		"JSON needs the stage's HTTP": func(c *QueryConfig) { c.Stage.HTTP = "" },
		"1m0s at most of a stage":     func(c *QueryConfig) { c.For = 2 * time.Minute },
		"1025 prompts":                func(c *QueryConfig) { c.Stage.Prompts = make([][]uint32, 1025) },
		"prompt 2 is of 0 tokens":     func(c *QueryConfig) { c.Stage.Prompts = [][]uint32{{1}, {}} },
		"at most 1e+07 requests":      func(c *QueryConfig) { c.MostRate = 1e7 },
		"-1 tokens a block":           func(c *QueryConfig) { c.Stage.BlockSize = -1 },
		"asked by tokens":             func(c *QueryConfig) { c.Tokens = false },
		"a stage takes 1048576":       func(c *QueryConfig) { c.Blocks = []int{65536}; c.Stage.Model, c.Stage.BlockSize = "two", 64 },
	} {
		told.ready = query.Readiness{Ready: true}
		c := ofStage(stage)
		change(&c)
		if err := RunQuery(t.Context(), c, nil, io.Discard, io.Discard, noProgress{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// An answer that cannot be right is found.
func TestCheckWhole(t *testing.T) {
	right := func() *pb.MatchResponse {
		return &pb.MatchResponse{Blocks: 5, Matches: []*pb.WorkerMatch{{Worker: "w", DepthBlocks: 3, DepthExternalBlocks: 5}}}
	}
	if err := checkWhole(right(), 5); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*pb.MatchResponse){
		"partial":           func(r *pb.MatchResponse) { r.Partial = true },
		"of another prompt": func(r *pb.MatchResponse) { r.Blocks = 4 },
		"deeper than it is": func(r *pb.MatchResponse) { r.Matches[0].DepthExternalBlocks = 6 },
		"deeper in device":  func(r *pb.MatchResponse) { r.Matches[0].DepthExternalBlocks = 2 },
	} {
		r := right()
		spoil(r)
		if err := checkWhole(r, 5); err == nil {
			t.Errorf("%s: taken for right", name)
		}
	}
}
