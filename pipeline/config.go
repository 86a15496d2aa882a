// This file is the stage's configuration, its defaults and its check.

package pipeline

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"regexp"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/kafkalog"
	"kvindex/pipeline/query"
	"kvindex/pipeline/secure"
)

// structures are the index structures that answers can come from, where hashes are
// computed. All give the same answers.
var structures = map[string]func(*Config) index.Structure{
	"positional": func(c *Config) index.Structure { return index.NewPositionalIndex(c.JumpSize) },
	"runs":       func(*Config) index.Structure { return index.NewRunIndex() },
}

// Config is what the stage can be told. DefaultConfig gives the defaults,
// Validate checks everything that can be checked without a broker.
type Config struct {
	Brokers       []string // host:port seeds
	Topic         string   // events
	SnapshotTopic string   // compacted, with at least as many partitions; "" runs without snapshots
	Group         string   // names the floor's committed offset, the snapshot duty's group and the transactional ids
	Instance      string   // this instance in status, logs, client ids and the snapshot duty: the same after a restart, no other's; "": host name and gRPC port
	Version       string   // of the build, for status and telemetry

	Models    []ModelConfig // if not empty, records of others are refused
	MaxModels int           // distinct (model, block size, hasher), so that bad records cannot make any number of indexes
	JumpSize  int           // blocks the positional index jumps in a search
	Structure string        // of the indexes whose hashes are computed: "runs" or "positional"

	SnapshotMaxAge time.Duration // after this a changed worker-rank is written again, an unchanged one gets its manifest refreshed
	SnapshotBudget int64         // bytes of snapshots a second, all partitions together; 0: no limit

	WorkerTTL   time.Duration // silence, by the broker's clock, after which a worker-rank is left out of answers
	WorkerGrace time.Duration // silence after which it is retired, and then as long again until its epoch is forgotten

	ReadyLag     int64         // offsets behind the end within which a partition that has caught up counts as live
	Buffer       int           // fetched batches a partition holds before it is paused
	DrainTimeout time.Duration // bound on finishing queries and writing last snapshots after SIGTERM

	GRPCListen string // loopback by default
	HTTPListen string
	Limits     query.Limits

	TLS           secure.Server // of both ports
	AuthTokenFile string        // bearer tokens that callers must show; "": everybody may ask
	OpenMetrics   bool          // /metrics needs neither token nor certificate

	Logger *slog.Logger

	// KafkaOptions are added to every client: security, tests' dialers.
	KafkaOptions []kgo.Opt
	// Tick is the pause between looks at what is due; tests shorten it.
	Tick time.Duration
	// Watch is the pause between looks at the topic's id and end.
	Watch time.Duration
}

// ModelConfig allows one model.
type ModelConfig struct {
	Name      string
	BlockSize int // tokens
	Hasher    index.Hasher
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Brokers:        []string{"127.0.0.1:9092"},
		Topic:          "kv-events",
		SnapshotTopic:  "kv-snapshots",
		Group:          "kvindex",
		MaxModels:      256,
		JumpSize:       32,
		Structure:      "runs",
		SnapshotMaxAge: 5 * time.Minute,
		SnapshotBudget: 32 << 20,
		WorkerTTL:      2 * time.Minute,
		WorkerGrace:    time.Hour,
		ReadyLag:       1000,
		Buffer:         16,
		DrainTimeout:   10 * time.Second,
		GRPCListen:     "127.0.0.1:7400",
		HTTPListen:     "127.0.0.1:7401",
		Limits: query.Limits{
			MaxRequestBytes: 4 << 20,
			MaxBlocks:       65536,
			Deadline:        time.Second,
			QueueTimeout:    100 * time.Millisecond,
			MaxRunnable:     16,
			MaxConnections:  4096,
			MaxUnreadBytes:  128 << 20,
			RequestTimeout:  15 * time.Second,
			IdleTimeout:     15 * time.Minute,
		},
		Tick:  200 * time.Millisecond,
		Watch: time.Second,
	}
}

