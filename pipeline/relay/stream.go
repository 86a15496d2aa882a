// This file reads what one engine rank publishes over ZeroMQ and hands each
// batch on exactly once and in order, or says that the past is lost.

package relay

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"

	"kvindex/pipeline/relay/zmtp"
)

const (
	tickEvery = time.Second
	// tickSoon is the same while the feed waits for nothing but Kafka.
	tickSoon = 50 * time.Millisecond
	// aliveFor is how long a peer that was heard counts as alive: longer than
	// the pause between probes, and than what a heartbeat of ZeroMQ takes.
	aliveFor = 30 * time.Second
	// An idle engine is asked for what was missed after probeMin, then less
	// often up to probeMax; one that does not answer less and less, up to probeRest.
	probeMin  = time.Second
	probeMax  = 10 * time.Second
	probeRest = 5 * time.Minute
	// maxStrikes is how many connections in a row may bring what the replay
	// endpoint does not know, until it is held to be another engine's.
	maxStrikes = 3
	// maxSums bounds the checksums kept until a connection is proven, 8 bytes each.
	maxSums = 1 << 16
	// muteFor is how long a replay endpoint that did not answer is not asked for
	// the sake of a message: each time would hold the others up.
	muteFor = 30 * time.Second
)

// follower is what a stream needs of its feed.
type follower interface {
	// apply takes the payload of one batch, the next in order.
	apply(payload []byte)
	// empty says that what came before counts no more: the engine restarted, or
	// some of it is lost. whole: the engine is known to hold nothing now, so that
	// what follows is all that it holds.
	empty(whole bool, why cause)
	// at says where the stream stands, after each apply and empty.
	at(position)
	// release is called when the stream has caught up with the engine, or cannot.
	release()
	// tick is called about every second; alive says that the engine is.
	tick(now time.Time, alive bool)
	// pending says that the feed has something to do at the next tick.
	pending() bool
}

// subscriber is what a stream needs of zmtp.Sub.
type subscriber interface {
	Next(context.Context) (zmtp.Event, error)
	Disconnect()
	Heard() time.Time
	Close() error
}

// stream follows one engine rank's publisher. One goroutine runs it.
//
// Engines number their batches from 0 as their process starts, and a number says
// nothing of which process gave it. So that the batches of two processes
// (incarnations) never mix, each step is proven by checksums: payloads carry the
// time, so that two batches of one number and checksum are the same batch.
//
//   - A replay is asked from the batch before the next one. If that comes first
//     and is the one that was applied, the replay is of the incarnation that
//     everything so far is of.
//   - The first message of a connection counts once it was found in a replay
//     asked for after it came. Until then all is taken from replays.
//
// Without a replay endpoint each connection is a new beginning.
type stream struct {
	feed   follower
	sub    subscriber
	dealer asker // nil: no replay endpoint
	counts *streamCounts
	status *streamStatus

	pos position
	// dirty: a batch was applied since the feed was last emptied, or it never was;
	// whole is how it was.
	dirty, whole bool

	connected bool
	last      int64 // greatest number on this connection, -1 for none
	proven    bool  // this connection is of the incarnation that pos is of
	strikes   int   // connections in a row that were found not to be
	confirmed bool  // a replay since the connection began showed pos right
	mute      bool  // the replay endpoint did not answer when last asked
	mutedAt   time.Time
	fault     string // what stays wrong until a restart of the relay

	// sums are checksums of the batches before pos.next, kept while a connection
	// is not proven; the last is of pos.next-1.
	sums []uint64

	// steps counts what brought pos on, to tell a question that was in vain.
	steps int

	troubles       // thin out the log
	due      cause // of beginning anew, while nothing is known

	tickCtx  context.Context // ends at the next tick
	tickEnd  context.CancelFunc
	active   bool // a message came since the last tick
	probeAt  time.Time
	pause    time.Duration // between probes
	answered time.Time     // when the replay endpoint last answered
}

