// This file is what a relay says of itself: state by worker-rank, for /v1/status
// and /readyz.

package relay

import (
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
