// This file bounds the memory of answers that their callers have not taken yet.

package query

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
)

// unread counts the answers of both ports that are ready and not written out. A client
// need only grant no window, and answer pings, for gRPC to keep its answers for ever.
// So one that is not taken in time has its connection closed, and once they are too
// many so has each that has waited for a while, oldest first: slow readers keep nobody
// out. Nothing less frees them: what gRPC has been given to send waits for its reader
// even when its stream has ended.
type unread struct {
	most     int64         // bytes of queries' answers
	refusals int64         // and of refusals on streams, which go on, and of metrics
	patience time.Duration // after which an answer must go if others need the room
	timeout  time.Duration // after which it must in any case

	mu       sync.Mutex
	bytes    int64
	answers  list.List // of *unreadAnswer, oldest first
	sweeping bool      // a timer runs

	full *busyError // made once: a refusal shall cost little
}

func newUnread(l Limits) *unread {
	return &unread{
		most: int64(l.MaxUnreadBytes), refusals: int64(l.MaxUnreadBytes) / 4 * 5, patience: l.Deadline, timeout: l.RequestTimeout,
		full: &busyError{unreadFull, fmt.Sprintf("busy: callers have yet to take %d bytes of answers: ask another instance, or again later", l.MaxUnreadBytes)},
	}
}

// unreadAnswer is one answer. Its memory is from a pool that it stands for, to be told
// when gRPC needs it no more.
type unreadAnswer struct {
	all   *unread
	conn  *doorConn
	since time.Time
	bytes int64
	at    *list.Element // in answers; nil once it is taken; guarded by all.mu
}

// keptBesides is what is kept for an answer beside its bytes: its stream's state.
const keptBesides = 2 << 10

// room fails with a *busyError if there is none.
func (u *unread) room() error {
	u.mu.Lock()
	gone := u.evict(u.most - 1)
	full := u.bytes >= u.most
	u.mu.Unlock()
	u.close(gone, u.patience)
	if full {
		return u.full
	}
	return nil
}

// hold counts an answer until take. It fails with a *busyError if more than most bytes
// would be counted.
func (u *unread) hold(c *doorConn, bytes int, most int64) (*unreadAnswer, error) {
	a := &unreadAnswer{all: u, conn: c, since: time.Now(), bytes: int64(bytes + keptBesides)}
	u.mu.Lock()
	gone := u.evict(min(most, u.most) - a.bytes)
	full := u.bytes+a.bytes > most
	if !full && !c.left {
		u.bytes += a.bytes
		a.at = u.answers.PushBack(a)
		c.unread[a] = struct{}{}
		if !u.sweeping {
			u.sweeping = true
			time.AfterFunc(u.timeout, u.sweep)
		}
	}
	u.mu.Unlock()
	u.close(gone, u.patience)
	if full {
		return nil, u.full
	}
	return a, nil
}

// take ends the count. It may be called again.
func (a *unreadAnswer) take() {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	a.out()
}

// out is take under the lock.
func (a *unreadAnswer) out() {
	if a.at != nil {
		a.all.answers.Remove(a.at)
		delete(a.conn.unread, a)
		a.all.bytes -= a.bytes
		a.at = nil
	}
}

// evict picks, under the lock, connections to close until no more than most bytes are
// left, or none that has waited long enough.
func (u *unread) evict(most int64) (gone []*doorConn) {
	for u.bytes > most && u.answers.Len() > 0 {
		a := u.answers.Front().Value.(*unreadAnswer)
		if time.Since(a.since) < u.patience {
			break
		}
		gone = append(gone, a.conn)
		a.conn.leave()
	}
	return gone
}

// sweep closes the connections whose answers have waited for too long.
func (u *unread) sweep() {
	var gone []*doorConn
	u.mu.Lock()
	for u.sweeping = false; u.answers.Len() > 0; {
		a := u.answers.Front().Value.(*unreadAnswer)
		if left := u.timeout - time.Since(a.since); left > 0 {
			u.sweeping = true
			time.AfterFunc(left, u.sweep)
			break
		}
		gone = append(gone, a.conn)
		a.conn.leave()
	}
	u.mu.Unlock()
	u.close(gone, u.timeout)
}

func (u *unread) close(gone []*doorConn, after time.Duration) {
	for _, c := range gone {
		c.Close()
		c.door.refuse(slowReader, c.RemoteAddr(), fmt.Errorf("an answer was not taken within %v: its connection is closed", after))
	}
}

// held is how many bytes are counted.
func (u *unread) held() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.bytes
}

// leave drops what a connection that is closed has not taken, under unread's lock.
func (c *doorConn) leave() {
	c.left = true
	for a := range c.unread {
		a.out()
	}
}

// doorAddr is a connection's remote address, by which those who see only that find it.
type doorAddr struct {
	net.Addr
	conn *doorConn
}

// connOf is the connection that a gRPC request has come by.
func connOf(ctx context.Context) (*doorConn, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errors.New("BUG: a request without a peer")
	}
	return p.Addr.(doorAddr).conn, nil
}

// encoded is a gRPC answer as the codec passes it on.
type encoded struct{ buf mem.Buffer }

// answerPool has buffers of twice what is asked for at most; gRPC's own goes from
// 32 KiB to 1 MiB.
var answerPool = func() mem.BufferPool {
	pool, err := mem.NewBinaryTieredBufferPool(11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return pool
}()

// leastPooled is what a buffer has so that its pool is told of its end.
const leastPooled = 2 << 10

// encode makes an answer what can be sent, and counts it until it is. It fails as hold
// does.
func (u *unread) encode(ctx context.Context, answer any, most int64) (*encoded, error) {
	conn, err := connOf(ctx)
	if err != nil {
		return nil, err
	}
	m := answer.(proto.Message)
	buf := answerPool.Get(max(proto.Size(m), leastPooled))
	a, err := u.hold(conn, cap(*buf), most)
	if err != nil {
		answerPool.Put(buf)
		return nil, err
	}
	if *buf, err = (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend((*buf)[:0], m); err != nil {
		a.Put(buf)
		return nil, err
	}
	return &encoded{mem.NewBuffer(buf, a)}, nil
}

// Get implements mem.BufferPool.
func (a *unreadAnswer) Get(n int) *[]byte { return answerPool.Get(n) }

// Put implements mem.BufferPool: gRPC has written the answer, or dropped it.
func (a *unreadAnswer) Put(buf *[]byte) {
	a.take()
	answerPool.Put(buf)
}

// countedStream counts what a stream sends.
type countedStream struct {
	grpc.ServerStream
	unread *unread
	most   int64
}

// SendMsg implements grpc.ServerStream.
func (s countedStream) SendMsg(m any) error {
	e, err := s.unread.encode(s.Context(), m, s.most)
	if err != nil {
		return err
	}
	return s.ServerStream.SendMsg(e)
}
