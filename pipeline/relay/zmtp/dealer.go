// This file has the DEALER socket.

package zmtp

import (
	"context"
	"errors"
)

// Dealer sends requests to one peer (ROUTER) and reads what it answers, any
// number of messages. Nothing happens outside of its methods.
type Dealer struct {
	*peer
}

// NewDealer returns a socket that connects at the first call of Send. The error
// is that of [Config.Validate], or that there are topics.
func NewDealer(cfg Config) (*Dealer, error) {
	if len(cfg.Topics) > 0 {
		return nil, errors.New("zmtp: a DEALER has no topics")
	}
	p, err := newPeer(cfg, "DEALER")
	if err != nil {
		return nil, err
	}
	return &Dealer{p}, nil
}

// Send sends one message. Without a connection it waits until an attempt to
// connect is due and makes one. After an error there is no connection, and the
// message may have been sent or not, though never in part.
func (d *Dealer) Send(ctx context.Context, frames ...[]byte) error {
	d.use.Lock()
	defer d.use.Unlock()
	if d.conn == nil {
		if err := d.connect(ctx); err != nil {
			return err
		}
	}
	err := d.conn.send(ctx, frames)
	if err != nil {
		err = d.lost(err)
		if err != ErrClosed && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}
	return err
}

// Recv waits for the next message. The frames are good until the next call of
// Recv. Its error is the cause of ctx's end, after which a call with another
// context goes on where this one stopped; or [ErrClosed]; or why the connection
// was lost, which means that answers not yet returned never come, and the next
// is [ErrNotConnected] until Send has connected again.
func (d *Dealer) Recv(ctx context.Context) ([][]byte, error) {
	d.use.Lock()
	defer d.use.Unlock()
	if d.conn == nil {
		if d.life.Err() != nil {
			return nil, ErrClosed
		}
		return nil, ErrNotConnected
	}
	frames, err := d.conn.message(ctx)
	switch {
	case err == errInterrupted:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, d.lost(err)
	}
	return frames, nil
}

// Disconnect closes the connection, so that answers to what was asked before,
// however late, are not taken for answers to what is asked next: a ROUTER does
// not know the next connection as the same peer.
func (d *Dealer) Disconnect() {
	d.use.Lock()
	defer d.use.Unlock()
	d.drop()
}
