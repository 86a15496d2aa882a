// This file collects latencies.

package bench

import (
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// latencies is a histogram from 1 ns to a minute, to three digits. It is for one
// goroutine.
type latencies struct {
	h   *hdrhistogram.Histogram
	sum time.Duration
}

const longestLatency = time.Minute

func newLatencies() *latencies {
	return &latencies{h: hdrhistogram.New(1, int64(longestLatency), 3)}
}

func (l *latencies) record(d time.Duration) {
	l.sum += d
	if err := l.h.RecordValue(int64(min(max(d, 1), longestLatency))); err != nil {
		panic("BUG: latency out of range: " + err.Error())
	}
}

func (l *latencies) merge(m *latencies) {
	l.sum += m.sum
	l.h.Merge(m.h)
}

func (l *latencies) count() int64 { return l.h.TotalCount() }

// us returns a percentile in microseconds.
func (l *latencies) us(percentile float64) float64 {
	return float64(l.h.ValueAtPercentile(percentile)) / 1e3
}

func (l *latencies) meanUs() float64 { return float64(l.sum) / float64(l.count()) / 1e3 }

// figure is us, NaN if nothing was recorded.
func (l *latencies) figure(percentile float64) figure {
	if l.count() == 0 {
		return figure(math.NaN())
	}
	return figure(l.us(percentile))
}
