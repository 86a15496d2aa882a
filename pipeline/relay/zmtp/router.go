// This file has the ROUTER socket.

package zmtp

import (
	"bytes"
	"context"
	"sync"
)

// Router receives messages of any number of DEALER or REQ sockets and answers
// them. It is for demonstrations and tests, where it stands for an engine's
// replay; its methods may be called by any goroutine.
type Router struct {
	*server
	requests chan Request
	mu       sync.Mutex // guards the next
	byID     map[uint64]*served
}

// Request is a message that has come.
type Request struct {
	// From is the peer's connection; a peer that connects again is another.
	From   uint64
	Frames [][]byte // the caller's own
}

// maxRequests is how many requests wait, of all peers together. Then peers are
// not read until one is taken.
const maxRequests = 1000

// ListenRouter returns a socket that listens on a TCP address, host:port; port 0
// is any. Its errors are those of [ListenConfig.Validate] and of listening.
func ListenRouter(address string, cfg ListenConfig) (*Router, error) {
	s, err := listen(address, "ROUTER", cfg)
	if err != nil {
		return nil, err
	}
	r := &Router{server: s, requests: make(chan Request, maxRequests), byID: map[uint64]*served{}}
	s.joined, s.read, s.left = r.join, r.listenTo, r.leave
	s.running.Go(s.accept)
	return r, nil
}

// Recv waits for the next message. Its error is the cause of ctx's end, or [ErrClosed].
func (r *Router) Recv(ctx context.Context) (Request, error) {
	select {
	case <-r.life.Done():
		return Request{}, ErrClosed
	case <-ctx.Done():
		return Request{}, context.Cause(ctx)
	case q := <-r.requests:
		return q, nil
	}
}

// Send sends one message of at least one frame to a peer, and reports whether
// it was queued: not if the peer is gone, and not at [ListenConfig].HWM. It never
// waits. The last frame is kept until it is written, so it must not be changed
// any more.
func (r *Router) Send(to uint64, frames ...[]byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	peer, ok := r.byID[to]
	return ok && r.send(peer, encode(frames))
}

func (r *Router) join(peer *served) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byID[peer.id] = peer
}

func (r *Router) leave(peer *served) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byID, peer.id)
}

func (r *Router) listenTo(peer *served) error {
	for {
		frames, err := peer.conn.message(context.Background())
		if err != nil {
			return err
		}
		q := Request{From: peer.id}
		for _, f := range frames {
			q.Frames = append(q.Frames, bytes.Clone(f))
		}
		select {
		case r.requests <- q:
		case <-peer.life.Done():
			return peer.life.Err()
		}
	}
}
