// Package relay takes what unmodified inference engines say of their KV caches
// and forwards it as records on the events topic. [Relay] is all of it; the
// packages below it, zmtp and engine, read sockets and payloads.
//
// # What is promised
//
// The index is never told of a block that the engine does not hold, beyond what
// is on its way. Each worker-rank's records are those of one process of the
// engine, without holes, or begin anew in an epoch that forgets what was before;
// if what follows is not all that the engine holds, the epoch says so and the
// worker-rank shows as incomplete. When Kafka is away the engine's events are
// still read and kept in mind, and an epoch tells all of it afterwards.
//
// How that is known: see stream for engines that publish over ZeroMQ, poller for
// TensorRT-LLM's buffer, and feed for the way to Kafka.
//
// What cannot be known: a forwarder between engine and relay that keeps its
// connection while the engine behind it restarts hides the restart, if the new
// process's first batch that comes through has exactly the number that is next.
// Connect relays to engines, not to proxies.
//
// # Goroutines
//
// One a worker-rank for an engine on ZeroMQ, or one an engine for one that is
// polled: it alone reads, maps and writes for its ranks, and waits for no other.
// Kafka's client has its own and reports back through counters under a lock; one
// serves HTTP. At the end the readers stop first, each after what it is at; then
// every feed waits for its records, all within Config.DrainTimeout, and leaves
// its checkpoint; then HTTP and the client go.
//
// # Memory
//
// By worker-rank: the engine's hashes and their blocks, some 110 to 170 bytes
// each; the largest message, up to 64 MiB twice, while one is read; and 512 KiB
// of checksums between a connection and the first message on it. Records on their
// way to Kafka are bounded by Config.BufferBytes for all together.
package relay
