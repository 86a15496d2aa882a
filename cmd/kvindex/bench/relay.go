// This file is what the measurements of the relay have in common: their
// configuration, and the publisher and the reader that go on in step.

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"kvindex/index"
	"kvindex/pipeline/relay"
)

// RelayConfig says what to measure of a relay.
type RelayConfig struct {
	Mode    string
	Batches int64    // throughput: of each measurement, at least; memory: in all
	Runs    int      // throughput: in turn, of which the medians are told
	Brokers []string // throughput: write to these too; none: don't
	Topic   string   // of Brokers; it must be there

	// Publisher starts the process that publishes, with its standard input and
	// output, so that its work is not taken for the relay's; nil: this process
	// does it.
	Publisher func() (io.ReadWriteCloser, error)
}

// DefaultRelayConfig measures throughput without Kafka.
func DefaultRelayConfig() RelayConfig {
	return RelayConfig{Mode: relayModes[0].name, Batches: 100_000, Runs: 3}
}

var relayModes = []struct {
	name string
	run  func(*relayBench) error
}{
	{"throughput", (*relayBench).throughput},
	{"memory", (*relayBench).memory},
}

// RelayModes returns the names of the modes.
func RelayModes() []string {
	var names []string
	for _, m := range relayModes {
		names = append(names, m.name)
	}
	return names
}

// Bounds of a measurement of the relay.
const (
	minRelayBatches = 1000
	maxRelayBatches = 1_000_000_000
	maxRelayRuns    = 1000
)

// Validate says what is wrong with a configuration.
func (c *RelayConfig) Validate() error {
	switch {
	case !slices.Contains(RelayModes(), c.Mode):
		return fmt.Errorf("no mode %q: want one of %s", c.Mode, strings.Join(RelayModes(), ", "))
	case c.Batches < minRelayBatches || c.Batches > maxRelayBatches:
		return fmt.Errorf("%d batches: want %d to %d", c.Batches, int64(minRelayBatches), int64(maxRelayBatches))
	case c.Runs < 1 || c.Runs > maxRelayRuns:
		return fmt.Errorf("%d runs: want 1 to %d", c.Runs, maxRelayRuns)
	case len(c.Brokers) > 0 && c.Topic == "":
		return errors.New("brokers take a topic")
	}
	return nil
}

// relayBench is one measurement of the relay.
type relayBench struct {
	RelayConfig
	ctx       context.Context
	out       *json.Encoder
	progress  Progress
	publisher *publisherLink
}

// RunRelay measures a relay and writes a JSON line for each result. Mode memory
// fails with ErrGrew if memory is not that of what is held.
func RunRelay(ctx context.Context, c RelayConfig, out io.Writer, p Progress) (err error) {
	if err := c.Validate(); err != nil {
		return err
	}
	b := &relayBench{RelayConfig: c, ctx: ctx, out: json.NewEncoder(out), progress: p}
	start := c.Publisher
	if start == nil {
		start = publishHere
	}
	to, err := start()
	if err != nil {
		return fmt.Errorf("start the publisher: %w", err)
	}
	b.publisher = newPublisherLink(to)
	defer func() { err = errors.Join(err, to.Close()) }()
	return relayModes[slices.Index(RelayModes(), c.Mode)].run(b)
}

// benchBlock is the tokens in a block of what is published.
const benchBlock = 16

// follower is what reads the publisher.
type follower interface {
	// read is how many batches were dealt with.
	read() int64
	// settled reports whether nothing of those is still on its way.
	settled() bool
	// stop ends it, and says what went wrong.
	stop() error
}

const (
	// publishAhead bounds how many batches are published and not read yet: well
	// within the publisher's high-water mark, so that none is dropped.
	publishAhead = 1 << 14
	lookEvery    = time.Millisecond
	// relayPatience is how long a reader may make no progress.
	relayPatience = 30 * time.Second
)

// advance has batches published and waits until r has dealt with all below to.
func (b *relayBench) advance(r follower, to int64) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	told, seen, since := int64(0), max(r.read(), 0), time.Now()
	for {
		at := max(r.read(), 0)
		if at > seen {
			b.progress.Add(at - seen)
			seen, since = at, time.Now()
		}
		if at >= to && r.settled() {
			return nil
		}
		if time.Since(since) > relayPatience {
			return fmt.Errorf("at batch %d of %d, and no further for %v", at, to, relayPatience)
		}
		// The first batches go out once the reader has subscribed.
		if next := min(to, at+publishAhead); next-told > publishAhead/4 || next == to && told < to {
			if err := b.publisher.publish(next); err != nil {
				return err
			}
			told = next
		}
		select {
		case <-tick.C:
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
	}
}

// relayReader is a whole relay.
type relayReader struct {
	relay  *relay.Relay
	cancel context.CancelFunc
	ended  chan error
}

// quiet is the log of a relay that is measured: what it says of Kafka that
// stalls is meant to be.
var quiet = slog.New(slog.DiscardHandler)

// startRelay starts a relay of one engine. Without to it writes to b.Brokers.
func (b *relayBench) startRelay(endpoint string, to relay.Producer, buffer int64) (*relayReader, error) {
	c := relay.DefaultConfig()
	c.Producer, c.BufferBytes = to, buffer
	if to == nil {
		c.Brokers, c.Topic = b.Brokers, b.Topic
	}
	c.Instance, c.HTTPListen, c.Logger = "bench", "127.0.0.1:0", quiet
	c.HeartbeatEvery = 10 * time.Minute
	c.Engines = []relay.Engine{{
		Worker: fmt.Sprintf("bench-%d", time.Now().UnixNano()), Kind: relay.VLLM, Events: endpoint,
		Model: "bench", BlockSize: benchBlock, Hasher: index.Flash, Ranks: 1,
	}}
	r, err := relay.New(c)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(b.ctx)
	s := &relayReader{relay: r, cancel: cancel, ended: make(chan error, 1)}
	go func() { s.ended <- r.Run(ctx) }()
	return s, nil
}

// rank is the status of the one rank; nil while the relay is starting.
func (s *relayReader) rank() *relay.RankStatus {
	if st := s.relay.Status(); len(st.Ranks) == 1 {
		return &st.Ranks[0]
	}
	return nil
}

func (s *relayReader) read() int64 {
	if r := s.rank(); r != nil {
		return r.EngineSeq
	}
	return -1
}

func (s *relayReader) settled() bool {
	r := s.rank()
	return r != nil && r.InFlight == 0
}

func (s *relayReader) stop() error {
	s.cancel()
	return <-s.ended
}

// epoch is the epoch of what is written, 0 for none; it changes when records are
// lost, and then what was measured is not the relay's usual work.
func (s *relayReader) epoch() int64 {
	if r := s.rank(); r != nil && r.State == "writing" {
		return r.Epoch
	}
	return 0
}
