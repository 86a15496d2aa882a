package query

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

func connect(t testing.TB, s *Server) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(s.GRPCAddr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestProbesFollowReadiness(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{})
	health := healthpb.NewHealthClient(connect(t, s))
	check := func(wantHTTP int, want healthpb.HealthCheckResponse_ServingStatus, wantText string) {
		t.Helper()
		if code, text := get(t, s, "/readyz"); code != wantHTTP || !strings.Contains(text, wantText) {
			t.Errorf("readyz: %d %s, want %d %s", code, text, wantHTTP, wantText)
		}
		if code, _ := get(t, s, "/healthz"); code != http.StatusOK {
			t.Errorf("healthz: %d", code)
		}
		for _, service := range []string{"", "kvindex.v1.KVIndex"} {
			resp, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
			if err != nil || resp.Status != want {
				t.Errorf("health of %q: %v, %v, want %v", service, resp, err, want)
			}
		}
	}
	check(200, healthpb.HealthCheckResponse_SERVING, `{"ready":true,"missing":[]}`)
	f.setReady(Readiness{Missing: []string{"kv-events/0: restoring", `kv-events/1: "odd"`}})
	check(503, healthpb.HealthCheckResponse_NOT_SERVING, `{"ready":false,"missing":["kv-events/0: restoring","kv-events/1: \"odd\""]}`)
	f.setReady(Readiness{Ready: true})
	check(200, healthpb.HealthCheckResponse_SERVING, `true`)

	if _, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "x"}); status.Code(err) != codes.NotFound {
		t.Errorf("unknown service: %v", err)
	}
	list, err := health.List(t.Context(), &healthpb.HealthListRequest{})
	if err != nil || len(list.Statuses) != 2 {
		t.Errorf("list: %v, %v", list, err)
	}
}

// A watcher is told every change, and last of all that we are going.
func TestHealthWatch(t *testing.T) {
	f := fleet(t)
	s := serve(t, f, Config{})
	stream, err := healthpb.NewHealthClient(connect(t, s)).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if resp, err := stream.Recv(); err != nil || resp.Status != want {
			t.Fatalf("got %v, %v, want %v", resp, err, want)
		}
	}
	next(healthpb.HealthCheckResponse_SERVING)
	f.setReady(Readiness{})
	next(healthpb.HealthCheckResponse_NOT_SERVING)
	f.setReady(Readiness{Ready: true})
	next(healthpb.HealthCheckResponse_SERVING)
	s.Drain()
	next(healthpb.HealthCheckResponse_NOT_SERVING)
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the end: %v, want Unavailable", err)
	}
}

