// This file bounds the requests that need no place and whose messages are on their way.

package query

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// senders are the callers of unary gRPC methods, other than queries, whose message is
// not there yet. gRPC keeps the headers of each, and a connection may have a hundred.
// Once there are too many the oldest is cut off: so nobody is refused, and who sends his
// message at once does not notice.
type senders struct {
	most int
	mu   sync.Mutex
	open list.List // of func(), which cut them off, oldest first
}

// enter lets one in, until leave, and cuts the oldest off if there are too many.
func (s *senders) enter(cut func()) (leave func()) {
	s.mu.Lock()
	var out func()
	if s.open.Len() >= s.most {
		out = s.open.Remove(s.open.Front()).(func())
	}
	at := s.open.PushBack(cut)
	s.mu.Unlock()
	if out != nil {
		out()
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open.Remove(at) // of none that was cut off
	}
}

var (
	errNotArrived = errors.New("the request's message did not arrive in time")
	errTooMany    = errors.New("the request's message has not arrived, and others need the room")
)

// arrives has a method's messages arrive in time, and not too many at once if among
// is not nil.
func (s *Server) arrives(d grpc.MethodDesc, among *senders) grpc.MethodDesc {
	next := d.Handler
	d.Handler = func(srv any, ctx context.Context, read func(any) error, with grpc.UnaryServerInterceptor) (any, error) {
		arriving := ctx.Value(arrivingKey{}).(*arriving)
		cut := func(why error) func() {
			return func() {
				s.refuse(overGRPC, slowSender, peerOf(arriving), why)
				arriving.cut()
			}
		}
		leave := func() {}
		if among != nil {
			leave = among.enter(cut(errTooMany))
		}
		defer leave() // of those that are cut off, or whose message is none
		late := time.AfterFunc(s.limits.RequestTimeout, cut(errNotArrived))
		return next(srv, ctx, func(into any) error {
			defer leave()
			defer late.Stop()
			return read(into)
		}, with)
	}
	return d
}
