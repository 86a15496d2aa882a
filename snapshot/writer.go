package snapshot

// This file writes one partition's snapshots, in fenced transactions.

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/schemas"
)

const (
	// TransactionTimeout is how long a broker lets a silent writer's
	// transaction stand. Nobody waits for it: readers stop below the
	// transaction, and the next writer aborts it.
	TransactionTimeout = time.Minute
	// endTimeout bounds the end of a transaction, which the caller's context
	// must not cut short: its outcome would stay unknown.
	endTimeout = 20 * time.Second
)

// WriterConfig is what a Writer needs. Hook, Logger and Now may be nil.
type WriterConfig struct {
	Group     string         // its offset follows the floor, and the transactional id begins with it
	Source    consumer.Topic // the events topic as the caller reads it
	Topic     string         // of the snapshots
	Partition int32          // of both topics
	// Client asks for metadata and commits the group's offset. It may be
	// shared, but not with a consumer.
	Client *kgo.Client
	// Opts (brokers, TLS, SASL and so on) are for the writer's own client: a
	// transactional id belongs to one.
	Opts []kgo.Opt
	// Reader has read this partition, or will; Take continues it. Its table
	// is the writer's from then on, which drops its payloads.
	Reader *Reader
	// Hook, for tests, is called after every acknowledged step. With a hook
	// each record waits for its acknowledgement. An error kills the writer at
	// this step: nothing more is sent, not even the transaction's end.
	Hook   func(Step) error
	Logger *slog.Logger
	Now    func() time.Time
}

// Writer has the duty of writing one partition's snapshots. One goroutine uses
// it at a time, and not the one that applies the partition's events: a round
// takes some 20 to 50 ms of waiting on a real broker.
type Writer struct {
	cfg    WriterConfig
	cl     client
	adm    committer
	reader *Reader

	taken   bool  // the table is what is on the topic, and nobody fenced us yet
	open    bool  // a transaction may be open, or how it ended is not known
	dead    error // set once: nothing is written any more
	offset  int64 // last committed for the group, -1: none by this writer
	sent    int
	bytes   int64
	failed  error // of the records sent since begin, written by the client's goroutine; read after a flush
	scratch schemas.Chunk
}

// client is what a Writer needs of its own *kgo.Client.
type client interface {
	ProducerID(context.Context) (int64, int16, error)
	BeginTransaction() error
	Produce(context.Context, *kgo.Record, func(*kgo.Record, error))
	ProduceSync(context.Context, ...*kgo.Record) kgo.ProduceResults
	Flush(context.Context) error
	AbortBufferedRecords(context.Context) error
	EndTransaction(context.Context, kgo.TransactionEndTry) error
	Close()
}

// committer is what a Writer needs of a *kadm.Client.
type committer interface {
	CommitAllOffsets(ctx context.Context, group string, offsets kadm.Offsets) error
}

// NewWriter returns a writer that has yet to take the duty. It connects to
// nothing.
func NewWriter(cfg WriterConfig) (*Writer, error) {
	opts := append(append([]kgo.Opt(nil), cfg.Opts...),
		kgo.TransactionalID(fmt.Sprintf("%s-snapshot-%s-%d", cfg.Group, cfg.Topic, cfg.Partition)),
		kgo.TransactionTimeout(TransactionTimeout),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(kgo.ZstdCompression()),
		kgo.ProducerLinger(0),
		kgo.MaxBufferedBytes(8<<20),
		kgo.RecordDeliveryTimeout(TransactionTimeout),
	)
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("snapshot writer: %w", err)
	}
	return newWriter(cfg, cl, kadm.NewClient(cfg.Client)), nil
}

func newWriter(cfg WriterConfig, cl client, adm committer) *Writer {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Logger = cfg.Logger.With("topic", cfg.Topic, "partition", cfg.Partition)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.Reader.table.DropPayloads()
	return &Writer{cfg: cfg, cl: cl, adm: adm, reader: cfg.Reader, offset: -1}
}

