// This file has what a relay can be told.

package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
	"kvindex/pipeline/secure"
)

// Kind is what publishes an engine's events, and how.
type Kind string

// The kinds of engines.
const (
	VLLM                 Kind = "vllm"          // ZeroMQ
	SGLang               Kind = "sglang"        // ZeroMQ
	TensorRTLLM          Kind = "trtllm"        // a buffer, asked over HTTP
	TensorRTLLMStreaming Kind = "trtllm-stream" // ZeroMQ
)

// Kinds are all of them.
var Kinds = []Kind{VLLM, SGLang, TensorRTLLM, TensorRTLLMStreaming}

// Engine says where one engine's events are, and what is to be made of them. All
// its ranks are of one model.
type Engine struct {
	Worker string // its name in records: what routers know it by
	Kind   Kind

	// Events is where rank 0 publishes: tcp://host:port, of which rank n has port
	// port+n, or ipc:///path for a single rank. For TensorRTLLM it is the URL that
	// gives all ranks' events.
	Events string
	// Replay is where rank 0 answers what was missed, likewise; empty if it does
	// not. Without it every lost message or connection empties the index of the
	// rank.
	Replay string
	Topic  string // of the messages, a prefix; empty: all

	Model     string
	BlockSize int          // tokens
	Hasher    index.Hasher // Flash or Dynamo, as the model's queries have it
	Eagle     bool         // blocks are hashed with the token after them

	FirstRank int // data parallel rank
	Ranks     int // how many, from FirstRank on

	Media map[string]index.Tier // words for kinds of memory, besides those known
}

// maxRanks bounds the ranks of a relay.
const maxRanks = 4096

// Config is what a relay can be told. DefaultConfig gives the defaults, Validate
// checks everything that can be checked without a broker or an engine.
type Config struct {
	Brokers  []string // host:port seeds
	Topic    string   // events
	Instance string   // this relay in records, status, logs and the client id; "": host name
	Version  string   // of the build, for status and telemetry

	Engines []Engine

	StateDir        string        // of checkpoints; "": none, and a restart of the relay asks the engines for everything
	CheckpointEvery time.Duration // between a worker-rank's checkpoints
	BufferBytes     int64         // of records on their way to Kafka
	HeartbeatEvery  time.Duration // of a quiet engine
	WorkerGrace     time.Duration // the stage's: silence after which it retires a worker-rank
	DrainTimeout    time.Duration // bound on writing what is left after SIGTERM

	HTTPListen string // health, metrics, status; loopback by default

	Logger *slog.Logger

	// KafkaOptions are added to the client: security, tests' dialers.
	KafkaOptions []kgo.Opt

	// Producer takes the records in the place of a client of Brokers, for
	// measurements; nil: none.
	Producer Producer
}

// DefaultConfig returns the defaults; engines have none.
func DefaultConfig() Config {
	return Config{
		Brokers:         []string{"127.0.0.1:9092"},
		Topic:           "kv-events",
		CheckpointEvery: 30 * time.Second,
		BufferBytes:     64 << 20,
		HeartbeatEvery:  10 * time.Second,
		WorkerGrace:     time.Hour,
		DrainTimeout:    10 * time.Second,
		HTTPListen:      "127.0.0.1:7402",
	}
}

