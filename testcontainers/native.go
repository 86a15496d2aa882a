// This file runs a real Apache Kafka as processes on the loopback interface.

package testcontainers

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/pipeline/ports"
)

//go:embed native/server.properties
var serverProperties string

//go:embed native/log4j2.properties
var log4jProperties []byte

// startTimeout bounds one start of a whole cluster or of one node. A start takes 3 to 6 s; a busy machine with two cores needs more.
const startTimeout = 5 * time.Minute

// NativeConfig is how [StartNative] starts its cluster. The zero value is one node.
type NativeConfig struct {
	// Nodes is the number of combined broker and controller nodes, 1 when 0. With 3 or more, topics have replication factor 3 and
	// min.insync.replicas 2.
	Nodes int
	// Listeners are names of further listeners, each on a port of its own; what they speak is for Properties to say.
	Listeners []string
	// Properties are lines for server.properties, over those of this package.
	Properties map[string]string
}

// Native is a real Kafka cluster of processes on 127.0.0.1, with a heap of 256 MiB each. Nodes are numbered from 0, as in
// Brokers; Kafka's own node ids are one larger. Its methods are safe for concurrent use; faults on one node run one after the other.
type Native struct {
	java, jars string
	dir        string // data, configuration and log of every node
	nodes      []*node
	addrs      []string
	more       map[string][]string // of NativeConfig.Listeners, the nodes' addresses
	ports      []*ports.Row        // of all

	closeOnce sync.Once
	closeErr  error
}

// node is one member of the cluster. Its ports are its for the cluster's life, whether it runs or not.
type node struct {
	mu   sync.Mutex // held over each operation on the node
	id   int32      // Kafka's
	dir  string
	addr string
	proc *process // nil until the first start
}

// StartNative starts a cluster and returns once all its nodes serve; the caller closes it. The first call on a machine fetches
// the jars. The error says what to install when Java or Maven is missing.
func StartNative(ctx context.Context, cfg NativeConfig) (*Native, error) {
	java, err := findJava(ctx)
	if err != nil {
		return nil, err
	}
	jars, err := kafkaJars(ctx)
	if err != nil {
		return nil, err
	}
	// Between the choice of a free port and its use, another process may take it: then all is chosen anew.
	for attempt := 1; ; attempt++ {
		n, err := startNative(ctx, java, jars, cfg)
		if err == nil || attempt == 3 || !errors.Is(err, syscall.EADDRINUSE) {
			return n, err
		}
	}
}

