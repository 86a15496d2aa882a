// Package zmtp is a client of ZeroMQ's wire protocol for one peer: [Sub] reads
// what a PUB socket publishes, [Dealer] asks a ROUTER socket. It is written for
// reading the events of inference engines, which publish through libzmq. For
// demonstrations and tests there is the other side too: [Pub] and [Router], which
// serve many peers and have goroutines and bounded queues for each.
//
// A client has no goroutines. Whoever calls [Sub.Next] or [Dealer.Recv] does
// all the work in that call: connecting, waiting before the next attempt,
// heartbeats, decoding. So nothing is queued, and an event tells exactly between
// which two messages a connection was lost. A slow caller makes the peer queue,
// and drop at its high-water mark, which no event can tell; that, too, is for
// sequence numbers in the messages.
//
// # Protocol
//
// The NULL mechanism of ZMTP 3 (https://rfc.zeromq.org/spec/23, ZMTP 3.0, and
// https://rfc.zeromq.org/spec/37, ZMTP 3.1). The greeting says 3.1, and the
// connection speaks the lower of that and what the peer's greeting says, as
// both texts allow ("a peer MAY downgrade its protocol to talk to a lower
// protocol peer") and as libzmq does. With a peer of 3.1 or later (libzmq from
// 4.3.3 says so) subscriptions are SUBSCRIBE commands and silence is answered by
// PING. With a peer of 3.0, whose text knows neither, subscriptions are
// messages, and PING is sent only once the peer has sent one itself (libzmq 4.2
// says 3.0 and has heartbeats); until then only TCP's keep-alive tells that an
// idle peer is gone. PINGs of ours have no time-to-live: a peer must not hang
// up because our caller is busy. A peer's time-to-live is not kept, as our own
// heartbeats notice silence anyway. Peers before 3.0 are refused.
//
// A subscription takes effect when the publisher has read it, which nothing in
// the protocol confirms: after [Connected] the first messages may still be
// missed.
//
// # Cost and memory
//
// A connection has one read buffer of 64 KiB that grows by doubling as bytes
// arrive, never because a header announces them, up to the largest message
// allowed; a buffer over 1 MiB is given back as soon as it is nearly empty. A warm
// reader allocates nothing per message while messages fit into 1 MiB and the
// caller keeps to one context. On two busy cores a message of 200 bytes takes
// about 200 ns, where reading the same bytes and looking at none takes about
// 125, and one of 100 kB 58 µs beside 49 (the medians of five runs in turn of
// go test -run xxx -bench 'Sub|Socket').
package zmtp
