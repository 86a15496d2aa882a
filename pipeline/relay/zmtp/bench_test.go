// This file has what reading costs, beside the bare socket.

package zmtp

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"kvindex/testcontainers"
)

// benchSizes are of payloads: an event of one block, of a short prompt, of a long one.
var benchSizes = []int{200, 2_000, 100_000}

// flood listens and sends each connection what hello returns and then the
// messages over and over, until the connection ends.
func flood(tb testing.TB, hello, messages []byte) (address string) {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				nc.Write(hello)
				for err == nil {
					_, err = nc.Write(messages)
				}
			}()
		}
	}()
	return l.Addr().String()
}

// engineMessages is about 1 MiB of messages as engines send them, whole ones.
func engineMessages(size int) (b []byte, one int) {
	m := message("", "\x00\x00\x00\x00\x00\x00\x00\x01", strings.Repeat("x", size))
	for len(b) < 1<<20 {
		b = append(b, m...)
	}
	return b, len(m)
}

// BenchmarkSub is reading messages of topic, sequence number and payload; B/s
// are the bytes on the wire, headers too.
func BenchmarkSub(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("payload=%d", size), func(b *testing.B) {
			messages, one := engineMessages(size)
			s, err := NewSub(DefaultConfig("tcp://" + flood(b, hello(1), messages)))
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			ctx := b.Context()
			if e, err := s.Next(ctx); err != nil || e.Kind != Connected {
				b.Fatal(e, err)
			}
			b.SetBytes(int64(one))
			b.ReportAllocs()
			for b.Loop() {
				if e, err := s.Next(ctx); e.Kind != Message || len(e.Frames) != 3 {
					b.Fatal(e, err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}

// BenchmarkSocket is reading the same bytes and looking at none of them, with
// the buffer that a connection has.
func BenchmarkSocket(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("payload=%d", size), func(b *testing.B) {
			messages, one := engineMessages(size)
			nc, err := net.Dial("tcp", flood(b, nil, messages))
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			buf := make([]byte, bufferMin)
			b.SetBytes(int64(one))
			b.ReportAllocs()
			have := 0
			for b.Loop() {
				for have < one {
					n, err := nc.Read(buf)
					if err != nil {
						b.Fatal(err)
					}
					have += n
				}
				have -= one
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}

// A warm reader allocates nothing.
func TestReadingAllocatesNothing(t *testing.T) {
	for _, size := range []int{200, 100_000} {
		messages, _ := engineMessages(size)
		s, err := NewSub(DefaultConfig("tcp://" + flood(t, hello(1), messages)))
		if err != nil {
			t.Fatal(err)
		}
		next := func() {
			if e, err := s.Next(t.Context()); err != nil || e.Err != nil {
				t.Fatal(errors.Join(err, e.Err))
			}
		}
		for range 100 {
			next()
		}
		if n := testcontainers.LeastAllocs(100, next); n != 0 {
			t.Errorf("payloads of %d bytes: %v allocations a message", size, n)
		}
		s.Close()
	}
}
