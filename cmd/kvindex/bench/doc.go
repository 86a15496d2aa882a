// Package bench measures index structures, the query side and the relay.
//
// [Run] is for structures: it drives one through its slots, a slot for each worker, with
// the events and queries of a workload file, and prints what that took as JSON.
//
// The JSON keys and their meaning are those of other programs that replay KVW1 files, so
// that two implementations can be compared on the same file; a digest of all answers shows
// whether they gave the same ones. Times are wall-clock times: a cpu_share or cores_used
// well below what a mode needs shows that other processes had the CPU.
//
// [RunRelay] is for the relay: a publisher, best in a process of its own
// ([ServePublisher]), publishes as an engine does, and a whole relay, or parts of one,
// follow it.
package bench
