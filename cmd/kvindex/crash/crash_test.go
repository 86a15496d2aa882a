// Package crash kills the stage as an operator's worst night would, on a real
// Kafka and under load, and compares what comes back with an oracle that shares
// nothing with the stage but the hash. It does so with the relay, engines and
// Kafka too, and compares with what the engines hold.
//
// `make crash` runs the first at full length: ten kills, and with TRACE=file the
// requests of that trace. KAFKA_BROKERS=host:port,... points it at brokers that
// run already; without, it starts one. `make crash-relay` runs the second: twenty
// rounds.
package crash

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/verify"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

const (
	patience   = 3 * time.Minute
	partitions = 8
	queries    = 1000
)

// kills is how many times the stage dies under load, warmUp how long the load
// runs before the first: a tenth of a log that is a second old is nothing, and on
// a busy machine a snapshot may be some seconds old.
func kills(t *testing.T) int {
	text := os.Getenv("KVINDEX_KILLS")
	if text == "" {
		return 3
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("KVINDEX_KILLS=%q: want a number above 0", text)
	}
	return n
}

const warmUp = 40 * time.Second

func TestKillNineUnderLoad(t *testing.T) {
	var broker testcontainers.Broker
	if addrs := os.Getenv("KAFKA_BROKERS"); addrs != "" {
		broker = testcontainers.NewExternal(strings.Split(addrs, ",")...)
	} else {
		broker = testcontainers.NewNative(t, testcontainers.NativeConfig{})
	}
	h := newHarness(t, broker)
	h.command("topics", "create", "--partitions", strconv.Itoa(partitions), "--replication-factor", "1")
	h.command("topics", "check")

	stage := h.serve()
	stage.ready()
	load := h.replay()
	n := kills(t)
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 7))
	pause(t, warmUp)
	for i := range n {
		pause(t, time.Duration(2000+rng.IntN(5000))*time.Millisecond)
		load.alive()
		before := stage.status()
		stage.kill()
		stage = h.serve()
		stage.notReadyUntilRestored()
		total, reread := stage.reread(before)
		h.stopLoad(load)
		compared := h.compare(stage, uint64(i))
		t.Logf("kill %d: %d records had been applied, %d were read again (%.1f %%), ready after %s, %d answers equal",
			i+1, total, reread, 100*float64(reread)/float64(total), stage.took.Round(time.Millisecond), compared)
		if reread*10 > total {
			t.Errorf("kill %d: %d of %d records were read again, want at most a tenth", i+1, reread, total)
		}
		h.goOn(load)
	}
	load.alive()
	h.stopLoad(load)
	load.end()
	h.compare(stage, 999) // the oracle reads what is about to be trimmed

	// Everything below the floor may be trimmed.
	floors := stage.floors()
	for p, floor := range floors {
		testcontainers.DeleteRecords(t, broker, h.events, int32(p), floor)
	}
	stage.kill()
	stage = h.serve()
	stage.ready()
	t.Logf("log trimmed up to the floors %v: %d answers equal", floors, h.compare(stage, 1000))

	// A compaction that takes records away leaves a restore as it was.
	removed := testcontainers.Compact(t, broker, h.snapshots)
	sum := 0
	for _, k := range removed {
		sum += k
	}
	if sum == 0 {
		t.Error("compaction of the snapshot topic removed nothing: it proves nothing")
	}
	stage.kill()
	stage = h.serve()
	stage.ready()
	t.Logf("%d snapshot records compacted away (by partition %v): %d answers equal", sum, removed, h.compare(stage, 1001))
	for _, w := range stage.status().Warnings {
		t.Errorf("the stage warns: %s", w)
	}
}

// harness is the commands' surroundings.
type harness struct {
	t                 *testing.T
	broker            testcontainers.Broker
	binary            string
	events, snapshots string
	env               []string
	grpc, http        string
	oracle            *verify.Oracle
	read              map[int32]int64
}

func newHarness(t *testing.T, b testcontainers.Broker) *harness {
	h := &harness{
		t: t, broker: b, binary: filepath.Join(t.TempDir(), "kvindex"),
		events: testcontainers.Name("kv-events"), snapshots: testcontainers.Name("kv-snapshots"),
		grpc: testcontainers.FreeAddress(t, 1), http: testcontainers.FreeAddress(t, 1),
		oracle: verify.New(time.Hour), read: map[int32]int64{},
	}
	build := exec.Command("go", "build", "-o", h.binary, "kvindex/cmd/kvindex")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	h.env = append(os.Environ(),
		"KVINDEX_BROKERS="+strings.Join(b.Brokers(), ","),
		"KVINDEX_TOPIC="+h.events,
		"KVINDEX_SNAPSHOT_TOPIC="+h.snapshots,
		"KVINDEX_GROUP="+testcontainers.Name("kvindex"),
		"KVINDEX_QUERY_ADDRESS="+h.grpc,
	)
	return h
}

