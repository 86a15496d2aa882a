// This file writes a partition's snapshots while this instance has the duty.

package pipeline

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"kvindex/consumer"
	"kvindex/schemas"
	"kvindex/snapshot"
)

// saver is the goroutine that writes one partition's snapshots while this
// instance has the duty. It waits for brokers so that the partition does not.
type saver struct {
	p       *partition
	log     *slog.Logger
	rounds  chan *round           // from the partition's goroutine, one at a time
	results chan roundResult      // back to it
	duties  chan bool             // the duty was given or taken; only the newest counts
	readers chan *snapshot.Reader // what restore read, for the first takeover to go on from
	drops   chan struct{}         // the partition forgot everything: the topic must be looked at anew
	turns   int64                 // how many times the duty was taken up

	// Shared.
	turn    atomic.Int64 // number of the present turn, 0 if this instance is not writing
	floor   atomic.Int64 // on the topic, -1 if none or unknown
	written atomic.Int64 // unix milliseconds of the last round written, 0 if none
	problem atomic.Pointer[string]
}

// roundResult is what became of a round; without one it is what was on the
// topic when the duty was taken up.
type roundResult struct {
	round *round
	snapshot.Result
	err error

	turn    int64
	onTopic []onTopic
	end     int64 // of the log then
}

// onTopic is a worker-rank on the topic.
type onTopic struct {
	id       snapshot.ID
	manifest *schemas.Manifest // nil if it cannot be read; not to be changed
}

func newSaver(p *partition) *saver {
	s := &saver{
		p:       p,
		log:     p.log.With("snapshot_topic", p.stage.cfg.SnapshotTopic),
		rounds:  make(chan *round, 1),
		results: make(chan roundResult, 2),
		duties:  make(chan bool, 1),
		readers: make(chan *snapshot.Reader, 1),
		drops:   make(chan struct{}, 1),
	}
	s.floor.Store(-1)
	return s
}

// offer hands over a reader that has read the partition of the snapshot topic.
func (s *saver) offer(r *snapshot.Reader) {
	r.Table().DropPayloads()
	if f, ok := r.Table().Floor(); ok {
		s.floor.Store(f.Offset)
	}
	select {
	case <-s.readers:
	default:
	}
	s.readers <- r
}

// assign says whether this instance has the duty.
func (s *saver) assign(has bool) {
	select {
	case <-s.duties:
	default:
	}
	s.duties <- has
}

// drop says that the partition forgot everything it held.
func (s *saver) drop() {
	s.floor.Store(-1)
	select {
	case s.drops <- struct{}{}:
	default:
	}
}

func (s *saver) setProblem(err error) {
	if err == nil {
		s.problem.Store(nil)
		return
	}
	text := err.Error()
	s.problem.Store(&text)
}

// run is the saver's goroutine.
func (s *saver) run(ctx context.Context) {
	has := false
	failed := time.Duration(0) // the pause after the last failure
	var again <-chan time.Time // after being fenced: when to see whether the group still means this instance
	for {
		if !has {
			select {
			case <-ctx.Done():
				return
			case has = <-s.duties:
			case <-again:
				has = s.p.stage.assigned(s.p.number)
			case r := <-s.rounds: // sent at the moment a turn ended
				s.answer(ctx, roundResult{round: r, err: errDutyTaken})
				continue
			}
			again, failed = nil, 0
			continue
		}
		err := s.serve(ctx)
		if s.turn.Swap(0) != 0 {
			failed = 0
		}
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errDutyTaken):
			has = false
			s.setProblem(nil)
		case errors.Is(err, snapshot.ErrFenced):
			has = false
			s.p.counts.add(snapshotFenced, 1)
			s.setProblem(nil)
			// Usually the group's next word follows. A broker that gave up on a
			// transaction fences too, though, and then nobody else is coming.
			again = time.After(fencedPause + rand.N(fencedPause/2))
			s.log.Warn("another instance writes this partition's snapshots now, the duty is dropped", "error", err)
		default:
			wait := s.p.stage.cfg.Tick
			if !errors.Is(err, errNotLive) && !errors.Is(err, errDropped) {
				failed = min(max(2*failed, s.p.stage.saveRetry), maxSaveRetry)
				wait = failed
				s.setProblem(err)
				s.p.counts.add(snapshotFailures, 1)
				s.log.Error("snapshots are not being written, trying again", "error", err, "wait", wait)
			}
			select {
			case <-ctx.Done():
				return
			case has = <-s.duties:
			case r := <-s.rounds:
				s.answer(ctx, roundResult{round: r, err: errDropped})
			case <-time.After(wait):
			}
		}
	}
}

// maxSaveRetry is the longest pause between two attempts to take up the duty.
const maxSaveRetry = 30 * time.Second

// fencedPause is how long a fenced writer leaves the duty alone although the
// group still deals it to this instance.
const fencedPause = 20 * time.Second

var (
	errDutyTaken = errors.New("the duty was given to another instance")
	errNotLive   = errors.New("the partition is not live yet")
	errDropped   = errors.New("the partition is being restored again")
)

