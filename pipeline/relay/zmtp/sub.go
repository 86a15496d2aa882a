// This file has the SUB socket.

package zmtp

import (
	"context"
	"fmt"
	"time"
)

// Sub reads what one publisher (PUB, XPUB) sends. Nothing happens outside of
// [Sub.Next].
type Sub struct {
	*peer
}

// NewSub returns a socket that connects at the first call of Next. The error is
// that of [Config.Validate].
func NewSub(cfg Config) (*Sub, error) {
	p, err := newPeer(cfg, "SUB")
	if err != nil {
		return nil, err
	}
	return &Sub{p}, nil
}

// Kind says what an [Event] is.
type Kind int

const (
	// Message: a message has come; Frames has it.
	Message Kind = iota + 1
	// Connected: there is a connection and the subscriptions have been sent on it.
	// Whatever was published before may be lost.
	Connected
	// Disconnected: the connection is lost; Err says why. Every message that had
	// come whole was returned before; those after the last one and before the next
	// [Connected] are lost, and a few after that may be.
	Disconnected
	// Failed: an attempt to connect did not succeed; Err says why.
	Failed
)

// String returns the kind's name.
func (k Kind) String() string {
	switch k {
	case Message:
		return "message"
	case Connected:
		return "connected"
	case Disconnected:
		return "disconnected"
	case Failed:
		return "failed"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Event is what happened next.
type Event struct {
	Kind Kind
	// Frames are a message's, at least one. They are good until the next call of
	// Next: the buffer that they are in is used again.
	Frames [][]byte
	// Err is why it is Disconnected or Failed; see this package's errors.
	Err error
	// Retry is when the next attempt to connect is due, after Disconnected and
	// Failed; the next call of Next waits for it. With [ErrRefused] it is as late
	// as it can be, and ZMTP says not to come again with the same credentials;
	// NULL has none, so what can change is the peer, and it is up to the caller.
	Retry time.Time
}

// Next waits for the next event. Its error is the cause of ctx's end or
// [ErrClosed]; after the former nothing is lost, and a call with another context
// goes on where this one stopped, even within a message or a pause; only an
// attempt to connect begins again.
//
// It must be called again soon, as heartbeats are answered only here. One
// goroutine at a time gets on; others wait.
func (s *Sub) Next(ctx context.Context) (Event, error) {
	s.use.Lock()
	defer s.use.Unlock()
	if s.conn == nil {
		err := s.connect(ctx)
		switch {
		case err == nil:
			return Event{Kind: Connected}, nil
		case s.life.Err() != nil:
			return Event{}, ErrClosed
		case ctx.Err() != nil:
			return Event{}, context.Cause(ctx)
		}
		return Event{Kind: Failed, Err: err, Retry: s.next}, nil
	}
	frames, err := s.conn.message(ctx)
	switch {
	case err == nil:
		return Event{Kind: Message, Frames: frames}, nil
	case err == errInterrupted:
		return Event{}, context.Cause(ctx)
	}
	if err := s.lost(err); err != ErrClosed {
		return Event{Kind: Disconnected, Err: err, Retry: s.next}, nil
	}
	return Event{}, ErrClosed
}

// Disconnect closes the connection, if there is one. What had come and was not
// yet returned is lost; Next connects again, after a pause as after a lost
// connection, and there is no [Disconnected] in between.
func (s *Sub) Disconnect() {
	s.use.Lock()
	defer s.use.Unlock()
	if s.conn != nil {
		s.drop()
		s.delay(nil)
	}
}