// pause lets the load run: time is what this test is about, not what it waits for.
func pause(t *testing.T, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// command runs one to its end.
func (h *harness) command(args ...string) {
	h.t.Helper()
	cmd := exec.Command(h.binary, args...)
	cmd.Env = h.env
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("kvindex %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// process is a command that runs beside the test.
type process struct {
	h      *harness
	cmd    *exec.Cmd
	out    *bytes.Buffer
	exited chan struct{}
	took   time.Duration // until it was ready
	begun  time.Time
}

func (h *harness) start(args ...string) *process {
	h.t.Helper()
	p := &process{h: h, cmd: exec.Command(h.binary, args...), out: new(bytes.Buffer), exited: make(chan struct{}), begun: time.Now()}
	p.cmd.Env = h.env
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	go func() {
		p.cmd.Wait()
		close(p.exited)
	}()
	h.t.Cleanup(func() {
		p.kill()
		if h.t.Failed() {
			text := p.out.String()
			h.t.Logf("%s printed, at the end:\n%s", args[0], text[max(0, len(text)-6000):])
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) {
	p.h.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.h.t.Fatal(err)
	}
}

// kill ends it as kill -9 does, and waits until it is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// alive fails the test if it has ended.
func (p *process) alive() {
	p.h.t.Helper()
	select {
	case <-p.exited:
		p.h.t.Fatalf("%s has ended too soon", p.cmd.Args[1])
	default:
	}
}

func (h *harness) serve() *process {
	return h.start("serve", "--grpc-listen", h.grpc, "--http-listen", h.http,
		"--snapshot-max-age", "1s", "--worker-ttl", "30m", "--worker-grace", "1h", "--max-runnable", "1000000")
}

// replay starts the load: a trace of the operator's, or one made up.
func (h *harness) replay() *process {
	length := fmt.Sprint(80+6*kills(h.t)) + "s" // it has to outlast the kills
	if trace := os.Getenv("KVINDEX_TRACE"); trace != "" {
		return h.start("replay", "--trace", trace, "--speed", "25", "--capacity", "4096", "--stay")
	}
	return h.start("replay", "--synthetic", "200000", "--speed", "40", "--duration", length, "--capacity", "2048", "--stay")
}

// stopLoad freezes the load, and waits until nothing of it is on its way.
func (h *harness) stopLoad(load *process) {
	h.t.Helper()
	load.signal(syscall.SIGSTOP)
	last := fmt.Sprint(testcontainers.EndOffsets(h.t, h.broker, h.events))
	still := time.Now()
	testcontainers.Eventually(h.t, patience, func() error {
		now := fmt.Sprint(testcontainers.EndOffsets(h.t, h.broker, h.events))
		if now != last {
			last, still = now, time.Now()
		}
		if time.Since(still) < 2*time.Second {
			return errors.New("records are still arriving")
		}
		return nil
	})
}

func (h *harness) goOn(load *process) { load.signal(syscall.SIGCONT) }

// end stops the load for good.
func (p *process) end() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// readyz returns the readiness endpoint's status code and body.
func (p *process) readyz() (int, string) {
	resp, err := http.Get("http://" + p.h.http + "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

func (p *process) ready() {
	p.h.t.Helper()
	testcontainers.Eventually(p.h.t, patience, func() error {
		p.alive()
		if code, body := p.readyz(); code != http.StatusOK {
			return fmt.Errorf("not ready: %d %s", code, body)
		}
		p.took = time.Since(p.begun)
		return nil
	})
}

// notReadyUntilRestored watches readiness from the start: it must say no, with
// what is missing, for as long as a partition is not live, and a query in
// between must be refused rather than answered from half an index.
func (p *process) notReadyUntilRestored() {
	p.h.t.Helper()
	client, err := client.Dial(p.h.grpc, time.Second)
	if err != nil {
		p.h.t.Fatal(err)
	}
	defer client.Close()
	refused := 0
	testcontainers.Eventually(p.h.t, patience, func() error {
		p.alive()
		_, err := client.Match(p.h.t.Context(), &pb.MatchRequest{Model: "demo", LocalHashes: []uint64{1}})
		switch code, body := p.readyz(); {
		case code == http.StatusOK:
			p.took = time.Since(p.begun)
			return nil
		case code == 0:
			return errors.New("not listening yet")
		case code != http.StatusServiceUnavailable || !strings.Contains(body, p.h.events):
			p.h.t.Fatalf("readyz: %d %s", code, body)
		case err != nil:
			refused++
		}
		return errors.New("not ready yet")
	})
	if refused == 0 {
		p.h.t.Log("ready so soon that no query met it restoring")
	}
}

func (p *process) status() *pb.StatusResponse {
	p.h.t.Helper()
	client, err := client.Dial(p.h.grpc, patience)
	if err != nil {
		p.h.t.Fatal(err)
	}
	defer client.Close()
	st, err := client.Status(p.h.t.Context())
	if err != nil {
		p.h.t.Fatal(err)
	}
	return st
}

// reread returns how many records the process before had applied when it was
// last asked, and how many of those this one read again.
func (p *process) reread(before *pb.StatusResponse) (total, again int64) {
	p.h.t.Helper()
	began := map[int32]int64{}
	for _, row := range p.status().Partitions {
		began[row.Partition] = row.StartedAt
	}
	for _, row := range before.Partitions {
		total += row.Position
		again += max(0, row.Position-began[row.Partition])
	}
	return total, again
}

// floors waits until every partition has one and returns them.
func (p *process) floors() []int64 {
	p.h.t.Helper()
	floors := make([]int64, partitions)
	testcontainers.Eventually(p.h.t, patience, func() error {
		for _, row := range p.status().Partitions {
			if row.Floor < 0 {
				return fmt.Errorf("partition %d has no floor", row.Partition)
			}
			floors[row.Partition] = row.Floor
		}
		return nil
	})
	return floors
}

// compare brings stage and oracle to the same offsets, asks the stage random
// queries and compares every depth. It returns how many queries that were.
func (h *harness) compare(stage *process, seed uint64) int {
	h.t.Helper()
	ends := map[int32]int64{}
	for p, end := range testcontainers.StableOffsets(h.t, h.broker, h.events) {
		ends[int32(p)] = end
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	if err := h.oracle.Read(ctx, []kgo.Opt{kgo.SeedBrokers(h.broker.Brokers()...)}, h.events, h.read, ends); err != nil {
		h.t.Fatal(err)
	}
	h.read = ends
	testcontainers.Eventually(h.t, patience, func() error {
		for _, row := range stage.status().Partitions {
			if row.Position != ends[row.Partition] {
				return fmt.Errorf("partition %d: the stage is at %d, the oracle at %d", row.Partition, row.Position, ends[row.Partition])
			}
		}
		return nil
	})
	client, err := client.Dial(h.grpc, patience)
	if err != nil {
		h.t.Fatal(err)
	}
	defer client.Close()
	asked := h.oracle.Queries(rand.New(rand.NewPCG(seed, 3)), queries)
	if len(asked) < queries {
		h.t.Fatalf("%d queries can be made of what is held, want %d", len(asked), queries)
	}
	hits := 0
	for i, q := range asked {
		req := &pb.MatchRequest{Model: q.Model, BlockSize: uint32(q.BlockSize)}
		for _, l := range q.Locals {
			req.LocalHashes = append(req.LocalHashes, uint64(l))
		}
		resp, err := client.Match(ctx, req)
		if err != nil {
			h.t.Fatalf("query %d: %v", i, err)
		}
		want := h.oracle.Depths(q.Model, q.BlockSize, q.Locals)
		got := map[verify.WorkerRank]index.Depths{}
		for _, m := range resp.Matches {
			got[verify.WorkerRank{Worker: m.Worker, Rank: int32(m.DpRank)}] = index.Depths{int(m.DepthBlocks), int(m.DepthHostBlocks), int(m.DepthDiskBlocks), int(m.DepthExternalBlocks)}
		}
		if g, w := text(got), text(want); g != w {
			h.t.Fatalf("query %d of %d blocks: the stage says %s, the oracle %s", i, len(q.Locals), g, w)
		}
		hits += min(1, len(want))
	}
	if hits < len(asked)/2 {
		h.t.Fatalf("only %d of %d queries have an answer: they prove little", hits, len(asked))
	}
	return len(asked)
}

// text spells depths in a fixed order.
func text(depths map[verify.WorkerRank]index.Depths) string {
	m := make(map[string]index.Depths, len(depths))
	for k, v := range depths {
		m[fmt.Sprintf("%s/%d", k.Worker, k.Rank)] = v
	}
	b, _ := json.Marshal(m)
	return string(b)
}
