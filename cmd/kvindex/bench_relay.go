// This file is the command bench relay, and the one of the process that publishes
// for it.

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvindex/cmd/kvindex/bench"
)

// modeVisible is the mode that is not in package bench: it takes a stage and a
// relay as processes.
const modeVisible = "visible"

func benchRelayCommand() command {
	c := bench.DefaultRelayConfig()
	c.Publisher = startPublisher
	v := visibleConfig{rate: 100, seconds: 30}
	var profile string
	return command{
		use:   "relay",
		short: "Measure the relay, on this machine",
		long: `Relay measures what kvindex relay does with the events of an engine that a process of its
own plays, and prints that as JSON lines.

Modes.
  throughput  batches as fast as one core reads them (GOMAXPROCS 1): the bare socket;
              decoded and mapped besides; a whole relay whose records are thrown away;
              and, with --brokers, one that writes them to --topic. The ways take turns
              --runs times, and each reads --batches at least after a warm-up. One line
              for prefill, what a fake vLLM 0.33 publishes, and one for single, a block
              stored and one removed by each batch
  memory      --batches of ever new blocks, a fixed number of them held: live memory
              after 10, 30, 50, 70 and 100 %, once with a Kafka that takes everything,
              once with one that stalls from 30 to 70 %. Exit code 1 if it grew
  visible     an engine publishes --rate batches a second for --seconds; how long after
              publishing does a stage's answer show it? Broker (in this process, unless
              --brokers is given), relay and stage are started for it, with topics of
              their own that are deleted afterwards

cpu_share below 1 says that the core was waiting for the publisher or had to be shared.
Compare figures of one line with one another; times of another hour are another machine's.`,
		example: `  kvindex bench relay
  kvindex bench relay --brokers 127.0.0.1:9092 --topic bench --runs 3
  kvindex bench relay --mode memory --batches 1000000
  kvindex bench relay --mode visible --rate 200 --seconds 30 --brokers 127.0.0.1:9092`,
		flags: func(fs *pflag.FlagSet) {
			fs.Var(&choice{&c.Mode, append(bench.RelayModes(), modeVisible)}, "mode", "measure in this `mode`")
			fs.Int64Var(&c.Batches, "batches", c.Batches, "throughput, memory: publish this many `batches`")
			fs.IntVar(&c.Runs, "runs", c.Runs, "throughput: report the medians of this `number` of runs")
			fs.StringSliceVar(&c.Brokers, "brokers", nil, "throughput, visible: Kafka brokers to start from, `host:port,...`")
			fs.StringVar(&c.Topic, "topic", "", "throughput: write to this existing `topic`, not one that a stage reads")
			fs.Float64Var(&v.rate, "rate", v.rate, "visible: `batches` a second")
			fs.Float64Var(&v.seconds, "seconds", v.seconds, "visible: publish for this many `seconds`")
			fs.StringVar(&profile, "cpu-profile", "", "write a CPU profile to this `file`")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			p := &benchProgress{con: con}
			defer p.end()
			if c.Mode == modeVisible {
				v.brokers = c.Brokers
				return v.run(ctx, con, p)
			}
			if err := c.Validate(); err != nil {
				return usageError{err}
			}
			stop, err := profileTo(profile)
			if err != nil {
				return err
			}
			return errors.Join(bench.RunRelay(ctx, c, con.out, p), stop())
		},
	}
}

const publisherCommandName = "bench-publisher"

// publisherCommand publishes what its standard input says until that ends.
func publisherCommand() command {
	return command{
		use: publisherCommandName, hidden: true,
		short:   "Publish for bench relay",
		example: "  kvindex " + publisherCommandName,
		run: func(ctx context.Context, con *console, _ []string) error {
			return bench.ServePublisher(ctx, con.in, con.out)
		},
	}
}

// publisherProcess is the publisher of bench relay.
type publisherProcess struct {
	cmd *exec.Cmd
	io.WriteCloser
	io.Reader
}

func startPublisher() (io.ReadWriteCloser, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &publisherProcess{cmd: exec.Command(self, publisherCommandName)}
	p.cmd.Stderr = os.Stderr
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, envPrefix+"_") })
	p.cmd.WaitDelay = 5 * time.Second
	if p.WriteCloser, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if p.Reader, err = p.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	return p, p.cmd.Start()
}

// Close ends the process, which stops when its input does.
func (p *publisherProcess) Close() error {
	p.WriteCloser.Close()
	return p.cmd.Wait()
}
