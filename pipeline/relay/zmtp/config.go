// This file has the configuration of a socket, and endpoints.

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// Config says whom a socket connects to, and its limits. [DefaultConfig] has
// the defaults; a zero value is not one.
type Config struct {
	// Endpoint is the peer as ZeroMQ writes it: tcp://host:port (IPv6 addresses in
	// brackets) or ipc:///path. Names are resolved at each attempt.
	Endpoint string
	// Topics are the prefixes that a [Sub] subscribes to, at each connection; ""
	// matches every message. None means no messages. A [Dealer] has none.
	Topics []string

	// HandshakeTimeout bounds connecting, and then once more the handshake. 5 s.
	HandshakeTimeout time.Duration
	// WriteTimeout bounds each write; what a client writes is small, so a peer
	// that does not take it is stuck. 5 s.
	WriteTimeout time.Duration
	// HeartbeatInterval is the silence after which the peer is sent a PING. 5 s.
	HeartbeatInterval time.Duration
	// HeartbeatTimeout is how much longer the silence may last before the
	// connection is given up. Any byte ends the silence, and only time spent
	// waiting for bytes counts, so a busy caller loses no connection. 10 s.
	HeartbeatTimeout time.Duration
	// MinBackoff and MaxBackoff bound the pause before the next attempt to
	// connect: it doubles from the one to the other, and a random half of it is
	// left out. It starts anew once a connection has brought a message or an
	// answer to a PING. 100 ms and 5 s.
	MinBackoff, MaxBackoff time.Duration

	// MaxFrame is the largest frame in bytes. 64 MiB.
	MaxFrame int
	// MaxMessage is the largest message, all its frames together, in bytes; it
	// bounds what a connection takes of memory: this, some 64 KiB, and while the
	// buffer grows as much as half again. 64 MiB.
	MaxMessage int
	// MaxFrames is the largest number of frames in a message. 16.
	MaxFrames int

	// dial is net.Dialer's DialContext, but in tests.
	dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// DefaultConfig returns the defaults for a peer, with a subscription to every message.
func DefaultConfig(endpoint string) Config {
	return Config{
		Endpoint:          endpoint,
		Topics:            []string{""},
		HandshakeTimeout:  5 * time.Second,
		WriteTimeout:      5 * time.Second,
		HeartbeatInterval: 5 * time.Second,
		HeartbeatTimeout:  10 * time.Second,
		MinBackoff:        100 * time.Millisecond,
		MaxBackoff:        5 * time.Second,
		MaxFrame:          64 << 20,
		MaxMessage:        64 << 20,
		MaxFrames:         16,
	}
}

// Validate returns what is wrong with the configuration, all of it.
func (c *Config) Validate() error {
	var errs []error
	if _, _, err := splitEndpoint(c.Endpoint); err != nil {
		errs = append(errs, err)
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{
		{"HandshakeTimeout", c.HandshakeTimeout}, {"WriteTimeout", c.WriteTimeout},
		{"HeartbeatInterval", c.HeartbeatInterval}, {"HeartbeatTimeout", c.HeartbeatTimeout},
		{"MinBackoff", c.MinBackoff},
	} {
		if d.d <= 0 {
			errs = append(errs, fmt.Errorf("zmtp: %s is %v, must be more than 0", d.name, d.d))
		}
	}
	if c.MaxBackoff < c.MinBackoff {
		errs = append(errs, fmt.Errorf("zmtp: MaxBackoff %v is less than MinBackoff %v", c.MaxBackoff, c.MinBackoff))
	}
	for _, n := range []struct {
		name string
		n    int
	}{{"MaxFrame", c.MaxFrame}, {"MaxMessage", c.MaxMessage}, {"MaxFrames", c.MaxFrames}} {
		if n.n <= 0 || n.n > 1<<30 {
			errs = append(errs, fmt.Errorf("zmtp: %s is %d, must be 1 to 2^30", n.name, n.n))
		}
	}
	return errors.Join(errs...)
}

// splitEndpoint returns network and address as package net takes them.
func splitEndpoint(endpoint string) (network, address string, err error) {
	scheme, address, _ := strings.Cut(endpoint, "://")
	switch scheme {
	case "tcp":
		host, port, err := net.SplitHostPort(address)
		switch {
		case err != nil:
			return "", "", fmt.Errorf("zmtp: endpoint %q: %w", endpoint, err)
		case host == "" || host == "*" || port == "" || port == "*" || port == "0":
			return "", "", fmt.Errorf("zmtp: endpoint %q: to connect takes a host and a port", endpoint)
		}
		return "tcp", address, nil
	case "ipc":
		if address == "" || address == "*" {
			return "", "", fmt.Errorf("zmtp: endpoint %q: to connect takes a path", endpoint)
		}
		return "unix", address, nil
	}
	return "", "", fmt.Errorf("zmtp: endpoint %q: want tcp://host:port or ipc:///path", endpoint)
}
