// This file counts and tells of what is refused at the door, whatever it asked.

package query

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"kvindex/pipeline/secure"
)

// refusal is why a request or a connection was turned away.
type refusal int

const (
	queueFull refusal = iota
	queueTimeout
	processorsBehind
	tooManyWaiting
	unauthenticated
	tokenExpired
	noCertificate
	tooManyConnections
	tooManyStreams
	unreadFull
	slowReader
	slowSender
	noHandshake
	refusals
)

var refusalNames = [refusals]string{"queue_full", "queue_timeout", "processors", "waiting", "unauthenticated", "token_expired", "no_certificate", "connections", "streams", "unread", "slow_reader", "slow_sender", "tls_handshake"}

// tellEvery is the least time between two log lines about one kind of refusal.
const tellEvery = 10 * time.Second

// refused counts the refusals and tells of them now and then.
type refused struct {
	counter metric.Int64Counter
	labels  [transports][refusals][]metric.AddOption
	told    [transports][refusals]struct {
		next, untold atomic.Int64 // Unix nanoseconds; since the last line
	}
}

func (r *refused) init(meter metric.Meter) (err error) {
	r.counter, err = meter.Int64Counter("kvindex_query_refused",
		metric.WithDescription("Requests and connections turned away at the door, by transport and reason."))
	for t := range transports {
		tr := attribute.String("transport", transportNames[t])
		for why := range refusals {
			set := attribute.NewSet(tr, attribute.String("reason", refusalNames[why]))
			r.labels[t][why] = []metric.AddOption{metric.WithAttributeSet(set)}
			if r.counter != nil {
				r.counter.Add(context.Background(), 0, r.labels[t][why]...)
			}
		}
	}
	return err
}

// refuse counts a refusal. err says it in words.
func (s *Server) refuse(t transport, why refusal, from string, err error) {
	r := &s.in.refused
	r.counter.Add(context.Background(), 1, r.labels[t][why]...)
	told := &r.told[t][why]
	told.untold.Add(1)
	now := time.Now().UnixNano()
	if next := told.next.Load(); now < next || !told.next.CompareAndSwap(next, now+int64(tellEvery)) {
		return
	}
	s.log.Warn("refused", "transport", transportNames[t], "reason", refusalNames[why], "number", told.untold.Swap(0), "last_from", from, "last", err)
}

// refusedBusy counts an error if the gate gave it.
func (s *Server) refusedBusy(t transport, err error) {
	if err == nil {
		return
	}
	if e, ok := errors.AsType[*busyError](err); ok {
		s.refuse(t, e.why, "", e)
	}
}

// tokenRefusal is how an error of secure.Tokens counts.
func tokenRefusal(err error) refusal {
	if _, ok := errors.AsType[*secure.ExpiredError](err); ok {
		return tokenExpired
	}
	return unauthenticated
}
