// This file is what a relay says of itself: state by worker-rank, for /v1/status
// and /readyz.

package relay

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// linkState is how far a source is with its engine.
type linkState string

const (
	stateConnecting linkState = "connecting"  // there is no connection
	stateCatchingUp linkState = "catching-up" // what was missed is being asked for
	stateLive       linkState = "live"        // what the engine says is followed
)

// streamStatus is a source's state as others see it. It may be read and written
// at any time.
type streamStatus struct {
	mu      sync.Mutex
	state   linkState
	problem string
	began   bool // it was live once

	nextSeq   atomic.Int64 // -1 if nothing is known
	lastHeard atomic.Int64 // Unix nanoseconds, 0 for never
}

func newStreamStatus() *streamStatus {
	s := &streamStatus{state: stateConnecting}
	s.nextSeq.Store(-1)
	return s
}

func (s *streamStatus) set(st linkState, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.problem = st, problem
	s.began = s.began || st == stateLive
}

func (s *streamStatus) get() (st linkState, problem string, began bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.problem, s.began
}

func (s *streamStatus) next(seq int64) { s.nextSeq.Store(seq) }

func (s *streamStatus) heard(at time.Time) {
	if !at.IsZero() {
		s.lastHeard.Store(at.UnixNano())
	}
}

// Status is what /v1/status says.
type Status struct {
	Ready    bool         `json:"ready"`
	Missing  []string     `json:"missing"` // why it is not
	Instance string       `json:"instance"`
	Version  string       `json:"version"`
	Started  time.Time    `json:"started"`
	Topic    string       `json:"topic"`
	Buffer   int64        `json:"buffer_bytes"`    // the most that may be on its way to Kafka
	InFlight int64        `json:"in_flight_bytes"` // that are on their way to Kafka
	Ranks    []RankStatus `json:"ranks"`
}

// RankStatus is one worker-rank's.
type RankStatus struct {
	Worker    string           `json:"worker"`
	Rank      int              `json:"rank"`
	Kind      Kind             `json:"kind"`
	Model     string           `json:"model"`
	Source    string           `json:"source"`             // connecting, catching-up or live
	EngineSeq int64            `json:"engine_seq"`         // next of the engine's batches or events; -1: not known
	Heard     *time.Time       `json:"engine_heard"`       // when the engine was last known to be alive
	State     string           `json:"state"`              // held, due, opening or writing
	Cause     string           `json:"cause"`              // why the epoch began, or is to
	Epoch     int64            `json:"epoch"`              // 0: none yet
	Seq       int64            `json:"seq"`                // of the last record
	Whole     bool             `json:"whole"`              // all that the engine holds is known
	Blocks    map[string]int   `json:"blocks"`             // by tier
	Aside     int              `json:"blocks_aside"`       // held by the engine, but their prefix is not known
	InFlight  int64            `json:"in_flight_bytes"`    //
	KafkaAck  *time.Time       `json:"kafka_acknowledged"` // the last record
	Saved     *time.Time       `json:"checkpoint"`         // the last one
	Problem   string           `json:"problem"`            // what is wrong now
	LeftOut   map[string]int64 `json:"left_out,omitempty"` // blocks and events, by reason
}

// Status returns what the relay is doing. Safe for concurrent use.
func (r *Relay) Status() Status {
	st := Status{
		Ready: true, Missing: []string{}, Instance: r.cfg.Instance, Version: r.cfg.Version, Started: r.started,
		Topic: r.cfg.Topic, Buffer: r.cfg.BufferBytes, Ranks: []RankStatus{},
	}
	if !r.made.Load() {
		st.Ready, st.Missing = false, []string{"the relay is starting"}
		return st
	}
	st.InFlight = r.out.used.Load()
	for _, k := range r.ranks {
		f := k.feed.status()
		source, problem, began := k.status.get()
		row := RankStatus{
			Worker: f.Worker, Rank: int(f.Rank), Kind: k.engine.Kind, Model: f.Model,
			Source: string(source), EngineSeq: k.status.nextSeq.Load(),
			State: f.State, Cause: f.Cause, Epoch: f.Epoch, Seq: f.Seq, Whole: f.Whole,
			Blocks: map[string]int{}, Aside: f.Aside, InFlight: f.Bytes,
			KafkaAck: someTime(f.Heard), Saved: someTime(f.Saved), Problem: join(problem, f.Problem),
			LeftOut: map[string]int64{},
		}
		if at := k.status.lastHeard.Load(); at != 0 {
			row.Heard = someTime(time.Unix(0, at))
		}
		for t, n := range f.Blocks {
			row.Blocks[tierName(t)] = n
		}
		for reason, n := range k.leftOut() {
			row.LeftOut[reason] = n
		}
		if !began || f.State != stateNames[writing] || f.Stalled {
			st.Ready = false
			text := fmt.Sprintf("%s/%d: %s, %s", f.Worker, f.Rank, source, f.State)
			if row.Problem != "" {
				text += ": " + row.Problem
			}
			st.Missing = append(st.Missing, text)
		}
		st.Ranks = append(st.Ranks, row)
	}
	return st
}

func join(a, b string) string {
	if a != "" && b != "" {
		return a + "; " + b
	}
	return a + b
}

func someTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
