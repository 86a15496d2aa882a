// This file reads files again once they have changed.

package secure

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxFileBytes bounds what is read from one file.
	maxFileBytes = 1 << 20
	// settled is how old a file's modification time must be for it to be told
	// from a later one: file systems count in steps.
	settled = 2 * time.Second
)

// watched is what a few files say together, read again once one of them has
// changed. It may be used by any number of goroutines.
type watched[T any] struct {
	paths []string
	parse func(contents [][]byte) (T, error)
	every time.Duration // least time between two looks at the files; 0: at each get
	// failed is told, once a change, why the files cannot be used while older
	// contents go on; nil: the log is.
	failed func(error)

	good atomic.Pointer[T]
	next atomic.Int64 // Unix nanoseconds from which get looks again

	mu   sync.Mutex
	seen []os.FileInfo // of what good, or the last failure, is from
	told string        // last failure
}

// get returns what the files say, or said when they last could be used. It
// fails only if they never could.
func (w *watched[T]) get() (T, error) {
	if v := w.good.Load(); v != nil && w.every > 0 && time.Now().UnixNano() < w.next.Load() {
		return *v, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next.Store(time.Now().Add(w.every).UnixNano())
	err := w.refresh()
	v := w.good.Load()
	if v == nil {
		var none T
		return none, err
	}
	if err == nil {
		w.told = ""
	} else if text := err.Error(); text != w.told {
		w.told = text
		if w.failed != nil {
			w.failed(err)
		} else {
			slog.Warn("a changed file cannot be used, its former content stays in use", "error", err)
		}
	}
	return *v, nil
}

// refresh reads the files if they have changed.
func (w *watched[T]) refresh() error {
	now := time.Now()
	infos := make([]os.FileInfo, len(w.paths))
	same := len(w.seen) == len(w.paths) && w.told == ""
	for i, p := range w.paths {
		var err error
		if infos[i], err = os.Stat(p); err != nil {
			w.seen = nil
			return err
		}
		same = same && os.SameFile(infos[i], w.seen[i]) && infos[i].Size() == w.seen[i].Size() &&
			infos[i].ModTime().Equal(w.seen[i].ModTime()) && now.Sub(infos[i].ModTime()) > settled
	}
	if same && w.good.Load() != nil {
		return nil
	}
	contents := make([][]byte, len(w.paths))
	for i, p := range w.paths {
		var err error
		if contents[i], err = readFile(p); err != nil {
			return err
		}
	}
	v, err := w.parse(contents)
	if err != nil {
		return err
	}
	w.good.Store(&v)
	w.seen = slices.Clone(infos)
	return nil
}

// readFile is os.ReadFile with a limit.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(data) > maxFileBytes {
		err = fmt.Errorf("%s: more than %d bytes", path, maxFileBytes)
	}
	return data, err
}
