// Package fixed reads the files that the relay keeps, whose values have fixed sizes.
package fixed

import "encoding/binary"

// Reader reads little-endian values from P, which gets shorter. Reading past the
// end makes it Bad, and then all that is read is 0.
type Reader struct {
	P   []byte
	Bad bool
}

// Take returns the next n bytes, a part of P; nil if there are not so many.
func (r *Reader) Take(n int) []byte {
	if r.Bad || n > len(r.P) {
		r.Bad = true
		return nil
	}
	v := r.P[:n]
	r.P = r.P[n:]
	return v
}

// U8 reads one byte.
func (r *Reader) U8() byte {
	if v := r.Take(1); v != nil {
		return v[0]
	}
	return 0
}

// U32 reads 4 bytes.
func (r *Reader) U32() uint32 {
	if v := r.Take(4); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

// U64 reads 8 bytes.
func (r *Reader) U64() uint64 {
	if v := r.Take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}
