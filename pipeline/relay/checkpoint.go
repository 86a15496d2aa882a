// This file keeps a feed over restarts: what the engine holds, where in its
// sequence, and which epochs there were.

package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"kvindex/index"
	"kvindex/pipeline/relay/fixed"
)

// A feed has two files in the state directory. The checkpoint has what the
// engine holds and the position that it is true for. The ledger, of a few bytes,
// has the highest epoch, written before the epoch's first record, so that no
// number comes again whatever the clock does and whatever becomes of the
// checkpoint; and, after an orderly end, which record was the last one and
// which checkpoint goes with it.
const (
	checkpointMagic   = "KVRC"
	checkpointVersion = 1
	ledgerMagic       = "KVRL"
	ledgerVersion     = 1

	maxName       = 64 << 10 // bytes of a text in a file
	maxLedger     = 5*maxName + 256
	maxCheckpoint = 2 << 30 // bytes of a file
)

// What can be wrong with a file of the state directory, besides what reading it
// can fail with. The error itself says what.
var (
	errDamaged  = errors.New("file is damaged")
	errVersion  = errors.New("file is of an unknown version")
	errOther    = errors.New("file is of another engine or another configuration")
	errTooLarge = errors.New("file is too large")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ledger is what is known of a worker-rank's epochs.
type ledger struct {
	epoch int64 // the highest

	// clean says that every record of epoch is acknowledged; only then the rest
	// counts.
	clean    bool
	seq      int64
	producer string
	heard    int64  // when a record was last acknowledged, Unix milliseconds
	topic    string // that it is in
	place    place  // of that record
	check    uint32 // checksum of the checkpoint that has what the records say
}

func (l *ledger) append(dst []byte, worker string, rank int32) []byte {
	dst = append(append(dst, ledgerMagic...), ledgerVersion)
	dst = appendText(dst, worker)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(rank))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.epoch))
	dst = append(dst, flag(l.clean))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.seq))
	dst = appendText(dst, l.producer)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.heard))
	dst = appendText(dst, l.topic)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(l.place.partition))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.place.offset))
	dst = binary.LittleEndian.AppendUint32(dst, l.check)
	return appendCheck(dst)
}

// parseLedger reads what append wrote for that worker-rank. Errors: errDamaged,
// errVersion, errOther.
func parseLedger(p []byte, worker string, rank int32) (l ledger, err error) {
	r, _, err := openFile(p, ledgerMagic, ledgerVersion)
	if err != nil {
		return ledger{}, err
	}
	w, n := r.text(), int32(r.U32())
	l.epoch, l.clean, l.seq = int64(r.U64()), r.flag(), int64(r.U64())
	l.producer, l.heard, l.topic = r.text(), int64(r.U64()), r.text()
	l.place, l.check = place{int32(r.U32()), int64(r.U64())}, r.U32()
	switch {
	case r.Bad || len(r.P) > 0 || l.epoch < 1 || l.clean && (l.seq < -1 || l.producer == ""):
		return ledger{}, fmt.Errorf("%w: ledger", errDamaged)
	case w != worker || n != rank:
		return ledger{}, fmt.Errorf("%w: of worker %.64q rank %d", errOther, w, n)
	}
	return l, nil
}

// checkpoint is what is known of a worker-rank's engine.
type checkpoint struct {
	identity string // of all that must be alike for it to be of use
	whole    bool
	pos      position
	mapping  []byte // of engine.Mapping's Append
	check    uint32 // the file's checksum
}

// identity tells what a checkpoint depends on.
func (c *feedConfig) identity() string {
	h := c.engine.Hasher
	return fmt.Sprintf("worker %q rank %d engine %d at %q model %q hasher %s block size %d eagle %t",
		c.worker, c.rank, c.engine.Engine, c.source, c.model, h.Scheme, h.BlockSize, h.Eagle)
}

// parseCheckpoint reads a checkpoint; its mapping is part of p. Errors:
// errDamaged, errVersion, errOther.
func parseCheckpoint(p []byte, identity string) (c checkpoint, err error) {
	r, check, err := openFile(p, checkpointMagic, checkpointVersion)
	if err != nil {
		return checkpoint{}, err
	}
	c = checkpoint{identity: r.text(), whole: r.flag(), pos: position{next: int64(r.U64()), sum: r.U64()}, check: check}
	if r.Bad || c.pos.next < 0 {
		return checkpoint{}, fmt.Errorf("%w: checkpoint", errDamaged)
	}
	if c.identity != identity {
		return checkpoint{}, fmt.Errorf("%w: it is of %.512s; the configuration says %.512s", errOther, c.identity, identity)
	}
	c.mapping = r.P
	return c, nil
}

