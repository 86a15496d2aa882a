// This file tests what is left of a feed for the next process.

package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// storedBatch stores n root chains of one block, from the engine's hash on.
func storedBatch(n int, hash uint64) *engine.Batch {
	b := &engine.Batch{}
	for i := range n {
		h := hash + uint64(i)
		b.Events = append(b.Events, engine.Event{
			Kind: engine.Stored, Hashes: []uint64{h}, Tokens: []uint32{uint32(h), 1}, Usable: 2, BlockSize: 2,
		})
	}
	return b
}

// lives is a Kafka, a clock and a state directory, for feeds that follow one
// another.
type lives struct {
	*testing.T
	kafka fakeKafka
	clock time.Time
	dir   string
	log   bytes.Buffer
	feeds int
	other bool // feeds are of another instance from now on
	topic string
}

func newLives(t *testing.T) *lives {
	w := &lives{T: t, topic: "events", clock: time.UnixMilli(1_800_000_000_000), dir: t.TempDir()}
	w.kafka.now = w.now
	w.kafka.direct = true
	return w
}

func (w *lives) now() time.Time { return w.clock }

func (w *lives) config() feedConfig {
	c := testConfig(w.now)
	c.stateDir = w.dir
	c.logger = slog.New(slog.NewTextHandler(&w.log, nil))
	return c
}

// feed returns a feed of a new process.
func (w *lives) feed(c feedConfig) *feed {
	w.Helper()
	w.feeds++
	name := fmt.Sprintf("relay-%d", w.feeds)
	if w.other {
		name = fmt.Sprintf("other-%d", w.feeds)
	}
	out, err := newOutlet(&w.kafka, w.topic, name, leastBuffer)
	if err != nil {
		w.Fatal(err)
	}
	f, err := newFeed(c, out)
	if err != nil {
		w.Fatal(err)
	}
	return f
}

// left returns a feed that took in a batch and left in an orderly way.
func (w *lives) left(c feedConfig) *feed {
	w.Helper()
	f := w.feed(c)
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(5, 100))
	f.at(position{next: 1, sum: 42})
	f.close(context.Background())
	return f
}

func (w *lives) read() *reader { w.Helper(); return readAll(w.T, w.kafka.log, testGrace) }

// TestEpochGoesOn: after an orderly end the next process goes on in the same
// epoch, under the name of the process before.
func TestEpochGoesOn(t *testing.T) {
	w := newLives(t)
	w.left(w.config())
	w.clock = w.clock.Add(10 * time.Minute)
	f := w.feed(w.config())
	pos, ok := f.restore()
	if want := (position{1, 42}); !ok || pos != want {
		t.Fatalf("position %v, %t", pos, ok)
	}
	f.applyBatch(storedBatch(1, 200))
	f.tick(w.now(), true)
	w.clock = w.clock.Add(11 * time.Second)
	f.tick(w.now(), true)
	r := w.read()
	if r.seq != 1 || r.producer != "relay-1" || r.incomplete || r.refused > 0 || len(r.held[0]) != 6 || len(w.kafka.log) != 4 {
		t.Errorf("read %d blocks up to seq %d of %s, %d records", len(r.held[0]), r.seq, r.producer, len(w.kafka.log))
	}
	// The ledger is clean no more: should this process crash, an epoch begins.
	f = w.feed(w.config())
	if _, ok := f.restore(); !ok || f.state != held {
		t.Errorf("after a crash the feed is %s", f.state)
	}
	f.release()
	if r := w.read(); r.producer != "relay-3" || len(r.held[0]) != 5 {
		t.Errorf("%d blocks by %s", len(r.held[0]), r.producer)
	}
}

