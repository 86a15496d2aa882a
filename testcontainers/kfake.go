// This file is the broker inside the test process: franz-go's kfake.

package testcontainers

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"

	"kvindex/pipeline/ports"
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
	ports []*ports.Row // the nodes', whether it runs or not
	addrs []string

	mu      sync.Mutex     // guards what follows
	cluster *kfake.Cluster // nil once closed
}

// StartKfake starts a broker; the caller closes it.
func StartKfake(cfg KfakeConfig) (*Kfake, error) {
	cfg.Nodes = max(cfg.Nodes, 1)
	// Between the choice of a free port and its use, somebody else may take it: then all is chosen anew.
	for attempt := 1; ; attempt++ {
		k := &Kfake{cfg: cfg}
		err := k.choose()
		if err == nil {
			err = k.open()
		}
		if err == nil {
			k.addrs = k.cluster.ListenAddrs()
			return k, nil
		}
		k.Close()
		if attempt == 3 || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
}

// choose claims a port for each node.
func (k *Kfake) choose() error {
	for range k.cfg.Nodes {
		c, err := ports.Claim(1)
		if err != nil {
			return err
		}
		k.ports = append(k.ports, c)
	}
	return nil
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

// open starts the cluster.
func (k *Kfake) open() error {
	var listen []int
	for _, c := range k.ports {
		listen = append(listen, c.First())
	}
	opts := []kfake.Opt{kfake.Ports(listen...), kfake.BrokerConfigs(map[string]string{
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
	k.cluster.Close()
	k.cluster = nil
	return k.open()
}

// Close stops the broker. A data directory stays.
func (k *Kfake) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.cluster != nil {
		k.cluster.Close()
		k.cluster = nil
	}
	for _, c := range k.ports {
		c.Release()
	}
	return nil
}
