// This file bounds a query's time and has it wait for the records that its answer
// must have.

package query

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// due is when a query that begins now must have its answer.
func (s *Service) due(ctx context.Context, timeoutMs uint32, failOpen bool) time.Time {
	within := s.limits.Deadline
	if timeoutMs > 0 {
		within = min(within, time.Duration(timeoutMs)*time.Millisecond)
	}
	now := time.Now()
	if failOpen {
		// What is known at the caller's own deadline would come too late.
		if callers, ok := ctx.Deadline(); ok {
			within = min(within, callers.Sub(now)*9/10)
		}
	}
	return now.Add(within)
}

// await waits until the records named by partition are in the index, or the time is
// over, and returns what is missing then. partial says whether the caller takes an
// answer of an instance that is not ready; if not, and it is not, await does not wait.
// open says whether the caller takes an answer in any case. turn says whether the query
// may work then; if not, that is among what is missing.
func (s *Service) await(ctx context.Context, records map[int32]int64, due time.Time, partial, open bool) (late []string, turn bool, err error) {
	if len(records) == 0 {
		return nil, true, nil
	}
	if n := len(records); n > s.limits.MaxOffsets { // each may be named in each answer
		return nil, false, tooMany("min_offsets", n, "partitions", s.limits.MaxOffsets)
	}
	waits := false
	for p, offset := range records {
		if offset < 0 {
			return nil, false, invalid("min_offsets: offset %d of partition %d is negative", offset, p)
		}
		switch applied, err := s.src.Applied(p, offset); {
		case err != nil:
			switch ready := s.src.Readiness(); {
			case ready.Ready:
				return nil, false, invalid("min_offsets: %v", err)
			case !open: // it may be unknown because the topic is
				return nil, false, status.Error(codes.Unavailable, "min_offsets: "+err.Error()+"; "+missingText(ready))
			}
			waits = true // for the others; this one will be missing
		case !applied:
			waits = true
		}
	}
	if !waits {
		return nil, true, nil
	}
	if ready := s.src.Readiness(); !ready.Ready && !partial {
		return nil, false, notReady(ready)
	}
	defer s.waiting.Add(-1)
	if s.waiting.Add(1) > int64(s.limits.MaxWaiting) {
		return nil, false, &busyError{tooManyWaiting, fmt.Sprintf("busy: %d queries wait for min_offsets: ask another instance, or again later", s.limits.MaxWaiting)}
	}
	wait := func() { late, err = s.wait(ctx, records, due) }
	p, ok := ctx.Value(placeKey{}).(*place)
	if !ok { // a Service of its own
		wait()
		return late, true, err
	}
	switch again := p.outside(ctx, due, wait); {
	case err != nil:
		return nil, false, err
	case errors.Is(again, errNoTurn):
		return append(late, again.Error()), false, nil
	case again != nil:
		return nil, false, again
	}
	return late, true, nil
}

// wait does await's waiting.
func (s *Service) wait(ctx context.Context, records map[int32]int64, due time.Time) (late []string, err error) {
	timed, cancel := context.WithDeadline(ctx, due)
	defer cancel()
	for p, offset := range records {
		err := s.src.AwaitApplied(timed, p, offset)
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			late = append(late, fmt.Sprintf("partition %d: offset %d is not applied yet", p, offset))
		case err != nil: // it is unknown
			late = append(late, err.Error())
		}
	}
	slices.Sort(late)
	return late, nil
}
