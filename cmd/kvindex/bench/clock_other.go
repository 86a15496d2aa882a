// This file leaves out, on other systems, what only Linux is asked for.

//go:build !linux

package bench

import "time"

func threadTime() time.Duration  { return 0 }
func processTime() time.Duration { return 0 }
func resident() int64            { return 0 }
func pause(d time.Duration)      { time.Sleep(d) }
