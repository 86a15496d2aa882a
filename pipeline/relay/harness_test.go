// This file is the harness of the feed's tests: a Kafka that does what a test
// wants, and a reader of its records.

package relay

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

var errRefused = errors.New("refused by the test")

// tb is what testing.T and rapid.T have in common.
type tb interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// fakeKafka is one partition. It belongs to one goroutine.
type fakeKafka struct {
	now     func() time.Time // the broker's clock
	direct  bool             // records are acknowledged as they come
	refuse  error            // records are refused as they come
	large   int              // so are values of more bytes, if not 0
	pending []pendingRecord
	log     []written
	seen    func(value []byte) // is called with each record that comes
	part    int32              // the partition
	next    int64              // offset of the next record
}

type pendingRecord struct {
	r    *kgo.Record
	done func(*kgo.Record, error)
}

// written is a record in the log.
type written struct {
	at    time.Time
	value []byte
}

// TryProduce implements Producer.
func (k *fakeKafka) TryProduce(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	if k.seen != nil {
		k.seen(r.Value)
	}
	k.pending = append(k.pending, pendingRecord{r, done})
	switch {
	case k.refuse != nil:
		k.fail(len(k.pending), 0, k.refuse)
	case k.large > 0 && len(r.Value) > k.large:
		k.fail(len(k.pending), 0, errRefused)
	case k.direct:
		k.ack(len(k.pending))
	}
}

// ack writes the first n records that are pending.
func (k *fakeKafka) ack(n int) {
	for ; n > 0; n-- {
		k.write(k.pending[0])
		k.end(nil)
	}
}

func (k *fakeKafka) write(p pendingRecord) {
	p.r.Partition, p.r.Offset = k.part, k.next
	k.next++
	k.log = append(k.log, written{k.now(), append([]byte(nil), p.r.Value...)})
}

// fail refuses the first n records that are pending, the first of which are
// written all the same.
func (k *fakeKafka) fail(n, written int, err error) {
	for i := range n {
		if i < written {
			k.write(k.pending[0])
		}
		k.end(err)
	}
}

// end tells the first pending record's producer what came of it.
func (k *fakeKafka) end(err error) {
	p := k.pending[0]
	k.pending = k.pending[1:]
	p.done(p.r, err)
}

// held is a set of blocks a tier.
type heldBlocks [index.Tiers]map[index.SeqHash]bool

func newHeld() (h heldBlocks) {
	for t := range h {
		h[t] = map[index.SeqHash]bool{}
	}
	return h
}

func (h *heldBlocks) equal(o *heldBlocks) bool {
	for t := range h {
		if !maps.Equal(h[t], o[t]) {
			return false
		}
	}
	return true
}

// within reports whether o has all that h has.
func (h *heldBlocks) within(o *heldBlocks) bool {
	for t := range h {
		for seq := range h[t] {
			if !o[t][seq] {
				return false
			}
		}
	}
	return true
}

func (h *heldBlocks) store(t index.Tier, s *index.Stored) {
	seq := s.Parent
	for i, l := range s.Locals {
		if i == 0 && !s.HasParent {
			seq = index.SeqHash(l)
		} else {
			seq = index.Next(seq, l)
		}
		h[t][seq] = true
	}
}

func (h *heldBlocks) apply(events []schemas.Event) (cleared bool) {
	for i := range events {
		switch e := &events[i]; e.Kind {
		case schemas.KindStored:
			h.store(e.Tier, &e.Stored)
		case schemas.KindRemoved:
			for _, seq := range e.Removed {
				delete(h[e.Tier], seq)
			}
		case schemas.KindCleared:
			*h, cleared = newHeld(), true
		}
	}
	return cleared
}

// heldBy is what a mapping says is held.
func heldBy(m *engine.Mapping) heldBlocks {
	h := newHeld()
	m.Dump(func(t index.Tier, s index.Stored) bool {
		h.store(t, &s)
		return true
	})
	return h
}

// reader knows of one worker-rank what the rules of docs/producing.md make of its
// records.
type reader struct {
	grace      time.Duration
	epoch, seq int64
	producer   string
	heard      time.Time
	retired    bool
	incomplete bool
	held       heldBlocks
	refused    int // records of the newest epoch that were not taken
	batch      schemas.Batch
}

func (r *reader) read(t tb, w written) {
	t.Helper()
	b := &r.batch
	if err := b.Decode(w.value); err != nil {
		t.Fatal(err)
	}
	if r.epoch != 0 && w.at.Sub(r.heard) >= r.grace {
		r.retired, r.held, r.incomplete = true, newHeld(), false
	}
	switch {
	case b.Epoch < r.epoch:
		return
	case b.Epoch > r.epoch:
		r.epoch, r.seq, r.producer = b.Epoch, -1, string(b.Producer)
		r.retired, r.incomplete, r.held, r.refused = false, false, newHeld(), 0
	case r.retired:
		r.refused++
		return
	case string(b.Producer) != r.producer:
		r.refused++
		r.incomplete = true
		return
	}
	heartbeat := len(b.Events) == 0
	if !heartbeat && b.Seq <= r.seq {
		r.refused++
		return
	}
	if heartbeat && b.Seq > r.seq || !heartbeat && b.Seq > r.seq+1 {
		r.incomplete = true
	}
	if b.Seq >= r.seq {
		r.heard = w.at
	}
	r.seq = max(r.seq, b.Seq)
	if r.held.apply(b.Events) {
		r.incomplete = false
	}
}

// readAll returns what the log means.
func readAll(t tb, log []written, grace time.Duration) *reader {
	t.Helper()
	r := &reader{grace: grace, held: newHeld()}
	for _, w := range log {
		r.read(t, w)
	}
	return r
}

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

const testGrace = time.Hour

// testConfig is a feed's with blocks of two tokens.
func testConfig(now func() time.Time) feedConfig {
	return feedConfig{
		worker: "wörker", rank: 3, model: "m", source: "tcp://127.0.0.1:1",
		engine: engine.Config{Engine: engine.VLLM, Hasher: index.BlockHasher{BlockSize: 2}},
		grace:  testGrace, logger: silent, now: now,
	}
}

// newTestFeed returns a feed that writes to k, with a roomy outlet.
func newTestFeed(t testing.TB, k Producer, c feedConfig) *feed {
	t.Helper()
	out, err := newOutlet(k, "events", "relay-test", 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFeed(c, out)
	if err != nil {
		t.Fatal(err)
	}
	return f
}
