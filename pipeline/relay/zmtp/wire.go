// This file has the bytes of ZMTP 3: the greeting, frame headers, commands.

package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
)

// Flags of a frame; the other bits must be zero.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

const (
	greetingLen = 64
	headerMax   = 9       // of a frame: flags, and 8 bytes of size
	maxCommand  = 8 << 10 // bytes of a command's body; libzmq's are under 512
)

// mechanism is NULL as a greeting has it.
var mechanism = append([]byte("NULL"), make([]byte, 16)...)

// appendGreeting appends our greeting.
func appendGreeting(b []byte) []byte {
	b = append(b, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1)
	b = append(b, mechanism...)
	return append(b, make([]byte, 32)...)
}

// checkGreeting checks as much of a greeting as there is, so that a peer of
// another protocol, which may wait for us to go on, is told at once.
func checkGreeting(g []byte) error {
	switch {
	case len(g) >= 1 && g[0] != 0xff, len(g) >= 10 && g[9] != 0x7f:
		return fmt.Errorf("%w: no ZMTP: the peer's greeting begins with %x", ErrProtocol, g[:min(len(g), 10)])
	case len(g) >= 11 && g[10] < 3:
		// A revision of 0 is ZMTP 1.0, 1 is 2.0.
		return fmt.Errorf("%w: the peer speaks a ZMTP before 3.0 (revision %d)", ErrProtocol, g[10])
	case len(g) >= 32 && !bytes.Equal(g[12:32], mechanism):
		return fmt.Errorf("%w: the peer wants the mechanism %q, want NULL", ErrProtocol, bytes.TrimRight(g[12:32], "\x00"))
	}
	return nil
}

// appendHeader appends the header of a frame.
func appendHeader(b []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(b, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(size))
}

// appendCommand appends a command.
func appendCommand(b []byte, name string, data []byte) []byte {
	b = appendHeader(b, flagCommand, 1+len(name)+len(data))
	b = append(append(b, byte(len(name))), name...)
	return append(b, data...)
}

// splitCommand takes a command's body apart.
func splitCommand(body []byte) (name, data []byte, err error) {
	if len(body) == 0 || body[0] == 0 || int(body[0]) >= len(body) {
		return nil, nil, fmt.Errorf("%w: a command without a whole name", ErrProtocol)
	}
	n := 1 + int(body[0])
	return body[1:n], body[n:], nil
}

// appendMetadata appends one property of a READY command.
func appendMetadata(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// socketTypeOf returns the Socket-Type of a READY command's metadata, or "".
func socketTypeOf(b []byte) (socketType string, err error) {
	for len(b) > 0 {
		n := int(b[0])
		if n == 0 || len(b) < 1+n+4 {
			return "", fmt.Errorf("%w: the READY command's metadata are cut off", ErrProtocol)
		}
		name, size := string(b[1:1+n]), binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: the READY command's metadata are cut off", ErrProtocol)
		}
		if strings.EqualFold(name, "Socket-Type") {
			socketType = string(b[:size])
		}
		b = b[size:]
	}
	return socketType, nil
}

// reason is what an ERROR command says.
func reason(data []byte) error {
	if len(data) > 0 && int(data[0]) <= len(data)-1 {
		data = data[1 : 1+int(data[0])]
	}
	return fmt.Errorf("%w: %q", ErrRefused, data)
}
