// This file writes workload files.

package kvw

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// Writer writes a file's operations one by one. It is for one goroutine.
type Writer struct {
	f   io.WriteSeeker
	w   *bufio.Writer
	h   Header
	buf []byte
}

// NewWriter begins a file of operations of that many workers, with blocks of
// that many tokens.
func NewWriter(f io.WriteSeeker, workers, blockSize uint32) (*Writer, error) {
	if workers > MaxWorkers {
		return nil, fmt.Errorf("%d workers: at most %d are taken", workers, MaxWorkers)
	}
	x := &Writer{f: f, w: bufio.NewWriterSize(f, 1<<16), h: Header{Workers: workers, BlockSize: blockSize}}
	x.buf = append(x.buf, magic...)
	x.buf = binary.LittleEndian.AppendUint32(x.buf, workers)
	x.buf = binary.LittleEndian.AppendUint32(x.buf, blockSize)
	x.buf = binary.LittleEndian.AppendUint64(x.buf, 0)
	_, err := x.w.Write(x.buf)
	return x, err
}

// Write adds an operation. A store's position and hashes are not written: its
// sequence hashes follow from its parent and local hashes.
func (x *Writer) Write(op *Op) error {
	if op.Kind != Query && uint32(op.Worker) >= x.h.Workers {
		return fmt.Errorf("worker %d of %d", op.Worker, x.h.Workers)
	}
	le := binary.LittleEndian
	b := append(x.buf[:0], byte(op.Kind))
	switch op.Kind {
	case Store:
		s := &op.Stored
		b = le.AppendUint32(b, uint32(op.Worker))
		if s.HasParent {
			b = le.AppendUint64(append(b, 1), uint64(s.Parent))
		} else {
			b = le.AppendUint64(append(b, 0), 0)
		}
		b = le.AppendUint32(b, uint32(len(s.Locals)))
		i := 0
		for seq := range Seqs(s) {
			b = le.AppendUint64(b, uint64(s.Locals[i]))
			b = le.AppendUint64(b, uint64(seq))
			i++
		}
	case Remove:
		b = le.AppendUint32(b, uint32(op.Worker))
		b = le.AppendUint32(b, uint32(len(op.Hashes)))
		for _, h := range op.Hashes {
			b = le.AppendUint64(b, uint64(h))
		}
	case Query:
		b = le.AppendUint32(b, uint32(len(op.Query)))
		for _, l := range op.Query {
			b = le.AppendUint64(b, uint64(l))
		}
	default:
		return fmt.Errorf("no operation is of kind %d", op.Kind)
	}
	x.buf = b
	x.h.Ops++
	_, err := x.w.Write(b)
	return err
}

// Finish writes what is buffered and then the number of operations into the
// header. It does not close the file. Without it the file says that it is empty.
func (x *Writer) Finish() error {
	if err := x.w.Flush(); err != nil {
		return err
	}
	if _, err := x.f.Seek(int64(opsOffset), io.SeekStart); err != nil {
		return err
	}
	if _, err := x.f.Write(binary.LittleEndian.AppendUint64(x.buf[:0], x.h.Ops)); err != nil {
		return err
	}
	_, err := x.f.Seek(0, io.SeekEnd)
	return err
}
