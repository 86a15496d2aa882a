package examples

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/query/client"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

// answered is a line that query.py prints.
type answered struct {
	Blocks  int
	Partial bool
	Missing []string
	Workers map[string]struct{ Tokens, Loadable int }
}

// The Python client, made from the proto file as it is, has the answers that the
// records' own hashes give: by calls and by a stream, past a replica that is away, and
// with the records that it wants to be in.
func TestPythonQuery(t *testing.T) {
	python := testcontainers.Python(t, "grpcio-tools==1.85.1")
	made := t.TempDir()
	gen := exec.CommandContext(t.Context(), python, "-m", "grpc_tools.protoc", "-I", "../../pipeline/query/kvindexpb",
		"--python_out="+made, "--grpc_python_out="+made, "kvindex.proto")
	if out, err := gen.CombinedOutput(); err != nil {
		t.Fatalf("protoc: %v\n%s", err, out)
	}
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "kv-events", 2, nil)
	_, address, _ := stage(t, b, topic)
	asking, err := client.Dial(address, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer asking.Close()
	testcontainers.Eventually(t, 2*time.Minute, func() error {
		st, err := asking.Status(t.Context())
		if err == nil && !st.Ready {
			err = fmt.Errorf("not ready: %v", st.Missing)
		}
		return err
	})

	const blockSize = 4
	rng := rand.New(rand.NewPCG(3, 4))
	prompt := make([]uint32, 40*blockSize)
	for i := range prompt {
		prompt[i] = rng.Uint32()
	}
	chain := index.BlockHasher{BlockSize: blockSize}.Append(nil, prompt, index.Extra{})
	cl := testcontainers.Client(t, b, kgo.DefaultProduceTopic(topic))
	held, last := map[string]int{}, map[int32]int64{}
	for i := range 8 {
		worker := fmt.Sprintf("wörker-%d", i)
		held[worker+"/0"] = 1 + rng.IntN(len(chain))
		value, err := schemas.AppendBatch(nil, &schemas.Batch{
			Producer: []byte("p"), Worker: []byte(worker), Epoch: 1, Model: []byte("example"), BlockSize: blockSize,
			Events: []schemas.Event{{Kind: schemas.KindStored, Stored: index.Stored{Locals: chain[:held[worker+"/0"]]}}}})
		if err != nil {
			t.Fatal(err)
		}
		rec := &kgo.Record{Key: []byte(worker), Value: value}
		if err := cl.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
			t.Fatal(err)
		}
		last[rec.Partition] = rec.Offset
	}

	args := []string{"query.py", "--address", "127.0.0.1:1", "--address", address, "--timeout", "30"}
	for p, offset := range last {
		args = append(args, "--min-offset", fmt.Sprintf("%d=%d", p, offset))
	}
	var lengths []int
	var input strings.Builder
	for range 20 {
		n := 1 + rng.IntN(len(prompt))
		lengths = append(lengths, n)
		fmt.Fprintln(&input, strings.Trim(fmt.Sprint(prompt[:n]), "[]"))
	}
	ask := func(args ...string) (out []answered) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), python, args...)
		cmd.Env = append(cmd.Environ(), "PYTHONPATH="+made)
		cmd.Stdin = strings.NewReader(input.String())
		var stderr strings.Builder
		cmd.Stderr = &stderr
		text, err := cmd.Output()
		if err != nil {
			t.Fatalf("query.py: %v\n%s%s", err, text, stderr.String())
		}
		for lines := bufio.NewScanner(strings.NewReader(string(text))); lines.Scan(); {
			var a answered
			if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
				t.Fatalf("%s: %v", lines.Text(), err)
			}
			out = append(out, a)
		}
		if len(out) != len(lengths) {
			t.Fatalf("%d answers, want %d", len(out), len(lengths))
		}
		return out
	}
	for way, answers := range map[string][]answered{
		"calls":  ask(args...),
		"stream": ask(append(slices.Delete(slices.Clone(args), 1, 3), "--stream")...),
	} {
		for i, a := range answers {
			blocks := lengths[i] / blockSize
			want := map[string]int{}
			for w, n := range held {
				if n := min(n, blocks); n > 0 {
					want[w] = n * blockSize
				}
			}
			got := map[string]int{}
			for w, d := range a.Workers {
				got[w] = d.Tokens
				if d.Loadable != d.Tokens {
					t.Errorf("%s: %s has %+v", way, w, d)
				}
			}
			if a.Partial || a.Blocks != blocks || !maps.Equal(got, want) {
				t.Fatalf("%s: prompt of %d tokens: %+v, want %v", way, lengths[i], a, want)
			}
		}
	}
	for _, a := range ask("query.py", "--address", "127.0.0.1:1") {
		if !a.Partial || len(a.Workers) != 0 || !strings.Contains(a.Missing[0], "UNAVAILABLE") {
			t.Errorf("nobody is there: %+v", a)
		}
	}
}
