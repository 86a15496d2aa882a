// Package bench measures index structures and the relay.
//
// [Run] is for structures: it drives one through its slots with
// the events and queries of a workload file, a slot a worker, and tells what that
// took as JSON.
//
// What it prints of a mode has the keys and the meaning of other programs that
// replay KVW1 files, so that two implementations can be set side by side on the
// same file, and a digest of all answers shows whether they gave the same ones.
// Times are of wall clocks: cpu_share or cores_used well below what a mode needs
// says that others had the processor.
//
// [RunRelay] is for the relay: it has a publisher, best in a process of its own
// ([ServePublisher]), publish as an engine does, and follows it with a whole relay
// or with parts of one.
package bench