// instanceName is what Kafka allows as a static group member's name.
var instanceName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,200}$`)

// setDefaults fills in what depends on other settings.
func (c *Config) setDefaults() {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Instance == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "kvindex"
		}
		_, port, _ := net.SplitHostPort(c.GRPCListen)
		c.Instance = host + "-" + port
	}
}

// Validate fills in what depends on other settings and says all that is wrong,
// each with its name as a flag.
func (c *Config) Validate() error {
	c.setDefaults()
	var errs []error
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if err := secure.CheckBrokers(c.Brokers); err != nil {
		errs = append(errs, err)
	}
	bad(c.Topic != "", "topic: must not be empty")
	bad(c.Topic != c.SnapshotTopic, "snapshot-topic: must not be the events topic %q", c.Topic)
	bad(c.Group != "", "group: must not be empty")
	bad(instanceName.MatchString(c.Instance), "instance: %q, must be 1 to 200 letters, digits, '.', '_' or '-'", c.Instance)
	bad(c.MaxModels > 0, "max-models: %d, must be above 0", c.MaxModels)
	bad(len(c.Models) <= c.MaxModels, "models: %d given, max-models is %d", len(c.Models), c.MaxModels)
	for _, m := range c.Models {
		bad(m.Name != "" && m.BlockSize > 0 && m.BlockSize <= math.MaxInt32, "models: %q with blocks of %d tokens: want a name and a block size above 0 and below 2^31", m.Name, m.BlockSize)
	}
	bad(structures[c.Structure] != nil, "structure: %q, want runs or positional", c.Structure)
	bad(c.JumpSize > 0, "jump-size: %d, must be above 0", c.JumpSize)
	bad(c.SnapshotMaxAge > 0, "snapshot-max-age: %s, must be above 0", c.SnapshotMaxAge)
	bad(c.SnapshotBudget >= 0, "snapshot-budget: %d bytes a second, must not be negative", c.SnapshotBudget)
	bad(c.WorkerTTL > 0, "worker-ttl: %s, must be above 0", c.WorkerTTL)
	bad(c.WorkerGrace >= c.WorkerTTL, "worker-grace: %s, must not be below worker-ttl %s", c.WorkerGrace, c.WorkerTTL)
	bad(c.ReadyLag >= 0, "ready-lag: %d, must not be negative", c.ReadyLag)
	bad(c.Buffer >= 4 && c.Buffer <= 1024, "buffer: %d batches, want 4 to 1024", c.Buffer)
	bad(c.DrainTimeout > 0, "drain-timeout: %s, must be above 0", c.DrainTimeout)
	bad(c.Tick > 0, "tick: %s, must be above 0", c.Tick)
	bad(c.Watch > 0, "watch: %s, must be above 0", c.Watch)
	for _, l := range []struct{ name, addr string }{{"grpc-listen", c.GRPCListen}, {"http-listen", c.HTTPListen}} {
		_, _, err := net.SplitHostPort(l.addr)
		bad(err == nil, "%s: %q is not host:port", l.name, l.addr)
	}
	if err := c.Limits.Validate(); err != nil {
		errs = append(errs, err)
	}
	if err := c.TLS.Validate(); err != nil {
		errs = append(errs, err)
	}
	if c.AuthTokenFile != "" {
		_, err := secure.NewTokens(c.AuthTokenFile, nil)
		bad(err == nil, "auth-token-file: %w", err)
	}
	return errors.Join(errs...)
}

// structure makes the structure of an index of that hasher. Opaque hashes need a
// tree: the others find a query's blocks by hashes that they compute.
func (c *Config) structure(h index.Hasher) index.Structure {
	if h == index.Opaque {
		return index.NewConcurrentRadixTree()
	}
	return structures[c.Structure](c)
}

// kafka returns the options of a client of this stage.
func (c *Config) kafka(role string, more ...kgo.Opt) []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(c.Brokers...),
		kgo.WithLogger(kafkalog.New(c.Logger, role)),
		kgo.ClientID("kvindex-" + role + "-" + c.Instance),
		kgo.DialTimeout(5 * time.Second),
		kgo.RetryTimeout(20 * time.Second),
		kgo.RequestTimeoutOverhead(10 * time.Second),
		kgo.MetadataMinAge(250 * time.Millisecond),
		kgo.MetadataMaxAge(30 * time.Second),
	}
	opts = append(opts, c.KafkaOptions...)
	return append(opts, more...)
}
