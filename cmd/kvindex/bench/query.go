// This file measures a stage's query side: what is asked of it, and in which order.

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// QueryConfig says what to ask, and how much.
type QueryConfig struct {
	Transports []string
	Blocks     []int // in a prompt: each is asked in turn
	Workers    []int // that hold it: a server for each
	Tokens     bool  // send tokens, not local hashes

	Held            int64         // blocks that the workers hold besides
	BlocksPerSecond float64       // that are written, stored and removed ones, while it is asked
	Step            time.Duration // of each rate on the way to saturation
	For             time.Duration // at half of it, and for each echo
	Overload        time.Duration // at four times it; 0: none
	Slowest         time.Duration // median latency from which on a rate is too much
	MostRate        float64       // at which the search for saturation ends, requests a second
	Connections     int           // over gRPC

	Stage *Stage // to ask instead, see OfStage; nil: a server that is started
}

// DefaultQueryConfig takes less than a minute.
func DefaultQueryConfig() QueryConfig {
	return QueryConfig{
		Transports:      QueryTransports(),
		Blocks:          []int{192},
		Workers:         []int{64},
		Held:            4_000_000,
		BlocksPerSecond: 1e6,
		Step:            500 * time.Millisecond,
		For:             2 * time.Second,
		Slowest:         10 * time.Millisecond,
		MostRate:        1e6,
		Connections:     4,
	}
}

// QueryTransports returns the names of the transports.
func QueryTransports() []string { return []string{"grpc", "stream", "json"} }

// The most that may be asked for.
const (
	mostQueryBlocks  = 65536
	mostQueryWorkers = 10000
	mostConnections  = 64
)

// Validate says what is wrong with a configuration.
func (c *QueryConfig) Validate() error {
	for _, t := range c.Transports {
		if !slices.Contains(QueryTransports(), t) {
			return fmt.Errorf("no transport %q: want some of %s", t, strings.Join(QueryTransports(), ", "))
		}
	}
	if len(c.Transports) == 0 || len(c.Blocks) == 0 || len(c.Workers) == 0 {
		return fmt.Errorf("want at least one transport, one number of blocks and one of workers")
	}
	for _, n := range c.Blocks {
		if n < 1 || n > mostQueryBlocks {
			return fmt.Errorf("prompts of %d blocks: want 1 to %d", n, mostQueryBlocks)
		}
	}
	for _, n := range c.Workers {
		if c.Stage == nil && n < 1 || n > mostQueryWorkers {
			return fmt.Errorf("%d workers: want 1 to %d", n, mostQueryWorkers)
		}
	}
	switch {
	case c.Held < 0 || c.Held > 1e9:
		return fmt.Errorf("%d blocks held: want 0 to a billion", c.Held)
	case !(c.BlocksPerSecond >= 0 && c.BlocksPerSecond <= 1e9):
		return fmt.Errorf("%v blocks a second: want 0 to 1e9", c.BlocksPerSecond)
	case c.Step <= 0 || c.For <= 0 || c.Overload < 0 || max(c.Step, c.For, c.Overload) > time.Hour:
		return fmt.Errorf("steps of %v, then %v, then %v: want more than 0, and an hour at most", c.Step, c.For, c.Overload)
	case c.Slowest <= 0:
		return fmt.Errorf("a median of %v is never reached", c.Slowest)
	case !(c.MostRate >= 1 && c.MostRate <= 1e6):
		return fmt.Errorf("at most %v requests a second: want 1 to a million", c.MostRate)
	case c.Connections < 1 || c.Connections > mostConnections:
		return fmt.Errorf("%d connections: want 1 to %d", c.Connections, mostConnections)
	}
	if c.Stage != nil {
		return c.validateStage()
	}
	return nil
}