func startNative(ctx context.Context, java, jars string, cfg NativeConfig) (*Native, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	dir, err := os.MkdirTemp("", "kvindex-kafka-")
	if err != nil {
		return nil, err
	}
	n := &Native{java: java, jars: jars, dir: dir, more: map[string][]string{}}
	err = n.configure(cfg)
	if err == nil {
		err = n.startAll(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// configure chooses ports and writes every node's directory.
func (n *Native) configure(cfg NativeConfig) error {
	count := max(cfg.Nodes, 1)
	var addrs []string
	for range (2 + len(cfg.Listeners)) * count {
		c, err := ports.Claim(1)
		if err != nil {
			return err
		}
		n.ports = append(n.ports, c)
		addrs = append(addrs, c.Address())
	}
	brokers, controllers := addrs[:count], addrs[count:2*count]
	var voters []string
	for i, at := range controllers {
		voters = append(voters, fmt.Sprintf("%d@%s", i+1, at))
	}
	replicas, insync := 1, 1
	if count >= 3 {
		replicas, insync = 3, 2
	}
	for i := range count {
		d := filepath.Join(n.dir, strconv.Itoa(i))
		var props strings.Builder
		fmt.Fprintf(&props, "node.id=%d\ncontroller.quorum.voters=%s\nlog.dirs=%s\n", i+1, strings.Join(voters, ","), filepath.Join(d, "data"))
		advertised := "PLAINTEXT://" + brokers[i]
		for j, name := range cfg.Listeners {
			at := addrs[(2+j)*count+i]
			n.more[name] = append(n.more[name], at)
			advertised += "," + name + "://" + at
		}
		fmt.Fprintf(&props, "listeners=CONTROLLER://%s,%s\nadvertised.listeners=%[2]s\n", controllers[i], advertised)
		fmt.Fprintf(&props, "default.replication.factor=%d\nmin.insync.replicas=%d\n", replicas, insync)
		for _, log := range []string{"offsets.topic", "transaction.state.log", "share.coordinator.state.topic"} {
			fmt.Fprintf(&props, "%s.replication.factor=%d\n", log, replicas)
		}
		fmt.Fprintf(&props, "transaction.state.log.min.isr=%d\nshare.coordinator.state.topic.min.isr=%d\n", insync, insync)
		props.WriteString(serverProperties)
		for _, k := range slices.Sorted(maps.Keys(cfg.Properties)) {
			fmt.Fprintf(&props, "%s=%s\n", k, cfg.Properties[k])
		}
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(d, "server.properties"), []byte(props.String()), 0o644); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(d, "log4j2.properties"), log4jProperties, 0o644); err != nil {
			return err
		}
		n.nodes = append(n.nodes, &node{id: int32(i + 1), dir: d, addr: brokers[i]})
		n.addrs = append(n.addrs, brokers[i])
	}
	return nil
}

// startAll formats and starts all nodes at once and waits until each serves and knows the others.
func (n *Native) startAll(ctx context.Context) error {
	err := n.each(func(nd *node) error {
		if err := n.format(ctx, nd); err != nil {
			return err
		}
		return n.start(ctx, nd)
	})
	if err != nil {
		return err
	}
	return n.each(func(nd *node) error { return n.serves(ctx, nd, len(n.nodes)) })
}

// each runs f for every node at once.
func (n *Native) each(f func(*node) error) error {
	errs := make([]error, len(n.nodes))
	var wg sync.WaitGroup
	for i, nd := range n.nodes {
		wg.Go(func() { errs[i] = f(nd) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// javaCommand is a run of one of Kafka's classes. The serial collector and the first compiler tier only make a short-lived, small
// broker start in 3 s instead of 6.
func (n *Native) javaCommand(ctx context.Context, nd *node, heap string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, n.java, append([]string{
		"-Xms" + heap, "-Xmx" + heap, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto",
		"-Dlog4j2.configurationFile=" + filepath.Join(nd.dir, "log4j2.properties"),
		"-cp", filepath.Join(n.jars, "*"),
	}, args...)...)
}

// format writes the node's metadata log, once before its first start.
func (n *Native) format(ctx context.Context, nd *node) error {
	const clusterID = "kvindexkvindexkvindexw" // any 16 bytes in base64url
	out, err := n.javaCommand(ctx, nd, "64m", "kafka.tools.StorageTool", "format", "-t", clusterID, "-c", filepath.Join(nd.dir, "server.properties")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("format Kafka node %s: %w\n%s", nd.addr, err, lastLines(out, 15))
	}
	return nil
}

// start starts the node's process and waits for Kafka's own word that it is started.
func (n *Native) start(ctx context.Context, nd *node) error {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	if nd.proc != nil && nd.proc.running() {
		return nil
	}
	log, err := os.OpenFile(nd.log(), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	from, err := log.Seek(0, 2) // what earlier starts wrote is not this one's word
	if err != nil {
		return err
	}
	// Not the caller's context: the process outlives the start.
	cmd := n.javaCommand(context.Background(), nd, "256m", "kafka.Kafka", filepath.Join(nd.dir, "server.properties"))
	cmd.Stdout, cmd.Stderr = log, log
	if nd.proc, err = startProcess(cmd); err != nil {
		return fmt.Errorf("start Kafka node %s: %w", nd.addr, err)
	}
	proc := nd.proc
	return poll(ctx, func() error {
		ended := !proc.running()
		out, err := os.ReadFile(nd.log())
		if err != nil {
			return err
		}
		out = out[from:]
		switch {
		case bytes.Contains(out, []byte("Kafka Server started")):
			return nil
		case ended && bytes.Contains(out, []byte("Address already in use")):
			return stop(fmt.Errorf("kafka node %s: %w", nd.addr, syscall.EADDRINUSE))
		case ended:
			return stop(fmt.Errorf("kafka node %s ended while starting: %v\n%s", nd.addr, proc.err, lastLines(out, 30)))
		}
		return fmt.Errorf("kafka node %s has not started\n%s", nd.addr, lastLines(out, 10))
	})
}

// serves waits until the node answers and names itself among at least want brokers.
func (n *Native) serves(ctx context.Context, nd *node, want int) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(nd.addr), kgo.MetadataMinAge(100*time.Millisecond))
	if err != nil {
		return err
	}
	defer cl.Close()
	return poll(ctx, func() error {
		m, err := kadm.NewClient(cl).BrokerMetadata(ctx)
		if err != nil {
			return fmt.Errorf("ask Kafka node %s for its metadata: %w", nd.addr, err)
		}
		if ids := m.Brokers.NodeIDs(); len(ids) < want || !slices.Contains(ids, nd.id) {
			return fmt.Errorf("kafka node %s (id %d) knows brokers %v, want itself and %d in all", nd.addr, nd.id, ids, want)
		}
		return nil
	})
}

// log is the file with everything the node has said.
func (nd *node) log() string { return filepath.Join(nd.dir, "log") }

// NewNative is [StartNative] for a test: an error fails it, and the cluster ends with it. The nodes' logs are kept, and their
// place said, when the test has failed.
func NewNative(t testing.TB, cfg NativeConfig) *Native {
	t.Helper()
	n, err := StartNative(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the logs of the Kafka nodes are kept in %s", n.keepLogs())
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Name is "kafka".
func (*Native) Name() string { return "kafka" }

// Brokers are the nodes' addresses, running or not.
func (n *Native) Brokers() []string { return n.addrs }

// Listener returns the nodes' addresses of one of NativeConfig.Listeners.
func (n *Native) Listener(name string) []string { return n.more[name] }

// Kill ends node i with SIGKILL, as a crash does, and returns once it is gone. Its data stays.
func (n *Native) Kill(i int) error {
	return n.fault(i, func(p *process) error { p.kill(); return nil })
}

// Pause stops node i with SIGSTOP: it holds its connections and answers nothing.
func (n *Native) Pause(i int) error {
	return n.fault(i, func(p *process) error { return p.signal(syscall.SIGSTOP) })
}

// Resume lets a paused node i go on.
func (n *Native) Resume(i int) error {
	return n.fault(i, func(p *process) error { return p.signal(syscall.SIGCONT) })
}

func (n *Native) fault(i int, f func(*process) error) error {
	nd := n.nodes[i]
	nd.mu.Lock()
	defer nd.mu.Unlock()
	if nd.proc == nil || !nd.proc.running() {
		return fmt.Errorf("kafka node %d (%s) does not run; its log ends with\n%s", i, nd.addr, nd.lastWords())
	}
	return f(nd.proc)
}

// Start starts node i again on its data and its port, and returns once it serves. A node that runs is left alone.
func (n *Native) Start(i int) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	nd := n.nodes[i]
	if err := n.start(ctx, nd); err != nil {
		return err
	}
	return n.serves(ctx, nd, 1)
}

// lastWords is the end of the node's log, for errors.
func (nd *node) lastWords() string {
	out, err := os.ReadFile(nd.log())
	if err != nil {
		return err.Error()
	}
	return lastLines(out, 10)
}

// keepLogs moves the nodes' logs out of the cluster's directory, which Close deletes, and returns where they are.
func (n *Native) keepLogs() string {
	kept, err := os.MkdirTemp("", "kvindex-kafka-logs-")
	if err != nil {
		return err.Error()
	}
	for i, nd := range n.nodes {
		if err := os.Rename(nd.log(), filepath.Join(kept, fmt.Sprintf("node-%d.log", i))); err != nil {
			return err.Error()
		}
	}
	return kept
}

// Close kills all nodes and deletes their data.
func (n *Native) Close() error {
	n.closeOnce.Do(func() {
		n.each(func(nd *node) error {
			nd.mu.Lock()
			defer nd.mu.Unlock()
			if nd.proc != nil {
				nd.proc.kill()
			}
			return nil
		})
		for _, c := range n.ports {
			c.Release()
		}
		n.closeErr = os.RemoveAll(n.dir)
	})
	return n.closeErr
}
