// This file has the PUB socket.

package zmtp

import (
	"bytes"
	"context"
	"fmt"
	"sync"
)

// Pub publishes to any number of SUB sockets, as libzmq's PUB does: a peer gets
// what it has subscribed to from then on, and what it is too slow for is dropped
// at [ListenConfig].HWM. It is for demonstrations and tests, where it stands for
// an engine; its methods may be called by any goroutine.
type Pub struct {
	*server
	mu          sync.Mutex // guards the next
	subscribers map[*served]subscriptions
}

// subscriptions counts a peer's, by prefix.
type subscriptions map[string]int

// maxSubscriptions bounds those of a peer.
const maxSubscriptions = 1000

// ListenPub returns a socket that listens on a TCP address, host:port; port 0 is
// any. Its errors are those of [ListenConfig.Validate] and of listening.
func ListenPub(address string, cfg ListenConfig) (*Pub, error) {
	s, err := listen(address, "PUB", cfg)
	if err != nil {
		return nil, err
	}
	p := &Pub{server: s, subscribers: map[*served]subscriptions{}}
	s.joined, s.read, s.left = p.join, p.listenTo, p.leave
	s.running.Go(s.accept)
	return p, nil
}

// Send publishes one message of at least one frame; the first is what
// subscriptions are compared with. It never waits. The last frame is kept until
// it is written, so it must not be changed any more.
func (p *Pub) Send(frames ...[]byte) {
	var m outgoing
	p.mu.Lock()
	defer p.mu.Unlock()
	for peer, subs := range p.subscribers {
		if !subs.match(frames[0]) {
			continue
		}
		if m.head == nil {
			m = encode(frames)
		}
		p.send(peer, m)
	}
}

// Subscribers returns how many peers have a subscription.
func (p *Pub) Subscribers() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, subs := range p.subscribers {
		if len(subs) > 0 {
			n++
		}
	}
	return n
}

func (p *Pub) join(peer *served) {
	peer.conn.other = func(name, data []byte) error {
		switch string(name) {
		case "SUBSCRIBE":
			return p.subscribe(peer, data, 1)
		case "CANCEL":
			return p.subscribe(peer, data, -1)
		}
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subscribers[peer] = subscriptions{}
}

func (p *Pub) leave(peer *served) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.subscribers, peer)
}

// listenTo reads subscriptions in the form that ZMTP 3.0 has for them, messages.
// Commands go the other way. Other messages to a PUB are passed over.
func (p *Pub) listenTo(peer *served) error {
	for {
		frames, err := peer.conn.message(context.Background())
		if err != nil {
			return err
		}
		if len(frames) != 1 || len(frames[0]) == 0 || frames[0][0] > 1 {
			continue
		}
		count := 2*int(frames[0][0]) - 1
		if err := p.subscribe(peer, frames[0][1:], count); err != nil {
			return err
		}
	}
}

// subscribe adds a subscription, or takes one back that there is.
func (p *Pub) subscribe(peer *served, topic []byte, count int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	subs := p.subscribers[peer]
	n := subs[string(topic)] + count
	switch {
	case n < 0:
	case n == 0:
		delete(subs, string(topic))
	case n == 1 && len(subs) >= maxSubscriptions:
		return fmt.Errorf("%w: more than %d subscriptions", ErrProtocol, maxSubscriptions)
	default:
		subs[string(topic)] = n
	}
	return nil
}

func (s subscriptions) match(topic []byte) bool {
	for prefix := range s {
		if bytes.HasPrefix(topic, []byte(prefix)) {
			return true
		}
	}
	return false
}
