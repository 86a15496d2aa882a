// This file fuzzes the handshake and the reader.

package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"
)

// replay is a connection on which bytes come, so many at a time, and then its
// end. What is written is kept.
type replay struct {
	net.Conn
	in    []byte
	chunk int
	out   bytes.Buffer
}

func (r *replay) Read(b []byte) (int, error) {
	if len(r.in) == 0 {
		return 0, io.EOF
	}
	n := copy(b, r.in[:min(r.chunk, len(r.in))])
	r.in = r.in[n:]
	return n, nil
}

func (r *replay) Write(b []byte) (int, error)      { return r.out.Write(b) }
func (*replay) SetReadDeadline(time.Time) error    { return nil }
func (*replay) SetWriteDeadline(t time.Time) error { return nil }
func (*replay) Close() error                       { return nil }

// decode is the reader again, as plainly as can be, of all bytes at once: the
// messages up to the first error, and whether there is one before the end.
func decode(b []byte, cfg *Config) (messages [][]string, pongs []byte, bad bool) {
	var frames []string
	total := 0
	for len(b) >= 2 {
		flags, size, header := b[0], uint64(b[1]), 2
		if flags > 7 || flags&(flagCommand|flagMore) == flagCommand|flagMore || flags&flagCommand == 0 && len(frames) == cfg.MaxFrames {
			return messages, pongs, true
		}
		if flags&flagLong != 0 {
			if header = headerMax; len(b) < header {
				break
			}
			size = binary.BigEndian.Uint64(b[1:])
		}
		if flags&flagCommand != 0 && size > maxCommand ||
			flags&flagCommand == 0 && (size > uint64(cfg.MaxFrame) || uint64(total)+size > uint64(cfg.MaxMessage)) {
			return messages, pongs, true
		}
		if uint64(len(b)-header) < size {
			break
		}
		body := b[header : header+int(size)]
		b = b[header+int(size):]
		if flags&flagCommand != 0 {
			if len(body) == 0 || body[0] == 0 || len(body) < 1+int(body[0]) {
				return messages, pongs, true
			}
			switch name, data := string(body[1:1+body[0]]), body[1+body[0]:]; name {
			case "PING":
				if len(data) < 2 || len(data) > 18 {
					return messages, pongs, true
				}
				pongs = appendCommand(pongs, "PONG", data[2:])
			case "ERROR":
				return messages, pongs, true
			}
			continue
		}
		frames, total = append(frames, string(body)), total+len(body)
		if flags&flagMore == 0 {
			messages, frames, total = append(messages, frames), nil, 0
		}
	}
	return messages, pongs, false
}

// FuzzReader: whatever comes after the handshake, in pieces of any size, the
// reader gives what the plain decoder gives, and its buffer stays small.
func FuzzReader(f *testing.F) {
	for _, c := range [][]byte{
		message("", "\x00\x00\x00\x00\x00\x00\x00\x01", "payload"),
		slices.Concat([]byte{flagMore, 1, 'a'}, command("PING", "\x00\x00ctx"), message("b")),
		message("a", string(make([]byte, 300)), "c"),
		command("ERROR", "\x03bye"),
		{flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		{flagLong, 0, 0, 0, 0, 0, 0x03, 0xff, 0xff, 1, 2, 3},
		bytes.Repeat([]byte{flagMore, 0}, 20),
		bytes.Repeat(message("x", "y"), 50),
	} {
		f.Add(c, uint16(7))
	}
	cfg := DefaultConfig("tcp://fuzz:1")
	cfg.MaxFrame, cfg.MaxMessage, cfg.MaxFrames = 200_000, 300_000, 5
	f.Fuzz(func(t *testing.T, stream []byte, chunk uint16) {
		want, pongs, bad := decode(stream, &cfg)
		nc := &replay{in: slices.Clone(stream), chunk: int(chunk) + 1}
		c := newConn(nc, &cfg)
		c.established = true
		for i := 0; ; i++ {
			frames, err := c.message(t.Context())
			if len(c.buf) > max(bufferMin, 2*len(stream)) {
				t.Fatalf("a buffer of %d bytes for a stream of %d", len(c.buf), len(stream))
			}
			if err != nil {
				if (errors.Is(err, ErrProtocol) || errors.Is(err, ErrRefused)) != bad || i != len(want) {
					t.Fatalf("after %d messages of %d: %v; bad: %v", i, len(want), err, bad)
				}
				if !bytes.Equal(nc.out.Bytes(), pongs) {
					t.Fatalf("wrote %q, want %q", nc.out.Bytes(), pongs)
				}
				return
			}
			var got []string
			for _, f := range frames {
				got = append(got, string(f))
			}
			if i >= len(want) || !slices.Equal(got, want[i]) {
				t.Fatalf("message %d is %q", i, got)
			}
		}
	})
}

// FuzzHandshake: whatever a peer begins with, in pieces of any size, it is taken
// only when it could be a publisher, and the buffer stays as it was.
func FuzzHandshake(f *testing.F) {
	for _, c := range [][]byte{
		hello(0), hello(1), append(hello(1), message("a")...), append(greeting(1), ready("PULL")...),
		append(greeting(1), command("ERROR", "\x05go on")...), append(greeting(1), command("READY", "\x01a\xff\xff\xff\xff")...),
		[]byte("HTTP/1.1 400 Bad Request\r\n"), {1, 0}, {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 1},
	} {
		f.Add(c, uint16(7))
	}
	cfg := DefaultConfig("tcp://fuzz:1")
	f.Fuzz(func(t *testing.T, stream []byte, chunk uint16) {
		c := newConn(&replay{in: slices.Clone(stream), chunk: int(chunk) + 1}, &cfg)
		err := c.handshake(t.Context(), "SUB")
		if len(c.buf) != bufferMin {
			t.Errorf("a buffer of %d bytes", len(c.buf))
		}
		if err == nil && !(c.established && bytes.HasPrefix(stream, []byte{0xff}) && bytes.Contains(stream, []byte("\x05READY"))) {
			t.Errorf("%q is taken", stream)
		}
	})
}
