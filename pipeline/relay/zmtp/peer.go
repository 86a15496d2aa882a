// This file has what Sub and Dealer share: connecting to the peer again and again.

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// peer connects to one peer, one connection at a time.
type peer struct {
	cfg        Config
	socketType string
	dialer     func(ctx context.Context, network, address string) (net.Conn, error)

	// use is held by whoever uses conn, backoff and next. Before state.
	use     sync.Mutex
	conn    *conn         // nil when there is no connection
	backoff time.Duration // the longest pause due after the next failure
	next    time.Time     // when the next attempt is due

	// life ends with Close, and with it every wait.
	life context.Context
	end  context.CancelFunc

	state sync.Mutex // guards live
	live  *conn      // the same as conn, for those that do not hold use
	heard time.Time  // of the connections before; guarded by state
}

func newPeer(cfg Config, socketType string) (*peer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := &peer{cfg: cfg, socketType: socketType, dialer: cfg.dial, backoff: cfg.MinBackoff}
	if p.dialer == nil {
		// Keep-alive is all there is with peers without PING: gone after 30 s.
		keep := net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}
		p.dialer = (&net.Dialer{Timeout: cfg.HandshakeTimeout, KeepAliveConfig: keep}).DialContext
	}
	p.life, p.end = context.WithCancel(context.Background())
	return p, nil
}

// connect waits until an attempt is due and makes one. With an error that is
// ctx's, none was made or it does not count.
func (p *peer) connect(ctx context.Context) error {
	if p.life.Err() != nil {
		return ErrClosed
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.life, func() { cancel(ErrClosed) })()

	if wait := time.Until(p.next); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	network, address, _ := splitEndpoint(p.cfg.Endpoint) // validated
	nc, err := p.dialer(ctx, network, address)
	if err == nil {
		c := newConn(nc, &p.cfg)
		p.setConn(c)
		if err = c.handshake(ctx, p.socketType); err == nil {
			return nil
		}
		p.drop()
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.delay(err)
	return fmt.Errorf("connecting to %s: %w", p.cfg.Endpoint, err)
}

// delay sets when the next attempt is due, after one that failed or a
// connection that broke by err.
func (p *peer) delay(err error) {
	if errors.Is(err, ErrRefused) {
		p.backoff = p.cfg.MaxBackoff // it was told not to come
	}
	p.next = time.Now().Add(p.backoff/2 + rand.N(p.backoff/2+1))
	p.backoff = min(2*p.backoff, p.cfg.MaxBackoff)
}

// lost gives the connection up after err. With ctx's own end nothing is lost.
func (p *peer) lost(err error) error {
	if p.conn.lively {
		p.backoff = p.cfg.MinBackoff
	}
	p.drop()
	if p.life.Err() != nil {
		return ErrClosed
	}
	p.delay(err)
	return fmt.Errorf("connection to %s: %w", p.cfg.Endpoint, err)
}

func (p *peer) setConn(c *conn) {
	p.conn = c
	p.state.Lock()
	defer p.state.Unlock()
	if p.live != nil {
		p.heard = p.live.lastHeard()
	}
	p.live = c
	if c != nil && p.life.Err() != nil { // Close has not seen it
		c.nc.Close()
	}
}

// drop closes the connection, if there is one.
func (p *peer) drop() {
	if p.conn != nil {
		p.conn.close()
		p.setConn(nil)
	}
}

// Heard returns when the peer was last heard: a whole frame of it, be it of a
// message or the answer to a heartbeat, had come. Zero: never. Bytes count when
// they are read, so that it stands still while the caller of Next or Recv is
// busy. It may be called at any time.
func (p *peer) Heard() time.Time {
	p.state.Lock()
	defer p.state.Unlock()
	if p.live != nil {
		if at := p.live.lastHeard(); !at.IsZero() {
			return at
		}
	}
	return p.heard
}

// Close closes the connection, ends a call that waits, with [ErrClosed], and
// returns when it has ended. It may be called at any time, more than once.
func (p *peer) Close() error {
	p.end()
	p.state.Lock()
	if p.live != nil {
		p.live.nc.Close()
	}
	p.state.Unlock()
	p.use.Lock()
	defer p.use.Unlock()
	p.drop()
	return nil
}

// lastHeard returns when the last whole frame had come, zero for none.
func (c *conn) lastHeard() time.Time {
	if at := c.heard.Load(); at != 0 {
		return time.Unix(0, at)
	}
	return time.Time{}
}