// appendCheckpoint appends a checkpoint of f.
func (f *feed) appendCheckpoint(dst []byte) []byte {
	dst = append(append(dst, checkpointMagic...), checkpointVersion)
	dst = appendText(dst, f.cfg.identity())
	dst = append(dst, flag(f.whole))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(f.pos.next))
	dst = binary.LittleEndian.AppendUint64(dst, f.pos.sum)
	dst = f.mapping.Append(dst)
	return appendCheck(dst)
}

// restore takes up what an earlier process left, and returns the position from
// which the engine's sequence goes on. It is called before anything else. If
// that process ended in an orderly way, its epoch goes on at once; if not,
// nothing is written until release, which is for when the engine was read up to
// its present: what of the epoch's last records reached Kafka nobody knows, so
// another one will say it all. Without anything of use, ok is false, and the
// feed waits for empty; what was wrong is logged and counted. If the feed is stuck
// afterwards, it must not be used.
func (f *feed) restore() (pos position, ok bool) {
	if f.files == nil {
		return position{next: -1}, false
	}
	defer f.publish()
	l := f.restoreLedger()
	f.last = l.epoch
	p, err := f.files.read(f.files.checkpoint, maxCheckpoint)
	if p == nil && err == nil {
		return position{next: -1}, false
	}
	var c checkpoint
	if err == nil {
		c, err = parseCheckpoint(p, f.cfg.identity())
	}
	if err == nil {
		err = f.mapping.Load(c.mapping)
	}
	if err != nil {
		f.counts.saveFailures.Add(1)
		f.log.Warn("checkpoint is of no use", "file", f.files.checkpoint, "error", err)
		return position{next: -1}, false
	}
	f.pos, f.whole, f.why = c.pos, c.whole, causeRestored
	heard := time.UnixMilli(l.heard)
	quiet := f.cfg.now().Sub(heard)
	same := l.check == c.check && l.topic == f.out.topic &&
		instanceOf(l.producer) == instanceOf(string(f.out.name))
	if l.clean && same && quiet >= 0 && quiet < f.cfg.grace/2 {
		if f.note(ledger{epoch: l.epoch}) {
			f.record.Producer, f.record.Epoch, f.record.Seq = []byte(l.producer), l.epoch, l.seq
			f.flight.resume(l.epoch, heard, l.place)
			f.state, f.said, f.wrote = writing, c.whole, heard
		} else {
			// The ledger still says that this epoch can go on. A process after
			// this one must not: there will be a newer one.
			f.owed, f.changed = true, true
			if err := f.files.remove(f.files.checkpoint); err != nil {
				f.stuck = fmt.Errorf("the ledger cannot be written, nor the checkpoint removed that goes with it: %w", err)
			}
		}
	}
	f.log.Info("checkpoint restored", "engine_seq", f.pos.next, "blocks", f.mapping.Len(index.Device), "epoch", l.epoch, "epoch_goes_on", f.state == writing)
	return f.pos, true
}

// restoreLedger returns the ledger, with epoch 0 if there is none of use.
func (f *feed) restoreLedger() ledger {
	p, err := f.files.read(f.files.ledger, maxLedger)
	if p == nil && err == nil {
		return ledger{}
	}
	var l ledger
	if err == nil {
		l, err = parseLedger(p, f.cfg.worker, f.cfg.rank)
	}
	if err != nil {
		f.counts.saveFailures.Add(1)
		f.log.Warn("ledger of epochs is of no use: the next epoch's number is the clock's", "file", f.files.ledger, "error", err)
		return ledger{}
	}
	return l
}

// instanceOf returns the part of a producer's name that tells the instance and not
// the process. Files that were copied are another instance's: two processes that
// went on with one epoch under one name would be taken for one.
func instanceOf(producer string) string {
	return producer[:max(0, strings.LastIndexByte(producer, '-'))]
}

