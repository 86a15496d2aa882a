// The broker inside the test process: franz-go's kfake.

package testcontainers

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
)

// KfakeConfig is how [StartKfake] starts its broker. The zero value is one node in memory.
type KfakeConfig struct {
	// Nodes is the number of brokers, 1 when 0.
	Nodes int
	// DataDir keeps the log on disk: a broker started on the same directory has everything again. Empty: in memory.
	DataDir string
}

// Kfake is a broker in this process. It is no real Kafka: a compaction happens only on demand, moves the log's start and
// ignores min.compaction.lag.ms. Safe for concurrent use.
type Kfake struct {
	cfg   KfakeConfig
	addrs []string

	mu      sync.Mutex     // guards what follows
	cluster *kfake.Cluster // nil once closed
}

// StartKfake starts a broker; the caller closes it.
func StartKfake(cfg KfakeConfig) (*Kfake, error) {
	cfg.Nodes = max(cfg.Nodes, 1)
	k := &Kfake{cfg: cfg}
	if err := k.open(kfake.NumBrokers(cfg.Nodes)); err != nil {
		return nil, err
	}
	k.addrs = k.cluster.ListenAddrs()
	return k, nil
}

// NewKfake is [StartKfake] for a test: an error fails it, and the broker ends with it.
func NewKfake(t testing.TB, cfg KfakeConfig) *Kfake {
	t.Helper()
	k, err := StartKfake(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// open starts the cluster, with nodes chosen by the option.
func (k *Kfake) open(nodes kfake.Opt) error {
	opts := []kfake.Opt{nodes, kfake.BrokerConfigs(map[string]string{
		"default.replication.factor":           strconv.Itoa(k.cfg.Nodes),
		"group.min.session.timeout.ms":         "1000",
		"group.consumer.heartbeat.interval.ms": "500",
	})}
	if k.cfg.DataDir != "" {
		opts = append(opts, kfake.DataDir(k.cfg.DataDir))
	}
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		return fmt.Errorf("start kfake: %w", err)
	}
	k.cluster = c
	return nil
}

// Name is "kfake".
func (*Kfake) Name() string { return "kfake" }

// Brokers are the nodes' addresses.
func (k *Kfake) Brokers() []string { return k.addrs }

// Cluster is the broker itself, for faults and controls that only kfake has. It is another one after [Kfake.Restart], and nil
// after Close.
func (k *Kfake) Cluster() *kfake.Cluster {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cluster
}

// Restart stops all nodes and starts them again on the same ports. What was in memory is gone; what was in the data directory
// is there again.
func (k *Kfake) Restart() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.cluster == nil {
		return fmt.Errorf("restart kfake: it is closed")
	}
	ports := make([]int, 0, len(k.addrs))
	for _, a := range k.addrs {
		_, port, err := net.SplitHostPort(a)
		if err != nil {
			return fmt.Errorf("restart kfake: %w", err)
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			return fmt.Errorf("restart kfake: %w", err)
		}
		ports = append(ports, n)
	}
	k.cluster.Close()
	k.cluster = nil
	return k.open(kfake.Ports(ports...))
}

// Close stops the broker. A data directory stays.
func (k *Kfake) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.cluster != nil {
		k.cluster.Close()
		k.cluster = nil
	}
	return nil
}
