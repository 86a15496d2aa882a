// This file measures wall time and, with it, processor time.

package bench

import "time"

// stopwatch counts wall and processor time from when it was made.
type stopwatch struct {
	clock     func() time.Duration // of the processor
	wall      time.Time
	processor time.Duration
}

func startWatch(clock func() time.Duration) stopwatch {
	return stopwatch{clock, time.Now(), clock()}
}

// read returns the seconds so far, and the processor's seconds in each.
func (s *stopwatch) read() (seconds, share float64) {
	seconds = time.Since(s.wall).Seconds()
	return seconds, (s.clock() - s.processor).Seconds() / seconds
}
