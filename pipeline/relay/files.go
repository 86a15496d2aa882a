// This file reads and writes the files of the state directory, each whole and at
// once.

package relay

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"
)

// files are those of one worker-rank in the state directory.
type files struct {
	dir        string
	checkpoint string // paths
	ledger     string

	// For tests.
	fault func(step string) error   // fails a write before the step of that name
	sync  func(file *os.File) error // makes a file or directory durable
}

// newFiles names the files: by the worker, as far as its name is fit for that,
// and by a hash of the whole, so that different ones never meet.
func newFiles(dir, worker string, rank int32) *files {
	const most = 64
	safe := make([]byte, 0, most)
	for i := 0; i < len(worker) && len(safe) < most; i++ {
		c := worker[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.' && len(safe) > 0 {
			safe = append(safe, c)
		} else {
			safe = append(safe, '_')
		}
	}
	h := xxh3.Hash(binary.LittleEndian.AppendUint32([]byte(worker), uint32(rank)))
	base := filepath.Join(dir, fmt.Sprintf("%s-%d-%016x", safe, rank, h))
	return &files{dir: dir, checkpoint: base + ".checkpoint", ledger: base + ".ledger", sync: (*os.File).Sync}
}

// read returns a file's bytes, nil if there is no such file. Errors: errTooLarge,
// and those of the file system.
func (f *files) read(path string, most int64) ([]byte, error) {
	file, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > most {
		return nil, fmt.Errorf("%w: %d bytes, limit %d", errTooLarge, info.Size(), most)
	}
	p := make([]byte, info.Size())
	if _, err := io.ReadFull(file, p); err != nil {
		return nil, err
	}
	return p, nil
}

// write makes p the content of the file: after a crash at any moment it is
// either that or what it was, and once write returned, p. It makes the
// directory if need be. Only the owner can read it: it may hold tokens of
// prompts.
func (f *files) write(path string, p []byte) (err error) {
	temporary := path + ".tmp"
	defer func() {
		if err != nil {
			os.Remove(temporary)
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if err := f.step("create"); err != nil {
		return err
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = f.step("write")
	if err == nil {
		_, err = file.Write(p)
	}
	if err == nil {
		err = f.step("sync")
	}
	if err == nil {
		err = f.sync(file)
	}
	if failed := file.Close(); err == nil {
		err = failed
	}
	if err != nil {
		return err
	}
	if err := f.step("rename"); err != nil {
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	return f.syncDir()
}

// check tries what a relay has to do in the directory, which it makes if need be.
// Errors: those of the file system.
func (f *files) check() error {
	path := filepath.Join(f.dir, "check")
	if err := f.write(path, []byte("kvindex tries this directory\n")); err != nil {
		return err
	}
	return f.remove(path)
}

// remove removes a file; once it returned nil, no crash brings it back.
func (f *files) remove(path string) error {
	if err := f.step("remove"); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	return f.syncDir()
}

func (f *files) syncDir() error {
	dir, err := os.Open(f.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return f.sync(dir)
}

func (f *files) step(name string) error {
	if f.fault == nil {
		return nil
	}
	return f.fault(name)
}