func TestReflectionKnowsTheService(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	stream, err := reflectpb.NewServerReflectionClient(connect(t, s)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(resp.GetListServicesResponse().GetService(), func(s *reflectpb.ServiceResponse) bool { return s.Name == "kvindex.v1.KVIndex" }) {
		t.Errorf("got %v", resp)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
}

// While shutting down, probes say no, a request under way is answered, and new
// ones find nobody.
func TestShutdownAnswersWhatIsUnderWay(t *testing.T) {
	f := fleet(t)
	arrived, goOn := make(chan struct{}), make(chan struct{})
	f.onModel = func() {
		arrived <- struct{}{}
		<-goOn
	}
	s := serve(t, f, Config{})
	answers := make(chan error, 2)
	for _, a := range askers(t, s) {
		go func() {
			resp, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
			if err == nil && show(resp) != "deep/0:3" {
				err = errors.New(show(resp))
			}
			answers <- err
		}()
	}
	<-arrived
	<-arrived
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(context.Background()) }()
	eventually(t, "the listeners are closed", func() bool {
		for _, addr := range []net.Addr{s.GRPCAddr(), s.HTTPAddr()} {
			if conn, err := net.Dial("tcp", addr.String()); err == nil {
				conn.Close()
				return false
			}
		}
		return true
	})
	if s.readiness().Ready {
		t.Error("ready while draining")
	}
	close(goOn)
	for range 2 {
		if err := <-answers; err != nil {
			t.Errorf("a request under way: %v", err)
		}
	}
	if err := <-down; err != nil {
		t.Errorf("shutdown: %v", err)
	}
}

func TestShutdownCutsOffAtItsDeadline(t *testing.T) {
	f := fleet(t)
	arrived, goOn := make(chan struct{}), make(chan struct{})
	f.onModel = func() {
		close(arrived)
		<-goOn
	}
	s, err := NewServer(f, Config{GRPCAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	client, answer := dial(t, s), make(chan error, 1)
	go func() {
		_, err := client.Match(context.Background(), &pb.MatchRequest{Model: "m", Tokens: prompt})
		answer <- err
	}()
	<-arrived
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(ctx) }()
	if err := <-answer; status.Code(err) != codes.Unavailable {
		t.Errorf("the request: %v, want Unavailable", err)
	}
	close(goOn) // grpc-go waits for its handlers even so
	if err := <-down; !errors.Is(err, context.Canceled) {
		t.Errorf("shutdown: %v, want that it cut requests off", err)
	}
}

func TestStartFailsOnAnAddressInUse(t *testing.T) {
	taken := serve(t, fleet(t), Config{}).HTTPAddr().String()
	for name, cfg := range map[string]Config{"grpc": {GRPCAddr: taken}, "http": {GRPCAddr: "127.0.0.1:0", HTTPAddr: taken}} {
		s, err := NewServer(fleet(t), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Start(t.Context()); err == nil || !strings.Contains(err.Error(), taken) {
			t.Errorf("%s: %v, want an error that names %s", name, err, taken)
		}
	}
}

func TestNegativeLimitsAreRefused(t *testing.T) {
	_, err := NewServer(newFake(), Config{Limits: Limits{MaxTokens: -1, Deadline: -1}})
	if err == nil || !strings.Contains(err.Error(), "max-tokens") || !strings.Contains(err.Error(), "query-deadline") {
		t.Errorf("got %v, want both named", err)
	}
}

func TestWorkersAndStatus(t *testing.T) {
	f := newFake()
	f.workers = []WorkerStatus{{
		Worker: "w", Rank: 2, Model: "m", BlockSize: 16, Hasher: index.Dynamo, Partition: 5, Epoch: 7, Seq: 8,
		Blocks: [index.Tiers]int{1, 2, 3, 4}, Age: 2 * time.Second, Silent: true, Incomplete: true, Retired: true,
	}}
	f.ready = Readiness{Missing: []string{"kv-events/1: failed"}}
	f.status = Status{
		Group: "g", Instance: "i", Version: "v1", Started: time.UnixMilli(12345),
		Events: TopicStatus{"kv-events", "id1"}, Snapshots: TopicStatus{"kv-snapshots", "id2"},
		Partitions: []PartitionStatus{{
			Partition: 1, State: "failed", Position: 10, End: 12, Lag: 2, StartedAt: 3, Reread: 4, Floor: -1, SnapshotDuty: true,
			SnapshotAge: time.Minute, Workers: 6, Paused: true, RestoreSeconds: 0.25, Problem: "gone",
		}},
		Models:   []ModelStatus{{"m", 16, index.Flash, 3, 99}},
		Counters: map[string]int64{"records": 5, "gaps": 1},
		Warnings: []string{"snapshots fail"},
	}
	s := serve(t, f, Config{})
	const (
		worker = `{"worker":"w","dp_rank":2,"model":"m","block_size":16,"hasher":"dynamo","partition":5,"epoch":7,"seq":8,` +
			`"blocks":{"device":1,"host":2,"disk":3,"external":4},"age_ms":2000,"silent":true,"incomplete":true,"retired":true}`
		stage = `{"ready":false,"group":"g","instance":"i","version":"v1","started_ms":12345,` +
			`"events":{"name":"kv-events","id":"id1"},"snapshots":{"name":"kv-snapshots","id":"id2"},` +
			`"partitions":[{"partition":1,"state":"failed","position":10,"end":12,"lag":2,"started_at":3,"reread":4,"floor":-1,` +
			`"snapshot_duty":true,"snapshot_age_ms":60000,"workers":6,"paused":true,"restore_seconds":0.25,"problem":"gone"}],` +
			`"models":[{"model":"m","block_size":16,"hasher":"flash","workers":3,"blocks":99}],` +
			`"counters":{"gaps":1,"records":5},"warnings":["snapshots fail"],"missing":["kv-events/1: failed"]}`
	)
	if code, got := get(t, s, "/v1/workers?model=m"); code != 200 || got != `{"workers":[`+worker+"]}\n" {
		t.Errorf("workers: %d %s", code, got)
	}
	if code, got := get(t, s, "/v1/status"); code != 200 || got != stage+"\n" {
		t.Errorf("status: %d %s", code, got)
	}
	client := dial(t, s)
	workers, err := client.Workers(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	if got := string(appendJSON(nil, workers.Workers[0].ProtoReflect())); got != worker {
		t.Errorf("workers over gRPC: %s", got)
	}
	st, err := client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := string(appendJSON(nil, st.ProtoReflect())); got != stage {
		t.Errorf("status over gRPC: %s", got)
	}
}

// A stream that a tool has left open does not hold up the shutdown.
func TestReflectionEndsWithTheServer(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	stream, err := reflectpb.NewServerReflectionClient(connect(t, s)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ends with %v", err)
	}
}

// A connection that asks nothing is closed, one with a stream is not, and a client that
// asks again does not notice.
func TestIdleConnectionsEnd(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{IdleTimeout: 50 * time.Millisecond}})
	open := &s.grpcAt.(*doorListener).open
	client, watching := dial(t, s), openStream(t, t.Context(), s)
	for range 3 {
		if _, err := client.Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "only the stream's is open", func() bool { return open.Load() == 1 })
		if code, text := post(t, s, `{"model":"m","tokens":[1,2,3,4]}`); code != http.StatusOK {
			t.Fatal(code, text)
		}
		eventually(t, "none is open over HTTP", func() bool { return s.httpAt.(*doorListener).open.Load() == 0 })
	}
	sendOn(t, watching, 1, &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
	if resp, err := watching.Recv(); err != nil || showAnswer(resp) != "1: deep/0:3" {
		t.Error(resp, err)
	}
}
