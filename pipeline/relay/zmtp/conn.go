// This file has one connection: its buffer, reading messages, heartbeats, writing.

package zmtp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"
)

const (
	bufferMin  = 64 << 10 // what a connection begins with
	bufferKeep = 1 << 20  // a larger buffer goes when what is in it fits into a new one
)

// conn is one connection. It has no goroutine; one at a time may use it, but
// for heard, and closing nc, which ends whatever goes on.
//
// Reading can be left at any byte, by the end of a context (errInterrupted), and
// gone on with. Any other error is the connection's end.
type conn struct {
	nc  net.Conn
	cfg *Config

	// buf[base:next] are the whole frames of the message being read (commands
	// among them are cut out), buf[next:end] is not yet looked at.
	buf             []byte
	base, next, end int
	spans           []span   // the frames' bodies, from base
	frames          [][]byte // the message handed out

	minor       byte // of the version spoken, 3.minor
	established bool // the handshake is done
	canPing     bool // the peer knows PING
	pinged      bool // the first period of silence is over
	lively      bool // has brought a message or a PONG

	silent   time.Duration // waited without a byte
	deadline time.Time     // of the socket's reads, as last set; zero when it must be set
	out      []byte        // reused for writes

	// The next are a server's; nil in a client.
	later func(b []byte)                // takes a copy of what tell writes, once there is a writer
	other func(name, data []byte) error // takes the commands that are not answered here

	watched <-chan struct{} // of the context that interrupts reads
	unwatch func() bool

	readAt time.Time    // of the last bytes
	heard  atomic.Int64 // when the last whole frame had come, in Unix nanoseconds
}

type span struct{ from, to int }

func newConn(nc net.Conn, cfg *Config) *conn {
	return &conn{nc: nc, cfg: cfg, buf: make([]byte, bufferMin)}
}

// close closes the connection and lets go of the last context.
func (c *conn) close() {
	c.nc.Close()
	c.forget()
}

// forget lets go of the context last watched.
func (c *conn) forget() {
	if c.watched != nil {
		c.unwatch()
		c.watched = nil
	}
}

// watch makes the end of ctx interrupt a read. It keeps to the context it was
// last given, so that a caller that always gives the same pays once.
func (c *conn) watch(ctx context.Context) {
	done := ctx.Done()
	if done == c.watched {
		return
	}
	c.forget()
	c.watched = done
	if done != nil {
		c.unwatch = context.AfterFunc(ctx, func() { c.nc.SetReadDeadline(time.Unix(1, 0)) })
	}
}

// message returns the frames of the next message. They are good until the next call.
func (c *conn) message(ctx context.Context) ([][]byte, error) {
	c.watch(ctx)
	c.frames = c.frames[:0]
	if len(c.spans) == 0 { // else a message was left half read
		c.base = c.next
		rest := c.buf[c.next:c.end]
		if len(c.buf) > bufferKeep && len(rest) < bufferMin {
			c.buf = make([]byte, bufferMin)
			c.base, c.next, c.end = 0, 0, copy(c.buf, rest)
		}
		if len(rest) == 0 {
			c.base, c.next, c.end = 0, 0, 0
		}
	}
	for {
		flags, body, err := c.frame(ctx)
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.command(c.buf[body.from:body.to]); err != nil {
				return nil, err
			}
			c.cut(body.to)
			continue
		}
		c.spans = append(c.spans, span{body.from - c.base, body.to - c.base})
		c.next = body.to
		if flags&flagMore == 0 {
			break
		}
	}
	for _, s := range c.spans {
		c.frames = append(c.frames, c.buf[c.base+s.from:c.base+s.to:c.base+s.to])
	}
	c.spans = c.spans[:0]
	c.lively = true
	return c.frames, nil
}

// frame makes the frame at c.next whole in the buffer and returns where its body
// is there. It leaves c.next, so that an interrupted call can be made again.
func (c *conn) frame(ctx context.Context) (flags byte, body span, err error) {
	header := 2
	for c.end-c.next < header {
		if err := c.fill(ctx, header); err != nil {
			return 0, span{}, err
		}
	}
	flags = c.buf[c.next]
	size := uint64(c.buf[c.next+1])
	if flags&flagLong != 0 {
		header = headerMax
	}
	if err := c.checkFlags(flags); err != nil {
		return 0, span{}, err
	}
	for c.end-c.next < header {
		if err := c.fill(ctx, header); err != nil {
			return 0, span{}, err
		}
	}
	if flags&flagLong != 0 {
		size = binary.BigEndian.Uint64(c.buf[c.next+1:])
	}
	if err := c.checkSize(flags, size); err != nil {
		return 0, span{}, err
	}
	whole := header + int(size)
	for c.end-c.next < whole {
		if err := c.fill(ctx, whole); err != nil {
			return 0, span{}, err
		}
	}
	if at := c.readAt.UnixNano(); at != c.heard.Load() {
		c.heard.Store(at)
	}
	return flags, span{c.next + header, c.next + whole}, nil
}

// checkFlags checks a frame's flags, and that the message may have another frame.
func (c *conn) checkFlags(flags byte) error {
	switch {
	case flags&^(flagMore|flagLong|flagCommand) != 0:
		return fmt.Errorf("%w: a frame with reserved flags %#x", ErrProtocol, flags)
	case flags&flagCommand != 0 && flags&flagMore != 0:
		return fmt.Errorf("%w: a command of several frames", ErrProtocol)
	case flags&flagCommand == 0 && !c.established:
		return fmt.Errorf("%w: a message in the handshake", ErrProtocol)
	case flags&flagCommand == 0 && len(c.spans) == c.cfg.MaxFrames:
		return fmt.Errorf("%w: a message of more than %d frames is %w", ErrProtocol, c.cfg.MaxFrames, ErrTooLarge)
	}
	return nil
}

