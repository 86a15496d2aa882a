// This file is what a replay tells at its end.

package main

import (
	"fmt"
	"math"
	"strings"
	"time"

	"kvindex/cmd/kvindex/fleet"
)

// replaySummary is a replay in numbers.
type replaySummary struct {
	Requests       int     `json:"requests"`
	Seconds        float64 `json:"seconds"`
	Workers        int     `json:"workers"`
	CapacityBlocks int     `json:"capacity_blocks"` // of each worker
	BlockSize      int     `json:"block_size"`      // tokens
	Model          string  `json:"model"`
	Epoch          int64   `json:"epoch"`

	Events        int            `json:"events"`
	BlocksStored  int            `json:"blocks_stored"`
	BlocksRemoved int            `json:"blocks_removed"`
	Produced      fleet.Produced `json:"produced"`

	Route   string        `json:"route"` // whose events were produced
	Index   routeSummary  `json:"index"`
	Random  routeSummary  `json:"random"`
	Queries *querySummary `json:"queries,omitempty"` // unless routed at random
}

// routeSummary is how one way to route did.
type routeSummary struct {
	HitShare    float64 `json:"hit_share"`
	MaxOverMean float64 `json:"max_over_mean_requests"`
}

// querySummary is how the stage answered.
type querySummary struct {
	Answered int     `json:"answered"`
	Failed   int     `json:"failed"` // routed by load alone
	P50Ms    float64 `json:"p50_ms"`
	P99Ms    float64 `json:"p99_ms"`
}

func round3(x float64) float64 { return math.Round(x*1000) / 1000 }

func (s *sim) summary() replaySummary {
	own, beside := s.own.Stats(), s.beside.Stats()
	sum := replaySummary{
		Seconds:        round3(s.ended.Sub(s.started).Seconds()),
		Workers:        s.cfg.workers,
		CapacityBlocks: s.cfg.capacity,
		BlockSize:      s.cfg.blockSize,
		Model:          s.cfg.model,
		Epoch:          s.epoch,
		Events:         s.events,
		BlocksStored:   own.Stored,
		BlocksRemoved:  own.Removed,
		Produced:       s.producer.Produced(),
		Route:          s.cfg.route,
	}
	for _, n := range own.Requests {
		sum.Requests += n
	}
	way := func(st fleet.Stats) routeSummary {
		return routeSummary{round3(st.HitShare()), round3(st.MaxOverMean())}
	}
	sum.Index, sum.Random = way(own), way(beside)
	if s.cfg.route == routeRandom {
		sum.Index, sum.Random = sum.Random, sum.Index
	}
	if a := s.asker; a != nil {
		ms := func(q float64) float64 { return round3(float64(quantile(a.took, q)) / float64(time.Millisecond)) }
		sum.Queries = &querySummary{Answered: len(a.took), Failed: a.failed, P50Ms: ms(0.5), P99Ms: ms(0.99)}
	}
	return sum
}

func (s replaySummary) print(con *console) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%d requests to %d workers of %d blocks of %d tokens, in %.1f s\n",
		s.Requests, s.Workers, s.CapacityBlocks, s.BlockSize, s.Seconds)
	fmt.Fprintf(&b, "%d events in %d records and %d heartbeats: %d blocks stored, %d removed\n",
		s.Events, s.Produced.Records, s.Produced.Heartbeats, s.BlocksStored, s.BlocksRemoved)
	if s.Produced.Failed > 0 {
		fmt.Fprintf(&b, "%s\n", con.outStyle.red(fmt.Sprintf("%d records could not be written", s.Produced.Failed)))
	}
	byIndex := "by the index"
	if s.Route == routeRandom {
		byIndex = "by an index that is never late (simulated)"
	}
	b.WriteString("\n")
	if err := table(&b, []string{"routed", "prefix hits", "busiest worker"}, [][]string{
		{byIndex, fmt.Sprintf("%.1f %%", 100*s.Index.HitShare), fmt.Sprintf("%.2f x mean", s.Index.MaxOverMean)},
		{"at random", fmt.Sprintf("%.1f %%", 100*s.Random.HitShare), fmt.Sprintf("%.2f x mean", s.Random.MaxOverMean)},
	}); err != nil {
		return err
	}
	if q := s.Queries; q != nil {
		fmt.Fprintf(&b, "\n%d queries answered, p50 %.2f ms, p99 %.2f ms", q.Answered, q.P50Ms, q.P99Ms)
		if q.Failed > 0 {
			b.WriteString(con.outStyle.yellow(fmt.Sprintf("; %d not answered, routed by load alone", q.Failed)))
		}
		b.WriteString("\n")
	}
	_, err := fmt.Fprint(con.out, b.String())
	return err
}