func newStream(log *slog.Logger, feed follower, sub subscriber, dealer asker, from position, counts *streamCounts, status *streamStatus) *stream {
	return &stream{
		feed: feed, sub: sub, dealer: dealer, counts: counts, status: status,
		pos: from, dirty: true, last: -1, due: causeStart,
		troubles: troubles{log: log, now: time.Now},
	}
}

// run follows the engine until ctx ends, and closes the sockets.
func (s *stream) run(ctx context.Context) {
	defer func() {
		s.sub.Close()
		if s.dealer != nil {
			s.dealer.Close()
		}
		if s.tickEnd != nil {
			s.tickEnd()
		}
	}()
	for ctx.Err() == nil {
		c := s.ticking(ctx)
		e, err := s.sub.Next(c)
		switch {
		case errors.Is(err, zmtp.ErrClosed):
			return
		case err == nil:
			s.event(ctx, &e)
		}
		if c.Err() != nil && ctx.Err() == nil {
			s.beat()
			s.probe(ctx)
		}
	}
}

// ticking returns a context that ends at the next tick. There is one a tick, as
// sockets that are given the same one again have less to do.
func (s *stream) ticking(ctx context.Context) context.Context {
	if s.tickCtx == nil || s.tickCtx.Err() != nil {
		if s.tickEnd != nil {
			s.tickEnd()
		}
		every := tickEvery
		if s.feed.pending() {
			every = tickSoon
		}
		s.tickCtx, s.tickEnd = context.WithTimeout(ctx, every)
	}
	return s.tickCtx
}

// beat is what is done at each tick, whatever goes on.
func (s *stream) beat() {
	now := time.Now()
	heard := s.sub.Heard()
	if s.answered.After(heard) {
		heard = s.answered
	}
	s.status.heard(heard)
	// While it is not known whether the engine is the one of before, its being
	// alive says nothing of what was said of it.
	known := s.confirmed || s.mute || s.dealer == nil
	s.feed.tick(now, s.connected && known && now.Sub(heard) <= aliveFor)
}

// probe asks an idle engine for what was missed: the last messages before the
// silence may have been lost, and the first after a connection began, as a
// subscription takes effect when the publisher gets to it.
func (s *stream) probe(ctx context.Context) {
	now := time.Now()
	if s.active {
		s.active, s.pause = false, probeMin
		s.probeAt = now.Add(s.pause)
	}
	if !s.connected || s.dealer == nil || now.Before(s.probeAt) {
		return
	}
	was := s.proven
	if s.catchUp(ctx, 1) {
		s.pause = min(2*s.pause, probeMax)
		if was && !s.proven {
			s.reconnect("it is not the engine that the replay endpoint is of")
		}
	} else {
		s.pause = min(2*max(s.pause, probeMax), probeRest)
	}
	s.probeAt = time.Now().Add(s.pause)
}

// event deals with what the subscription brought.
func (s *stream) event(ctx context.Context, e *zmtp.Event) {
	switch e.Kind {
	case zmtp.Message:
		s.active = true
		s.message(ctx, e.Frames)
	case zmtp.Connected:
		s.counts.add(connects, 1)
		s.connected, s.last = true, -1
		s.disprove()
		s.pause = probeMin
		s.probeAt = time.Now().Add(s.pause)
		s.begun(ctx)
	case zmtp.Disconnected:
		s.counts.add(disconnects, 1)
		s.troubles.log.Warn("connection lost", "error", e.Err)
		s.connected = false
		s.show(stateConnecting, e.Err.Error())
	case zmtp.Failed:
		s.counts.add(connectFailures, 1)
		s.say("cannot connect to the engine", "error", e.Err)
		s.connected = false
		s.show(stateConnecting, e.Err.Error())
		if errors.Is(e.Err, syscall.ECONNREFUSED) || errors.Is(e.Err, fs.ErrNotExist) {
			// Its process is gone, and its cache with it.
			s.clear(true, causeRestart, "nobody listens at the engine's address")
			s.move(position{})
		}
	}
}

