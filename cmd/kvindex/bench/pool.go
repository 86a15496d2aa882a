// This file replays a workload through an index.Pool.

package bench

import (
	"errors"
	"runtime"
	"strconv"
	"time"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Pool is what it took to put a workload through an index.Pool over an
// index.Index: one goroutine hands over all events and makes the queries between
// them, as fast as it can. The time ends when the last event is applied.
//
// Queries run ahead of the events, so there are no answers to compare, but with the
// barrier, where the time means little.
type Pool struct {
	heading
	EventWorkers  int    `json:"event_workers"`
	Barrier       bool   `json:"barrier"` // each query waits for the events before it
	Runs          int    `json:"runs"`
	WallMs        figure `json:"wall_ms"` // until the last event is applied
	BestMs        figure `json:"best_ms"`
	SpreadPercent figure `json:"spread_percent"`
	IssueMs       figure `json:"issue_ms"`          // until the last one is handed over
	CoresUsed     figure `json:"cores_used"`        // by the process
	LogicalOps    figure `json:"logical_ops_per_s"` // events and queries
	BlockOps      figure `json:"block_ops_per_s"`   // hashes in events and queries
	queryLatencies
	AnswersOfQueries *Answers `json:"answers"` // null without the barrier
}

// poolQueue is how many events wait for a goroutine before the one that hands
// them over does.
const poolQueue = 1024

type poolRun struct {
	wall, issue, cores float64 // seconds; cores a number
	took               *latencies
	answers            Answers
}

func (b *bench) poolOnce() (r poolRun, err error) {
	w := b.workload
	p := index.NewPool(index.New(b.structure.empty()), b.EventWorkers, poolQueue)
	defer func() { err = errors.Join(err, p.Stop()) }()
	names := make([]string, w.Header.Workers)
	for i := range names {
		names[i] = strconv.Itoa(i)
		if err := p.AddWorker(names[i], 0, index.Slot(i)); err != nil {
			return r, err
		}
	}
	r.took = newLatencies()
	var result index.Result
	query := 0
	b.progress.Start("operations", int64(len(w.Ops)))
	runtime.GC()
	watch := startWatch(processTime)
	for i := range w.Ops {
		op := &w.Ops[i]
		switch op.Kind {
		case kvw.Store:
			err = p.Store(b.ctx, names[op.Worker], 0, index.Device, op.Stored)
		case kvw.Remove:
			err = p.Remove(b.ctx, names[op.Worker], 0, index.Device, op.Hashes)
		case kvw.Query:
			if b.Barrier {
				err = p.Flush(b.ctx)
			}
			if err == nil {
				begun := time.Now()
				err = p.Find(&index.Query{Locals: op.Query}, &result)
				r.took.record(time.Since(begun))
			}
			if b.Barrier {
				for _, m := range result.Matches {
					r.answers.add(query, m.Worker.Tag.(index.Slot), m.Depth)
				}
			}
			query++
		}
		if err != nil {
			return r, err
		}
		if err := b.step(i); err != nil {
			return r, err
		}
	}
	r.issue, _ = watch.read()
	if err := p.Flush(b.ctx); err != nil {
		return r, err
	}
	r.wall, r.cores = watch.read()
	return r, nil
}

func (b *bench) pool() error {
	var runs []poolRun
	for range b.Runs {
		r, err := b.poolOnce()
		if err != nil {
			return err
		}
		if runs = append(runs, r); r.answers != runs[0].answers {
			return errDiffer
		}
	}
	wall := func(r *poolRun) float64 { return r.wall }
	seconds := median(runs, wall)
	line := Pool{
		heading:       b.heading(),
		EventWorkers:  b.EventWorkers,
		Barrier:       b.Barrier,
		Runs:          b.Runs,
		WallMs:        seconds * 1e3,
		BestMs:        least(runs, wall) * 1e3,
		SpreadPercent: spread(runs, wall),
		IssueMs:       median(runs, func(r *poolRun) float64 { return r.issue * 1e3 }),
		CoresUsed:     median(runs, func(r *poolRun) float64 { return r.cores }),
		LogicalOps:    figure(b.workload.Totals.LogicalOps()) / seconds,
		BlockOps:      figure(b.workload.Totals.BlockOps()) / seconds,
		queryLatencies: queryLatencies{
			Mean: median(runs, func(r *poolRun) float64 { return r.took.meanUs() }),
			P50:  median(runs, func(r *poolRun) float64 { return r.took.us(50) }),
			P99:  median(runs, func(r *poolRun) float64 { return r.took.us(99) }),
			P999: median(runs, func(r *poolRun) float64 { return r.took.us(99.9) }),
		},
	}
	if b.Barrier {
		line.AnswersOfQueries = &runs[0].answers
	}
	return b.tell(line)
}
