// This file has what the server sockets Pub and Router share: listening, one
// reader and one writer for each peer, the queue between.

package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ListenConfig has the limits of a server socket. [DefaultListenConfig] has the
// defaults; a zero value is not one.
type ListenConfig struct {
	// HWM is how many messages may wait for a peer, besides those that the
	// kernel has. Further ones to that peer are dropped, as libzmq does. Each
	// costs a peer 48 bytes from its start. 1000.
	HWM int
	// HandshakeTimeout bounds a peer's handshake. 5 s.
	HandshakeTimeout time.Duration
	// MaxPeers is how many peers may be connected; further ones are hung up on. 1024.
	MaxPeers int
}

// DefaultListenConfig returns the defaults.
func DefaultListenConfig() ListenConfig {
	return ListenConfig{HWM: 1000, HandshakeTimeout: 5 * time.Second, MaxPeers: 1024}
}

// Validate returns what is wrong with the configuration, all of it.
func (c *ListenConfig) Validate() error {
	var errs []error
	if c.HWM < 1 || c.HWM > 1<<20 {
		errs = append(errs, fmt.Errorf("zmtp: HWM is %d, must be 1 to 2^20", c.HWM))
	}
	if c.HandshakeTimeout <= 0 {
		errs = append(errs, fmt.Errorf("zmtp: HandshakeTimeout is %v, must be more than 0", c.HandshakeTimeout))
	}
	if c.MaxPeers < 1 {
		errs = append(errs, fmt.Errorf("zmtp: MaxPeers is %d, must be 1 or more", c.MaxPeers))
	}
	return errors.Join(errs...)
}

const (
	// never is the silence after which a server asks: as libzmq's, which has no
	// heartbeats unless told, it leaves a peer that is busy alone. TCP's keep-alive
	// finds those that are gone.
	never = time.Duration(1) << 62
	// maxRequest bounds what a peer may send in one message, in bytes.
	maxRequest = 64 << 10
	// maxPongs is how many answers to PINGs may wait for a peer that does not read.
	maxPongs = 16
)

// server is a listening socket.
type server struct {
	cfg        Config // of each connection
	limits     ListenConfig
	socketType string
	listener   net.Listener
	joined     func(*served)       // the handshake is done; nothing was read or sent yet
	read       func(*served) error // reads until the connection ends
	left       func(*served)       // no more of it, if it had joined

	life    context.Context // ends with Close
	end     context.CancelFunc
	running sync.WaitGroup
	peers   atomic.Int64 // connected, handshakes included
	dropped atomic.Uint64
}

// served is one peer's connection.
type served struct {
	id    uint64 // in the order in which they came
	conn  *conn
	queue chan outgoing
	pongs chan []byte
	life  context.Context // its end closes the connection
	end   context.CancelFunc
}

// outgoing is a message as it is written: all but the last frame's body, and that.
type outgoing struct{ head, body []byte }

func encode(frames [][]byte) outgoing {
	size := 0
	for _, f := range frames[:len(frames)-1] {
		size += len(f)
	}
	head := make([]byte, 0, size+len(frames)*headerMax)
	for i, f := range frames {
		if i == len(frames)-1 {
			return outgoing{appendHeader(head, 0, len(f)), f}
		}
		head = append(appendHeader(head, flagMore, len(f)), f...)
	}
	panic("BUG: a message without frames")
}

// listen begins to listen on a TCP address, host:port. The caller then sets the
// functions and calls accept in s.running.
func listen(address, socketType string, limits ListenConfig) (*server, error) {
	if err := limits.Validate(); err != nil {
		return nil, err
	}
	cfg := DefaultConfig("")
	cfg.Topics = nil
	cfg.HandshakeTimeout, cfg.WriteTimeout = limits.HandshakeTimeout, limits.HandshakeTimeout
	cfg.HeartbeatInterval = never
	cfg.MaxFrame, cfg.MaxMessage = maxRequest, maxRequest
	keep := net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}
	lc := net.ListenConfig{KeepAliveConfig: keep}
	l, err := lc.Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	s := &server{cfg: cfg, limits: limits, socketType: socketType, listener: l}
	s.life, s.end = context.WithCancel(context.Background())
	return s, nil
}

// Endpoint returns the address listened on as ZeroMQ writes it, with the port
// that was chosen if it was 0.
func (s *server) Endpoint() string { return "tcp://" + s.listener.Addr().String() }

// Dropped returns how many messages were dropped, for each peer that should have
// had them.
func (s *server) Dropped() uint64 { return s.dropped.Load() }

// Close hangs up on every peer, whatever waits for it, and returns when nothing
// of the socket goes on. It may be called at any time, more than once.
func (s *server) Close() error {
	s.end()
	s.listener.Close()
	s.running.Wait()
	return nil
}

// accept serves peers until Close.
func (s *server) accept() {
	for id := uint64(1); ; id++ {
		nc, err := s.listener.Accept()
		switch {
		case s.life.Err() != nil:
			if err == nil {
				nc.Close()
			}
			return
		case err != nil: // as of too many open files: the peer comes again
			select {
			case <-s.life.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		case s.peers.Load() >= int64(s.limits.MaxPeers):
			nc.Close()
			continue
		}
		s.peers.Add(1)
		s.running.Go(func() {
			defer s.peers.Add(-1)
			s.serve(id, nc)
		})
	}
}

// serve serves one peer. What a peer does wrong ends its connection, no more.
func (s *server) serve(id uint64, nc net.Conn) {
	p := &served{id: id, conn: newConn(nc, &s.cfg)}
	p.life, p.end = context.WithCancel(s.life)
	defer p.end()
	defer context.AfterFunc(p.life, func() { nc.Close() })()
	defer p.conn.close()
	if p.conn.handshake(p.life, s.socketType) != nil {
		return
	}
	nc.SetWriteDeadline(time.Time{}) // a slow reader may be as slow as it likes
	p.queue, p.pongs = make(chan outgoing, s.limits.HWM), make(chan []byte, maxPongs)
	p.conn.later = p.pong
	s.joined(p)
	defer s.left(p)
	var writing sync.WaitGroup
	defer writing.Wait()
	defer nc.Close() // ends a write
	defer p.end()
	writing.Go(func() {
		defer p.end()
		p.write()
	})
	_ = s.read(p)
}

// pong queues an answer to a PING. There is no use in many of them.
func (p *served) pong(b []byte) {
	select {
	case p.pongs <- append([]byte(nil), b...):
	default:
	}
}

// write writes what is queued until the connection ends.
func (p *served) write() {
	w := bufio.NewWriterSize(p.conn.nc, bufferMin)
	for {
		var m outgoing
		select {
		case <-p.life.Done():
			return
		case m.head = <-p.pongs:
		case m = <-p.queue:
		}
		w.Write(m.head) // a bufio.Writer keeps its first error
		w.Write(m.body)
		if len(p.queue)+len(p.pongs) > 0 {
			continue
		}
		if w.Flush() != nil {
			return
		}
	}
}

// send queues a message or drops it.
func (s *server) send(p *served, m outgoing) bool {
	select {
	case p.queue <- m:
		return true
	default:
		s.dropped.Add(1)
		return false
	}
}
