// This file measures how much one core's relay takes, beside what its parts do.

package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
)

// RelayThroughput is what one core does of what an engine publishes, each way from
// the socket on. Figures are medians of the runs; blocks are stored and removed
// ones together, and bytes are of payloads.
type RelayThroughput struct {
	Impl           string     `json:"impl"`
	Mode           string     `json:"mode"`
	Series         string     `json:"series"`
	Batches        int64      `json:"batches"` // of each measurement
	Runs           int        `json:"runs"`
	BlocksPerBatch figure     `json:"blocks_per_batch"`
	BytesPerBatch  figure     `json:"bytes_per_batch"`
	Ways           []RelayWay `json:"ways"`
}

// RelayWay is one of the ways that begin at the socket.
type RelayWay struct {
	// Way is socket: messages are read and looked at no further; mapping: decoded
	// and mapped besides; relay: a whole relay, records made and thrown away;
	// kafka: a whole relay and a Kafka client, until all is acknowledged.
	Way              string `json:"way"`
	BatchesPerSecond figure `json:"batches_per_second"`
	BlocksPerSecond  figure `json:"blocks_per_second"`
	MBPerSecond      figure `json:"mb_per_second"`
	CPUPerBatchNs    figure `json:"cpu_ns_per_batch"`
	CPUPerBlockNs    figure `json:"cpu_ns_per_block"`
	CPUShare         figure `json:"cpu_share"`      // of the one core while it was at it
	TimesSocket      figure `json:"times_socket"`   // processor time beside that of the socket, in the same run
	SpreadPercent    figure `json:"spread_percent"` // of the processor time among the runs
}

// relayReading is one measurement.
type relayReading struct {
	seconds, cpu float64 // wall and processor time
	socket       float64 // processor time of the socket in the same run
}

// relayWays are the ways, kafka only with brokers.
var relayWays = []struct {
	name  string
	start func(b *relayBench, endpoint string) (follower, error)
}{
	{"socket", func(b *relayBench, endpoint string) (follower, error) { return b.startSub(endpoint, nil) }},
	{"mapping", (*relayBench).startMapping},
	{"relay", func(b *relayBench, endpoint string) (follower, error) {
		return b.startRelay(endpoint, &gate{}, 64<<20)
	}},
	{"kafka", func(b *relayBench, endpoint string) (follower, error) {
		// Its share is a quarter: room for all that is published ahead.
		return b.startRelay(endpoint, nil, 512<<20)
	}},
}

func (b *relayBench) throughput() error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, s := range []series{{Kind: prefill}, {Kind: chains, Blocks: 1, Live: 8192, Circle: 16384}} {
		if err := b.seriesThroughput(s); err != nil {
			return fmt.Errorf("series %s: %w", s.Kind, err)
		}
	}
	return nil
}

func (b *relayBench) seriesThroughput(s series) error {
	ways := relayWays
	if len(b.Brokers) == 0 {
		ways = ways[:len(ways)-1]
	}
	b.progress.Start("batches", 0)
	line := RelayThroughput{Impl: "kvindex", Mode: b.Mode, Series: s.Kind, Runs: b.Runs}
	if s.Kind == chains {
		line.Series = "single"
	}
	readings := make([][]relayReading, len(ways))
	var o opened
	for range b.Runs {
		for i, w := range ways {
			var err error
			if o, err = b.publisher.open(s); err != nil {
				return err
			}
			line.Batches = (b.Batches + o.Batches - 1) / o.Batches * o.Batches
			one, err := b.measure(w.start, o, line.Batches)
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			one.socket = one.cpu
			if i > 0 {
				socket := readings[0]
				one.socket = socket[len(socket)-1].cpu
			}
			readings[i] = append(readings[i], one)
		}
	}
	batches := float64(line.Batches)
	blocks := float64(o.Stored+o.Removed) / float64(o.Batches)
	bytes := float64(o.Bytes) / float64(o.Batches)
	line.BlocksPerBatch, line.BytesPerBatch = figure(blocks), figure(bytes)
	for i, w := range ways {
		rate := median(readings[i], func(r *relayReading) float64 { return batches / r.seconds })
		cpu := median(readings[i], func(r *relayReading) float64 { return r.cpu / batches * 1e9 })
		line.Ways = append(line.Ways, RelayWay{
			Way: w.name, BatchesPerSecond: rate, BlocksPerSecond: rate * figure(blocks), MBPerSecond: rate * figure(bytes) / 1e6,
			CPUPerBatchNs: cpu, CPUPerBlockNs: cpu / figure(blocks),
			CPUShare:      median(readings[i], func(r *relayReading) float64 { return r.cpu / r.seconds }),
			TimesSocket:   median(readings[i], func(r *relayReading) float64 { return r.cpu / r.socket }),
			SpreadPercent: spread(readings[i], func(r *relayReading) float64 { return r.cpu }),
		})
	}
	return b.out.Encode(line)
}

// measure has one way warm up on a circle of batches, and measures it on so many
// more.
func (b *relayBench) measure(start func(*relayBench, string) (follower, error), o opened, batches int64) (m relayReading, err error) {
	r, err := start(b, o.Endpoint)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := b.advance(r, o.Batches); err != nil {
		return m, err
	}
	var epoch int64
	whole, ok := r.(*relayReader)
	if ok {
		epoch = whole.epoch()
	}
	runtime.GC()
	watch := startWatch(processTime)
	if err := b.advance(r, o.Batches+batches); err != nil {
		return m, err
	}
	var share float64
	m.seconds, share = watch.read()
	m.cpu = m.seconds * share
	if ok && (epoch == 0 || whole.epoch() != epoch) {
		return m, errors.New("records were lost meanwhile: Kafka is slower than what is published")
	}
	return m, nil
}

// subReader reads a socket.
type subReader struct {
	n      atomic.Int64
	cancel context.CancelFunc
	ended  chan error
}

// startSub reads a socket and hands each payload on.
func (b *relayBench) startSub(endpoint string, take func(payload []byte) error) (follower, error) {
	sub, err := zmtp.NewSub(zmtp.DefaultConfig(endpoint))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(b.ctx)
	r := &subReader{cancel: cancel, ended: make(chan error, 1)}
	go func() {
		defer sub.Close()
		for {
			e, err := sub.Next(ctx)
			if err == nil && e.Kind == zmtp.Message && take != nil {
				err = take(e.Frames[len(e.Frames)-1])
			}
			switch {
			case ctx.Err() != nil:
				r.ended <- nil
				return
			case err != nil:
				r.ended <- err
				return
			case e.Kind == zmtp.Message:
				r.n.Add(1)
			}
		}
	}()
	return r, nil
}

// startMapping decodes and maps besides.
func (b *relayBench) startMapping(endpoint string) (follower, error) {
	m, err := engine.New(engine.Config{Engine: engine.VLLM, Hasher: index.BlockHasher{BlockSize: benchBlock, Scheme: index.Flash}})
	if err != nil {
		return nil, err
	}
	var batch engine.Batch
	var out engine.Output
	return b.startSub(endpoint, func(payload []byte) error {
		if err := batch.Decode(payload, engine.Limits{}); err != nil {
			return err
		}
		out.Reset()
		for i := range batch.Events {
			m.Apply(&batch.Events[i], &out)
		}
		return nil
	})
}

func (r *subReader) read() int64   { return r.n.Load() }
func (r *subReader) settled() bool { return true }

func (r *subReader) stop() error {
	r.cancel()
	return <-r.ended
}