// TestEpochDoesNotGoOn: with any doubt that the stage would take the same epoch's
// next record, another begins, with a greater number.
func TestEpochDoesNotGoOn(t *testing.T) {
	for name, change := range map[string]func(w *lives){
		"silent for half of the grace": func(w *lives) { w.clock = w.clock.Add(testGrace / 2) },
		"the clock went back":          func(w *lives) { w.clock = w.clock.Add(-time.Second) },
		"files of another instance":    func(w *lives) { w.other = true },
		"another topic":                func(w *lives) { w.topic = "others" },
		"ledger gone":                  func(w *lives) { w.remove("ledger") },
		"ledger damaged":               func(w *lives) { w.damage("ledger") },
		"the last record was refused": func(w *lives) {
			f := w.feed(w.config())
			f.restore()
			w.kafka.refuse = errRefused
			f.applyBatch(storedBatch(1, 900))
			f.close(context.Background())
			w.kafka.refuse = nil
			if f.state != due || f.flight.look().records > 0 {
				w.Fatalf("%s", f.state)
			}
		},
		"writing was put off": func(w *lives) {
			f := w.feed(w.config())
			f.restore()
			f.hold()
			f.applyBatch(storedBatch(1, 900))
			f.close(context.Background())
		},
		"another checkpoint": func(w *lives) {
			f := w.feed(w.config())
			f.restore()
			f.applyBatch(storedBatch(3, 300))
			f.at(position{next: 2})
			if err := f.files.write(f.files.checkpoint, f.appendCheckpoint(nil)); err != nil {
				w.Fatal(err)
			}
			l := ledger{epoch: f.record.Epoch, clean: true, producer: "relay-1", topic: w.topic, heard: w.now().UnixMilli(), check: 1}
			if !f.note(l) {
				w.Fatal("not noted")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newLives(t)
			before := w.left(w.config()).record.Epoch
			change(w)
			f := w.feed(w.config())
			if _, ok := f.restore(); !ok || f.state != held {
				t.Fatalf("restored: %t, %s", ok, f.state)
			}
			f.release()
			w.clock = w.clock.Add(time.Second)
			f.tick(w.now(), false)
			if strings.HasPrefix(name, "ledger") {
				return // the clock alone tells a greater number
			}
			if f.state != writing || f.record.Epoch <= before {
				t.Errorf("%s in epoch %d after %d", f.state, f.record.Epoch, before)
			}
		})
	}
}

// TestTopicChangesWhileAway: an epoch that went on in another partition, or in a
// topic that lost its records, is not gone on with.
func TestTopicChangesWhileAway(t *testing.T) {
	for name, change := range map[string]func(w *lives){
		"partitions added": func(w *lives) { w.kafka.part = 5 },
		"records lost":     func(w *lives) { w.kafka.next = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newLives(t)
			before := w.left(w.config()).record.Epoch
			change(w)
			f := w.feed(w.config())
			if _, ok := f.restore(); !ok || f.state != writing {
				t.Fatalf("restored: %t, %s", ok, f.state)
			}
			f.applyBatch(storedBatch(1, 200))
			f.applyBatch(storedBatch(1, 300))
			if r := w.read(); r.epoch <= before || r.epoch != f.record.Epoch || f.why != causeTopic || r.incomplete || len(r.held[0]) != 7 {
				t.Errorf("%d blocks in epoch %d after %d for %s", len(r.held[0]), r.epoch, before, f.why)
			}
			f.applyBatch(storedBatch(1, 400))
			if f.counts.epochs[causeTopic].Load() != 1 {
				t.Error("another epoch")
			}
		})
	}
}

// path returns the state directory's file of that kind.
func (w *lives) path(kind string) string {
	w.Helper()
	all, err := filepath.Glob(filepath.Join(w.dir, "*."+kind))
	if err != nil || len(all) != 1 {
		w.Fatal(all, err)
	}
	return all[0]
}

func (w *lives) remove(kind string) {
	w.Helper()
	if err := os.Remove(w.path(kind)); err != nil {
		w.Fatal(err)
	}
}

func (w *lives) damage(kind string) {
	w.Helper()
	path := w.path(kind)
	p, err := os.ReadFile(path)
	if err == nil {
		p[len(p)/2] ^= 1
		err = os.WriteFile(path, p, 0o600)
	}
	if err != nil {
		w.Fatal(err)
	}
}

// TestEpochNeverAgain: whatever the clock says, and whether or not there is a
// checkpoint of use, an epoch's number is greater than any before.
func TestEpochNeverAgain(t *testing.T) {
	w := newLives(t)
	last := int64(0)
	for i := range 20 {
		f := w.feed(w.config())
		f.restore()
		f.empty(i%2 == 0, causeGap)
		if f.state != writing || f.record.Epoch <= last {
			t.Fatalf("%s in epoch %d after %d", f.state, f.record.Epoch, last)
		}
		last = f.record.Epoch
		f.at(position{next: 1})
		f.leave()
		if i == 10 {
			w.damage("checkpoint")
		}
		if i == 12 {
			w.remove("checkpoint")
		}
		w.clock = w.clock.Add(-24 * time.Hour)
	}
}

