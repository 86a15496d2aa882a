// This file is the publisher of the relay's measurements, and how it is told
// what to do: JSON over two pipes.

package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
)

// series says what is published.
type series struct {
	// Kind: prefill is what a fake vLLM publishes that serves made-up requests,
	// batches of many blocks as a rule; it comes again and again. chains is Blocks
	// stored by a batch, never the same, and the ones of Live batches ago removed.
	Kind   string `json:"kind"`
	Blocks int    `json:"blocks,omitempty"`
	Live   int    `json:"live,omitempty"`
	// Circle: of chains, after how many batches they come again, made beforehand;
	// 0: never.
	Circle int `json:"circle,omitempty"`
}

const (
	prefill = "prefill"
	chains  = "chains"
)

// order is what a publisher is told: to begin a series on a new socket, or up to
// which batch to publish.
type order struct {
	Open *series `json:"open,omitempty"`
	To   int64   `json:"to,omitempty"`
}

// opened is what it answers to the former.
type opened struct {
	Endpoint string `json:"endpoint"`
	Error    string `json:"error,omitempty"`

	// The next are of a circle.
	Batches int64 `json:"batches"`
	Stored  int64 `json:"stored"`  // blocks
	Removed int64 `json:"removed"` // blocks
	Bytes   int64 `json:"bytes"`   // of payloads
}

// publisherLink is the other side of a publisher.
type publisherLink struct {
	to   *json.Encoder
	from *json.Decoder
}

func newPublisherLink(to io.ReadWriter) *publisherLink {
	return &publisherLink{json.NewEncoder(to), json.NewDecoder(to)}
}

func (l *publisherLink) open(s series) (o opened, err error) {
	if err = l.to.Encode(order{Open: &s}); err == nil {
		err = l.from.Decode(&o)
	}
	if err == nil && o.Error != "" {
		err = errors.New(o.Error)
	}
	if err != nil {
		return o, fmt.Errorf("publisher: %w", err)
	}
	return o, nil
}

func (l *publisherLink) publish(to int64) error {
	if err := l.to.Encode(order{To: to}); err != nil {
		return fmt.Errorf("publisher: %w", err)
	}
	return nil
}

// ServePublisher publishes what orders on in say and answers on out. It returns nil
// when in or ctx ends, whatever it was doing.
func ServePublisher(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	orders := make(chan order)
	go func() { // ends with in, or with the order after the end
		from := json.NewDecoder(in)
		for {
			var o order
			if err := from.Decode(&o); err != nil {
				cancel(err)
				return
			}
			select {
			case orders <- o:
			case <-ctx.Done():
				return
			}
		}
	}()
	p := &publishing{}
	defer p.close()
	answers := json.NewEncoder(out)
	for {
		var err error
		select {
		case o := <-orders:
			err = p.do(ctx, o, answers)
		case <-ctx.Done():
			err = ctx.Err()
		}
		switch cause := context.Cause(ctx); {
		case err == nil:
		case !errors.Is(err, context.Canceled):
			return err
		case errors.Is(cause, io.EOF) || errors.Is(cause, context.Canceled):
			return nil
		default:
			return fmt.Errorf("orders: %w", cause)
		}
	}
}

// publishHere is a publisher in this process.
func publishHere() (io.ReadWriteCloser, error) {
	in, orders := io.Pipe()
	answers, out := io.Pipe()
	h := &publisherHere{PipeReader: answers, orders: orders, ended: make(chan error, 1)}
	go func() {
		err := ServePublisher(context.Background(), in, out) // until Close
		in.CloseWithError(err)
		out.CloseWithError(err)
		h.ended <- err
	}()
	return h, nil
}

type publisherHere struct {
	*io.PipeReader
	orders *io.PipeWriter
	ended  chan error
}

func (h *publisherHere) Write(p []byte) (int, error) { return h.orders.Write(p) }

func (h *publisherHere) Close() error {
	h.orders.Close()
	return <-h.ended
}

// publishing is a publisher at work.
type publishing struct {
	series series
	pub    *zmtp.Pub
	next   int64 // batch
	circle [][]byte
	told   opened // of the circle
}

func (p *publishing) close() {
	if p.pub != nil {
		p.pub.Close()
	}
}

func (p *publishing) do(ctx context.Context, o order, answers *json.Encoder) error {
	if o.Open == nil {
		return p.publish(ctx, o.To)
	}
	answer, err := p.open(ctx, *o.Open)
	if err != nil {
		answer.Error = err.Error()
	}
	return answers.Encode(answer)
}

// publisherHWM is as of the engines.
const publisherHWM = 100_000

func (p *publishing) open(ctx context.Context, s series) (o opened, err error) {
	p.close()
	c := zmtp.DefaultListenConfig()
	c.HWM = publisherHWM
	if p.pub, err = zmtp.ListenPub("127.0.0.1:0", c); err != nil {
		return o, err
	}
	p.next = 0
	if s != p.series {
		p.series, p.circle, p.told = s, nil, opened{}
		switch {
		case s.Kind == prefill:
			p.circle, err = prefillPayloads(ctx)
		case s.Kind == chains && s.Blocks > 0 && s.Live > 0:
			for n := range s.Circle {
				p.circle = append(p.circle, s.payload(nil, int64(n)))
			}
		default:
			err = fmt.Errorf("no series %+v", s)
		}
		if err == nil {
			err = p.count()
		}
		if err != nil {
			p.series = series{}
			return o, err
		}
	}
	o = p.told
	o.Endpoint = p.pub.Endpoint()
	return o, nil
}

// count counts what is in a circle.
func (p *publishing) count() error {
	var b engine.Batch
	for _, payload := range p.circle {
		if err := b.Decode(payload, engine.Limits{}); err != nil {
			return fmt.Errorf("payload of %d bytes: %w", len(payload), err)
		}
		p.told.Batches++
		p.told.Bytes += int64(len(payload))
		for i := range b.Events {
			switch e := &b.Events[i]; e.Kind {
			case engine.Stored:
				p.told.Stored += int64(len(e.Hashes))
			case engine.Removed:
				p.told.Removed += int64(len(e.Hashes))
			}
		}
	}
	return nil
}

// publish publishes all batches below to, the first once there is a subscriber.
func (p *publishing) publish(ctx context.Context, to int64) error {
	if p.pub == nil {
		return errors.New("nothing was opened")
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for p.pub.Subscribers() == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for ; p.next < to; p.next++ {
		var payload []byte
		if len(p.circle) > 0 {
			payload = p.circle[p.next%int64(len(p.circle))]
		} else {
			payload = p.series.payload(make([]byte, 0, 1024), p.next)
		}
		p.pub.Send(nil, binary.BigEndian.AppendUint64(nil, uint64(p.next)), payload)
	}
	return nil
}
