// This file has the handshake: greetings, READY commands, subscriptions.

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
)

// socketTypes are ours, and those that the peer may be. A DEALER may talk to a
// DEALER too, but not here: TCP can connect a socket to itself, when nobody
// listens on a port that it may choose as its own.
var socketTypes = map[string][]string{
	"SUB":    {"PUB", "XPUB"},
	"DEALER": {"ROUTER"},
	"PUB":    {"SUB", "XSUB"},
	"ROUTER": {"DEALER", "REQ"},
}

// handshake makes the connection ready for messages. The caller closes it on an error.
func (c *conn) handshake(ctx context.Context, socketType string) error {
	late := fmt.Errorf("%w within %v", ErrHandshake, c.cfg.HandshakeTimeout)
	limited, cancel := context.WithTimeoutCause(ctx, c.cfg.HandshakeTimeout, late)
	defer cancel()
	c.watch(limited)
	defer c.forget()
	err := c.greet(limited)
	if err == nil {
		err = c.ready(limited, socketType)
	}
	if err == errInterrupted {
		return context.Cause(limited)
	}
	if err != nil {
		return err
	}
	c.established = true
	return c.subscribe()
}

// greet exchanges greetings and settles the version.
func (c *conn) greet(ctx context.Context) error {
	if err := c.tell(appendGreeting(c.out[:0])); err != nil {
		return err
	}
	for {
		greeting := c.buf[:min(c.end, greetingLen)]
		if err := checkGreeting(greeting); err != nil {
			return err
		}
		if len(greeting) == greetingLen {
			if greeting[10] > 3 || greeting[11] >= 1 {
				c.minor, c.canPing = 1, true
			}
			c.base, c.next = greetingLen, greetingLen
			return nil
		}
		if err := c.fill(ctx, greetingLen); err == io.EOF || err == io.ErrUnexpectedEOF || errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("the peer hung up in the greeting, as libzmq does when it wants another mechanism than NULL: %w", err)
		} else if err != nil {
			return err
		}
	}
}

// ready exchanges READY commands.
func (c *conn) ready(ctx context.Context, socketType string) error {
	metadata := appendMetadata(nil, "Socket-Type", socketType)
	if err := c.tell(appendCommand(c.out[:0], "READY", metadata)); err != nil {
		return err
	}
	_, body, err := c.frame(ctx)
	if err != nil {
		return err
	}
	name, data, err := splitCommand(c.buf[body.from:body.to])
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
	case "ERROR":
		return reason(data)
	default:
		return fmt.Errorf("%w: the command %.20q in the handshake", ErrProtocol, name)
	}
	peer, err := socketTypeOf(data)
	if err != nil {
		return err
	}
	if peer != "" && !slices.Contains(socketTypes[socketType], peer) { // it should say, but need not
		err := fmt.Errorf("%w: the peer is a %.20q socket, want %v", ErrProtocol, peer, socketTypes[socketType])
		const why = "invalid socket type"
		return errors.Join(err, c.tell(appendCommand(c.out[:0], "ERROR", append([]byte{byte(len(why))}, why...))))
	}
	c.cut(body.to)
	return nil
}

// subscribe sends the subscriptions.
func (c *conn) subscribe() error {
	b := c.out[:0]
	for _, topic := range c.cfg.Topics {
		if c.minor >= 1 {
			b = appendCommand(b, "SUBSCRIBE", []byte(topic))
		} else {
			b = append(append(appendHeader(b, 0, 1+len(topic)), 1), topic...)
		}
	}
	if len(b) == 0 {
		return nil
	}
	return c.tell(b)
}
