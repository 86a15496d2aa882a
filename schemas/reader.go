package schemas

// This file decodes Avro's binary encoding without allocating.

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"
)

// reader walks through one record. The first error stays: from then on every
// method returns zero values, and loops over arrays end.
type reader struct {
	buf []byte
	pos int
	err error
}

// fail keeps the first error.
func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d: %w", r.pos, err)
	}
}

// end returns the first error, or ErrLeftover if bytes remain.
func (r *reader) end() error {
	if r.err == nil && r.pos != len(r.buf) {
		r.fail(fmt.Errorf("%w: %d", ErrLeftover, len(r.buf)-r.pos))
	}
	return r.err
}

// long reads a zig-zag integer of any legal length.
func (r *reader) long() int64 {
	if r.err != nil {
		return 0
	}
	u, n := binary.Uvarint(r.buf[r.pos:])
	switch {
	case n == 0:
		r.fail(ErrTruncated)
		return 0
	case n < 0:
		r.fail(errVarint)
		return 0
	}
	r.pos += n
	return int64(u>>1) ^ -int64(u&1)
}

func (r *reader) int() int32 {
	v := r.long()
	if v < math.MinInt32 || v > math.MaxInt32 {
		r.fail(errInt)
		return 0
	}
	return int32(v)
}

// choice reads the index of an enum's symbol or of a union's branch.
func (r *reader) choice(n int) int {
	v := r.long()
	if v < 0 || v >= int64(n) {
		r.fail(fmt.Errorf("%w: choice %d of %d", ErrInvalid, v, n))
		return 0
	}
	return int(v)
}

func (r *reader) boolean() bool {
	b := r.take(1)
	if len(b) == 0 {
		return false
	}
	if b[0] > 1 {
		r.fail(errBool)
	}
	return b[0] == 1
}

// take returns the next n bytes of the record itself.
func (r *reader) take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if n > len(r.buf)-r.pos {
		r.fail(ErrTruncated)
		return nil
	}
	b := r.buf[r.pos : r.pos+n : r.pos+n]
	r.pos += n
	return b
}

// text returns the bytes of a string, aliasing the record.
func (r *reader) text() []byte {
	n := r.long()
	if n < 0 {
		r.fail(fmt.Errorf("%w: string of %d bytes", ErrInvalid, n))
		return nil
	}
	if n > int64(len(r.buf)-r.pos) {
		r.fail(ErrTruncated)
		return nil
	}
	b := r.take(int(n))
	if !utf8.Valid(b) {
		r.fail(errUTF8)
	}
	return b
}

func (r *reader) hash() uint64 {
	b := r.take(8)
	if b == nil {
		return 0
	}
	return binary.LittleEndian.Uint64(b)
}

// array is how far the reading of one array has got.
type array struct {
	items int // of the blocks begun
	end   int // where the current block says that it ends, 0 if it does not say
}

// block begins the array's next block, or its first, and returns its number of
// items: 0 at the array's end and on an error. An item takes at least itemBytes,
// which must not be 0, so a count that the rest of the record cannot hold is
// refused before anything is allocated for it.
func (r *reader) block(a *array, itemBytes, maxItems int) int {
	if a.end != 0 && a.end != r.pos {
		r.fail(fmt.Errorf("%w: %w", ErrInvalid, errBlockSize))
	}
	a.end = 0
	n := r.long()
	sized := n < 0 // then the block's size in bytes follows
	if sized {
		n = -n // still negative for the least int64
	}
	if n < 0 || n > int64(maxItems-a.items) {
		r.fail(fmt.Errorf("%w: array of more items than %d", ErrTooLarge, maxItems))
	}
	if sized {
		size := r.long()
		if size < 0 {
			r.fail(fmt.Errorf("%w: %w: %d", ErrInvalid, errBlockSize, size))
		} else if size > int64(len(r.buf)-r.pos) {
			r.fail(fmt.Errorf("%w: %w", ErrTruncated, errBlockSize))
		}
		a.end = r.pos + int(size)
	}
	if n > int64((len(r.buf)-r.pos)/itemBytes) {
		r.fail(ErrTruncated)
	}
	if r.err != nil {
		return 0
	}
	a.items += int(n)
	return int(n)
}

// hashes appends an array of Hash64 to dst. A dst that must grow moves, but
// slices of it made before keep their contents: nobody writes to the old array
// any more.
func hashes[H ~uint64](r *reader, dst []H) []H {
	var a array
	for n := r.block(&a, 8, maxBlockCount); n > 0; n = r.block(&a, 8, maxBlockCount) {
		b := r.take(n * 8)
		at := len(dst)
		dst = slices.Grow(dst, n)[:at+n]
		for i := range dst[at:] {
			dst[at+i] = H(binary.LittleEndian.Uint64(b[i*8:]))
		}
	}
	return dst
}
