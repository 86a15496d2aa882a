// This file counts what a function allocates, in a process in which others allocate too.

package testcontainers

import "testing"

// LeastAllocs is [testing.AllocsPerRun], the least of some: what others allocate meanwhile, as clients of brokers do, is not f's.
// So few runs should be asked for that they take no more than some milliseconds.
func LeastAllocs(runs int, f func()) float64 {
	least := testing.AllocsPerRun(runs, f)
	for i := 0; i < 50 && least > 0; i++ {
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}
