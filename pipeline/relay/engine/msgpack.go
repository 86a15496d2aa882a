// This file reads single msgpack values by their type. Nothing here allocates,
// and nothing trusts a length before there are bytes for it.

package engine

import (
	"encoding/binary"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// fault is what can be wrong with a value. Up to faultType the value is well
// formed and can be passed over; else the payload ends there.
type fault uint8

const (
	faultNone fault = iota
	faultType       // another type than wanted, or out of range
	faultShort
	faultForm
)

// faultOf classes an error of msgp.
func faultOf(err error) fault {
	switch {
	case err == nil:
		return faultNone
	case err == msgp.ErrShortBytes:
		return faultShort
	case msgp.Resumable(err):
		return faultType
	}
	return faultForm
}

func (f fault) fatal() bool { return f > faultType }

func (f fault) err() error {
	if f == faultShort {
		return ErrTruncated
	}
	return ErrMalformed
}

// typeOf returns the type of b's first value, InvalidType if there is none.
func typeOf(b []byte) msgp.Type {
	if len(b) == 0 {
		return msgp.InvalidType
	}
	return msgp.NextType(b)
}

// skip passes over one value, however deep. Each value that a header promises
// takes a byte at least, so that a promise without bytes ends it at once.
func skip(b []byte) ([]byte, fault) {
	for pending := uint64(1); pending > 0; pending-- {
		if pending > uint64(len(b)) {
			return b, faultShort
		}
		var n uint32
		var err error
		switch msgp.NextType(b) {
		case msgp.MapType:
			n, b, err = msgp.ReadMapHeaderBytes(b)
			pending += 2 * uint64(n)
		case msgp.ArrayType:
			n, b, err = msgp.ReadArrayHeaderBytes(b)
			pending += uint64(n)
		case msgp.InvalidType:
			return b, faultForm
		default:
			b, err = msgp.Skip(b)
		}
		if err == msgp.ErrShortBytes {
			return b, faultShort
		} else if err != nil {
			return b, faultForm
		}
	}
	return b, faultNone
}

// arrayLen reads an array's header. The array has no more elements than there
// are bytes.
func arrayLen(b []byte) (int, []byte, fault) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err == nil && uint64(n) > uint64(len(rest)) {
		return 0, b, faultShort
	}
	return int(n), rest, faultOf(err)
}

// mapLen reads a map's header. The map has no more keys and values than there
// are bytes.
func mapLen(b []byte) (int, []byte, fault) {
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	if err == nil && 2*uint64(n) > uint64(len(rest)) {
		return 0, b, faultShort
	}
	return int(n), rest, faultOf(err)
}

// nilValue passes over a nil, if there is one.
func nilValue(b []byte) ([]byte, bool) {
	if len(b) > 0 && b[0] == 0xc0 {
		return b[1:], true
	}
	return b, false
}

// text reads a str or bin.
func text(b []byte) ([]byte, []byte, fault) {
	switch typeOf(b) {
	case msgp.StrType:
		v, rest, err := msgp.ReadStringZC(b)
		return v, rest, faultOf(err)
	case msgp.BinType:
		v, rest, err := msgp.ReadBytesZC(b)
		return v, rest, faultOf(err)
	}
	return nil, b, wrongType(b)
}

// wrongType is the fault of a value of another type than wanted.
func wrongType(b []byte) fault {
	if len(b) == 0 {
		return faultShort
	}
	if msgp.NextType(b) == msgp.InvalidType {
		return faultForm
	}
	return faultType
}

// number reads a float or an integer.
func number(b []byte) (float64, []byte, fault) {
	switch typeOf(b) {
	case msgp.Float64Type, msgp.Float32Type:
		v, rest, err := msgp.ReadFloat64Bytes(b)
		return v, rest, faultOf(err)
	case msgp.IntType, msgp.UintType:
		v, rest, f := word(b)
		return float64(int64(v)), rest, f
	}
	return 0, b, wrongType(b)
}

// integer reads an integer that fits an int64.
func integer(b []byte) (int64, []byte, fault) {
	v, rest, f := word(b)
	if f == faultNone && b[0] == 0xcf && v > math.MaxInt64 {
		return 0, b, faultType
	}
	return int64(v), rest, f
}

// word reads any integer as a bit pattern.
func word(b []byte) (uint64, []byte, fault) {
	switch typeOf(b) {
	case msgp.UintType:
		v, rest, err := msgp.ReadUint64Bytes(b)
		return v, rest, faultOf(err)
	case msgp.IntType:
		v, rest, err := msgp.ReadInt64Bytes(b)
		return uint64(v), rest, faultOf(err)
	}
	return 0, b, wrongType(b)
}

// hash reads an engine's block hash: any integer, bytes, or hexadecimal digits.
func hash(b []byte) (uint64, []byte, fault) {
	if len(b) >= 9 && (b[0] == 0xcf || b[0] == 0xd3) {
		return binary.BigEndian.Uint64(b[1:]), b[9:], faultNone
	}
	switch typeOf(b) {
	case msgp.BinType:
		v, rest, err := msgp.ReadBytesZC(b)
		if err != nil {
			return 0, b, faultOf(err)
		}
		if len(v) < 8 {
			return 0, b, faultType
		}
		return binary.BigEndian.Uint64(v[len(v)-8:]), rest, faultNone
	case msgp.StrType:
		v, rest, err := msgp.ReadStringZC(b)
		if err != nil {
			return 0, b, faultOf(err)
		}
		h, ok := hexHash(v)
		if !ok {
			return 0, b, faultType
		}
		return h, rest, faultNone
	}
	return word(b)
}

// hexHash returns the last 8 bytes of at least 8, given as hexadecimal digits.
func hexHash(s []byte) (v uint64, ok bool) {
	if len(s) < 16 || len(s)%2 != 0 {
		return 0, false
	}
	for _, c := range s {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		v = v<<4 | uint64(c)
	}
	return v, true
}
