// This file replays a workload on one thread, in order.

package bench

import (
	"runtime"
	"time"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Seq is what a replay in order on one thread took. Each event and query is
// timed on its own; what is between them, adding up the answers included, is not
// in it.
type Seq struct {
	heading
	Runs             int     `json:"runs"`
	TotalMs          figure  `json:"total_ms"` // median of the runs, as all without another name
	BestMs           figure  `json:"best_ms"`
	SpreadPercent    figure  `json:"spread_percent"`
	CPUShare         figure  `json:"cpu_share"`  // of the measuring thread
	CoresUsed        figure  `json:"cores_used"` // by the process: more than cpu_share where the collector ran beside it
	StoreMs          figure  `json:"store_ms"`
	RemoveMs         figure  `json:"remove_ms"`
	QueryMs          figure  `json:"query_ms"`
	NsStoredBlock    figure  `json:"ns_per_stored_block"`
	NsRemovedBlock   figure  `json:"ns_per_removed_block"`
	NsQuery          figure  `json:"ns_per_query"`
	NsQueriedBlock   figure  `json:"ns_per_queried_block"`
	RejectedEvents   int     `json:"rejected_events"` // refused, or with a parent or a block that was not held
	AnswersOfQueries Answers `json:"answers"`
}

// replay is one run.
type replay struct {
	took             [kvw.Query + 1]time.Duration // by kind
	share, coresUsed float64
	rejected         int
	answers          Answers
}

func (r *replay) total() time.Duration {
	return r.took[kvw.Store] + r.took[kvw.Remove] + r.took[kvw.Query]
}

// apply applies an event. ok is false if there was something wrong with it.
func apply(s index.Structure, op *kvw.Op) (ok bool) {
	if op.Kind == kvw.Store {
		e, err := s.Store(op.Worker, op.Stored)
		return err == nil && e.Orphan == 0
	}
	return s.Remove(op.Worker, op.Hashes).Unknown == 0
}

func (b *bench) replay() (replay, error) {
	s := b.structure.empty()
	b.progress.Start("operations", int64(len(b.workload.Ops)))
	runtime.GC()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var r replay
	var m index.SlotMatches
	query := 0
	thread, process := startWatch(threadTime), startWatch(processTime)
	for i := range b.workload.Ops {
		op := &b.workload.Ops[i]
		begun := time.Now()
		if op.Kind == kvw.Query {
			s.Find(op.Query, index.FindOptions{}, &m)
			r.took[kvw.Query] += time.Since(begun)
			r.answers.addMatches(query, &m)
			query++
		} else {
			ok := apply(s, op)
			r.took[op.Kind] += time.Since(begun)
			if !ok {
				r.rejected++
			}
		}
		if err := b.step(i); err != nil {
			return r, err
		}
	}
	_, r.share = thread.read()
	_, r.coresUsed = process.read()
	return r, nil
}

func (b *bench) seq() error {
	var runs []replay
	for range b.Runs {
		r, err := b.replay()
		if err != nil {
			return err
		}
		if runs = append(runs, r); r.answers != runs[0].answers {
			return errDiffer
		}
	}
	w := b.workload
	took := func(k kvw.Kind) func(*replay) float64 {
		return func(r *replay) float64 { return float64(r.took[k]) }
	}
	ms := func(r *replay) float64 { return float64(r.total()) / 1e6 }
	store, remove, find := median(runs, took(kvw.Store)), median(runs, took(kvw.Remove)), median(runs, took(kvw.Query))
	per := func(ns figure, n int) figure { return ns / figure(max(n, 1)) }
	return b.tell(Seq{
		heading:          b.heading(),
		Runs:             b.Runs,
		TotalMs:          median(runs, ms),
		BestMs:           least(runs, ms),
		SpreadPercent:    spread(runs, ms),
		CPUShare:         median(runs, func(r *replay) float64 { return r.share }),
		CoresUsed:        median(runs, func(r *replay) float64 { return r.coresUsed }),
		StoreMs:          store / 1e6,
		RemoveMs:         remove / 1e6,
		QueryMs:          find / 1e6,
		NsStoredBlock:    per(store, w.Totals.Stored),
		NsRemovedBlock:   per(remove, w.Totals.Removed),
		NsQuery:          per(find, w.Totals.Queries),
		NsQueriedBlock:   per(find, w.Totals.Queried),
		RejectedEvents:   runs[len(runs)-1].rejected,
		AnswersOfQueries: runs[0].answers,
	})
}
