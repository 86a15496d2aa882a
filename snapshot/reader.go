package snapshot

// This file reads a snapshot partition to its end, by position.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/consumer"
)

// Reading goes on through anything that can pass; these bound its pace.
const (
	firstWait     = 20 * time.Millisecond
	longestWait   = time.Second
	missingTopics = 7 // answers in a row that the topic or partition does not exist
	fetchBytes    = 8 << 20
)

// ReaderConfig is what a Reader needs. Progress, Bad and Logger may be nil.
type ReaderConfig struct {
	// Client may be shared, but not with a consumer: the reader's fetches
	// would queue behind the consumer's long polls.
	Client    *kgo.Client
	Topic     string // of the snapshots
	Partition int32
	Progress  func(Progress)  // called after every fetch
	Bad       func(BadRecord) // called for every record that cannot be decoded, which is also logged
	Logger    *slog.Logger
}

// Progress is how far one ReadToEnd has come.
type Progress struct {
	Start    int64 // offset it began at
	Position int64 // next offset to read
	Target   int64 // offset it reads up to: the last stable one
	End      int64 // of the log when it was asked for Target, or Target: beyond it are records of transactions that are open
	Records  int64
	Bytes    int64 // of keys and values
}

// BadRecord is a record of the snapshot topic that cannot be decoded.
type BadRecord struct {
	Topic     string
	Partition int32
	Offset    int64
	Key       string
	Err       error
}

// Reader folds a snapshot partition into a Table. It reads what is committed,
// from the log's start up to the last stable offset as it was when asked, and
// knows its position: the end is reached however the log ends, be it in a
// transaction's marker, in a gap that compaction left or below a transaction
// that is still open. One goroutine uses a Reader at a time.
type Reader struct {
	cfg   ReaderConfig
	table *Table

	topicID  [16]byte
	leader   int32 // -1: to be asked
	epoch    int32
	position int64 // -1: the log's start, to be asked
	missing  int
	read     Progress // of the last ReadToEnd

	fetchBytes int32 // asked for at once; a larger batch comes whole all the same
}

// NewReader returns a Reader at the log's start with an empty table.
func NewReader(cfg ReaderConfig) *Reader {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Logger = cfg.Logger.With("topic", cfg.Topic, "partition", cfg.Partition)
	return &Reader{cfg: cfg, table: newTable(), leader: -1, position: -1, fetchBytes: fetchBytes}
}

// Table returns the table that the reader fills.
func (r *Reader) Table() *Table { return r.table }

// Position returns the next offset to read, or -1 before the first read.
func (r *Reader) Position() int64 { return r.position }

// Read returns how far the last ReadToEnd came.
func (r *Reader) Read() Progress { return r.read }

// permanent is an error that trying again does not help.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// errMoved tells ReadToEnd to begin anew: what was read is not in the log any more.
var errMoved = errors.New("log is not the one that was read")

// ReadToEnd reads on from the reader's position to the partition's end as it
// is now, and so to a state that one or more whole transactions left. It
// waits and tries again as long as that can help, until ctx ends. When the
// log's start has moved past the position, or the log is another, it empties
// the table and begins anew. After an error the table may hold half a
// transaction; reading on mends it.
func (r *Reader) ReadToEnd(ctx context.Context) error {
	var (
		target = int64(-1)
		wait   = firstWait
		p      = Progress{Start: r.position}
	)
	defer func() {
		if r.read = p; p.End > p.Target {
			r.cfg.Logger.Info("snapshot partition: a transaction is open, what was written past it is not read until it ends",
				"last_stable_offset", p.Target, "end", p.End)
		}
	}()
	r.leader = -1 // look at the topic's id: offsets alone don't tell a topic created anew
	for {
		done, err := r.step(ctx, &target, &p)
		if done {
			return nil
		}
		if err == nil {
			wait = firstWait
			continue
		}
		if ctx.Err() != nil {
			return r.wrap(fmt.Errorf("%w; last: %w", context.Cause(ctx), err))
		}
		var fatal permanent
		switch {
		case errors.As(err, &fatal), errors.Is(err, kgo.ErrClientClosed):
			return r.wrap(err)
		case errors.Is(err, kerr.OffsetOutOfRange), errors.Is(err, errMoved):
			r.cfg.Logger.Warn("snapshot partition: starting over", "position", r.position, "error", err)
			r.table.reset()
			r.position, target = -1, -1
		default:
			var ke *kerr.Error
			if errors.As(err, &ke) && !ke.Retriable {
				return r.wrap(err)
			}
			r.cfg.Logger.Debug("snapshot partition: trying again", "position", r.position, "error", err)
		}
		r.leader = -1
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, longestWait)
	}
}