// instanceName is what may be part of a client id.
var instanceName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,200}$`)

// Validate fills in what depends on other settings and says all that is wrong,
// each with its name as a flag.
func (c *Config) Validate() error {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Instance == "" {
		c.Instance = "relay"
		if host, err := os.Hostname(); err == nil {
			c.Instance = host
		}
	}
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
	bad(instanceName.MatchString(c.Instance), "instance: %q, must be 1 to 200 letters, digits, '.', '_' or '-'", c.Instance)
	bad(c.CheckpointEvery > 0, "checkpoint-every: %s, must be above 0", c.CheckpointEvery)
	bad(c.BufferBytes >= leastBuffer, "buffer-bytes: %d, must not be below %d", c.BufferBytes, int64(leastBuffer))
	bad(c.HeartbeatEvery > 0, "heartbeat-every: %s, must be above 0", c.HeartbeatEvery)
	bad(c.WorkerGrace >= 2*c.HeartbeatEvery, "worker-grace: %s, must be twice heartbeat-every %s or more", c.WorkerGrace, c.HeartbeatEvery)
	bad(c.DrainTimeout > 0, "drain-timeout: %s, must be above 0", c.DrainTimeout)
	_, _, err := net.SplitHostPort(c.HTTPListen)
	bad(err == nil, "http-listen: %q is not host:port", c.HTTPListen)

	bad(len(c.Engines) > 0, "engines: none given")
	ranks := 0
	type rank struct {
		worker string
		number int
	}
	seen, at := map[rank]int{}, map[string]int{}
	for i := range c.Engines {
		e := &c.Engines[i]
		name := fmt.Sprintf("engine %d (%q)", i+1, e.Worker)
		if err := e.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		ranks += e.Ranks
		if ranks > maxRanks {
			errs = append(errs, fmt.Errorf("engines: more than %d ranks", maxRanks))
			break
		}
		for n := range e.Ranks {
			r := rank{e.Worker, e.FirstRank + n}
			other, twice := seen[r]
			bad(!twice, "%s: rank %d of the worker is engine %d's already", name, r.number, other+1)
			seen[r] = i
			if e.Kind == TensorRTLLM && n > 0 {
				continue
			}
			endpoint := e.Events
			if e.Kind != TensorRTLLM {
				endpoint, _ = endpointOf(e.Events, r.number) // validated
			}
			other, twice = at[endpoint]
			bad(!twice, "%s: the events of rank %d are at %s, as engine %d's are", name, r.number, endpoint, other+1)
			at[endpoint] = i
		}
	}
	return errors.Join(errs...)
}

// Validate says all that is wrong with e, each with its name as a flag.
func (e *Engine) Validate() error {
	var errs []error
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(e.Worker != "" && utf8.ValidString(e.Worker), "worker: %q, must be a name in UTF-8", e.Worker)
	bad(e.Model != "" && utf8.ValidString(e.Model), "model: %q, must be a name in UTF-8", e.Model)
	bad(e.BlockSize > 0 && e.BlockSize <= math.MaxInt32, "block-size: %d tokens, must be above 0 and below 2^31", e.BlockSize)
	bad(e.Hasher == index.Flash || e.Hasher == index.Dynamo, "hasher: %s, want flash or dynamo", e.Hasher)
	bad(e.Ranks > 0 && e.Ranks <= maxRanks, "ranks: %d, want 1 to %d", e.Ranks, maxRanks)
	bad(e.FirstRank >= 0 && e.FirstRank <= math.MaxUint16, "first-rank: %d, want 0 to %d", e.FirstRank, math.MaxUint16)
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	switch e.Kind {
	case VLLM, SGLang, TensorRTLLMStreaming:
		for _, end := range []struct{ name, endpoint string }{{"events", e.Events}, {"replay", e.Replay}} {
			if end.endpoint == "" && end.name == "replay" {
				continue
			}
			for _, rank := range []int{e.FirstRank, e.FirstRank + e.Ranks - 1} {
				at, err := endpointOf(end.endpoint, rank)
				if err == nil {
					cfg := zmtp.DefaultConfig(at)
					err = cfg.Validate()
				}
				if err != nil {
					bad(false, "%s: %w", end.name, err)
					break
				}
			}
		}
		bad(e.Replay == "" || e.Replay != e.Events, "replay: %q is where the events are", e.Replay)
	case TensorRTLLM:
		u, err := url.Parse(e.Events)
		bad(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", "events: %q, want http://host:port/path", e.Events)
		bad(e.Replay == "", "replay: %q, but %s has none", e.Replay, e.Kind)
		bad(e.Topic == "", "topic prefix: %q, but %s has none", e.Topic, e.Kind)
	default:
		bad(false, "kind: %q, want one of %q", e.Kind, Kinds)
	}
	return errors.Join(errs...)
}

// endpointOf returns the endpoint of a rank, given rank 0's.
func endpointOf(endpoint string, rank int) (string, error) {
	if rank == 0 {
		return endpoint, nil
	}
	i := len(endpoint) - 1
	for i >= 0 && endpoint[i] >= '0' && endpoint[i] <= '9' {
		i--
	}
	port, err := strconv.Atoi(endpoint[i+1:])
	if len(endpoint) < 6 || endpoint[:6] != "tcp://" || i < 6 || endpoint[i] != ':' || err != nil {
		return "", fmt.Errorf("%q: rank %d takes an endpoint tcp://host:port, whose port the rank is added to", endpoint, rank)
	}
	if port+rank > math.MaxUint16 {
		return "", fmt.Errorf("%q: rank %d would have port %d", endpoint, rank, port+rank)
	}
	return endpoint[:i+1] + strconv.Itoa(port+rank), nil
}

// mapping returns the configuration of a rank's mapping.
func (e *Engine) mapping() engine.Config {
	kind := engine.VLLM
	switch e.Kind {
	case SGLang:
		kind = engine.SGLang
	case TensorRTLLM, TensorRTLLMStreaming:
		kind = engine.TensorRTLLM
	}
	return engine.Config{
		Engine: kind,
		Hasher: index.BlockHasher{BlockSize: e.BlockSize, Scheme: e.Hasher, Eagle: e.Eagle},
		Media:  e.Media,
	}
}
