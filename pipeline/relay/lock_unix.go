//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

// This file keeps two relays out of one state directory.

package relay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// errInUse: two relays that each think the ledger theirs could go on in an epoch
// that is over.
var errInUse = errors.New("another relay uses this state directory")

// lockState takes the state directory, which it makes if need be, until the
// returned file is closed or the process ends, however it does. Errors: errInUse,
// and those of the file system.
func lockState(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", errInUse, dir)
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f, nil
}
