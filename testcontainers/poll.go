// This file waits for what another process does: by asking again until a deadline, never by a fixed pause.

package testcontainers

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

// pollEvery is the pause between two tries.
const pollEvery = 50 * time.Millisecond

// permanent is an error that no further try can mend.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// stop makes err end a poll at once.
func stop(err error) error { return permanent{err} }

// poll calls try until it returns nil, an error of stop, or the context ends; then it returns the last try's error.
func poll(ctx context.Context, try func() error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		if p := (permanent{}); errors.As(err, &p) {
			return p.error
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

// Eventually calls check about 20 times a second until it returns nil. When that has not happened within the time, it fails
// the test with the last error.
func Eventually(t testing.TB, within time.Duration, check func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	if err := poll(ctx, check); err != nil {
		t.Fatalf("not within %v: %v", within, err)
	}
}