func (r *Reader) wrap(err error) error {
	return fmt.Errorf("read snapshots: topic %s partition %d at offset %d: %w", r.cfg.Topic, r.cfg.Partition, r.position, err)
}

// step does the next thing: find the leader, the start, the target, or fetch.
func (r *Reader) step(ctx context.Context, target *int64, p *Progress) (done bool, err error) {
	if r.leader < 0 {
		if err := r.findLeader(ctx); err != nil {
			return false, err
		}
	}
	if r.position < 0 {
		start, err := r.listOffset(ctx, -2, true)
		if err != nil {
			return false, err
		}
		r.position = start
		*p = Progress{Start: start}
	}
	if *target < 0 {
		end, err := r.listOffset(ctx, -1, false) // first: a transaction of before is open if it is beyond what is stable then
		if err != nil {
			return false, err
		}
		lso, err := r.listOffset(ctx, -1, true)
		if err != nil {
			return false, err
		}
		if lso < r.position {
			return false, fmt.Errorf("%w: it ends at %d, below the position", errMoved, lso)
		}
		*target = lso
		p.End = max(end, lso)
	}
	if r.position < *target {
		err = r.fetch(ctx, target, p)
	}
	p.Position, p.Target = r.position, *target
	if r.cfg.Progress != nil && err == nil {
		r.cfg.Progress(*p)
	}
	return err == nil && r.position >= *target && *target >= 0, err
}

// findLeader asks for the partition's leader and the topic's id.
func (r *Reader) findLeader(ctx context.Context) error {
	t, err := consumer.Metadata(ctx, r.cfg.Client, r.cfg.Topic)
	part := -1
	for i := range t.Partitions {
		if t.Partitions[i].Partition == r.cfg.Partition {
			part = i
		}
	}
	if err == nil && part < 0 {
		err = kerr.UnknownTopicOrPartition
	}
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		if r.missing++; r.missing >= missingTopics {
			return permanent{err}
		}
		return err
	}
	r.missing = 0
	if err != nil {
		return err
	}
	if r.topicID != t.TopicID {
		known := r.topicID != [16]byte{}
		r.topicID = t.TopicID
		if known {
			return fmt.Errorf("%w: the topic was created anew", errMoved)
		}
	}
	meta := &t.Partitions[part]
	if meta.Leader < 0 {
		return kerr.LeaderNotAvailable
	}
	r.leader, r.epoch = meta.Leader, meta.LeaderEpoch
	return nil
}

// listOffset asks the leader for the log's start (-2) or its end (-1), of what is
// committed the last stable offset. It has to be the leader that findLeader found,
// which consumer.ListBounds does not see to.
func (r *Reader) listOffset(ctx context.Context, timestamp int64, committed bool) (int64, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	if committed {
		req.IsolationLevel = 1
	}
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = r.cfg.Topic
	rp := kmsg.NewListOffsetsRequestTopicPartition()
	rp.Partition = r.cfg.Partition
	rp.CurrentLeaderEpoch = r.epoch
	rp.Timestamp = timestamp
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	kresp, err := r.cfg.Client.Broker(int(r.leader)).Request(ctx, req)
	if err != nil {
		return 0, err
	}
	for _, t := range kresp.(*kmsg.ListOffsetsResponse).Topics {
		for _, p := range t.Partitions {
			return p.Offset, kerr.ErrorForCode(p.ErrorCode)
		}
	}
	return 0, errors.New("list offsets: broker answered for no partition")
}