// QueryLine is what came of asking at one rate for a time. Latencies are from when a
// request should have been sent to its answer, whatever held it up.
type QueryLine struct {
	Mode      string `json:"mode"` // query
	What      string `json:"what"` // step, saturation, half, empty, bare, overload, after
	Transport string `json:"transport"`
	By        string `json:"by"` // hashes or tokens
	Blocks    int    `json:"blocks"`
	Workers   int    `json:"workers"` // 0: those of a stage

	Seconds  figure `json:"seconds"`
	Offered  figure `json:"offered_per_s"`
	Answered figure `json:"answered_per_s"`
	Requests int64  `json:"requests"` // all that were due: the sum of the next four
	Answers  int64  `json:"answers"`
	Refused  int64  `json:"refused"` // as busy
	Failed   int64  `json:"failed"`
	Unsent   int64  `json:"unsent"`  // too many were waiting to be sent
	Checked  int64  `json:"checked"` // answers whose every depth was compared with the truth

	P50   figure `json:"p50_us"`
	P99   figure `json:"p99_us"`
	P999  figure `json:"p999_us"`
	Late  figure `json:"sent_late_p99_us"` // after it was due: what this process is to blame for, and the server's slowness in taking it
	No50  figure `json:"refused_p50_us"`   // null: nothing was refused
	No99  figure `json:"refused_p99_us"`
	CPU   figure `json:"server_cpu_us_per_answer"` // the writing included
	Cores figure `json:"server_cores"`
	Mine  figure `json:"client_cores"`
	GC    figure `json:"gc_percent"` // of the server's processor time

	ResidentMiB figure `json:"resident_mib"` // of the server, the most of those seen each 100 ms
	Written     figure `json:"written_blocks_per_s"`
	// After overload: from its end to the due time of the last request that was refused
	// or slower than a second.
	Recovery *figure `json:"recovery_ms,omitempty"`
}

// Starter starts a process that runs ServeQueries with these arguments. What is
// written to in is its input; its end ends the process. wait returns how it ended.
type Starter func(ctx context.Context, c ServerConfig) (in io.WriteCloser, out io.Reader, wait func() error, err error)

// clientMemory is how many bytes the measuring side fills before it collects.
const clientMemory = 512 << 20

// RunQuery measures, and writes a JSON line for each result to out and at last a table
// to table. A wrong answer is an error.
func RunQuery(ctx context.Context, c QueryConfig, start Starter, out, table io.Writer, p Progress) error {
	if err := c.Validate(); err != nil {
		return err
	}
	// So small a heap would be collected every few milliseconds, on the server's processors.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(clientMemory))
	b := &queryBench{QueryConfig: c, ctx: ctx, start: start, out: json.NewEncoder(out), progress: p}
	p.Start("measurements", 0)
	if c.Stage != nil {
		if err := b.stage(); err != nil {
			return err
		}
		return b.table(table)
	}
	for _, workers := range c.Workers {
		if err := b.server(workers); err != nil {
			return err
		}
	}
	return b.table(table)
}

// queryBench is one measurement.
type queryBench struct {
	QueryConfig
	ctx      context.Context
	start    Starter
	out      *json.Encoder
	progress Progress
	told     []QueryLine
}

// server measures all with one number of workers.
func (b *queryBench) server(workers int) (err error) {
	s, err := startServer(b.ctx, b.start, ServerConfig{Workers: workers, Blocks: b.Blocks, Held: b.Held, BlocksPerSecond: b.BlocksPerSecond})
	if err != nil {
		return err
	}
	defer func() {
		if ended := s.stop(); err == nil {
			err = ended
		}
	}()
	return b.cases(s, workers)
}

// cases asks for each length of prompts over each transport.
func (b *queryBench) cases(s *server, workers int) error {
	for _, blocks := range b.Blocks {
		for _, transport := range b.Transports {
			c := queryCase{b, s, transport, blocks, workers}
			if err := c.run(); err != nil {
				return fmt.Errorf("%s, %d blocks, %d workers: %w", transport, blocks, workers, err)
			}
		}
	}
	return nil
}

// queryCase is what is asked for over one transport.
type queryCase struct {
	*queryBench
	s               *server
	transport       string
	blocks, workers int
}

func (c *queryCase) run() error {
	asked, err := c.lanes(c.s.Main, c.prompts())
	if err != nil {
		return err
	}
	defer asked.close()
	saturation, err := c.saturate(asked)
	if err != nil {
		return err
	}
	half := saturation / 2
	if _, err := c.measure("half", asked, half, c.For); err != nil {
		return err
	}
	for _, echo := range []struct {
		what string
		at   addresses
		of   []prompt
	}{{"empty", c.s.Main, nil}, {"bare", c.s.Bare, unchecked(c.prompts())}} {
		if echo.what == "bare" && (c.transport == "json" || c.Stage != nil) {
			continue // there is none
		}
		lanes, err := c.lanes(echo.at, echo.of)
		if err != nil {
			return err
		}
		_, err = c.measure(echo.what, lanes, half, c.For)
		lanes.close()
		if err != nil {
			return err
		}
	}
	if c.Overload > 0 {
		return c.overload(asked, saturation)
	}
	return nil
}

