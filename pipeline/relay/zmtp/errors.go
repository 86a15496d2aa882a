// This file has the errors that callers tell apart.

package zmtp

import "errors"

var (
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("zmtp: closed")
	// ErrProtocol: the peer sent what ZMTP 3 does not allow, or speaks something
	// else. The connection is closed.
	ErrProtocol = errors.New("zmtp: protocol error")
	// ErrTooLarge: a frame or message is over a limit of the [Config]. It is an
	// [ErrProtocol] too. The connection is closed, as nothing can be skipped
	// without reading it.
	ErrTooLarge = errors.New("over the limit")
	// ErrRefused: the peer sent the command ERROR.
	ErrRefused = errors.New("zmtp: refused by the peer")
	// ErrHandshake: the peer accepted the connection but had not finished the
	// handshake within Config.HandshakeTimeout.
	ErrHandshake = errors.New("zmtp: no handshake")
	// ErrSilent: the peer sent nothing for Config.HeartbeatInterval, then nothing
	// for Config.HeartbeatTimeout.
	ErrSilent = errors.New("zmtp: the peer is silent")
	// ErrNotConnected: there is no connection to receive from; see [Dealer.Recv].
	ErrNotConnected = errors.New("zmtp: not connected")

	// errInterrupted: the context that a read was given has ended.
	errInterrupted = errors.New("interrupted")
)
