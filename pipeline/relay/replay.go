// This file asks an engine's replay endpoint for batches that were missed.

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/zeebo/xxh3"
)

const (
	// maxTries is how often in a row the engine is asked in vain. What a replay
	// lost on its way at a high-water mark comes with the next.
	maxTries = 3
	// maxAsked and maxRestarts bound one catch-up with an engine that answers nonsense.
	maxAsked    = 1000
	maxRestarts = 3

	connectWithin = 5 * time.Second // to the replay endpoint, the request sent
	firstWithin   = 5 * time.Second // from the request to the first answer
	nextWithin    = time.Second     // from one answer to the next
	retryPause    = 100 * time.Millisecond
)

// asker is what a stream needs of zmtp.Dealer.
type asker interface {
	Send(ctx context.Context, frames ...[]byte) error
	Recv(ctx context.Context) ([][]byte, error)
	Disconnect()
	Close() error
}

// Why a question brought no more.
var (
	errRestarted = errors.New("the engine has restarted")
	errSkipped   = errors.New("the replay leaves batches out")
	errNoAnswer  = errors.New("no answer")
	errNonsense  = errors.New("answers are not understood")
)

// catchUp applies all that the engine has published, as far as its replay
// endpoint still has it, and says whether it has. tries is how often the engine
// is asked in vain. If it returns false, what is applied is still right, but
// there is more, or nothing is known (pos.next is -1).
//
// Each question has a connection of its own. So it is not older than the
// subscription's, and an engine's incarnations only advance: a replay is never
// of an older one than the messages.
func (s *stream) catchUp(ctx context.Context, tries int) bool {
	restarts := 0
	for asked, vain := 0, 0; asked < maxAsked; asked++ {
		before := s.steps
		err := s.ask(ctx, vain == tries-1)
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			s.counts.add(replaysComplete, 1)
			s.mute = false
			s.show(stateLive, "")
			return true
		}
		s.troubles.log.Info("replay incomplete", "error", err, "next", s.pos.next)
		if s.countReplay(err); err == errRestarted {
			if restarts++; restarts <= maxRestarts {
				continue
			}
		}
		if s.pos.next < 0 { // and soon is not known to be otherwise
			s.forget(s.due, "the replay endpoint: "+err.Error())
		}
		if vain++; s.steps != before {
			vain = 0
		}
		if vain >= tries || restarts > maxRestarts {
			s.show(stateLive, "the replay endpoint: "+err.Error())
			break
		}
	}
	s.mute, s.mutedAt = true, time.Now()
	return false
}

func (s *stream) countReplay(err error) {
	switch err {
	case errRestarted:
		s.counts.add(replaysRestarted, 1)
	case errSkipped:
		s.counts.add(replaysSkipped, 1)
	case errNoAnswer:
		s.counts.add(replaysTimedOut, 1)
	default:
		s.counts.add(replaysFailed, 1)
	}
}

// ask asks once and applies what comes. It returns nil if that is all there is.
// last: what this replay leaves out is lost for good.
func (s *stream) ask(ctx context.Context, last bool) error {
	from, overlap := int64(0), s.pos.next > 0
	if overlap {
		from = s.pos.next - 1
	}
	s.dealer.Disconnect()
	defer s.dealer.Disconnect()
	within, cancel := context.WithTimeout(ctx, connectWithin)
	err := s.dealer.Send(within, nil, binary.BigEndian.AppendUint64(nil, uint64(from)))
	cancel()
	if err != nil {
		return err
	}
	wait, applied, bad := firstWithin, 0, 0
	for first := true; ; {
		frames, err := s.answer(ctx, wait)
		if err != nil {
			return err
		}
		s.answered = time.Now()
		wait = nextWithin
		seq, payload, err := readAnswer(frames)
		switch {
		case err == errEnd && !first:
			return nil
		case err == errEnd && overlap: // the last batch is always kept
			return s.restarted("it has published less than before")
		case err == errEnd:
			s.begin(0, s.due, "the engine has published nothing yet")
			s.confirmed = true
			return nil
		case err != nil || seq < from:
			// Passed over: if it was a batch, it shows as missing.
			s.malformed("an answer", fmt.Sprint(err, ", batch ", seq))
			if bad++; bad > maxAsked {
				return errNonsense
			}
			continue
		}
		sum := xxh3.Hash(payload)
		if first && overlap && seq == from {
			if sum != s.pos.sum {
				return s.restarted("its batches are others")
			}
			s.confirmed, first = true, false
			continue
		}
		switch {
		case first && overlap:
			s.counts.add(gaps, 1)
			s.begin(seq, causeGap, fmt.Sprintf("the replay endpoint has no batch before %d", seq))
		case first:
			s.begin(seq, s.due, fmt.Sprintf("the replay begins at batch %d", seq))
		case seq < s.pos.next: // said twice
			if bad++; bad > maxAsked {
				return errNonsense
			}
			continue
		case seq > s.pos.next && (applied > 0 || !last):
			return errSkipped
		case seq > s.pos.next:
			s.begin(seq, causeGap, fmt.Sprintf("batches %d to %d are lost: replays leave them out", s.pos.next, seq-1))
		}
		s.confirmed, first = true, false
		s.apply(payload, sum)
		s.counts.add(batchesReplayed, 1)
		applied++
	}
}

// restarted notes that the engine is not the one that everything so far is of.
// What it holds is known with the answer to the next question.
func (s *stream) restarted(why string) error {
	s.counts.add(restarts, 1)
	s.troubles.log.Warn("the engine has restarted", "reason", why)
	s.move(position{next: -1})
	s.disprove()
	s.confirmed, s.due = false, causeRestart
	return errRestarted
}

// answer waits for an answer, and ticks meanwhile.
func (s *stream) answer(ctx context.Context, wait time.Duration) ([][]byte, error) {
	var until time.Time
	for {
		c := s.ticking(ctx)
		frames, err := s.dealer.Recv(c)
		if err == nil {
			if c.Err() != nil && ctx.Err() == nil {
				s.beat()
			}
			return frames, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if c.Err() == nil {
			return nil, err
		}
		s.beat()
		now := time.Now()
		if until.IsZero() {
			until = now.Add(wait - tickEvery/2)
		} else if !now.Before(until) {
			return nil, errNoAnswer
		}
	}
}

var (
	errEnd     = errors.New("end of the replay")
	errMessage = errors.New("not a message of a replay")
)

// endMark is the number of a replay's last message.
const endMark = math.MaxUint64

// readAnswer reads a replay's message: an empty frame, the topic (since vLLM 0.26
// and SGLang 0.5.22), the number, the payload.
func readAnswer(frames [][]byte) (seq int64, payload []byte, err error) {
	if len(frames) < 3 || len(frames) > 4 || len(frames[0]) != 0 {
		return 0, nil, errMessage
	}
	frames = frames[len(frames)-3:]
	if len(frames[1]) != 8 {
		return 0, nil, errMessage
	}
	number := binary.BigEndian.Uint64(frames[1])
	switch {
	case number == endMark && len(frames[2]) == 0:
		return 0, nil, errEnd
	case number > math.MaxInt64-1 || len(frames[2]) == 0:
		return 0, nil, errMessage
	}
	return int64(number), frames[2], nil
}
