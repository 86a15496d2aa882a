// This file is the tests' stage: a source over a real index, and both
// transports in front of it.

package query

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

// fakeSource is a stage whose state a test sets.
type fakeSource struct {
	mu      sync.Mutex
	models  []Model
	ready   Readiness
	states  map[*index.Worker]WorkerState
	workers []WorkerStatus
	status  Status
	onModel func() // called by Model, without the lock
	applied int64
	behind  int64
	moved   chan struct{} // closed by the next apply
}

var _ Source = (*fakeSource)(nil)

// newFake is a ready stage with one model, m, of 4 tokens a block.
func newFake() *fakeSource {
	f := &fakeSource{
		ready:  Readiness{Ready: true},
		states: map[*index.Worker]WorkerState{},
		moved:  make(chan struct{}),
	}
	f.addModel("m", 4, index.Flash)
	return f
}

func (f *fakeSource) addModel(name string, blockSize int, h index.Hasher) *index.Index {
	var s index.Structure = index.NewPositionalIndex(0)
	if h == index.Opaque {
		s = index.NewConcurrentRadixTree()
	}
	x := index.New(s)
	f.models = append(f.models, Model{Name: name, BlockSize: blockSize, Hasher: h, Index: x})
	return x
}

// holds makes a worker-rank of m hold the blocks, and gives it a state.
func (f *fakeSource) holds(t testing.TB, worker string, rank int32, locals []index.LocalHash, st WorkerState) *index.Worker {
	t.Helper()
	w := f.models[0].Index.AddWorker(worker, rank, nil)
	if _, err := w.Store(index.Device, index.Stored{Locals: locals}); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.states[w] = st
	return w
}

func (f *fakeSource) setReady(r Readiness) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ready = r
}

func (f *fakeSource) Readiness() Readiness {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ready
}

func (f *fakeSource) Model(name string, blockSize int, hasher string) (Model, error) {
	if f.onModel != nil {
		f.onModel()
	}
	var found Model // without allocating: see TestMatchAllocates
	n := 0
	for _, m := range f.models {
		if m.Name == name && (blockSize == 0 || blockSize == m.BlockSize) && (hasher == "" || hasher == m.Hasher.String()) {
			if n++; n > 1 {
				return Model{}, fmt.Errorf("%w %q: there are %v, %v", ErrAmbiguousModel, name, found, m)
			}
			found = m
		}
	}
	if n == 0 {
		return Model{}, fmt.Errorf("%w %q", ErrUnknownModel, name)
	}
	return found, nil
}

// Positions are those of four partitions, moved by apply.
func (f *fakeSource) Positions(dst []Position) []Position {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append(append(dst, Position{Next: 10 + f.applied, Behind: f.behind}), Position{Next: 11}, Position{Next: 12}, Position{Next: 1 << 60})
}

// apply applies so many more records of partition 0.
func (f *fakeSource) apply(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applied += n
	close(f.moved)
	f.moved = make(chan struct{})
}

func (f *fakeSource) Applied(partition int32, offset int64) (bool, error) {
	var buf [4]Position
	if partition < 0 || partition > 3 {
		return false, fmt.Errorf("%w %d: there are 4", ErrUnknownPartition, partition)
	}
	return f.Positions(buf[:0])[partition].Next > offset, nil
}

