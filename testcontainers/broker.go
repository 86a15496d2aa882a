// This file is the interface that every broker for tests satisfies, and the broker that somebody else runs.

package testcontainers

import (
	"os"
	"strings"
)

// Broker is a Kafka cluster that a test may use. It says only what holds for every kind: what a kind can do beyond it (kill a
// node, compact on demand) are methods of its own type, and the helpers of this package hide where the kinds differ. A broker
// in a container fits here without a change: its Brokers are the mapped ports and its Close removes the container.
type Broker interface {
	// Name is the kind: "kfake", "kafka" or "external". Suites name their subtests by it.
	Name() string
	// Brokers are the bootstrap addresses, host:port. They stay the same for the broker's life, over restarts of nodes too.
	Brokers() []string
	// Close stops the broker and deletes what it stored, except a data directory given by the caller. A second call does nothing.
	Close() error
}

// brokersEnv names the variable that points the suites at an outside broker.
const brokersEnv = "KAFKA_BROKERS"

// External is a cluster that the tests neither start nor stop. Topics that [NewTopic] creates there are deleted after the test.
type External struct{ addrs []string }

// NewExternal returns the cluster at addrs (host:port). Nothing is dialled.
func NewExternal(addrs ...string) *External { return &External{addrs} }

// externalFromEnv returns the cluster that KAFKA_BROKERS names (comma-separated), or nil.
func externalFromEnv() *External {
	var addrs []string
	for a := range strings.SplitSeq(os.Getenv(brokersEnv), ",") {
		if a = strings.TrimSpace(a); a != "" {
			addrs = append(addrs, a)
		}
	}
	if addrs == nil {
		return nil
	}
	return NewExternal(addrs...)
}

// Name is "external".
func (*External) Name() string { return "external" }

// Brokers are the addresses given.
func (e *External) Brokers() []string { return e.addrs }

// Close does nothing.
func (*External) Close() error { return nil }