// begun is the start of a connection.
func (s *stream) begun(ctx context.Context) {
	s.troubles.log.Info("connected")
	if s.dealer == nil {
		s.forget(causeConnection, "connected anew, and there is no replay endpoint")
		s.feed.release()
		s.show(stateLive, "")
		return
	}
	s.show(stateCatchingUp, "")
	s.confirmed = false
	ok := s.catchUp(ctx, maxTries)
	switch {
	case ctx.Err() != nil:
		return
	case ok:
		s.troubles.log.Info("caught up", "next", s.pos.next)
	case !s.confirmed:
		s.forget(causeConnection, "connected anew, and the replay endpoint does not answer")
	}
	s.feed.release()
}

// message takes one live message.
func (s *stream) message(ctx context.Context, frames [][]byte) {
	s.counts.add(messages, 1)
	if len(frames) != 3 || len(frames[1]) != 8 {
		s.malformed("a message", fmt.Sprintf("%d frames", len(frames)))
		return
	}
	number, payload := binary.BigEndian.Uint64(frames[1]), frames[2]
	s.counts.add(messageBytes, len(payload))
	if number > math.MaxInt64-1 {
		s.malformed("a message", fmt.Sprintf("number %d", number))
		return
	}
	seq := int64(number)
	if seq <= s.last {
		s.reconnect(fmt.Sprintf("batch %d came after batch %d", seq, s.last))
		return
	}
	s.last = seq
	switch {
	case s.dealer == nil || s.mute && s.pos.next < 0:
		if seq != s.pos.next {
			s.gap(seq, "")
		}
		s.apply(payload, xxh3.Hash(payload))
		s.proven = true
		return
	case s.proven && seq == s.pos.next:
		s.apply(payload, xxh3.Hash(payload))
		return
	case s.proven && seq < s.pos.next:
		s.counts.add(batchesReplayed, 1)
		return
	}
	s.prove(ctx, seq, payload)
}

// prove takes a live message that does not follow on what was applied, or is of
// a connection that is not proven. Its batch is applied in any case, from a
// replay if possible, or the connection is given up.
func (s *stream) prove(ctx context.Context, seq int64, payload []byte) {
	if s.proven {
		s.counts.add(gaps, 1)
		s.say("batches missing", "from", s.pos.next, "before", seq)
	}
	sum := xxh3.Hash(payload)
	ok := !s.mute || time.Since(s.mutedAt) > muteFor
	for try := 0; s.pos.next <= seq && ok && try < maxTries; try++ {
		if try > 0 {
			s.rest(ctx, retryPause) // a publisher may send before it keeps for replays
		}
		ok = s.catchUp(ctx, maxTries)
		if ctx.Err() != nil {
			return
		}
	}
	known, same := s.lookup(seq, sum)
	switch {
	case s.pos.next == seq && s.proven:
		s.apply(payload, sum)
	case s.pos.next <= seq && (!ok || s.proven):
		// What comes live is all there is.
		s.gap(seq, "the replay endpoint does not have it")
		s.apply(payload, sum)
		s.proven = true
	case s.proven:
		s.counts.add(batchesReplayed, 1)
	case same:
		s.proven, s.strikes, s.sums = true, 0, nil
		s.counts.add(batchesReplayed, 1)
	case known || s.pos.next <= seq:
		if s.strikes++; s.strikes == maxStrikes {
			s.distrust()
			return
		}
		s.reconnect("it is not the engine that the replay endpoint is of")
	default: // before what is known
		s.counts.add(batchesReplayed, 1)
	}
}

