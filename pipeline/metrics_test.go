package pipeline

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvindex/testcontainers"
)

// metrics scrapes the stage: values by name and labels, as Prometheus' text has them.
func (in *instance) metrics() map[string]float64 {
	in.r.t.Helper()
	resp, err := http.Get("http://" + in.HTTPAddr().String() + "/metrics")
	if err != nil {
		in.r.t.Fatal(err)
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), "} "); ok && name[0] != '#' {
			out[name+"}"], _ = strconv.ParseFloat(value, 64)
		} else if name, value, ok := strings.Cut(lines.Text(), " "); ok && name != "#" {
			out[name], _ = strconv.ParseFloat(value, 64)
		}
	}
	return out
}

// shows waits until the metrics have those values.
func (in *instance) shows(want map[string]float64) {
	in.r.t.Helper()
	testcontainers.Eventually(in.r.t, patience, func() error {
		got := in.metrics()
		for name, value := range want {
			if v, ok := got[name]; !ok || v != value {
				return fmt.Errorf("%s is %v, want %v", name, v, value)
			}
		}
		return nil
	})
}

// What a scrape says of partitions, worker-ranks and what was applied.
func TestMetricsOfWhatWasApplied(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	r := newRig(t, b, 2)
	r.cfg.Version = "v9"
	in := r.start()
	in.caughtUp()
	whole, incomplete, gone := r.produce("whole", 0), r.produce("incomplete", 0), r.produce("gone", 0)
	whole.send(stored(nil, locals(1, 3)...))
	incomplete.batch.Seq++
	incomplete.send(stored(nil, locals(1, 2)...)) // not the first
	gone.send(stored(nil, locals(2, 2)...))
	gone.send(retired())
	in.caughtUp()
	in.shows(map[string]float64{
		`kvindex_workers{state="answered"}`:                               1,
		`kvindex_workers{state="incomplete"}`:                             1,
		`kvindex_workers{state="retired"}`:                                1,
		`kvindex_workers{state="silent"}`:                                 0,
		`kvindex_workers{state="unknown"}`:                                0,
		`kvindex_partitions{state="live"}`:                                2,
		`kvindex_partitions{state="restoring"}`:                           0,
		`kvindex_ready`:                                                   1,
		`kvindex_brokers_reachable`:                                       1,
		`kvindex_index_blocks{block_size="16",hasher="flash",model="m"}`:  5,
		`kvindex_index_workers{block_size="16",hasher="flash",model="m"}`: 2,
	})
	var got map[string]float64
	testcontainers.Eventually(t, patience, func() error { // what a batch took is measured after it is applied
		got = in.metrics()
		if n := got["kvindex_apply_duration_seconds_count"]; n < 1 || n != got["kvindex_decode_duration_seconds_count"] {
			return fmt.Errorf("%v batches, %v decodings measured", n, got["kvindex_decode_duration_seconds_count"])
		}
		return nil
	})
	bytes, newest := 0.0, 0.0
	for p := range 2 {
		bytes += got[fmt.Sprintf(`kvindex_record_bytes_total{partition="%d"}`, p)]
		newest = max(newest, got[fmt.Sprintf(`kvindex_partition_newest_record_timestamp_seconds{partition="%d"}`, p)])
	}
	if bytes < 100 || time.Since(time.UnixMilli(int64(newest*1000))).Abs() > patience {
		t.Errorf("%v bytes, newest record of %v", bytes, newest)
	}
	in.saved()
	in.shows(map[string]float64{`kvindex_snapshot_failures_total{partition="0"}`: 0})
	testcontainers.Eventually(t, patience, func() error { // likewise
		if in.metrics()["kvindex_snapshot_duration_seconds_count"] < 1 {
			return errors.New("no round measured")
		}
		return nil
	})
	in.stop()

	again := r.start()
	again.caughtUp()
	got = again.metrics()
	read, blocks := 0.0, 0.0
	for p := range 2 {
		read += got[fmt.Sprintf(`kvindex_restore_snapshot_bytes{partition="%d"}`, p)]
		blocks += got[fmt.Sprintf(`kvindex_restore_blocks{partition="%d"}`, p)]
	}
	if read < 100 || blocks != 5 {
		t.Errorf("restored %v blocks from %v bytes", blocks, read)
	}
}

// While brokers are away, lag and readiness stand still. What is not known any
// more grows, and falls back once they return.
func TestMetricsWhileBrokersAreAway(t *testing.T) {
	b := testcontainers.NewNative(t, testcontainers.NativeConfig{})
	r := newRig(t, b, 1)
	in := r.start()
	r.produce("w", 0).send(stored(nil, locals(1, 3)...))
	in.caughtUp()
	const away, behind = "kvindex_brokers_away_seconds", `kvindex_partition_behind_seconds{partition="0"}`
	fresh := func() error {
		if got := in.metrics(); got[away] > 1 || got[behind] > 1 || got["kvindex_ready"] != 1 {
			return fmt.Errorf("away for %v, behind by %v, ready %v", got[away], got[behind], got["kvindex_ready"])
		}
		return nil
	}
	testcontainers.Eventually(t, patience, fresh)
	if err := b.Pause(0); err != nil {
		t.Fatal(err)
	}
	testcontainers.Eventually(t, patience, func() error {
		if got := in.metrics(); got[away] < 2 || got[behind] < 2 {
			return fmt.Errorf("away for %v, behind by %v", got[away], got[behind])
		}
		return nil
	})
	if got := in.metrics(); got["kvindex_ready"] != 1 || got[`kvindex_partition_lag_offsets{partition="0"}`] != 0 {
		t.Errorf("ready %v, lag %v: answers go on from memory", got["kvindex_ready"], got[`kvindex_partition_lag_offsets{partition="0"}`])
	}
	if err := b.Resume(0); err != nil {
		t.Fatal(err)
	}
	testcontainers.Eventually(t, patience, fresh)
}

// A worker-rank is in one state, the gravest.
func TestWorkerStates(t *testing.T) {
	k := &rank{worker: &worker{}}
	state := func(st rankStatus, silent bool) string {
		for _, s := range workerStates {
			if s.holds(k, &st, silent) {
				return s.name
			}
		}
		return ""
	}
	for _, c := range []struct {
		want       string
		st         rankStatus
		silent     bool
		incomplete bool
	}{
		{"answered", rankStatus{}, false, false},
		{"incomplete", rankStatus{}, false, true},
		{"silent", rankStatus{}, true, true},
		{"unknown", rankStatus{unknown: true}, true, true},
		{"retired", rankStatus{unknown: true, retired: true}, true, true},
	} {
		k.incomplete.Store(c.incomplete)
		if got := state(c.st, c.silent); got != c.want {
			t.Errorf("%+v is %s", c, got)
		}
	}
}
