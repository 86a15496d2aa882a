// This file measures how long it takes from an engine's publishing to an answer
// that shows it: mode visible of bench relay.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

// visibleConfig is what the mode is told.
type visibleConfig struct {
	rate    float64 // batches a second
	seconds float64
	brokers []string // none: one in this process
}

const (
	visibleWarmUp   = 2 * time.Second
	visibleBlock    = 16 // tokens
	visibleBlocks   = 64 // of a request, which is one batch
	visibleCapacity = 1 << 15
	// visibleSamples is how many batches a second are asked about, and
	// visibleAskEvery how often until they show: so seldom that asking takes little
	// of what is measured.
	visibleSamples  = 25
	visibleAskEvery = 250 * time.Microsecond
	visibleWait     = time.Minute
	visibleModel    = "bench"
	visibleWorker   = "engine"
)

// visibleLine is what it prints. Times are in milliseconds; visible is from before
// the engine made the batch until an answer that shows it has come, of which the
// last question took what query says and visibleAskEvery were the steps.
type visibleLine struct {
	Impl     string       `json:"impl"`
	Mode     string       `json:"mode"`
	Broker   string       `json:"broker"`
	Rate     float64      `json:"rate"`     // batches a second that were to be
	Achieved float64      `json:"achieved"` // and that were
	Batches  int          `json:"batches"`
	Blocks   int          `json:"blocks_per_batch"` // stored; as many are removed once the cache is full
	Samples  int          `json:"samples"`
	Asked    int          `json:"asked"`
	Visible  visibleTimes `json:"visible_ms"`
	Query    visibleTimes `json:"query_ms"`
}

type visibleTimes struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func timesOf(d []time.Duration) visibleTimes {
	return visibleTimes{millis(quantile(d, 0.5)), millis(quantile(d, 0.99)), millis(quantile(d, 1))}
}

// visible is one measurement.
type visible struct {
	visibleConfig
	name    string // of its topics and group
	dir     string
	broker  string // as it is told
	undo    []func()
	engine  *fakeengine.Engine
	stage   *client.Client
	at      string // of the stage
	running []*child
	request fleet.Request // of the last batch

	mu    sync.Mutex // guards the next
	took  []time.Duration
	asked []time.Duration
}

func (c *visibleConfig) run(ctx context.Context, con *console, p *benchProgress) error {
	if !(c.rate > 0 && c.rate <= 10_000) || !(c.seconds > 0 && c.seconds <= 3600) {
		return usagef("%v batches a second for %v seconds: want more than 0, and up to 10,000 and 3,600", c.rate, c.seconds)
	}
	v := &visible{visibleConfig: *c, name: fmt.Sprintf("kvindex-bench-%d", time.Now().UnixNano())}
	defer func() {
		for _, undo := range slices.Backward(v.undo) {
			undo()
		}
	}()
	if err := v.start(ctx); err != nil {
		return err
	}
	for _, child := range v.running {
		var stop context.CancelFunc
		ctx, stop = child.during(ctx)
		defer stop()
	}
	line, err := v.measure(ctx, p)
	if err != nil {
		return because(ctx, err)
	}
	return json.NewEncoder(con.out).Encode(line)
}

// start starts everything and waits until an answer shows the engine's first
// batch.
func (v *visible) start(ctx context.Context) (err error) {
	if v.dir, err = os.MkdirTemp("", "kvindex-bench-"); err != nil {
		return err
	}
	v.undo = append(v.undo, func() {
		if err := os.RemoveAll(v.dir); err != nil {
			slog.Warn("the measurement's folder stays", "error", err)
		}
	})
	if err := v.startBroker(ctx); err != nil {
		return err
	}
	c := fakeengine.DefaultConfig()
	c.Listen, c.ReplayListen = "127.0.0.1:0", "127.0.0.1:0"
	c.BlockSize, c.Capacity, c.Logger = visibleBlock, visibleCapacity, slog.New(slog.DiscardHandler)
	if v.engine, err = fakeengine.New(c); err != nil {
		return err
	}
	v.undo = append(v.undo, v.engine.Close)
	var addresses [3]string
	for i := range addresses {
		if addresses[i], err = claim(&v.undo, 1); err != nil {
			return err
		}
	}
	v.at = addresses[0]
	if v.stage, err = client.Dial(v.at, 0); err != nil {
		return err
	}
	v.undo = append(v.undo, func() { v.stage.Close() })
	brokers, rank := strings.Join(v.brokers, ","), v.engine.State().Ranks[0]
	if err := v.startChild(stageCommandName, "--brokers", brokers, "--topic", v.name, "--snapshot-topic", v.snapshots(), "--group", v.name,
		"--grpc-listen", v.at, "--http-listen", addresses[1], "--log-level", "warn", "--max-runnable", childRunnable); err != nil {
		return err
	}
	if err := v.startChild(relayCommandName, "--brokers", brokers, "--topic", v.name, "--http-listen", addresses[2], "--log-level", "warn",
		"--worker", visibleWorker, "--model", visibleModel, "--block-size", fmt.Sprint(visibleBlock), "--events", rank.Events, "--replay", rank.Replay); err != nil {
		return err
	}
	if _, err := v.publish(); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, visibleWait)
	defer cancel()
	_, err = v.await(bounded, fleet.AppendTokens(nil, &v.request), 20*time.Millisecond)
	return err
}

func (v *visible) snapshots() string { return v.name + "-snapshots" }