// lookup returns whether batch seq's checksum is known, and is sum.
func (s *stream) lookup(seq int64, sum uint64) (known, same bool) {
	i := seq - (s.pos.next - int64(len(s.sums)))
	if i < 0 || seq >= s.pos.next {
		return false, false
	}
	return true, s.sums[i] == sum
}

// distrust stops asking the replay endpoint, for good: each connection to the
// publisher, which was made before the one to it, brought batches that it never
// had.
func (s *stream) distrust() {
	s.counts.add(replaysDistrusted, 1)
	s.troubles.log.Error("the replay endpoint is of another engine than the events endpoint; it is not asked any more: correct the endpoints and restart")
	s.dealer.Close()
	s.dealer = nil
	s.fault = "the replay endpoint is of another engine than the events endpoint and is not asked any more"
	s.forget(causeConnection, s.fault)
	s.show(stateConnecting, "")
	s.sub.Disconnect()
	s.connected = false
}

// gap begins anew at batch seq of this connection, as those before are lost.
func (s *stream) gap(seq int64, why string) {
	switch {
	case s.pos.next < 0:
		s.begin(seq, s.due, "first batch of the connection")
	case s.pos.next == seq:
		s.begin(seq, causeConnection, "the batches before may be another engine's: "+why)
	default:
		if s.dealer == nil {
			s.counts.add(gaps, 1)
		}
		s.begin(seq, causeGap, fmt.Sprintf("batches %d to %d are lost: %s", s.pos.next, seq-1, cmp.Or(why, "there is no replay endpoint")))
	}
}

// begin makes seq the next batch, of an incarnation of which the ones before are
// not known, if there are any.
func (s *stream) begin(seq int64, c cause, why string) {
	s.clear(seq == 0, c, why)
	s.move(position{next: seq})
	s.disprove()
}

// forget gives up all that is known.
func (s *stream) forget(c cause, why string) {
	s.clear(false, c, why)
	s.move(position{next: -1})
}

// clear empties the feed, unless it was just emptied so.
func (s *stream) clear(whole bool, c cause, why string) {
	s.due = causeConnection
	if !s.dirty && s.whole == whole {
		return
	}
	s.tell(slog.LevelInfo, "begins anew: "+c.String(), "whole", whole, "reason", why)
	s.feed.empty(whole, c)
	s.dirty, s.whole = false, whole
}

// disprove makes the connection's incarnation unknown. What comes next is kept
// in mind to compare it with.
func (s *stream) disprove() {
	s.proven = false
	s.sums = s.sums[:0]
	if s.pos.next > 0 && s.pos.sum != 0 {
		s.sums = append(s.sums, s.pos.sum)
	}
}

// move sets the position.
func (s *stream) move(p position) {
	s.pos = p
	s.feed.at(p)
	s.status.next(p.next)
}

// apply hands batch pos.next to the feed.
func (s *stream) apply(payload []byte, sum uint64) {
	s.feed.apply(payload)
	s.dirty = true
	s.steps++
	s.counts.add(batches, 1)
	s.move(position{next: s.pos.next + 1, sum: sum})
	if !s.proven && s.dealer != nil {
		if len(s.sums) == maxSums {
			s.sums = append(s.sums[:0], s.sums[maxSums/2:]...)
		}
		s.sums = append(s.sums, sum)
	}
}

// reconnect gives the subscription's connection up.
func (s *stream) reconnect(why string) {
	s.counts.add(disconnects, 1)
	s.troubles.log.Warn("connecting anew", "reason", why)
	s.show(stateConnecting, why)
	s.sub.Disconnect()
	s.connected = false
}

// malformed counts what is passed over.
func (s *stream) malformed(what, why string) {
	s.counts.add(malformed, 1)
	s.say(what+" of the engine is not understood and passed over", "reason", why)
}

// show makes the state what the status shows.
func (s *stream) show(state linkState, problem string) {
	s.status.set(state, cmp.Or(problem, s.fault))
}

// rest waits.
func (s *stream) rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