// checkSize checks what a header announces, before anything is set aside for it.
func (c *conn) checkSize(flags byte, size uint64) error {
	if flags&flagCommand != 0 {
		if size > maxCommand {
			return fmt.Errorf("%w: a command of %d bytes is %w of %d", ErrProtocol, size, ErrTooLarge, maxCommand)
		}
		return nil
	}
	if size > uint64(c.cfg.MaxFrame) {
		return fmt.Errorf("%w: a frame of %d bytes is %w of %d", ErrProtocol, size, ErrTooLarge, c.cfg.MaxFrame)
	}
	for _, s := range c.spans {
		size += uint64(s.to - s.from)
	}
	if size > uint64(c.cfg.MaxMessage) {
		return fmt.Errorf("%w: a message of %d bytes is %w of %d", ErrProtocol, size, ErrTooLarge, c.cfg.MaxMessage)
	}
	return nil
}

// cut takes the command that ends at to out of the buffer: it may be in the
// middle of a message, and any number of them may.
func (c *conn) cut(to int) {
	if len(c.spans) == 0 {
		c.base, c.next = to, to
		return
	}
	c.end = c.next + copy(c.buf[c.next:], c.buf[to:c.end])
}

// command answers a command that came after the handshake.
func (c *conn) command(body []byte) error {
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch string(name) {
	case "PING":
		if len(data) < 2 || len(data) > 2+16 {
			return fmt.Errorf("%w: a PING of %d bytes", ErrProtocol, len(data))
		}
		c.canPing = true
		return c.tell(appendCommand(c.out[:0], "PONG", data[2:]))
	case "PONG":
		c.lively = true
	case "ERROR":
		return reason(data)
	default: // the texts leave other commands open; libzmq passes them over too
		if c.other != nil {
			return c.other(name, data)
		}
	}
	return nil
}

// fill reads more bytes, at least one. need is how many will be wanted from
// c.next; the buffer grows only when it is full, so never for a mere announcement.
func (c *conn) fill(ctx context.Context, need int) error {
	c.room(need)
	for {
		limit := c.cfg.HeartbeatInterval
		if c.pinged {
			limit += c.cfg.HeartbeatTimeout
		}
		began := time.Now()
		if by := began.Add(max(limit-c.silent, time.Millisecond)); c.deadline.After(by) || !c.deadline.After(began) {
			// A deadline that is early costs a turn of the loop, but setting one costs
			// more than that at each read.
			c.nc.SetReadDeadline(by) // can fail only when reading does
			c.deadline = by
		}
		if ctx.Err() != nil { // after setting the deadline, as the end of ctx sets it too
			return errInterrupted
		}
		n, err := c.nc.Read(c.buf[c.end:])
		now := time.Now()
		if n > 0 { // an error comes again
			c.end += n
			c.silent, c.pinged, c.readAt = 0, false, now
			return nil
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			c.deadline = time.Time{}
			c.silent += now.Sub(began)
			if ctx.Err() == nil && c.silent >= limit {
				if err := c.silence(); err != nil {
					return err
				}
			}
		case err == io.EOF && (c.next != c.end || len(c.spans) > 0):
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
	}
}

// room makes room to read into. need is how many bytes from c.next the frame takes.
func (c *conn) room(need int) {
	if c.base > 0 && (len(c.buf)-c.end < len(c.buf)/2 || c.next+need > len(c.buf)) {
		c.end = copy(c.buf, c.buf[c.base:c.end])
		c.next -= c.base
		c.base = 0
	}
	if c.end == len(c.buf) {
		// Full of a message within the limits, and perhaps a command, the rest of
		// which is to come; so it is smaller than the largest.
		largest := c.cfg.MaxMessage + (c.cfg.MaxFrames+1)*headerMax + maxCommand
		buf := make([]byte, min(2*len(c.buf), largest))
		copy(buf, c.buf[:c.end])
		c.buf = buf
	}
}

// silence is called when the time for bytes to come is over.
func (c *conn) silence() error {
	switch {
	case !c.established:
		return nil // the handshake has a context of its own
	case c.pinged:
		return fmt.Errorf("%w for %v", ErrSilent, c.silent.Round(time.Millisecond))
	case c.canPing:
		c.pinged = true
		return c.tell(appendCommand(c.out[:0], "PING", []byte{0, 0}))
	case c.next != c.end || len(c.spans) > 0:
		c.pinged = true // nothing to ask with, but the rest of a message is due
	default:
		c.silent = 0
	}
	return nil
}

// tell writes what the peer is told by the way. When it has hung up there may
// still be messages to read, and reading tells of the end after them; so only a
// peer that is there but does not read is an error here.
func (c *conn) tell(b []byte) error {
	if c.later != nil {
		c.out = b[:0]
		c.later(b)
		return nil
	}
	if err := c.write(context.Background(), b); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("writing: %w", err)
	}
	return nil
}

// write writes b, which becomes the buffer for the next write. After an error
// the connection is good for reading at most.
func (c *conn) write(ctx context.Context, b []byte) error {
	c.out = b[:0]
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.cfg.WriteTimeout)); err != nil {
		return err
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() { c.nc.SetWriteDeadline(time.Unix(1, 0)) })()
	}
	_, err := c.nc.Write(b)
	return err
}

// send writes one message, all its frames at once.
func (c *conn) send(ctx context.Context, frames [][]byte) error {
	b := c.out[:0]
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = append(appendHeader(b, flags, len(f)), f...)
	}
	return c.write(ctx, b)
}