// TestDamagedFiles: each byte that is another, and each end that is missing, is
// found out.
func TestDamagedFiles(t *testing.T) {
	w := newLives(t)
	c := w.config()
	w.left(c)
	for kind, parse := range map[string]func(p []byte) error{
		"checkpoint": func(p []byte) error { _, err := parseCheckpoint(p, c.identity()); return err },
		"ledger":     func(p []byte) error { _, err := parseLedger(p, c.worker, c.rank); return err },
	} {
		p, err := os.ReadFile(w.path(kind))
		if err != nil {
			t.Fatal(err)
		}
		if err := parse(p); err != nil {
			t.Fatal(kind, err)
		}
		for i := range p {
			if err := parse(p[:i]); !errors.Is(err, errDamaged) {
				t.Errorf("%s of %d bytes: %v", kind, i, err)
			}
			for bit := range 8 {
				p[i] ^= 1 << bit
				if err := parse(p); !errors.Is(err, errDamaged) {
					t.Errorf("%s, byte %d changed: %v", kind, i, err)
				}
				p[i] ^= 1 << bit
			}
		}
		if err := parse(append(p, 0)); !errors.Is(err, errDamaged) {
			t.Errorf("%s with a byte more: %v", kind, err)
		}
		// Another version, with the right checksum.
		p[4]++
		if err := parse(appendCheck(bytes.Clone(p[:len(p)-4]))); !errors.Is(err, errVersion) {
			t.Errorf("%s of another version: %v", kind, err)
		}
	}
}

// TestCheckpointOfUse: what does not fit the configuration, or cannot be read, is
// refused, said and counted; and the feed goes on without it.
func TestCheckpointOfUse(t *testing.T) {
	for name, test := range map[string]struct {
		change func(w *lives, c *feedConfig)
		said   string
	}{
		"model":      {func(_ *lives, c *feedConfig) { c.model = "other" }, "another configuration"},
		"source":     {func(_ *lives, c *feedConfig) { c.source = "tcp://127.0.0.1:2" }, "another configuration"},
		"engine":     {func(_ *lives, c *feedConfig) { c.engine.Engine = engine.SGLang }, "another configuration"},
		"hasher":     {func(_ *lives, c *feedConfig) { c.engine.Hasher.Scheme = index.Dynamo }, "another configuration"},
		"block size": {func(_ *lives, c *feedConfig) { c.engine.Hasher.BlockSize = 4 }, "another configuration"},
		"eagle":      {func(_ *lives, c *feedConfig) { c.engine.Hasher.Eagle = true }, "another configuration"},
		"damaged":    {func(w *lives, _ *feedConfig) { w.damage("checkpoint") }, "damaged"},
		"empty": {func(w *lives, _ *feedConfig) {
			if err := os.Truncate(w.path("checkpoint"), 0); err != nil {
				w.Fatal(err)
			}
		}, "damaged"},
		"a directory": {func(w *lives, _ *feedConfig) {
			path := w.path("checkpoint")
			w.remove("checkpoint")
			if err := os.Mkdir(path, 0o700); err != nil {
				w.Fatal(err)
			}
		}, "directory"},
		"too large": {func(w *lives, _ *feedConfig) {
			if err := os.Truncate(w.path("checkpoint"), maxCheckpoint+1); err != nil {
				w.Fatal(err)
			}
		}, "too large"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newLives(t)
			before := w.left(w.config())
			c := w.config()
			test.change(w, &c)
			f := w.feed(c)
			if pos, ok := f.restore(); ok || pos.next != -1 || f.state != held {
				t.Fatalf("restored at %v, %s", pos, f.state)
			}
			if n := f.counts.saveFailures.Load(); n != 1 || !strings.Contains(w.log.String(), test.said) {
				t.Errorf("%d failures, log: %s", n, w.log.String())
			}
			f.empty(false, causeGap)
			if f.state != writing || f.record.Epoch <= before.record.Epoch {
				t.Errorf("%s in epoch %d after %d", f.state, f.record.Epoch, before.record.Epoch)
			}
		})
	}
}

