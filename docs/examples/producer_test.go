// Package examples tests the examples that the documentation shows.
package examples

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

// The documentation shows the files as they are.
func TestDocumentationShowsTheFiles(t *testing.T) {
	for _, c := range []struct{ doc, language, file string }{
		{"producing.md", "python", "producer.py"},
		{"producing.md", "json", "../../schemas/kv_event_batch.avsc"},
		{"dropin.md", "python", "dropin.py"},
		{"api.md", "python", "query.py"},
	} {
		doc, err := os.ReadFile("../" + c.doc)
		if err != nil {
			t.Fatal(err)
		}
		file, err := os.ReadFile(c.file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(doc, []byte("```"+c.language+"\n"+string(file)+"```\n")) {
			t.Errorf("docs/%s does not show %s as it is", c.doc, c.file)
		}
	}
}

// tokens are the numbers from first to last.
func tokens(first, last uint32) (ts []uint32) {
	for t := first; t <= last; t++ {
		ts = append(ts, t)
	}
	return ts
}

// The hashes and bytes that the documentation gives are right.
func TestDocumentedVectors(t *testing.T) {
	doc, err := os.ReadFile("../producing.md")
	if err != nil {
		t.Fatal(err)
	}
	both := []index.Hasher{index.Flash, index.Dynamo}
	mm := []index.MMHash{{Hash: 42, End: 4}, {Hash: 7, End: 4}}
	for _, c := range []struct {
		hashers   []index.Hasher
		input     string
		blockSize int
		tokens    []uint32
		extra     index.Extra
	}{
		{both, "tokens 1 to 12, blocks of 4", 4, tokens(1, 12), index.Extra{}},
		{both, "tokens 1 to 32, blocks of 16", 16, tokens(1, 32), index.Extra{}},
		{both, "tokens 1 to 64, one block", 64, tokens(1, 64), index.Extra{}},
		{both, "tokens 0 to 3, one block", 4, tokens(0, 3), index.Extra{}},
		{both, "the same, salt `tenant-a`", 4, tokens(0, 3), index.Extra{Salt: "tenant-a"}},
		{both, "the same, multimodal hashes 42 and 7", 4, tokens(0, 3), index.Extra{MM: mm}},
		{both[:1], "the same, LoRA `adapter-a`", 4, tokens(0, 3), index.Extra{LoRA: "adapter-a"}},
		{both[:1], "the same, LoRA `adapter-a`, salt `tenant-a`", 4, tokens(0, 3), index.Extra{LoRA: "adapter-a", Salt: "tenant-a"}},
		{both[:1], "the same, LoRA `adapter-a`, multimodal hashes 42 and 7", 4, tokens(0, 3), index.Extra{LoRA: "adapter-a", MM: mm}},
		{both[1:], "the same, LoRA `adapter-a`", 4, tokens(0, 3), index.Extra{LoRA: "adapter-a"}},
		{both[1:], "the same, LoRA `adapter-a`, salt `tenant-a`", 4, tokens(0, 3), index.Extra{LoRA: "adapter-a", Salt: "tenant-a"}},
	} {
		var names []string
		var locals []index.LocalHash
		for _, h := range c.hashers {
			names = append(names, h.String())
			locals = index.BlockHasher{BlockSize: c.blockSize, Scheme: h}.Append(locals[:0], c.tokens, c.extra)
		}
		row := fmt.Sprintf("| %s | %s | %s | %s |", strings.Join(names, ", "), c.input, list(locals), list(index.Chain(nil, locals)))
		if !strings.Contains(string(doc), row+"\n") {
			t.Errorf("docs/producing.md lacks\n%s", row)
		}
	}
	chain := index.Chain(nil, []index.LocalHash{11, 22, 33})
	if row := fmt.Sprintf("| any | local hashes 11, 22, 33 | | %s |", list(chain)); !strings.Contains(string(doc), row+"\n") {
		t.Errorf("docs/producing.md lacks\n%s", row)
	}

	heartbeat, err := schemas.AppendBatch(nil, &schemas.Batch{
		Producer: []byte("p"), Worker: []byte("wörker"), Epoch: 1, Seq: -1, Model: []byte("m"), BlockSize: 64})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{heartbeat, heartbeat[:10]} {
		if line := fmt.Sprintf("\n    % x\n", b); !strings.Contains(string(doc), line) {
			t.Errorf("docs/producing.md lacks the bytes%s", line)
		}
	}
}

func list[H ~uint64](hs []H) string {
	var texts []string
	for _, h := range hs {
		texts = append(texts, fmt.Sprint(uint64(h)))
	}
	return strings.Join(texts, ", ")
}

// sent is the last line that producer.py prints.
type sent struct {
	Worker, Model string
	Epoch         int64
	Tokens        []uint32
	LocalHashes   []index.LocalHash `json:"local_hashes"`
	SeqHashes     []index.SeqHash   `json:"sequence_hashes"`
}

// run runs producer.py to its end.
func run(t *testing.T, python string, args ...string) sent {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), python, append([]string{"producer.py"}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("producer.py: %v\n%s%s", err, out, stderr.String())
	}
	var s sent
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	if err := json.Unmarshal(lines[len(lines)-1], &s); err != nil {
		t.Fatalf("producer.py printed %s: %v", out, err)
	}
	return s
}

