// This file is the measuring side's end of the server's process.

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// server is what is asked: a process, or a stage of somebody else's, of which only
// the addresses are known.
type server struct {
	greeting
	mu   sync.Mutex
	in   io.WriteCloser
	out  *json.Decoder
	wait func() error
}

func startServer(ctx context.Context, start Starter, c ServerConfig) (*server, error) {
	in, out, wait, err := start(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("the server: %w", err)
	}
	s := &server{in: in, out: json.NewDecoder(out), wait: wait}
	if err := s.out.Decode(&s.greeting); err != nil {
		return nil, fmt.Errorf("the server did not start: %w", errors.Join(err, s.stop()))
	}
	return s, nil
}

// stats asks how it is doing.
func (s *server) stats() (st serverStats, err error) {
	if s.in == nil {
		return st, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err = io.WriteString(s.in, "\n"); err == nil {
		err = s.out.Decode(&st)
	}
	if err != nil {
		err = fmt.Errorf("the server has ended: %w", err)
	}
	return st, err
}

func (s *server) stop() error {
	s.in.Close()
	return s.wait()
}
