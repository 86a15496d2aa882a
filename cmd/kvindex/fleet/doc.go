// Package fleet simulates the inference workers that kvindex keeps the index
// of: requests from a trace or made up, workers with prefix caches of a fixed
// capacity, the KV events their caches give rise to, and a router that sends
// each request where most of its prompt is cached already or simply at random.
//
// Nothing here knows the time or draws from anything but its seed: the same
// trace, seed and answers give the same events. Only [Producer] talks to Kafka.
// No type is safe for use by several goroutines, [Producer] excepted.
package fleet