// note writes the ledger, and reports whether it could. If there are no files it
// does nothing.
func (f *feed) note(l ledger) bool {
	if f.files == nil {
		return false
	}
	return f.saved(f.files.write(f.files.ledger, l.append(nil, f.cfg.worker, f.cfg.rank)))
}

// paid writes the ledger if it is owed, and reports whether none is owed now.
func (f *feed) paid() bool {
	f.owed = f.owed && !f.note(ledger{epoch: f.last})
	return !f.owed
}

// saved counts and says what came of a write, and reports whether it was well.
func (f *feed) saved(err error) bool {
	f.unsaved = ""
	if err != nil {
		f.counts.saveFailures.Add(1)
		f.unsaved = "state cannot be saved, a restart will begin anew: " + err.Error()
		f.say("state cannot be saved: a restart will begin anew", "error", err)
		return false
	}
	return true
}

// checkpoint writes a checkpoint, on another goroutine, if one is due.
func (f *feed) checkpoint(now time.Time) {
	if f.files == nil {
		return
	}
	if f.saving != nil {
		select {
		case err := <-f.saving:
			f.endSave(now, err)
		default:
		}
		return
	}
	if !f.changed || f.pos.next < 0 || since(now, f.savedAt) < f.cfg.saveEvery {
		return
	}
	f.savedAt = now
	if !f.paid() {
		return
	}
	f.changed = false
	p := f.appendCheckpoint(make([]byte, 0, f.savedBytes+f.savedBytes/8))
	f.savedBytes = len(p)
	done := make(chan error, 1)
	f.saving = done
	files := f.files
	go func() { done <- files.write(files.checkpoint, p) }()
}

// endSave takes note of how a save ended.
func (f *feed) endSave(now time.Time, err error) {
	f.saving = nil
	if f.saved(err) {
		f.counts.saves.Add(1)
		f.saveEnd = now
	} else {
		f.changed = true
	}
}

// leave writes the last checkpoint and, if Kafka has all that the epoch said, a
// ledger that says so.
func (f *feed) leave() {
	if f.files == nil {
		return
	}
	now := f.cfg.now()
	if f.saving != nil {
		f.endSave(now, <-f.saving)
	}
	if f.pos.next < 0 || !f.paid() {
		return
	}
	p := f.appendCheckpoint(nil)
	err := f.files.write(f.files.checkpoint, p)
	f.endSave(now, err)
	l := f.flight.look()
	if err != nil || f.state != writing || l.records > 0 || !l.sound() {
		return
	}
	f.note(ledger{
		epoch: f.record.Epoch, clean: true, seq: f.record.Seq, producer: string(f.record.Producer),
		heard: l.heard.UnixMilli(), topic: f.out.topic, place: l.place, check: binary.LittleEndian.Uint32(p[len(p)-4:]),
	})
}

// appendCheck appends the checksum that ends a file.
func appendCheck(file []byte) []byte {
	return binary.LittleEndian.AppendUint32(file, crc32.Checksum(file, castagnoli))
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func appendText(dst []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint32(dst, uint32(len(s))), s...)
}

// fileReader reads a checkpoint or a ledger.
type fileReader struct{ fixed.Reader }

// openFile returns what is between a file's head and its checksum. Errors:
// errDamaged, errVersion.
func openFile(p []byte, magic string, version byte) (r fileReader, check uint32, err error) {
	head := len(magic) + 1
	if len(p) < head+4 || string(p[:len(magic)]) != magic {
		return r, 0, fmt.Errorf("%w: too short, or not of kvindex", errDamaged)
	}
	body := p[:len(p)-4]
	check = binary.LittleEndian.Uint32(p[len(body):])
	if crc32.Checksum(body, castagnoli) != check {
		return r, 0, fmt.Errorf("%w: checksum is wrong", errDamaged)
	}
	if body[len(magic)] != version {
		return r, 0, fmt.Errorf("%w: %d", errVersion, body[len(magic)])
	}
	return fileReader{fixed.Reader{P: body[head:]}}, check, nil
}

func (r *fileReader) flag() bool {
	v := r.Take(1)
	if v == nil {
		return false
	}
	r.Bad = r.Bad || v[0] > 1
	return v[0] == 1
}

func (r *fileReader) text() string {
	n := r.U32()
	if n > maxName {
		r.Bad = true
		return ""
	}
	return string(r.Take(int(n)))
}
