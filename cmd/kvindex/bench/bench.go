// This file is what the modes have in common.

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Config says what to measure.
type Config struct {
	Mode      string
	Structure string
	File      string // a workload; of every mode but scale
	Positions bool   // events say their positions, which files do not have

	Runs            int     // seq, pool, dump: of which the median is told
	EventWorkers    int     // pool, mixed: goroutines that apply events
	Barrier         bool    // pool: each query waits for the events before it
	Readers         int     // mixed: goroutines that ask
	WarmUp          float64 // mixed: seconds before measuring
	Seconds         float64 // mixed: of measuring
	BlocksPerSecond float64 // mixed: of events; 0: as fast as they are applied

	Blocks  int64 // scale: to grow to, pairs of worker and block
	Workers int   // scale
	Queries int   // scale: at each line
}

// DefaultConfig is one run of seq over the first structure.
func DefaultConfig() Config {
	return Config{
		Mode: "seq", Structure: structures[0].name,
		Runs: 1, EventWorkers: 1, Readers: 1, WarmUp: 1, Seconds: 10,
		Blocks: 10_000_000, Workers: 1000, Queries: 100_000,
	}
}

// modes are all modes. The concurrent ones refuse structures for one goroutine.
var modes = []struct {
	name       string
	concurrent bool
	run        func(*bench) error
}{
	{"seq", false, (*bench).seq},
	{"pool", true, (*bench).pool},
	{"mixed", true, (*bench).mixed},
	{"mem", false, (*bench).mem},
	{"dump", false, (*bench).dump},
	{"scale", false, (*bench).scale},
}

// Modes returns the names of the modes.
func Modes() []string {
	var names []string
	for _, m := range modes {
		names = append(names, m.name)
	}
	return names
}

// Validate says what is wrong with a configuration.
func (c *Config) Validate() error {
	i := slices.Index(Modes(), c.Mode)
	if i < 0 {
		return fmt.Errorf("no mode %q: want one of %s", c.Mode, strings.Join(Modes(), ", "))
	}
	s, err := structureOf(c.Structure)
	switch {
	case err != nil:
		return err
	case modes[i].concurrent && s.alone:
		return fmt.Errorf("structure %s is for one goroutine: mode %s needs several", s.name, c.Mode)
	case c.File == "" && c.Mode != "scale":
		return fmt.Errorf("mode %s needs a workload file", c.Mode)
	case c.File != "" && c.Mode == "scale":
		return fmt.Errorf("mode scale takes no workload file: it makes up what it stores")
	case c.Runs < 1 || c.EventWorkers < 0 || c.Readers < 1:
		return fmt.Errorf("%d runs, %d event workers, %d readers: want at least 1, 0 and 1", c.Runs, c.EventWorkers, c.Readers)
	case c.EventWorkers < 1 && c.Mode == "pool":
		return fmt.Errorf("mode pool needs an event worker")
	case c.EventWorkers > mixedWindow || c.Readers > 1024:
		return fmt.Errorf("%d event workers, %d readers: want at most %d and 1024", c.EventWorkers, c.Readers, mixedWindow)
	case !(c.Seconds > 0 && c.Seconds <= 86400) || !(c.WarmUp >= 0 && c.WarmUp <= 86400) || !(c.BlocksPerSecond >= 0 && c.BlocksPerSecond <= 1e12):
		return fmt.Errorf("%v seconds, %v blocks a second: want more than 0 and up to a day, and 0 or more", c.Seconds, c.BlocksPerSecond)
	case c.Blocks < 1 || c.Queries < 1 || c.Workers < 1 || c.Workers > kvw.MaxWorkers:
		return fmt.Errorf("%d blocks, %d queries, %d workers: want at least 1, and at most %d workers", c.Blocks, c.Queries, c.Workers, kvw.MaxWorkers)
	}
	return nil
}

// Progress is told how far a measurement is, always by the same goroutine.
type Progress interface {
	Start(what string, total int64) // something new begins, with total of what it counts
	Add(n int64)                    // n more are done
}

// bench is one measurement.
type bench struct {
	Config
	ctx       context.Context
	structure structure
	workload  *kvw.Workload // nil in scale
	out       *json.Encoder
	progress  Progress
}

// Run measures and writes a JSON line for each result. Errors of the workload
// file are *kvw.FormatError, wrapped.
func Run(ctx context.Context, c Config, out io.Writer, p Progress) error {
	if err := c.Validate(); err != nil {
		return err
	}
	b := &bench{Config: c, ctx: ctx, out: json.NewEncoder(out), progress: p}
	var err error
	if b.structure, err = structureOf(c.Structure); err != nil {
		return err
	}
	if c.Mode != "scale" {
		if b.workload, err = kvw.Load(c.File); err != nil {
			return err
		}
		if c.Positions {
			b.workload.Place()
		}
	}
	return modes[slices.Index(Modes(), c.Mode)].run(b)
}

// stepSize is after how many operations a measurement looks up from its work.
const stepSize = 1024

// step is called after each operation, with its number from 0. It fails when the
// context has ended.
func (b *bench) step(i int) error {
	if i%stepSize > 0 {
		return nil
	}
	b.progress.Add(min(int64(i), stepSize))
	return b.ctx.Err()
}

// filled returns a structure after all events of the workload.
func (b *bench) filled() (index.Structure, error) {
	s := b.structure.empty()
	b.progress.Start("operations", int64(len(b.workload.Ops)))
	for i := range b.workload.Ops {
		if op := &b.workload.Ops[i]; op.Kind != kvw.Query {
			apply(s, op)
		}
		if err := b.step(i); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// heading is what each line begins with.
type heading struct {
	Impl      string `json:"impl"`
	Mode      string `json:"mode"`
	File      string `json:"file,omitempty"`
	Index     string `json:"index"` // the structure
	Positions bool   `json:"positions"`
}

func (b *bench) heading() heading {
	h := heading{Impl: "kvindex", Mode: b.Mode, Index: b.structure.name, Positions: b.Positions}
	if b.workload != nil {
		h.File = b.workload.Name
	}
	return h
}

func (b *bench) tell(line any) error { return b.out.Encode(line) }