// TestWriteIsAtomic: a write that ends before any of its steps leaves the file as
// it was, and the next one does not mind what is left over.
func TestWriteIsAtomic(t *testing.T) {
	for _, step := range []string{"create", "write", "sync", "rename"} {
		w := newLives(t)
		f := w.left(w.config())
		old, err := os.ReadFile(f.files.checkpoint)
		if err != nil {
			t.Fatal(err)
		}
		f.files.fault = func(s string) error {
			if s == step {
				panic(step) // nothing runs after a crash
			}
			return nil
		}
		func() {
			defer func() { recover() }()
			f.files.write(f.files.checkpoint, []byte("another content"))
			t.Errorf("no crash before %s", step)
		}()
		if now, err := os.ReadFile(f.files.checkpoint); err != nil || !bytes.Equal(now, old) {
			t.Errorf("crash before %s: %v, %q", step, err, now)
		}
		os.WriteFile(f.files.checkpoint+".tmp", []byte("half of a che"), 0o600)
		f.files.fault = nil
		next := w.feed(w.config())
		if _, ok := next.restore(); !ok || next.state != writing {
			t.Errorf("crash before %s: restored %t, %s", step, ok, next.state)
		}
		if err := f.files.write(f.files.checkpoint, []byte("new")); err != nil {
			t.Error(err)
		}
		if now, err := os.ReadFile(f.files.checkpoint); err != nil || string(now) != "new" {
			t.Errorf("%v, %q", err, now)
		}
	}
}

// TestStateCannotBeSaved: a full disk, or a directory that cannot be written, is
// said and counted, and everything else goes on.
func TestStateCannotBeSaved(t *testing.T) {
	for name, fail := range map[string]func(w *lives, f *feed){
		"full disk": func(_ *lives, f *feed) {
			f.files.fault = func(step string) error {
				if step == "write" {
					return syscall.ENOSPC
				}
				return nil
			}
		},
		"read-only": func(_ *lives, f *feed) {
			f.files.fault = func(step string) error {
				if step == "create" {
					return syscall.EROFS
				}
				return nil
			}
		},
		"a file in the directory's place": func(w *lives, _ *feed) {
			if err := errors.Join(os.RemoveAll(w.dir), os.WriteFile(w.dir, nil, 0o600)); err != nil {
				w.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newLives(t)
			f := w.feed(w.config())
			fail(w, f)
			f.restore()
			f.empty(true, causeStart)
			for i := range 3 {
				f.applyBatch(storedBatch(1, uint64(i)))
				f.at(position{next: int64(i + 1)})
				w.clock = w.clock.Add(31 * time.Second)
				f.tick(w.now(), true)
				if f.saving != nil {
					f.endSave(w.now(), <-f.saving)
				}
			}
			if r := w.read(); len(r.held[0]) != 3 || r.incomplete {
				t.Errorf("%d blocks, incomplete %t", len(r.held[0]), r.incomplete)
			}
			if n := f.counts.saveFailures.Load(); n < 4 || f.counts.saves.Load() > 0 || !strings.Contains(w.log.String(), "state cannot be saved") {
				t.Errorf("%d failures, log: %s", n, w.log.String())
			}
			if got := f.status().Problem; !strings.Contains(got, "state cannot be saved") {
				t.Errorf("problem %q", got)
			}
			if left, _ := filepath.Glob(filepath.Join(w.dir, "*")); len(left) > 0 {
				t.Errorf("left over: %v", left)
			}
			f.close(context.Background())
			if next := w.feed(w.config()); true {
				if _, ok := next.restore(); ok {
					t.Error("restored from nothing")
				}
			}
		})
	}
}

// TestCheckpointEvery: a checkpoint is written when something changed and the
// time has come, and not else.
func TestCheckpointEvery(t *testing.T) {
	w := newLives(t)
	f := w.feed(w.config())
	f.empty(true, causeStart)
	saves := func(want int64) {
		t.Helper()
		f.tick(w.now(), false)
		if f.saving != nil {
			f.endSave(w.now(), <-f.saving)
			f.publish()
		}
		if n := f.counts.saves.Load(); n != want {
			t.Errorf("%d checkpoints, want %d", n, want)
		}
	}
	f.applyBatch(storedBatch(1, 1))
	saves(0) // no position
	f.at(position{next: 1})
	w.clock = w.clock.Add(29 * time.Second)
	saves(0)
	w.clock = w.clock.Add(time.Second)
	saves(1)
	w.clock = w.clock.Add(time.Hour)
	saves(1)
	f.at(position{next: 2})
	saves(2)
	f.applyBatch(&engine.Batch{})
	saves(2)
	w.clock = w.clock.Add(30 * time.Second)
	saves(3)
	if !f.status().Saved.Equal(w.clock) {
		t.Errorf("saved at %v, want %v", f.status().Saved, w.clock)
	}
}

