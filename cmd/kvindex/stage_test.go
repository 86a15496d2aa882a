package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/pipeline/query/client"
	"kvindex/testcontainers"
)

// running is a stage in a process of its own.
type running struct {
	broker  testcontainers.Broker
	address string
	child   *child
}

func (r *running) start(t *testing.T) {
	t.Helper()
	if r.address == "" {
		r.address = testcontainers.FreeAddress(t, 1)
	}
	var err error
	r.child, err = startChild(filepath.Join(t.TempDir(), "log"), stageCommandName, "--brokers", r.broker.Brokers()[0],
		"--grpc-listen", r.address, "--http-listen", "127.0.0.1:0", "--snapshot-max-age", "200ms", "--drain-timeout", "1s", "--log-level", "warn", "--max-runnable", childRunnable)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.child.kill)
}

// settled waits until the stage has applied all there is.
func (r *running) settled(t *testing.T) {
	t.Helper()
	ctx, stop := r.child.during(t.Context())
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cl, err := client.Dial(r.address, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if _, _, err := stageAtEnd(ctx, r.address, cl, testcontainers.Admin(t, r.broker), func(string) {}); err != nil {
		t.Fatal(because(ctx, err))
	}
}

// run executes a command against the stage and its broker.
func (r *running) run(t *testing.T, code int, args ...string) executed {
	t.Helper()
	for k, v := range map[string]string{"KVINDEX_BROKERS": r.broker.Brokers()[0], "KVINDEX_QUERY_ADDRESS": r.address} {
		t.Setenv(k, v)
	}
	got := execute(t, args...)
	if got.code != code {
		t.Fatalf("%v: exit code %d, want %d\n%s%s", args, got.code, code, got.out, got.err)
	}
	return got
}

// TestCommandsAgainstAStage runs every command that asks a stage, before and
// after the stage is killed and the log trimmed.
func TestCommandsAgainstAStage(t *testing.T) {
	r := &running{broker: newTopics(t)}
	r.address = "127.0.0.1:1"
	if got := r.run(t, codeFailed, "status"); !strings.Contains(got.err, "127.0.0.1:1") {
		t.Errorf("status without a stage: %s", got.err)
	}
	r.address = ""
	r.start(t)
	r.settled(t)
	r.run(t, 0, "replay", "--synthetic", "400", "--workers", "6", "--capacity", "300")
	r.settled(t)

	got := r.run(t, 0, "status", "--workers")
	for _, want := range []string{"ready", "partition", "worker-5", "demo", "records_applied_total"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("status: no %q in\n%s", want, got.out)
		}
	}
	var status struct {
		Ready      bool
		Partitions []struct{ State string }
		Models     []struct {
			Model   string
			Workers int
		}
	}
	got = r.run(t, 0, "status", "--output", "json")
	if err := json.Unmarshal([]byte(got.out), &status); err != nil || !status.Ready || len(status.Partitions) != 4 || len(status.Models) != 1 || status.Models[0].Workers != 6 {
		t.Errorf("status: %v\n%s", err, got.out)
	}

	// Tokens that the simulated fleet has never seen, by each way to give them.
	for _, args := range [][]string{{"--tokens", "1,2 3"}, {"--tokens-file", writeFile(t, "[1,\n2, 3]")}, {"--local-hashes", "18446744073709551615"}} {
		if got := r.run(t, 0, append([]string{"query"}, args...)...); !strings.Contains(got.out, "0 workers hold some") {
			t.Errorf("query %v: %s", args, got.out)
		}
	}
	if got := r.run(t, 0, "query", "--tokens", "1", "--fail-open", "--min-offsets", "0=1099511627776", "--hasher", "flash"); !strings.Contains(got.out, "partial: partition 0: offset 1099511627776") {
		t.Errorf("query of a record to come: %s", got.out)
	}
	r.run(t, codeFailed, "query", "--model", "unheard", "--tokens", "1")
	for _, args := range []string{"", "--tokens 1 --local-hashes 1", "--tokens 1,x", "--tokens 4294967296", "--tokens-file /nowhere", "--tokens 1 --min-offsets 1", "--tokens 1 --watch -1s"} {
		r.run(t, codeUsage, append([]string{"query"}, strings.Fields(args)...)...)
	}

	if got := r.run(t, 0, "verify", "--queries", "300"); !strings.HasPrefix(got.out, "exact: 300 queries and the state of 6 worker-ranks") {
		t.Errorf("verify: %s", got.out)
	}
	for deadline := time.Now().Add(patience); ; {
		var parts []inspected
		got := r.run(t, 0, "snapshot", "inspect", "--output", "json")
		if err := json.Unmarshal([]byte(got.out), &parts); err != nil {
			t.Fatal(err)
		}
		saved := 0
		for _, p := range parts {
			saved += len(p.Workers)
		}
		if saved == 6 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d worker-ranks have a snapshot, want 6: %s", saved, got.out)
		}
	}
	if got := r.run(t, 0, "snapshot", "inspect"); !strings.Contains(got.out, "worker-3") || !strings.Contains(got.out, "floor ") {
		t.Errorf("snapshot inspect: %s", got.out)
	}

	// One that follows has seen what is trimmed before its second look.
	lines, line := io.Pipe()
	followed := make(chan executed)
	go func() {
		followed <- executeOf(t.Context(), commands(), lines, "verify", "--follow", "--queries", "200", "--timeout", patience.String())
	}()
	if _, err := io.WriteString(line, ""); err != nil {
		t.Fatal(err)
	}
	r.child.kill()
	r.start(t)
	r.settled(t)
	trimToFloors(t, r.broker)
	if _, err := io.WriteString(line, "\n"); err != nil {
		t.Fatal(err, (<-followed).err)
	}
	line.Close()
	if got := <-followed; got.code != 0 || strings.Count(got.out, "exact: 200 queries") != 2 {
		t.Errorf("verify --follow: exit code %d\n%s%s", got.code, got.out, got.err)
	}
	if got := r.run(t, codeFailed, "verify"); !strings.Contains(got.err, "cannot be checked") {
		t.Errorf("verify of a trimmed log: %s", got.err)
	}

	// Now one record that is none.
	cl := testcontainers.Client(t, r.broker, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err := cl.ProduceSync(t.Context(), &kgo.Record{Topic: defaultSnapshotTopic, Partition: 2, Key: []byte("?"), Value: []byte("?")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if got := r.run(t, codeCheck, "snapshot", "inspect", "--partition", "2", "--output", "json"); !strings.Contains(got.out, `"bad_records"`) {
		t.Errorf("snapshot inspect: %s", got.out)
	}
	r.run(t, 0, "snapshot", "inspect", "--partition", "1")
	r.run(t, codeUsage, "snapshot", "inspect", "--partition", "4")
	if got := r.run(t, codeCheck, "snapshot", "inspect", "--topic", "another"); strings.Count(got.out+got.err, "topic another does not exist") != 1 {
		t.Errorf("snapshot inspect: %s%s", got.out, got.err)
	}
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// trimToFloors deletes all records that the consumer group's offsets say are
// safe to delete, once there are some.
func trimToFloors(t *testing.T, broker testcontainers.Broker) {
	t.Helper()
	adm := testcontainers.Admin(t, broker)
	for deadline := time.Now().Add(patience); ; {
		floors, err := adm.FetchOffsetsForTopics(t.Context(), defaultGroup, defaultTopic)
		if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
			t.Fatal(err)
		}
		trim := kadm.Offsets{}
		floors.Each(func(o kadm.OffsetResponse) {
			if o.At > 0 {
				trim.Add(o.Offset)
			}
		})
		if len(trim[defaultTopic]) > 0 {
			deleted, err := adm.DeleteRecords(t.Context(), trim)
			if err == nil {
				err = deleted.Error()
			}
			if err != nil {
				t.Fatal(err)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no floor was committed: %v", floors)
		}
	}
}