// Table returns what is on the topic, as the writer knows it.
func (w *Writer) Table() *Table { return w.reader.table }

// Close gives the writer up. It ends no transaction: there is none between
// two calls but after an error, and that one the next writer aborts.
func (w *Writer) Close() {
	w.die(ErrClosed)
}

func (w *Writer) die(why error) error {
	if w.dead == nil {
		w.dead = why
		w.cl.Close()
	}
	return w.dead
}

// Take takes the duty: it fences the partition's former writer, whose open
// transaction the broker aborts, and then reads the partition to its end, so
// that nothing can be on it that this writer does not know. It can be called
// again. Errors: ErrSource, until the caller has a new source; what Dead returns,
// for good; anything else can be tried again.
func (w *Writer) Take(ctx context.Context) error {
	if w.dead != nil {
		return w.dead
	}
	w.taken = false
	src, err := consumer.DescribeTopic(ctx, w.cfg.Client, w.cfg.Source.Name)
	if err != nil {
		return w.wrap("take", err)
	}
	if src != w.cfg.Source {
		return w.wrap("take", fmt.Errorf("%w: %s has id %x and %d partitions, not %x and %d",
			ErrSource, src.Name, src.ID, src.Partitions, w.cfg.Source.ID, w.cfg.Source.Partitions))
	}
	if err := w.abort(ctx); err != nil {
		return w.fail("take: abort", err)
	}
	// The first time this asks the coordinator for a new epoch of the
	// transactional id, which fences. Later the epoch is still ours, or a newer
	// writer's, and then abort or this says so.
	if _, _, err := w.cl.ProducerID(ctx); err != nil {
		return w.fail("take: producer id", err)
	}
	if err := w.reader.ReadToEnd(ctx); err != nil {
		return w.wrap("take", err)
	}
	w.taken = true
	return nil
}

// Write writes a round: one transaction of the manifests, chunks and
// tombstones, then one of the floor, then the group's offset. It takes the duty
// first (again) if that is not certain.
//
// After an error the table is what is on the topic as far as that is known, and
// the next Write finds out the rest: the caller may try again, best with a fresh
// round. What Dead returns is for good. ErrBehind: the caller lags behind the
// floor, nothing was written.
func (w *Writer) Write(ctx context.Context, round Round) (Result, error) {
	w.sent, w.bytes = 0, 0
	res, err := w.write(ctx, round)
	res.Records, res.Bytes = w.sent, w.bytes
	return res, err
}

