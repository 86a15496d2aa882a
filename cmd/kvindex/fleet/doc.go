// Package fleet simulates the inference workers that kvindex keeps the index
// of: requests from a trace or made up, workers with prefix caches of a fixed
// capacity, the KV events that these caches cause, and a router that sends
// each request where most of its prompt is already cached.
//
// Apart from [Producer], nothing here depends on the time, or on chance other than its
// seed: the same trace, seed and answers give the same events. Only [Producer] talks to
// Kafka, and only it may be used by several goroutines.
package fleet