// TestLockState: one relay at a time has a state directory.
func TestLockState(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	one, err := lockState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockState(dir); !errors.Is(err, errInUse) {
		t.Errorf("a second relay: %v", err)
	}
	one.Close()
	two, err := lockState(dir)
	if err != nil {
		t.Fatal(err)
	}
	two.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := lockState(file); err == nil || errors.Is(err, errInUse) {
		t.Errorf("a file in the directory's place: %v", err)
	}
}

// TestFileNames: different worker-ranks never share a file, whatever they are
// called, and no name leads out of the directory.
func TestFileNames(t *testing.T) {
	seen := map[string]string{}
	for _, worker := range []string{"a", "A", "a/b", "a_b", "../a", "..", ".", "ä", strings.Repeat("x", 300), strings.Repeat("x", 301), "a\x00b"} {
		for _, rank := range []int32{0, 1} {
			f := newFiles("/state", worker, rank)
			for _, path := range []string{f.checkpoint, f.ledger} {
				id := fmt.Sprintf("%q %d", worker, rank)
				if other, ok := seen[strings.ToLower(path)]; ok {
					t.Errorf("%s and %s: %s", id, other, path)
				}
				seen[strings.ToLower(path)] = id
				if filepath.Dir(filepath.Clean(path)) != "/state" || len(filepath.Base(path)) > 200 {
					t.Errorf("%s: %s", id, path)
				}
			}
		}
	}
}

// FuzzCheckpoint reads a checkpoint, with its mapping, and a ledger of any bytes:
// they are refused, or say the same when written again.
func FuzzCheckpoint(f *testing.F) {
	c := testConfig(time.Now)
	out := &outlet{limit: leastBuffer}
	for _, n := range []int{0, 1, 20} {
		one, err := newFeed(c, out)
		if err != nil {
			f.Fatal(err)
		}
		one.applyBatch(storedBatch(n, 1))
		one.at(position{next: int64(n), sum: 7})
		p := one.appendCheckpoint(nil)
		f.Add(p[:len(p)-4])
		l := ledger{epoch: int64(n + 1), clean: n > 0, producer: "p", seq: 3, heard: 4, topic: "t", place: place{1, 2}, check: 5}
		p = l.append(nil, c.worker, c.rank)
		f.Add(p[:len(p)-4])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		p := appendCheck(bytes.Clone(body)) // or nothing would get past it
		if l, err := parseLedger(p, c.worker, c.rank); err == nil {
			if again := l.append(nil, c.worker, c.rank); !bytes.Equal(again, p) {
				t.Errorf("ledger %x, written again %x", p, again)
			}
		} else if !errors.Is(err, errDamaged) && !errors.Is(err, errVersion) && !errors.Is(err, errOther) {
			t.Errorf("ledger: %v", err)
		}
		got, err := parseCheckpoint(p, c.identity())
		if err != nil {
			if !errors.Is(err, errDamaged) && !errors.Is(err, errVersion) && !errors.Is(err, errOther) {
				t.Errorf("checkpoint: %v", err)
			}
			return
		}
		one, err := newFeed(c, out)
		if err != nil {
			t.Fatal(err)
		}
		if one.mapping.Load(got.mapping) != nil {
			return
		}
		one.pos, one.whole = got.pos, got.whole
		again, err := parseCheckpoint(one.appendCheckpoint(nil), c.identity())
		if err != nil || again.pos != got.pos || again.whole != got.whole {
			t.Errorf("%v: position %v, whole %t, were %v, %t", err, again.pos, again.whole, got.pos, got.whole)
		}
	})
}

// TestRefusedWhileLeaving: a record that is refused while the last checkpoint is
// written is lost, and its epoch is not gone on with.
func TestRefusedWhileLeaving(t *testing.T) {
	w := newLives(t)
	f := w.feed(w.config())
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(5, 100))
	w.kafka.direct = false
	f.applyBatch(removedBatch(5, 100))
	f.at(position{next: 2, sum: 42})
	f.files.fault = func(step string) error {
		if step == "create" && len(w.kafka.pending) > 0 {
			w.kafka.fail(1, 0, errRefused)
		}
		return nil
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.close(ended)
	w.kafka.direct = true
	f = w.feed(w.config())
	if _, ok := f.restore(); !ok {
		t.Fatal("no checkpoint")
	}
	f.release()
	f.applyBatch(storedBatch(1, 200))
	if r := w.read(); r.incomplete || len(r.held[0]) != 1 {
		t.Errorf("%d blocks, incomplete %t; the engine holds 1", len(r.held[0]), r.incomplete)
	}
}