// Saturation is looked for from here on, in steps.
const (
	firstRate = 1000.0
	bigStep   = 2.0
	smallStep = 1.15
	// enough is the share of the requests that must be answered in time for a rate to
	// count as one that the server can do.
	enough = 0.98
)

// saturate looks for the highest rate at which all but a few are answered: by doubling
// until that fails, then from the last that did not in small steps. One failure is not
// believed.
func (c *queryCase) saturate(l *lanes) (float64, error) {
	var best QueryLine
	rate, step := min(firstRate, c.MostRate), bigStep
	if c.Stage != nil {
		rate = min(stageFirstRate, c.MostRate)
	}
	for failed := 0; rate <= c.MostRate; {
		line, err := c.measure("step", l, rate, c.Step)
		if err != nil {
			return 0, err
		}
		if float64(line.Answers) >= enough*float64(line.Requests) && float64(line.P50) < float64(c.Slowest/time.Microsecond) {
			best, failed = line, 0
			rate *= step
			continue
		}
		if failed++; failed == 1 {
			continue
		}
		switch {
		case best.Requests == 0:
			rate, failed = rate/4, 0
			if rate < 1 {
				return 0, fmt.Errorf("not even %.0f requests a second are answered", rate*4)
			}
		case step == bigStep:
			step, failed = smallStep, 0
			rate = float64(best.Offered) * step
		default:
			best.What = "saturation"
			return float64(best.Offered), c.tell(best)
		}
	}
	best.What = "saturation"
	return float64(best.Offered), c.tell(best)
}

// measure asks at a rate and tells of it.
func (c *queryCase) measure(what string, l *lanes, rate float64, d time.Duration) (QueryLine, error) {
	t, line, err := c.offered(what, l, rate, d)
	if err != nil {
		return line, err
	}
	if t.failed > 0 {
		return line, fmt.Errorf("at %.0f requests a second %d failed; the first: %w", rate, t.failed, t.err)
	}
	return line, c.tell(line)
}

func (c *queryCase) tell(line QueryLine) error {
	c.progress.Add(1)
	c.told = append(c.told, line)
	return c.out.Encode(line)
}

// offered asks at a rate for a time, and watches the server.
func (c *queryCase) offered(what string, l *lanes, rate float64, d time.Duration) (*tally, QueryLine, error) {
	before, err := c.s.stats()
	if err != nil {
		return nil, QueryLine{}, err
	}
	watch := startWatch(processTime)
	looked := make(chan error, 1)
	over := make(chan struct{})
	most := before.Resident
	go func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-over:
				looked <- nil
				return
			case <-tick.C:
				now, err := c.s.stats()
				if err != nil {
					looked <- err
					return
				}
				most = max(most, now.Resident)
			}
		}
	}()
	t, err := l.offer(c.ctx, rate, d)
	close(over)
	if lost := <-looked; err == nil {
		err = lost
	}
	if err != nil {
		return nil, QueryLine{}, err
	}
	seconds, mine := watch.read()
	after, err := c.s.stats()
	if err != nil {
		return nil, QueryLine{}, err
	}
	cpu := after.CPU - before.CPU
	line := QueryLine{
		Mode: "query", What: what, Transport: c.transport, By: "hashes", Blocks: c.blocks, Workers: c.workers,
		Seconds: figure(seconds), Offered: figure(rate), Answered: figure(float64(t.answered.count()) / seconds),
		Requests: t.due, Answers: t.answered.count(), Refused: t.refused.count(), Failed: t.failed, Unsent: t.unsent, Checked: t.checked,
		P50: t.answered.figure(50), P99: t.answered.figure(99), P999: t.answered.figure(99.9),
		Late: t.late.figure(99), No50: t.refused.figure(50), No99: t.refused.figure(99),
		CPU: figure(cpu / float64(t.answered.count()) * 1e6), Cores: figure(cpu / seconds), Mine: figure(mine),
		GC:          figure((after.GC - before.GC) / cpu * 100),
		ResidentMiB: figure(max(most, after.Resident)) / (1 << 20),
		Written:     figure(float64(after.Written-before.Written) / seconds),
	}
	if c.Tokens {
		line.By = "tokens"
	}
	if c.Stage != nil { // which tells nothing of itself
		unknown := figure(math.NaN())
		line.CPU, line.Cores, line.GC, line.ResidentMiB, line.Written = unknown, unknown, unknown, unknown, unknown
	}
	return t, line, nil
}
