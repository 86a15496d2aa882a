// This file reads workload files.

package kvw

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"kvindex/index"
)

// FormatError says where a file is not what KVW1 says.
type FormatError struct {
	Offset int64 // bytes from the file's start to the field that is wrong, or missing in part
	Err    error // io.ErrUnexpectedEOF, wrapped, if the file ends too early
}

func (e *FormatError) Error() string { return fmt.Sprintf("at byte %d: %v", e.Offset, e.Err) }

// Unwrap returns what is wrong.
func (e *FormatError) Unwrap() error { return e.Err }

// Reader reads a file's operations one by one. It is for one goroutine.
type Reader struct {
	Header Header

	r    *bufio.Reader
	at   int64  // offset of what comes next
	read uint64 // operations
	buf  []byte
}

// NewReader reads the header. Its errors are *FormatError or those of r.
func NewReader(r io.Reader) (*Reader, error) {
	x := &Reader{r: bufio.NewReaderSize(r, 1<<16), buf: make([]byte, 1<<13)}
	b, err := x.next(len(magic), "magic")
	if err != nil {
		return nil, err
	}
	if string(b) != magic {
		return nil, &FormatError{0, fmt.Errorf("not a workload file: it begins with %q, not %q", b, magic)}
	}
	if b, err = x.next(headerSize-len(magic), "header"); err != nil {
		return nil, err
	}
	x.Header = Header{
		Workers:   binary.LittleEndian.Uint32(b),
		BlockSize: binary.LittleEndian.Uint32(b[4:]),
		Ops:       binary.LittleEndian.Uint64(b[8:]),
	}
	if x.Header.Workers > MaxWorkers {
		return nil, &FormatError{4, fmt.Errorf("%d workers: at most %d are taken", x.Header.Workers, MaxWorkers)}
	}
	return x, nil
}

// next returns the next n bytes, at most len(x.buf), which are good until the next call.
func (x *Reader) next(n int, what string) ([]byte, error) {
	b := x.buf[:n]
	got, err := io.ReadFull(x.r, b)
	if err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = &FormatError{x.at, fmt.Errorf("the file ends %d bytes into a field of %d, %s: %w", got, n, what, io.ErrUnexpectedEOF)}
		}
		return nil, err
	}
	x.at += int64(n)
	return b, nil
}

// Next reads the next operation into op, reusing its slices. It returns io.EOF
// after the last one, else *FormatError or the underlying reader's error. What it
// allocates is bounded by what the file has, whatever its counts say.
func (x *Reader) Next(op *Op) error {
	if x.read == x.Header.Ops {
		if _, err := x.r.ReadByte(); err == nil {
			return &FormatError{x.at, fmt.Errorf("bytes after the last of %d operations", x.Header.Ops)}
		} else if err != io.EOF {
			return err
		}
		return io.EOF
	}
	b, err := x.next(1, fmt.Sprintf("operation %d of %d", x.read, x.Header.Ops))
	if err != nil {
		return err
	}
	x.read++
	op.Kind = Kind(b[0])
	switch op.Kind {
	case Store:
		return x.store(op)
	case Remove:
		if err := x.worker(op); err != nil {
			return err
		}
		op.Hashes = op.Hashes[:0]
		return x.each(8, "sequence hash to remove", func(b []byte) error {
			op.Hashes = append(op.Hashes, index.SeqHash(binary.LittleEndian.Uint64(b)))
			return nil
		})
	case Query:
		op.Query = op.Query[:0]
		return x.each(8, "local hash of a query", func(b []byte) error {
			op.Query = append(op.Query, index.LocalHash(binary.LittleEndian.Uint64(b)))
			return nil
		})
	}
	return &FormatError{x.at - 1, fmt.Errorf("operation %d is of kind %d: want 1, 2 or 3", x.read-1, b[0])}
}

func (x *Reader) store(op *Op) error {
	if err := x.worker(op); err != nil {
		return err
	}
	b, err := x.next(9, "parent")
	if err != nil {
		return err
	}
	parent := index.SeqHash(binary.LittleEndian.Uint64(b[1:]))
	if b[0] > 1 || b[0] == 0 && parent != 0 {
		return &FormatError{x.at - 9, fmt.Errorf("has-parent %d with parent %016x", b[0], uint64(parent))}
	}
	op.Stored = index.Stored{Parent: parent, HasParent: b[0] == 1, Position: index.NoPosition, Locals: op.Stored.Locals[:0]}
	seq, chained := parent, op.Stored.HasParent
	return x.each(16, "block of a store", func(b []byte) error {
		local := index.LocalHash(binary.LittleEndian.Uint64(b))
		if chained {
			seq = index.Next(seq, local)
		} else {
			seq, chained = index.SeqHash(local), true
		}
		if got := index.SeqHash(binary.LittleEndian.Uint64(b[8:])); got != seq {
			return fmt.Errorf("sequence hash %016x: parent and local hash %016x make %016x", uint64(got), uint64(local), uint64(seq))
		}
		op.Stored.Locals = append(op.Stored.Locals, local)
		return nil
	})
}

func (x *Reader) worker(op *Op) error {
	b, err := x.next(4, "worker")
	if err != nil {
		return err
	}
	w := binary.LittleEndian.Uint32(b)
	if w >= x.Header.Workers {
		return &FormatError{x.at - 4, fmt.Errorf("worker %d of %d", w, x.Header.Workers)}
	}
	op.Worker = index.Slot(w)
	return nil
}

// each reads a count, and calls f for that many fields of size bytes each.
func (x *Reader) each(size int, what string, f func([]byte) error) error {
	b, err := x.next(4, "count")
	if err != nil {
		return err
	}
	n := int(binary.LittleEndian.Uint32(b))
	for done := 0; done < n; {
		many := min(n-done, len(x.buf)/size)
		b, err := x.next(many*size, fmt.Sprintf("%s, from number %d of %d on", what, done, n))
		if err != nil {
			return err
		}
		for i := range many {
			if err := f(b[i*size:][:size]); err != nil {
				return &FormatError{x.at - int64((many-i)*size), err}
			}
		}
		done += many
	}
	return nil
}
