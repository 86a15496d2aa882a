package snapshot

// This file keeps a snapshot partition in memory, for tests of who writes and
// restores snapshots: thousands of stories in the time that a broker takes to start.

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Memory is a partition of a snapshot topic without a broker: what is committed to
// it, compacted. The zero Memory is empty. It is for one goroutine.
type Memory struct {
	// Answer, if it is set, is called after each commit. Its error is what the writer
	// is told, who cannot know then whether it was committed.
	Answer func() error

	values map[string][]byte // by key
	writer *memoryClient     // of the writer that took the duty last
}

// Keys returns the keys of the records that are there, in order.
func (m *Memory) Keys() []string { return slices.Sorted(maps.Keys(m.values)) }

// Value returns the value of a key's last record, nil if there is none. It is not
// to be changed.
func (m *Memory) Value(key string) []byte { return m.values[key] }

// Put commits a record past all writers; a nil value is a tombstone.
func (m *Memory) Put(key string, value []byte) {
	if m.values == nil {
		m.values = make(map[string][]byte)
	}
	if value == nil {
		delete(m.values, key)
		return
	}
	m.values[key] = value
}

// Table returns what a Reader would read.
func (m *Memory) Table() *Table {
	t := newTable()
	m.Read(t)
	return t
}

// Read brings a table to what a Reader would have read by now.
func (m *Memory) Read(t *Table) {
	t.reset()
	for _, k := range m.Keys() {
		_ = t.apply([]byte(k), m.values[k]) // the table says what is wrong
	}
}

// Take returns a writer that has the duty, and fences the one before. Of cfg it
// needs what a Writer's own rules need: Group, Source, Topic, Partition, Hook. What
// would ask a broker, as Take does, it cannot do: after an error it is of no use.
func (m *Memory) Take(cfg WriterConfig) *Writer {
	cfg.Reader = &Reader{table: m.Table()}
	m.writer = &memoryClient{memory: m}
	w := newWriter(cfg, m.writer, m.writer)
	w.taken = true
	return w
}

// memoryClient is one writer's client of a Memory.
type memoryClient struct {
	memory *Memory
	sent   []*kgo.Record // in the open transaction
}

var errMemory = errors.New("memory has no broker to ask")

func (c *memoryClient) fenced() error {
	if c.memory.writer != c {
		return kerr.ProducerFenced
	}
	return nil
}

func (c *memoryClient) BeginTransaction() error {
	c.sent = nil
	return nil
}

func (c *memoryClient) Produce(ctx context.Context, rec *kgo.Record, promise func(*kgo.Record, error)) {
	promise(rec, c.ProduceSync(ctx, rec).FirstErr())
}

func (c *memoryClient) ProduceSync(_ context.Context, recs ...*kgo.Record) (res kgo.ProduceResults) {
	for _, r := range recs {
		c.sent = append(c.sent, r)
		res = append(res, kgo.ProduceResult{Record: r, Err: c.fenced()})
	}
	return res
}

func (c *memoryClient) Flush(context.Context) error { return nil }

func (c *memoryClient) EndTransaction(_ context.Context, commit kgo.TransactionEndTry) error {
	if err := c.fenced(); err != nil {
		return err
	}
	if commit == kgo.TryCommit {
		for _, r := range c.sent {
			c.memory.Put(string(r.Key), r.Value)
		}
		if c.memory.Answer != nil {
			return c.memory.Answer()
		}
	}
	return nil
}

func (c *memoryClient) AbortBufferedRecords(context.Context) error { return nil }

func (c *memoryClient) ProducerID(context.Context) (int64, int16, error) { return 0, 0, errMemory }

func (c *memoryClient) CommitAllOffsets(context.Context, string, kadm.Offsets) error { return nil }

func (c *memoryClient) Close() {}