// What the Python producer writes is what the documentation says, by hashing
// and decoding of our own; and with librdkafka's own partitioner its worker is
// refused, as documented, once it has been seen elsewhere.
func TestPythonProducer(t *testing.T) {
	const partitions = 16
	python := testcontainers.Python(t, "confluent-kafka", "fastavro", "xxhash")
	worker := ""
	for n := 0; worker == "" || murmur2(worker, partitions) == crc(worker, partitions); n++ {
		worker = fmt.Sprintf("wörker-%d", n)
	}
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		topic := testcontainers.NewTopic(t, b, "kv-events", partitions, nil)
		ask, _, _ := stage(t, b, topic)
		args := []string{"--brokers", strings.Join(b.Brokers(), ","), "--topic", topic, "--worker", worker}
		s := run(t, python, args...)

		locals := index.BlockHasher{BlockSize: 16}.Append(nil, s.Tokens, index.Extra{})
		if !slices.Equal(locals, s.LocalHashes) || len(locals) == 0 {
			t.Errorf("local hashes %d, want %d", s.LocalHashes, locals)
		}
		if chain := index.Chain(nil, locals); !slices.Equal(chain, s.SeqHashes) {
			t.Errorf("sequence hashes %d, want %d", s.SeqHashes, chain)
		}
		want := verify.State{
			WorkerRank: verify.WorkerRank{Worker: worker}, Partition: murmur2(worker, partitions), Model: "example", BlockSize: 16, Hasher: "flash",
			Producer: fmt.Sprintf("producer.py-%d", s.Epoch), Epoch: s.Epoch, Seq: 1, Blocks: [index.Tiers]int{len(locals)},
		}
		check(t, b, topic, want, locals)
		ask(s.Tokens, want, len(locals))

		run(t, python, append(args, "--partitioner", "consistent_random", "--epoch", fmt.Sprint(s.Epoch))...)
		want.Incomplete = true
		check(t, b, topic, want, locals)
		ask(s.Tokens, want, len(locals))

		s = run(t, python, append(args, "--partitioner", "consistent_random", "--epoch", fmt.Sprint(s.Epoch+1))...)
		want.Incomplete, want.Partition, want.Epoch, want.Producer = false, crc(worker, partitions), s.Epoch, fmt.Sprintf("producer.py-%d", s.Epoch)
		check(t, b, topic, want, locals)
		ask(s.Tokens, want, len(locals))
	})
}

// stage runs a stage on the topic. ask asks it, over gRPC, for the prompt's tokens until the answer is as wanted.
func stage(t *testing.T, b testcontainers.Broker, topic string) (ask func(tokens []uint32, want verify.State, depth int), grpcAddr, httpAddr string) {
	t.Helper()
	grpcAddr, httpAddr = testcontainers.FreeAddress(t, 1), testcontainers.FreeAddress(t, 1)
	cfg := pipeline.DefaultConfig()
	cfg.Brokers, cfg.Topic, cfg.SnapshotTopic = b.Brokers(), topic, ""
	cfg.GRPCListen, cfg.HTTPListen = grpcAddr, httpAddr
	// Whatever else the tests' process and the machine do.
	cfg.Limits.MaxRunnable, cfg.Limits.QueueTimeout, cfg.Limits.Deadline = 1<<20, time.Minute, time.Minute
	cfg.Logger = slog.New(slog.DiscardHandler)
	s, err := pipeline.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stage: %v", err)
		}
	})
	client, err := client.Dial(cfg.GRPCListen, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	ask = func(tokens []uint32, want verify.State, depth int) {
		t.Helper()
		testcontainers.Eventually(t, 2*time.Minute, func() error {
			resp, err := client.Match(t.Context(), &pb.MatchRequest{Model: want.Model, Tokens: tokens})
			if err != nil {
				return err
			}
			if len(resp.Matches) != 1 {
				return fmt.Errorf("the stage answers %v", resp)
			}
			m := resp.Matches[0]
			if m.Worker != want.Worker || int(m.DepthBlocks) != depth || m.Incomplete != want.Incomplete || int32(m.Partition) != want.Partition {
				return fmt.Errorf("the stage answers %v, want depth %d of %+v", m, depth, want)
			}
			return nil
		})
	}
	return ask, grpcAddr, httpAddr
}

// check reads the whole topic and checks that its one worker is as wanted and
// holds the prompt.
func check(t *testing.T, b testcontainers.Broker, topic string, want verify.State, prompt []index.LocalHash) {
	t.Helper()
	o := verify.New(time.Hour)
	to := make(map[int32]int64)
	for p, end := range testcontainers.EndOffsets(t, b, topic) {
		to[int32(p)] = end
	}
	if err := o.Read(t.Context(), []kgo.Opt{kgo.SeedBrokers(b.Brokers()...)}, topic, nil, to); err != nil {
		t.Fatal(err)
	}
	workers := o.Workers()
	if len(workers) == 1 {
		want.Heard = workers[0].Heard
	}
	if len(workers) != 1 || workers[0] != want {
		t.Errorf("workers %+v\nwant %+v\ncounts %v", workers, want, o.Counts())
	}
	if got := o.Depths(want.Model, want.BlockSize, prompt)[want.WorkerRank][index.Device]; got != len(prompt) {
		t.Errorf("depth %d of %d", got, len(prompt))
	}
}

// murmur2 is the partition that the default partitioners of Java's client and
// of franz-go give a key.
func murmur2(key string, partitions int) int32 {
	return int32(kgo.StickyKeyPartitioner(nil).ForTopic("").Partition(&kgo.Record{Key: []byte(key)}, partitions))
}

// crc is the partition that librdkafka's default partitioner gives a key.
func crc(key string, partitions uint32) int32 {
	return int32(crc32.ChecksumIEEE([]byte(key)) % partitions)
}