func (f *fakeSource) AwaitApplied(ctx context.Context, partition int32, offset int64) error {
	for {
		f.mu.Lock()
		moved := f.moved
		f.mu.Unlock()
		if ok, err := f.Applied(partition, offset); ok || err != nil {
			return err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (f *fakeSource) Now() time.Time { return time.Unix(1000, 0) }

func (f *fakeSource) Worker(w *index.Worker, _ time.Time) WorkerState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.states[w]
}

func (f *fakeSource) Workers(string) []WorkerStatus { return f.workers }
func (f *fakeSource) Status() Status                { return f.status }

func (f *fakeSource) Dump(context.Context, DumpFilter) ([]Held, error) { return nil, nil }

// serve starts a server over src on free ports of the loopback.
func serve(t testing.TB, src Source, cfg Config) *Server {
	t.Helper()
	cfg.GRPCAddr, cfg.HTTPAddr = "127.0.0.1:0", "127.0.0.1:0"
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	// Whatever else the tests' process and the machine do.
	cfg.Limits.MaxRunnable = cmp.Or(cfg.Limits.MaxRunnable, 1<<20)
	cfg.Limits.QueueTimeout = cmp.Or(cfg.Limits.QueueTimeout, patience)
	cfg.Limits.Deadline = cmp.Or(cfg.Limits.Deadline, patience)
	s, err := NewServer(src, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	return s
}

// asker asks the same of either transport.
type asker struct {
	name string
	ask  func(*pb.MatchRequest) (*pb.MatchResponse, error)
}

func askers(t testing.TB, s *Server) []asker {
	t.Helper()
	return []asker{
		{"grpc", func(req *pb.MatchRequest) (*pb.MatchResponse, error) {
			return dial(t, s).Match(t.Context(), req)
		}},
		{"http", func(req *pb.MatchRequest) (*pb.MatchResponse, error) {
			// protojson writes 64-bit numbers as strings and reads either.
			body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(req)
			if err != nil {
				t.Fatal(err)
			}
			code, answer := post(t, s, string(body))
			if code != http.StatusOK {
				return nil, httpToStatus(t, code, answer)
			}
			resp := new(pb.MatchResponse)
			if err := protojson.Unmarshal([]byte(answer), resp); err != nil {
				t.Fatalf("%v in %s", err, answer)
			}
			return resp, nil
		}},
	}
}

func dial(t testing.TB, s *Server) *client.Client {
	t.Helper()
	c, err := client.Dial(s.GRPCAddr().String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func post(t testing.TB, s *Server, body string) (int, string) {
	t.Helper()
	return do(t, s, http.MethodPost, "/v1/match", "application/json", strings.NewReader(body))
}

func postMany(t testing.TB, s *Server, body string) (int, string) {
	t.Helper()
	return do(t, s, http.MethodPost, "/v1/match_many", "application/json", strings.NewReader(body))
}

func get(t testing.TB, s *Server, path string) (int, string) {
	t.Helper()
	return do(t, s, http.MethodGet, path, "", nil)
}

func do(t testing.TB, s *Server, method, path, contentType string, body io.Reader) (int, string) {
	t.Helper()
	resp, answer := exchange(t, s, method, path, contentType, body)
	return resp.StatusCode, string(answer)
}

// exchange sends a request over HTTP and returns the answer with its body, which has
// been read.
func exchange(t testing.TB, s *Server, method, path, contentType string, body io.Reader) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.HTTPAddr().String()+path, body)
	if err != nil {
		t.Fatal(err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var buf bytes.Buffer
	if _, err := buf.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp, buf.Bytes()
}

// httpToStatus reads an error answer back into what the service said, and
// checks that its HTTP status fits its code.
func httpToStatus(t testing.TB, httpCode int, body string) error {
	t.Helper()
	want := map[string]int{
		"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "FAILED_PRECONDITION": 409, "RESOURCE_EXHAUSTED": 413, "UNAUTHENTICATED": 401,
		"INTERNAL": 500, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
	}
	code, message := errorOf(t, body)
	if httpCode == http.StatusTooManyRequests && code == "RESOURCE_EXHAUSTED" { // too many, not too large
		httpCode = want[code]
	}
	if want[code] != httpCode {
		t.Errorf("HTTP status %d with code %s", httpCode, code)
	}
	for c := range codesCount {
		if codeName(codes.Code(c)) == code {
			return status.Error(codes.Code(c), message)
		}
	}
	t.Fatalf("unknown code %q", code)
	return nil
}

// patience is how long anything that should happen may take.
const patience = 2 * time.Minute

// eventually polls until ok or patience is over.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
