package examples

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"kvindex/pipeline/verify"
	"kvindex/testcontainers"
)

// Real clients of the APIs of other indexers, and of gRPC by reflection, get from a
// stage what the oracle counts: five blocks of 16 tokens.
func TestForeignClients(t *testing.T) {
	python := testcontainers.Python(t, "confluent-kafka", "fastavro", "xxhash")
	client := testcontainers.Python(t, "msgpack", "requests", "xxhash")
	grpcurl := testcontainers.GoTool(t, "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4")
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "kv-events", 1, nil)
	ask, grpcAddr, httpAddr := stage(t, b, topic)
	produced := run(t, python, "--brokers", strings.Join(b.Brokers(), ","), "--topic", topic, "--worker", "42")
	ask(produced.Tokens, verify.State{WorkerRank: verify.WorkerRank{Worker: "42"}, Model: "example"}, 5)

	out := output(t, client, "dropin.py", "--url", "http://"+httpAddr)
	var answers map[string]json.RawMessage
	if err := json.Unmarshal(out, &answers); err != nil {
		t.Fatalf("dropin.py printed %s: %v", out, err)
	}
	mooncake := `{"default": {"42": {"longest_matched": 80, "GPU": 80, "DP": {"0": 80}, "CPU": 80, "DISK": 80}}}`
	dynamo := `{"scores": {"42": {"0": 80}}, "frequencies": [], "instances": {"42": {"longest_matched": 80, "gpu": 80, "dp": {"0": 80}, "cpu": 80, "disk": 80}}}`
	conductor := `{"instances": {"42": {"longest_matched": 80, "dp": {"0": 80}, "rank_matches": {"0": {"gpu": 80, "cpu": 80, "disk": 80}}, "gpu": 80, "cpu": 80, "disk": 80}}}`
	place := fmt.Sprintf("kafka:%s/0", topic)
	for path, want := range map[string]string{
		"/mooncake/query": mooncake, "/mooncake/query_by_hash": mooncake, "/mooncake/query in MessagePack": conductor,
		"/dynamo/query": dynamo, "/dynamo/query_by_hash": dynamo,
		"/dynamo/workers": fmt.Sprintf(`[{"instance_id": 42, "source": "kafka", "status": "active", "model_name": "example", "routing_group": "default", `+
			`"block_size": 16, "endpoints": {"0": %q}, "listeners": {"0": {"endpoint": %q, "status": "active"}}}]`, place, place),
	} {
		if got := string(answers[path]); got != want {
			t.Errorf("%s: %s\nwant %s", path, got, want)
		}
	}

	// grpcurl learns the service by reflection, and writes 64 bits as strings.
	var hashes []string
	for _, h := range produced.LocalHashes {
		hashes = append(hashes, fmt.Sprint(uint64(h)))
	}
	for _, prompt := range []map[string]any{{"tokens": produced.Tokens}, {"local_hashes": hashes}} {
		prompt["model"] = "example"
		body, err := json.Marshal(prompt)
		if err != nil {
			t.Fatal(err)
		}
		out := output(t, grpcurl, "-plaintext", "-d", string(body), grpcAddr, "kvindex.v1.KVIndex/Match")
		var got struct {
			Blocks  int
			Matches []struct {
				Worker      string
				DepthBlocks int
				DepthTokens int
			}
		}
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("grpcurl printed %s: %v", out, err)
		}
		if fmt.Sprint(got) != "{5 [{42 5 80}]}" {
			t.Errorf("grpcurl: %v of %s", got, out)
		}
	}
}

// output runs a program to its end and returns what it printed.
func output(t *testing.T, program string, args ...string) []byte {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program, args...).Output()
	if err != nil {
		var stderr []byte
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			stderr = e.Stderr
		}
		t.Fatalf("%s: %v\n%s%s", program, err, out, stderr)
	}
	return bytes.TrimSpace(out)
}
