// Package fakeengine publishes KV cache events as vLLM or SGLang would that
// serve a trace's requests, for demonstrations and tests: over ZeroMQ with a
// replay socket, in the bytes that the engines' own code makes, with their order
// of events, hashes of their own, and on request their faults.
//
// An [Engine] has one rank or more, each with a prefix cache on the GPU and
// perhaps one in the CPU's memory, which takes what the GPU evicts. Each request
// goes to a rank, and takes as many steps as its new blocks need; each step
// that changes a cache is one batch. What the caches really hold can be asked,
// as kvindex's hashes, so that a test can compare.
//
// What is left out: blocks of generated tokens, multimodal inputs, attention
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
