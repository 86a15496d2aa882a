// Package fakeengine publishes KV cache events as a vLLM or SGLang engine that
// serves a trace would, for demonstrations and tests: over ZeroMQ with a
// replay socket, with the bytes and the order of events of the engines' own code,
// hashes of its own, and on request the engines' faults.
//
// An [Engine] has one rank or more, each with a prefix cache on the GPU and
// perhaps one in the CPU's memory, which takes what the GPU evicts. Each request
// goes to a rank, and takes as many steps as its new blocks need; each step
// that changes a cache is one batch. The engine can be asked what its caches really
// hold, in kvindex's hashes, so that a test can compare.
//
// Not simulated: blocks of generated tokens, multimodal inputs, attention
// groups besides the one of full attention, partial blocks, second copies of a
// block, SGLang's evicting of whole nodes (as many blocks go as are needed).
//
// # Goroutines
//
// Those of zmtp's sockets; for each rank one that answers replay requests, which
// ends when its socket is closed; and those of the HTTP control. Requests are
// served by [Engine.Run]'s caller. Memory is that of what the caches hold,
// BufferSteps payloads a rank, and what waits for slow peers.
package fakeengine