// fetch reads one response's worth from the position on, and never past the
// target: beyond it a transaction may be cut in two by the response's size.
func (r *Reader) fetch(ctx context.Context, target *int64, p *Progress) error {
	resp, part, err := r.request(ctx)
	if err != nil {
		return err
	}
	if part == nil { // throttled: the broker withholds everything
		return fmt.Errorf("fetch: broker answered for no partition (throttled for %d ms)", resp.ThrottleMillis)
	}
	fp, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
		Offset:         r.position,
		IsolationLevel: kgo.ReadCommitted(),
		Topic:          r.cfg.Topic,
		Partition:      r.cfg.Partition,
	}, part, kgo.DefaultDecompressor(), nil)
	for _, rec := range fp.Records {
		if rec.Offset >= *target {
			break
		}
		p.Records++
		p.Bytes += int64(len(rec.Key) + len(rec.Value))
		if err := r.table.apply(rec.Key, rec.Value); err != nil {
			r.report(rec, err)
		}
	}
	switch {
	case next > r.position:
		r.position = min(next, *target)
	case fp.Err != nil:
		var ke *kerr.Error
		if errors.As(fp.Err, &ke) {
			return fp.Err
		}
		return permanent{fmt.Errorf("fetch: %w", fp.Err)}
	case len(part.RecordBatches) > 0:
		return permanent{fmt.Errorf("fetch: %d bytes without a whole batch", len(part.RecordBatches))}
	case part.LastStableOffset >= *target:
		r.position = *target // compaction removed the rest
	default:
		// A new leader that does not know yet how far the log is stable, or
		// a log that was cut: ask again how far to read.
		was := *target
		*target = -1
		return fmt.Errorf("fetch: nothing at %d, last stable offset %d is below the target %d", r.position, part.LastStableOffset, was)
	}
	return nil
}

// request sends one fetch to the leader. The returned partition is nil if the
// response names none.
func (r *Reader) request(ctx context.Context) (*kmsg.FetchResponse, *kmsg.FetchResponseTopicPartition, error) {
	req := kmsg.NewPtrFetchRequest()
	req.MaxWaitMillis = 0 // what is below the target is there
	req.MinBytes = 1
	req.MaxBytes = r.fetchBytes
	req.IsolationLevel = 1
	rt := kmsg.NewFetchRequestTopic()
	rt.Topic = r.cfg.Topic // up to version 12
	rt.TopicID = r.topicID // from version 13 on
	rp := kmsg.NewFetchRequestTopicPartition()
	rp.Partition = r.cfg.Partition
	rp.CurrentLeaderEpoch = r.epoch
	rp.FetchOffset = r.position
	rp.PartitionMaxBytes = r.fetchBytes
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	kresp, err := r.cfg.Client.Broker(int(r.leader)).Request(ctx, req)
	if err != nil {
		return nil, nil, err
	}
	resp := kresp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, nil, err
	}
	for i := range resp.Topics {
		for j := range resp.Topics[i].Partitions {
			return resp, &resp.Topics[i].Partitions[j], nil
		}
	}
	return resp, nil, nil
}

func (r *Reader) report(rec *kgo.Record, err error) {
	b := BadRecord{Topic: r.cfg.Topic, Partition: r.cfg.Partition, Offset: rec.Offset, Key: string(rec.Key), Err: err}
	r.cfg.Logger.Error("snapshot record cannot be decoded", "offset", b.Offset, "key", b.Key, "error", err)
	if r.cfg.Bad != nil {
		r.cfg.Bad(b)
	}
}