// TestLedgerStaysClean: if the ledger cannot be written when an epoch could go on,
// the process begins another, and the one after it must not go on with the old.
func TestLedgerStaysClean(t *testing.T) {
	w := newLives(t)
	w.left(w.config())
	f := w.feed(w.config())
	f.files.fault = noRoom
	if _, ok := f.restore(); !ok || f.state != held || f.stuck != nil {
		t.Fatalf("restored: %t, %s, %v", ok, f.state, f.stuck)
	}
	f.release()
	f.applyBatch(storedBatch(1, 200))

	w.clock = w.clock.Add(time.Minute)
	f = w.feed(w.config())
	if _, ok := f.restore(); ok {
		t.Error("the checkpoint of an epoch that is over was restored")
	}
	f.empty(true, causeStart)
	f.applyBatch(storedBatch(1, 300))
	if r := w.read(); r.refused > 0 || len(r.held[0]) != 1 || r.producer != "relay-3" {
		t.Errorf("%d blocks by %s, %d records refused", len(r.held[0]), r.producer, r.refused)
	}
}

// noRoom is the fault of a full disk.
func noRoom(step string) error {
	if step == "remove" {
		return nil
	}
	return syscall.ENOSPC
}

// TestCheckpointOfLyingLedger: while the ledger still says that an epoch that is over
// can go on, nothing is written that it could take for that epoch's checkpoint, be
// it the same to the byte; and the status says so until the disk has room again.
func TestCheckpointOfLyingLedger(t *testing.T) {
	for _, room := range []string{"never again", "later", "at the end"} {
		t.Run(room, func(t *testing.T) {
			w := newLives(t)
			f := w.feed(w.config())
			f.empty(true, causeStart)
			f.at(position{next: 5, sum: 42})
			f.close(context.Background())
			old, err := os.ReadFile(f.files.checkpoint)
			if err != nil {
				t.Fatal(err)
			}

			f = w.feed(w.config())
			ledger := true // cannot be written
			f.files.fault = noRoom
			f.restore()
			f.files.fault = func(step string) error {
				if step == "create" && ledger {
					ledger = room == "never again"
					return syscall.ENOSPC
				}
				return nil
			}
			if room == "at the end" {
				f.files.fault = noRoom
			}
			f.release()
			for range 3 {
				w.clock = w.clock.Add(31 * time.Second)
				f.tick(w.now(), true)
				if f.saving != nil {
					f.endSave(w.now(), <-f.saving)
				}
			}
			f.publish()
			if problem := f.status().Problem; (problem == "") != (room == "later") {
				t.Errorf("problem %q", problem)
			}
			last := f.record.Epoch
			if room == "at the end" {
				f.files.fault = nil
				f.close(context.Background())
			}

			f = w.feed(w.config())
			_, ok := f.restore()
			now, _ := os.ReadFile(f.files.checkpoint)
			if ok != (room != "never again") || ok != bytes.Equal(now, old) || f.record.Epoch != 0 && f.record.Epoch != last || ok && f.last != last {
				t.Errorf("restored %t, %s in epoch %d, the highest %d; there were %d", ok, f.state, f.record.Epoch, f.last, last)
			}
		})
	}
}

// TestStuck: if neither the ledger can be written nor the checkpoint removed, the
// process must not begin.
func TestStuck(t *testing.T) {
	w := newLives(t)
	w.left(w.config())
	f := w.feed(w.config())
	f.files.fault = func(string) error { return syscall.EIO }
	if f.restore(); f.stuck == nil || f.state != held {
		t.Errorf("%v, %s", f.stuck, f.state)
	}
}

// TestStateDirOfNoUse: a relay does not start with a state directory that it can
// never use, and names it; one that is not there yet is made.
func TestStateDirOfNoUse(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "taken", "check.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(file, "below"), filepath.Join(dir, "taken"), dir + "\x00"} {
		cfg := DefaultConfig()
		cfg.StateDir, cfg.Logger = path, silent
		cfg.Engines = []Engine{{Worker: "w", Kind: VLLM, Events: "tcp://127.0.0.1:1", Model: "m", BlockSize: 2, Ranks: 1}}
		r, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Run(t.Context()); !errors.Is(err, ErrStateDir) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", path, err)
		}
	}
	made := &files{dir: filepath.Join(dir, "made"), sync: (*os.File).Sync}
	if err := made.check(); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(made.dir, "*")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}
