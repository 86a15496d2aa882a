// This file reads and writes traces of requests, in the Mooncake format.

package fleet

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// TraceBlock is how many tokens one hash id of a trace stands for.
const TraceBlock = 512

// maxTraceLine bounds one line of a trace, in bytes: some 100,000 hash ids, or
// prompts of 50 million tokens.
const maxTraceLine = 1 << 20

// Request is one line of a trace. Requests that share leading HashIDs share
// that much of their prompts.
type Request struct {
	Timestamp    int64    `json:"timestamp"` // milliseconds since the trace's start
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"` // one for each started TraceBlock of the prompt
}

// check says what is wrong with a request as a trace gave it.
func (r *Request) check() error {
	switch want := (r.InputLength + TraceBlock - 1) / TraceBlock; {
	case r.Timestamp < 0:
		return fmt.Errorf("timestamp %d is negative", r.Timestamp)
	case r.InputLength <= 0:
		return fmt.Errorf("input_length %d is not positive", r.InputLength)
	case r.OutputLength < 0:
		return fmt.Errorf("output_length %d is negative", r.OutputLength)
	case len(r.HashIDs) != want:
		return fmt.Errorf("input_length %d needs %d hash_ids of %d tokens, not %d", r.InputLength, want, TraceBlock, len(r.HashIDs))
	}
	return nil
}

// Requests gives requests one by one; Next returns io.EOF after the last. The
// request's slices are good until the next call.
type Requests interface {
	Next() (*Request, error)
}

// reader reads a trace.
type reader struct {
	name string
	line int
	r    *bufio.Reader
	req  Request
}

// newReader reads the trace r; name and the line's number go into errors.
func newReader(r io.Reader, name string) *reader {
	return &reader{name: name, r: bufio.NewReaderSize(r, maxTraceLine)}
}

// Next returns the next request. Empty lines are passed over; anything else
// that is not a request is an error which names the line. Fields that Request
// does not have are ignored.
func (t *reader) Next() (*Request, error) {
	for {
		line, err := t.r.ReadSlice('\n')
		t.line++
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return nil, t.errorf("longer than %d bytes", maxTraceLine)
		case err != nil && err != io.EOF:
			return nil, t.errorf("%w", err)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			t.req = Request{HashIDs: t.req.HashIDs[:0]}
			if err := json.Unmarshal(line, &t.req); err != nil {
				return nil, t.errorf("%w", err)
			}
			if err := t.req.check(); err != nil {
				return nil, t.errorf("%w", err)
			}
			return &t.req, nil
		}
		if err == io.EOF {
			return nil, io.EOF
		}
	}
}

func (t *reader) errorf(format string, args ...any) error {
	return fmt.Errorf("%s:%d: "+format, append([]any{t.name, t.line}, args...)...)
}

// TraceFile is a trace in a file.
type TraceFile struct {
	*reader
	io.Closer
}

// OpenTrace opens the trace of that name; "-" is standard input.
func OpenTrace(name string) (*TraceFile, error) {
	if name == "-" {
		return &TraceFile{newReader(os.Stdin, "standard input"), io.NopCloser(nil)}, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return &TraceFile{newReader(f, name), f}, nil
}

// WriteTrace writes all requests as a trace and returns how many they were.
func WriteTrace(w io.Writer, from Requests) (int, error) {
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	for n := 0; ; n++ {
		r, err := from.Next()
		if err == io.EOF {
			return n, out.Flush()
		}
		if err != nil {
			return n, err
		}
		if err := enc.Encode(r); err != nil {
			return n, err
		}
	}
}
