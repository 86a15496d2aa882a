// This file caches what is fetched once for all test runs: one folder for each thing, with a lock next to it.

package testcontainers

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// cached returns the folder kvindex/name below the user's cache directory, calling fill when nobody has completed it yet. fill
// gets the empty folder at its final path (a Python environment can't be moved). Test processes that ask at the same time wait
// for the one that fills; what a killed or failed one left behind is removed and filled anew.
func cached(name string, fill func(dir string) error) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no user cache directory (set HOME or XDG_CACHE_HOME): %w", err)
	}
	base = filepath.Join(base, "kvindex")
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", err
	}
	dir := filepath.Join(base, name)

	// The lock goes with the descriptor, so a process that dies gives it up.
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}

	complete := filepath.Join(dir, ".complete")
	if _, err := os.Stat(complete); err == nil {
		return dir, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	if err := fill(dir); err != nil {
		return "", err
	}
	return dir, os.WriteFile(complete, nil, 0o644)
}