// serve takes up the duty and writes rounds until something ends it.
func (s *saver) serve(ctx context.Context) error {
	select {
	case <-s.drops: // what follows looks anew
	default:
	}
	// A partition that is still catching up is below what is on the topic: it
	// could only be refused, and would fence one that is not.
	if !s.p.stage.live(s.p.number) {
		return errNotLive
	}
	cfg := &s.p.stage.cfg
	source := s.p.stage.consumer.Topic()
	st, err := consumer.DescribeTopic(ctx, s.p.stage.aux, cfg.SnapshotTopic)
	if err != nil {
		return err
	}
	if s.p.number >= st.Partitions {
		return errNoSnapshotPartition
	}
	var reader *snapshot.Reader
	select {
	case reader = <-s.readers:
	default:
		reader = s.p.newReader()
	}
	w, err := snapshot.NewWriter(snapshot.WriterConfig{
		Group:     cfg.Group,
		Source:    source,
		Topic:     cfg.SnapshotTopic,
		Partition: s.p.number,
		Client:    s.p.stage.aux,
		Opts:      cfg.kafka("snapshot"),
		Reader:    reader,
		Hook:      s.p.stage.snapshotHook(s.p.number),
		Logger:    s.log,
	})
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Take(ctx); err != nil {
		return err
	}
	bounds, reason, err := s.p.stale(ctx, source, w.Table())
	if err != nil {
		return err
	}
	if reason != "" {
		s.log.Warn("snapshots of another log are removed", "reason", reason)
		if err := w.Discard(ctx, func(*schemas.Manifest) bool { return true }); err != nil {
			return err
		}
	}
	s.turns++
	s.turn.Store(s.turns)
	s.tell(ctx, w, bounds.End) // the former writer was at most there
	s.setProblem(nil)
	s.log.Info("writing this partition's snapshots")
	return s.write(ctx, w, source)
}

// tell gives the partition what is on the topic; it gives rounds in return.
func (s *saver) tell(ctx context.Context, w *snapshot.Writer, end int64) {
	t := w.Table()
	all := make([]onTopic, 0, len(t.IDs()))
	for _, id := range t.IDs() {
		all = append(all, onTopic{id, t.Manifest(id)})
	}
	s.floor.Store(-1)
	if f, ok := t.Floor(); ok {
		s.floor.Store(f.Offset)
	}
	s.answer(ctx, roundResult{turn: s.turns, onTopic: all, end: end})
}

func (s *saver) answer(ctx context.Context, r roundResult) {
	select {
	case s.results <- r:
	case <-ctx.Done():
	}
}

// write writes the rounds that the partition gives.
func (s *saver) write(ctx context.Context, w *snapshot.Writer, source consumer.Topic) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case has := <-s.duties:
			if !has {
				return errDutyTaken
			}
		case <-s.drops:
			return errDropped
		case r := <-s.rounds:
			// A round of an earlier turn may be of a log that is gone, and so may
			// one of a partition that has yet to hear of its topic's end.
			if r.turn != s.turns || r.topicID != source.ID {
				s.answer(ctx, roundResult{round: r, err: errDropped})
				continue
			}
			res, err := s.writeRound(ctx, w, &r.Round)
			s.answer(ctx, roundResult{round: r, Result: res, err: err})
			s.p.counts.add(snapshotBytes, int(res.Bytes))
			switch {
			case errors.Is(err, snapshot.ErrBehind):
				s.log.Info("waiting to be where the snapshots are", "error", err)
				continue
			case err != nil:
				return err
			}
			s.p.counts.add(snapshotRounds, 1)
			if len(s.drops) == 0 { // else it is the floor of a log that is gone
				s.floor.Store(res.Floor)
			}
			s.written.Store(time.Now().UnixMilli())
			s.setProblem(res.CommitErr)
			if t := s.p.stage.consumer.Topic(); t.ID != source.ID || t.Partitions != source.Partitions {
				return snapshot.ErrSource
			}
		}
	}
}

// writeRound writes one round, measured and under a span.
func (s *saver) writeRound(ctx context.Context, w *snapshot.Writer, r *snapshot.Round) (snapshot.Result, error) {
	began := time.Now()
	spanCtx, span := s.p.startSpan("kvindex.snapshot")
	res, err := w.Write(ctx, *r)
	if err == nil {
		record(spanCtx, s.p.stage.measures.snapshot, began)
	}
	span.SetAttributes(
		attribute.Int64("kvindex.offset.position", r.Position),
		attribute.Int("kvindex.snapshot.dumps", len(r.Dumps)),
		attribute.Int("kvindex.snapshot.refreshes", len(r.Refreshes)),
		attribute.Int("kvindex.snapshot.deletes", len(r.Deletes)),
		attribute.Int("kvindex.snapshot.written", len(res.Written)),
		attribute.Int("kvindex.snapshot.refused", len(res.Refused)),
		attribute.Int("kvindex.snapshot.records", res.Records),
		attribute.Int64("kvindex.snapshot.bytes", res.Bytes),
		attribute.Int64("kvindex.offset.floor", res.Floor),
	)
	endSpan(span, err)
	return res, err
}
