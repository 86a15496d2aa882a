package snapshot

// This file names what can go wrong.

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
)

// What the package's functions fail with; match with errors.Is.
var (
	// ErrNoManifest: the worker-rank has no snapshot.
	ErrNoManifest = errors.New("no manifest")
	// ErrDamaged: the worker-rank's snapshot is there but cannot be used. The
	// error is a *DamagedError.
	ErrDamaged = errors.New("snapshot is damaged")
	// ErrBehind: what was to be written lies below what the topic has. This
	// instance lags behind an earlier writer: wait, and try again.
	ErrBehind = errors.New("behind what the snapshot topic has")
	// ErrChanged: a refresh of a worker-rank whose blocks have changed since
	// the snapshot on the topic. Dump it instead.
	ErrChanged = errors.New("blocks have changed since the snapshot")
	// ErrSibling: another rank of the worker was refused in the same round.
	ErrSibling = errors.New("another rank of the worker is not written")
	// ErrFenced: another writer took the duty over, or the broker gave up a
	// transaction that took too long, which looks the same. This writer is
	// dead; an instance that is still meant to write makes a new one after a while.
	ErrFenced = errors.New("fenced: another writer took over")
	// ErrSource: the events topic was created anew or has another number of
	// partitions than this writer was told.
	ErrSource = errors.New("source topic is not the same")
	// ErrKilled: the hook stopped the writer.
	ErrKilled = errors.New("stopped by its hook")
	// ErrClosed: the writer was closed.
	ErrClosed = errors.New("writer is closed")
)

// DamagedError says what is wrong with one worker-rank's snapshot.
type DamagedError struct {
	ID   ID
	What string
	Err  error // cause, or nil
}

// Error returns the message.
func (e *DamagedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%v: %v: %s: %v", e.ID, ErrDamaged, e.What, e.Err)
	}
	return fmt.Sprintf("%v: %v: %s", e.ID, ErrDamaged, e.What)
}

// Is reports whether target is ErrDamaged.
func (e *DamagedError) Is(target error) bool { return target == ErrDamaged }

// Unwrap returns the cause.
func (e *DamagedError) Unwrap() error { return e.Err }

// fencing reports whether err is a broker's word that another producer of the
// same transactional id is newer. So does a transaction that somebody else has
// ended, and an id that the broker has mapped to another producer or forgotten:
// another may have had the duty since.
func fencing(err error) bool {
	return errors.Is(err, kerr.ProducerFenced) ||
		errors.Is(err, kerr.InvalidProducerEpoch) ||
		errors.Is(err, kerr.InvalidTxnState) ||
		errors.Is(err, kerr.InvalidProducerIDMapping)
}