func (w *Writer) write(ctx context.Context, round Round) (Result, error) {
	res := Result{Floor: -1}
	if err := w.ready(ctx); err != nil {
		return res, err
	}
	if f := w.floor(); f > round.Position {
		res.Floor = f
		return res, w.wrap("write", fmt.Errorf("%w: at offset %d, the floor is %d", ErrBehind, round.Position, f))
	}
	items := w.plan(round, &res)
	if len(items) > 0 {
		err := w.transact(ctx, func() error {
			for i := range items {
				if err := w.send(ctx, &items[i]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return res, w.fail("write", err)
		}
		for i := range items {
			items[i].apply(w.Table())
			res.Written = append(res.Written, items[i].id)
		}
		if err := w.step(Step{Kind: StepCommit}); err != nil {
			return res, err
		}
	}
	if err := w.writeFloor(ctx, round, &res); err != nil {
		return res, err
	}
	return res, w.commitOffset(ctx, &res)
}

// Discard removes the manifests that bad says cannot be used, with their
// chunks, and the floor. The caller has found out that the source topic is
// another one, or lost records that manifests are made of.
func (w *Writer) Discard(ctx context.Context, bad func(*schemas.Manifest) bool) error {
	if err := w.ready(ctx); err != nil {
		return err
	}
	t := w.Table()
	var items []item
	for _, id := range t.IDs() {
		if m := t.Manifest(id); m == nil || bad(m) {
			items = append(items, item{id: id, tombstones: t.chunksFrom(id, 0)})
		}
	}
	err := w.transact(ctx, func() error {
		if err := w.produce(ctx, key{kind: floorKey}, nil, Step{Kind: StepFloor}); err != nil {
			return err
		}
		for i := range items {
			if err := w.send(ctx, &items[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return w.fail("discard", err)
	}
	t.floor = nil
	for i := range items {
		items[i].apply(t)
	}
	return w.step(Step{Kind: StepCommit})
}

// ready makes sure of the duty.
func (w *Writer) ready(ctx context.Context) error {
	if w.dead != nil {
		return w.dead
	}
	if !w.taken {
		return w.Take(ctx)
	}
	return nil
}

// item is one worker-rank's part of a transaction.
type item struct {
	id         ID
	manifest   *schemas.Manifest // nil: removed
	blocks     *Packed           // nil: no chunks are written
	tombstones []int32           // chunks to remove
}

// apply does to the table what the item did to the topic.
func (it *item) apply(t *Table) {
	if it.blocks != nil {
		for n := range it.manifest.Chunks {
			t.entry(it.id).chunks[n] = nil
		}
	}
	for _, n := range it.tombstones {
		t.setChunk(it.id, n, nil)
	}
	t.setManifest(it.id, it.manifest, nil)
}

// plan decides what of the round is written, and puts the rest into res.
func (w *Writer) plan(round Round, res *Result) []item {
	var (
		t     = w.Table()
		items = make([]item, 0, len(round.Dumps)+len(round.Refreshes)+len(round.Deletes))
		seen  = make(map[ID]bool, cap(items))
	)
	add := func(it item, err error) {
		if err == nil && seen[it.id] {
			err = fmt.Errorf("twice in a round")
		}
		if err == nil && it.manifest != nil {
			// Whatever can't be encoded must not take the others with it.
			_, err = schemas.AppendManifest(nil, it.manifest)
		}
		if err != nil {
			res.Refused = append(res.Refused, Refusal{it.id, fmt.Errorf("%v: %w", it.id, err)})
			return
		}
		seen[it.id] = true
		items = append(items, it)
	}
	for i := range round.Dumps {
		d := &round.Dumps[i]
		it := w.item(&d.Manifest)
		var generation int64
		if old := t.Manifest(it.id); old != nil {
			generation = old.Generation
		}
		it.manifest.Generation = generation + 1
		it.manifest.Bytes, it.manifest.Chunks, it.manifest.CRC32C = 0, 0, nil
		if d.Blocks != nil {
			it.blocks = d.Blocks
			it.manifest.Chunks = int32(d.Blocks.Chunks())
		}
		it.tombstones = t.chunksFrom(it.id, it.manifest.Chunks)
		add(it, w.behind(it.manifest))
	}
	for i := range round.Refreshes {
		f := &round.Refreshes[i]
		it := w.item(&f.Manifest)
		old, err := w.refreshable(it.id, f.Changed)
		if err == nil {
			it.manifest.Generation, it.manifest.Chunks = old.Generation, old.Chunks
			it.manifest.Bytes, it.manifest.CRC32C = old.Bytes, old.CRC32C
			err = w.behind(it.manifest)
		}
		add(it, err)
	}
	for _, id := range round.Deletes {
		var err error
		if old := t.Manifest(id); old != nil && w.ours(old.TopicID, old.Partitions) && old.W > round.Position {
			err = fmt.Errorf("%w: delete at offset %d, its W is %d", ErrBehind, round.Position, old.W)
		}
		if t.entries[id] == nil && err == nil {
			continue // nothing to remove
		}
		add(item{id: id, tombstones: t.chunksFrom(id, 0)}, err)
	}
	// The ranks of a worker are written at once or not at all, so that they have one W.
	refused := make(map[string]bool, len(res.Refused))
	for _, r := range res.Refused {
		refused[r.ID.Worker] = true
	}
	return slices.DeleteFunc(items, func(it item) bool {
		if refused[it.id.Worker] {
			res.Refused = append(res.Refused, Refusal{it.id, fmt.Errorf("%v: %w", it.id, ErrSibling)})
		}
		return refused[it.id.Worker]
	})
}

// item begins an item with the manifest's copy.
func (w *Writer) item(m *schemas.Manifest) item {
	c := *m
	c.Format = schemas.SnapshotFormat
	c.TopicID, c.Partitions = w.cfg.Source.ID, w.cfg.Source.Partitions
	return item{id: ID{c.Worker, c.Rank}, manifest: &c}
}

// behind refuses a W below what is on the topic.
func (w *Writer) behind(m *schemas.Manifest) error {
	if f := w.floor(); m.W < f {
		return fmt.Errorf("%w: W %d, the floor is %d", ErrBehind, m.W, f)
	}
	old := w.Table().Manifest(ID{m.Worker, m.Rank})
	if old != nil && w.ours(old.TopicID, old.Partitions) && m.W < old.W {
		return fmt.Errorf("%w: W %d, the manifest has %d", ErrBehind, m.W, old.W)
	}
	return nil
}

// refreshable returns the manifest whose chunks a refresh can keep.
func (w *Writer) refreshable(id ID, changed int64) (*schemas.Manifest, error) {
	t := w.Table()
	old := t.Manifest(id)
	if old == nil || !w.ours(old.TopicID, old.Partitions) {
		return nil, ErrNoManifest
	}
	if old.W < changed {
		return nil, fmt.Errorf("%w: its W is %d, the last change was before %d", ErrChanged, old.W, changed)
	}
	e := t.entries[id]
	if e.damaged != nil {
		return nil, fmt.Errorf("%w that is good: %w", ErrNoManifest, e.damaged)
	}
	for n := range old.Chunks {
		if _, ok := e.chunks[n]; !ok {
			return nil, fmt.Errorf("%w that is good: chunk %d is missing", ErrNoManifest, n)
		}
	}
	return old, nil
}

// ours reports whether a record is of the source topic as it is now. Offsets
// of another one mean nothing here.
func (w *Writer) ours(topicID [16]byte, partitions int32) bool {
	return topicID == w.cfg.Source.ID && partitions == w.cfg.Source.Partitions
}

// floor returns the floor on the topic, -1 if there is none of this source.
func (w *Writer) floor() int64 {
	if f := w.Table().floor; f != nil && w.ours(f.TopicID, f.Partitions) {
		return f.Offset
	}
	return -1
}

// send sends an item's records: chunks, manifest, tombstones.
func (w *Writer) send(ctx context.Context, it *item) error {
	if it.manifest == nil {
		if err := w.produce(ctx, key{kind: manifestKey, id: it.id}, nil, Step{StepTombstone, it.id, -1}); err != nil {
			return err
		}
	} else {
		if it.blocks != nil {
			if err := w.sendChunks(ctx, it); err != nil {
				return err
			}
		}
		value, err := schemas.AppendManifest(nil, it.manifest)
		if err != nil {
			return err
		}
		if err := w.produce(ctx, key{kind: manifestKey, id: it.id}, value, Step{Kind: StepManifest, ID: it.id}); err != nil {
			return err
		}
	}
	for _, n := range it.tombstones {
		if err := w.produce(ctx, key{kind: chunkKey, id: it.id, chunk: n}, nil, Step{StepTombstone, it.id, n}); err != nil {
			return err
		}
	}
	return nil
}

// sendChunks encodes one chunk after the other and puts their checksums and
// bytes into the manifest.
func (w *Writer) sendChunks(ctx context.Context, it *item) error {
	m := it.manifest
	m.Bytes, m.CRC32C = 0, make([]uint32, 0, m.Chunks)
	for n := range m.Chunks {
		c := &w.scratch
		c.Worker, c.Rank, c.Generation, c.Index = m.Worker, m.Rank, m.Generation, n
		it.blocks.fill(c, int(n))
		// The client holds the value until it is acknowledged.
		value, err := schemas.AppendChunk(make([]byte, 0, it.blocks.chunks[n].bytes+len(m.Worker)+64), c)
		if err != nil {
			return fmt.Errorf("%v: chunk %d: %w", it.id, n, err)
		}
		m.Bytes += int64(len(value))
		m.CRC32C = append(m.CRC32C, crc32.Checksum(value, castagnoli))
		if err := w.produce(ctx, key{kind: chunkKey, id: it.id, chunk: n}, value, Step{StepChunk, it.id, n}); err != nil {
			return err
		}
	}
	return nil
}

// writeFloor writes the floor if it has risen: the least of every manifest's W,
// of the first offset of each worker-rank without one, and of the position.
// The manifests are committed by now; a floor above the W of one that never
// came to be would lose its events.
func (w *Writer) writeFloor(ctx context.Context, round Round, res *Result) error {
	t := w.Table()
	res.Floor = w.floor()
	offset := round.Position
	for _, e := range t.entries {
		if m := e.manifest; m != nil && w.ours(m.TopicID, m.Partitions) {
			offset = min(offset, m.W)
		}
	}
	for _, u := range round.Unsaved {
		if m := t.Manifest(u.ID); m == nil || !w.ours(m.TopicID, m.Partitions) {
			offset = min(offset, u.First)
		}
	}
	if offset <= res.Floor {
		return nil
	}
	f := &schemas.Floor{
		Format:     schemas.SnapshotFormat,
		Offset:     offset,
		TopicID:    w.cfg.Source.ID,
		Partitions: w.cfg.Source.Partitions,
		PastLostAt: round.PastLostAt,
		Written:    w.cfg.Now().UnixMilli(),
	}
	err := w.transact(ctx, func() error {
		return w.produce(ctx, key{kind: floorKey}, schemas.AppendFloor(nil, f), Step{Kind: StepFloor})
	})
	if err != nil {
		return w.fail("write floor", err)
	}
	t.floor = f
	res.Floor, res.FloorWritten = offset, true
	return w.step(Step{Kind: StepFloorCommit})
}

// commitOffset commits the floor as the group's offset, for Kafka's own tools
// to show. The error it returns is the hook's; that of the commit is in res.
func (w *Writer) commitOffset(ctx context.Context, res *Result) error {
	if res.Floor < 0 || res.Floor == w.offset {
		return nil
	}
	var offsets kadm.Offsets
	offsets.AddOffset(w.cfg.Source.Name, w.cfg.Partition, res.Floor, -1)
	if err := w.adm.CommitAllOffsets(ctx, w.cfg.Group, offsets); err != nil {
		res.CommitErr = &CommitError{Group: w.cfg.Group, Topic: w.cfg.Source.Name, Partition: w.cfg.Partition, Offset: res.Floor, Err: err}
		return nil
	}
	w.offset = res.Floor
	return w.step(Step{Kind: StepOffset})
}

// wrap says where an error happened.
func (w *Writer) wrap(what string, err error) error {
	return fmt.Errorf("snapshot writer: topic %s partition %d: %s: %w", w.cfg.Topic, w.cfg.Partition, what, err)
}

// fail wraps an error of the writer's own client, and kills the writer if it
// says that there is a newer one, or if the client will not get over it.
func (w *Writer) fail(what string, err error) error {
	if w.dead != nil {
		return w.dead
	}
	var ke *kerr.Error
	if !w.taken && errors.As(err, &ke) && !ke.Retriable && !fencing(err) {
		return w.die(w.wrap(what, err))
	}
	if fencing(err) {
		w.cfg.Logger.Warn("snapshot writer was fenced and drops the duty", "during", what, "error", err)
		return w.die(w.wrap(what, fmt.Errorf("%w: %w", ErrFenced, err)))
	}
	return w.wrap(what, err)
}
