// This file asks Linux for the processor's time and for resident memory.

package bench

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

func usage(who int) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		panic("BUG: getrusage: " + err.Error())
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// threadTime is the processor's time that the calling thread has had.
func threadTime() time.Duration { return usage(syscall.RUSAGE_THREAD) }

// processTime is the processor's time that all threads have had.
func processTime() time.Duration { return usage(syscall.RUSAGE_SELF) }

// resident returns how many bytes of memory the process has.
func resident() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if fields := bytes.Fields(text); err == nil && len(fields) > 1 {
		if pages, err := strconv.ParseInt(string(fields[1]), 10, 64); err == nil {
			return pages * int64(os.Getpagesize())
		}
	}
	return 0
}

// pause sleeps for a time below a second. The runtime's own sleep ends up to a
// millisecond late on an idle processor, which would be measured as latency.
func pause(d time.Duration) {
	t := syscall.NsecToTimespec(int64(min(d, time.Second)))
	_ = syscall.Nanosleep(&t, nil) // a signal that ends it early does no harm
}
