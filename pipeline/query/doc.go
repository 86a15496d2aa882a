// Package query is the side of the stage that routers talk to: Match, Workers
// and Status, as gRPC on one port and as JSON over HTTP on another.
//
// Service holds the one implementation; Server puts both transports, health,
// metrics and tracing around it; Source is what the stage has to give. A query
// runs on its request's goroutine from hashing to the answer and takes no lock
// of its own.
//
// The rule above all others: an instance that does not know everything says so
// (Unavailable, or partial if the caller allows that) and never answers with
// less in silence.
package query