// startBroker starts a broker if none is given, and makes the topics.
func (v *visible) startBroker(ctx context.Context) error {
	given := len(v.brokers) > 0
	v.broker = strings.Join(v.brokers, ",")
	if !given {
		v.broker = "in process"
		cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.DataDir(filepath.Join(v.dir, "broker")))
		if err != nil {
			return fmt.Errorf("start the broker: %w", err)
		}
		v.undo = append(v.undo, cluster.Close)
		v.brokers = cluster.ListenAddrs()
	}
	cl, err := kafkaClient(v.brokers)
	if err != nil {
		return err
	}
	v.undo = append(v.undo, cl.Close)
	adm := kadm.NewClient(cl)
	if given {
		v.undo = append(v.undo, func() { v.forget(context.WithoutCancel(ctx), adm) })
	}
	topics := topicsConfig{topic: v.name, snapshotTopic: v.snapshots(), partitions: demoPartitions, replication: 1}
	return topics.create(ctx, nil, adm)
}

// forget deletes what was made on brokers that stay.
func (v *visible) forget(ctx context.Context, adm *kadm.Client) {
	ctx, cancel := context.WithTimeout(ctx, visibleWait)
	defer cancel()
	deleted, err := adm.DeleteTopics(ctx, v.name, v.snapshots())
	if err == nil {
		err = deleted.Error()
	}
	if _, groupErr := adm.DeleteGroup(ctx, v.name); groupErr != nil {
		slog.Debug("the group stays", "group", v.name, "error", groupErr)
	}
	if err != nil {
		slog.Warn("the measurement's topics stay", "topics", []string{v.name, v.snapshots()}, "error", err)
	}
}

func (v *visible) startChild(args ...string) error {
	c, err := startChild(filepath.Join(v.dir, args[0]+".log"), args...)
	if err != nil {
		return fmt.Errorf("start %s: %w", args[0], err)
	}
	v.running = append(v.running, c)
	v.undo = append(v.undo, c.stop)
	return nil
}

// publish has the engine serve a request of a prompt that is like no other, which
// is one batch, and returns when that began.
func (v *visible) publish() (time.Time, error) {
	v.request.InputLength, v.request.HashIDs = visibleBlocks*visibleBlock, nil
	n := uint64(v.engine.State().Requests)
	per := uint64(visibleBlocks * visibleBlock / fleet.TraceBlock)
	for i := range per {
		v.request.HashIDs = append(v.request.HashIDs, n*per+i)
	}
	at := time.Now()
	_, err := v.engine.ServeAt(0, &v.request)
	return at, err
}

// await asks until all of the prompt's blocks show, and returns when that was.
func (v *visible) await(ctx context.Context, tokens []uint32, every time.Duration) (time.Time, error) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	req := &pb.MatchRequest{Model: visibleModel, BlockSize: visibleBlock, Tokens: tokens}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("a batch does not show: %w", context.Cause(ctx))
		}
		start := time.Now()
		answer, err := v.stage.Match(ctx, req)
		at := time.Now()
		switch code := status.Code(err); {
		case code == codes.NotFound || code == codes.Unavailable: // not ready, or nobody is known yet
		case err != nil && ctx.Err() == nil:
			return at, askError(v.at, err)
		case err == nil:
			v.mu.Lock()
			v.asked = append(v.asked, at.Sub(start))
			v.mu.Unlock()
			if len(answer.Matches) == 1 && answer.Matches[0].DepthBlocks == visibleBlocks {
				return at, nil
			}
		}
		tick.Reset(every)
	}
}

// measure publishes at the rate, whatever becomes of it, and asks about some of it.
func (v *visible) measure(ctx context.Context, p *benchProgress) (line visibleLine, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var sampling sync.WaitGroup
	defer sampling.Wait()
	defer cancel(nil)
	step := time.Duration(float64(time.Second) / v.rate)
	each := max(1, int(math.Ceil(v.rate/visibleSamples)))
	warm := int(visibleWarmUp.Seconds()*v.rate) + 1
	total := max(1, int(v.seconds*v.rate))
	p.Start("batches", int64(warm+total))
	begin := time.Now()
	var measured time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := range warm + total {
		if n == warm {
			sampling.Wait()
			v.mu.Lock()
			v.took, v.asked = nil, nil
			v.mu.Unlock()
			measured = time.Now()
			begin = measured.Add(-time.Duration(n) * step)
		}
		timer.Reset(time.Until(begin.Add(time.Duration(n) * step)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return line, context.Cause(ctx)
		}
		at, err := v.publish()
		if err != nil {
			return line, err
		}
		if n%each == 0 {
			tokens := fleet.AppendTokens(nil, &v.request)
			sampling.Go(func() {
				if err := v.sample(ctx, at, tokens); err != nil {
					cancel(err)
				}
			})
		}
		p.Add(1)
	}
	took := time.Since(measured)
	sampling.Wait()
	if err := context.Cause(ctx); err != nil {
		return line, err
	}
	if len(v.took) == 0 {
		return line, errors.New("nothing was asked about: measure for longer")
	}
	line = visibleLine{
		Impl: "kvindex", Mode: modeVisible, Broker: v.broker, Rate: v.rate,
		Achieved: round3(float64(total) / took.Seconds()), Batches: total, Blocks: visibleBlocks,
		Samples: len(v.took), Asked: len(v.asked), Visible: timesOf(v.took), Query: timesOf(v.asked),
	}
	return line, nil
}

// sample times one batch.
func (v *visible) sample(ctx context.Context, published time.Time, tokens []uint32) error {
	bounded, cancel := context.WithTimeout(ctx, visibleWait)
	defer cancel()
	at, err := v.await(bounded, tokens, visibleAskEvery)
	if err != nil {
		return because(ctx, err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.took = append(v.took, at.Sub(published))
	return nil
}
