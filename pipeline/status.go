package pipeline

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/pipeline/query"
)

// This file is what the query side sees of the stage: query.Source.

var _ query.Source = (*Stage)(nil)

// Readiness implements query.Source: ready when the topic is known and every
// partition of it is live.
func (s *Stage) Readiness() query.Readiness {
	parts := s.consumer.Partitions()
	if len(parts) == 0 {
		text := s.cfg.Topic + ": waiting for the topic"
		if problem := s.consumer.Problem(); problem != "" {
			text += ": " + problem
		}
		return query.Readiness{Missing: []string{text}}
	}
	var missing []string
	for _, p := range parts {
		if p.State() == consumer.Live {
			continue
		}
		text := fmt.Sprintf("%s/%d: %s", s.cfg.Topic, p.Number, p.State())
		if p.State() == consumer.CatchingUp {
			text += fmt.Sprintf(", %d offsets behind", p.End()-p.Position())
		}
		if problem := p.Problem(); problem != "" {
			text += ": " + problem
		}
		missing = append(missing, text)
	}
	return query.Readiness{Ready: len(missing) == 0, Missing: missing}
}

// Model implements query.Source.
func (s *Stage) Model(name string, blockSize int, hasher string) (query.Model, error) {
	return s.models.resolve(name, blockSize, hasher)
}

// Now implements query.Source.
func (s *Stage) Now() time.Time { return time.Now() }

// Positions implements query.Source.
func (s *Stage) Positions(dst []query.Position) []query.Position {
	for _, p := range s.consumer.Partitions() {
		pos := query.Position{Next: p.AppliedTo()} // the position of what was dropped says nothing of what is loaded
		if lag := p.End() - pos.Next; p.State() == consumer.Live && lag > s.cfg.ReadyLag {
			pos.Behind = lag
		}
		dst = append(dst, pos)
	}
	return dst
}

// Applied implements query.Source.
func (s *Stage) Applied(n int32, offset int64) (bool, error) {
	p, err := s.reading(n)
	return err == nil && p.Applied(offset), err
}

// AwaitApplied implements query.Source.
func (s *Stage) AwaitApplied(ctx context.Context, n int32, offset int64) error {
	p, err := s.reading(n)
	if err != nil {
		return err
	}
	return p.AwaitApplied(ctx, offset)
}

// reading finds a partition that the topic has.
func (s *Stage) reading(n int32) (*consumer.Partition, error) {
	parts := s.consumer.Partitions()
	if n < 0 || int(n) >= len(parts) {
		return nil, fmt.Errorf("%w %d: %s has %d, as far as is known", query.ErrUnknownPartition, n, s.cfg.Topic, len(parts))
	}
	return parts[n], nil
}

// Worker implements query.Source.
func (s *Stage) Worker(w *index.Worker, now time.Time) query.WorkerState {
	k := w.Tag.(*rank)
	age := k.partition.clock.age(k.lastHeard.Load(), now)
	return query.WorkerState{
		Hidden:     age > s.cfg.WorkerTTL || k.elsewhere.Load(),
		Incomplete: k.incomplete.Load() || k.rivalled.Load(),
		Age:        age,
		Partition:  k.partition.number,
	}
}

// Workers implements query.Source.
func (s *Stage) Workers(model string) []query.WorkerStatus {
	now := time.Now()
	var out []query.WorkerStatus
	for _, p := range s.partitions() {
		p.listing.Range(func(_, v any) bool {
			k := v.(*rank)
			st := k.status.Load()
			if st == nil || st.gone || k.elsewhere.Load() || model != "" && st.model.Name != model {
				return true
			}
			age := p.clock.age(k.lastHeard.Load(), now)
			row := query.WorkerStatus{
				Worker:     k.worker.name,
				Rank:       k.number,
				Model:      st.model.Name,
				BlockSize:  st.model.BlockSize,
				Hasher:     st.model.Hasher,
				Partition:  p.number,
				Epoch:      st.epoch,
				Seq:        k.seq.Load(),
				Age:        age,
				Silent:     age > s.cfg.WorkerTTL,
				Incomplete: !st.retired && (k.incomplete.Load() || k.rivalled.Load()),
				Retired:    st.retired,
			}
			for t := range row.Blocks {
				row.Blocks[t] = int(k.shown[t].Load())
			}
			out = append(out, row)
			return true
		})
	}
	slices.SortFunc(out, func(a, b query.WorkerStatus) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Partition, b.Partition))
	})
	return out
}

// Status implements query.Source.
func (s *Stage) Status() query.Status {
	topic := s.consumer.Topic()
	st := query.Status{
		Ready:     s.Readiness().Ready,
		Group:     s.cfg.Group,
		Instance:  s.cfg.Instance,
		Version:   s.cfg.Version,
		Started:   s.started,
		Events:    topicStatus(s.cfg.Topic, &topic),
		Snapshots: topicStatus(s.cfg.SnapshotTopic, s.place.Load()),
		Counters:  map[string]int64{},
	}
	if s.cfg.SnapshotTopic == "" {
		st.Warnings = append(st.Warnings, "snapshots are disabled: a restart replays the events topic from its start")
	}
	if problem := s.consumer.Problem(); problem != "" && topic.Partitions > 0 {
		st.Warnings = append(st.Warnings, "the events topic cannot be looked at, answers are from memory: "+problem)
	}
	if lacks := s.noPlace.Load(); lacks != nil {
		st.Warnings = append(st.Warnings, "snapshots are not written, or not of every partition: "+*lacks)
	}
	if why := s.noDuty.Load(); why != nil {
		st.Warnings = append(st.Warnings, "this instance may be dealt no snapshots to write, it is not in the group for that: "+*why)
	}
	mine := s.partitions()
	now := time.Now()
	for i, cp := range s.consumer.Partitions() {
		row := query.PartitionStatus{
			Partition: cp.Number,
			State:     cp.State().String(),
			Position:  cp.Position(),
			End:       cp.End(),
			Lag:       cp.End() - cp.Position(),
			StartedAt: cp.Start(),
			Floor:     -1,
			Paused:    cp.Paused(),
			Problem:   cp.Problem(),
		}
		if i < len(mine) {
			p := mine[i]
			row.Workers = int(p.ranks.Load())
			if n := p.unknown(); n > 0 {
				st.Warnings = append(st.Warnings, fmt.Sprintf("%s/%d: %d worker-ranks are not answered until their next epoch, or for twice worker-grace: what trimmed records did to them is lost", s.cfg.Topic, cp.Number, n))
			}
			row.Reread = p.reread.Load()
			row.RestoreSeconds = time.Duration(p.took.Load()).Seconds()
			if text, foreign := p.held.Load().problem(now); foreign {
				st.Warnings = append(st.Warnings, fmt.Sprintf("%s/%d: %s", s.cfg.SnapshotTopic, cp.Number, text))
			}
			if v := p.saver; v != nil {
				row.Floor = v.floor.Load()
				row.SnapshotDuty = v.turn.Load() != 0
				if at := v.written.Load(); at > 0 && row.SnapshotDuty {
					row.SnapshotAge = now.Sub(time.UnixMilli(at))
				}
				if n := p.passed.Load(); n > 0 {
					st.Warnings = append(st.Warnings, fmt.Sprintf("%s/%d: snapshots of %d worker-ranks of models not served here hold the floor", s.cfg.Topic, cp.Number, n))
				}
				if problem := v.problem.Load(); problem != nil {
					st.Warnings = append(st.Warnings, fmt.Sprintf("snapshots of %s/%d: %s", s.cfg.Topic, cp.Number, *problem))
				}
			}
		}
		st.Partitions = append(st.Partitions, row)
	}
	for k := range counter(numCounters) {
		var n int64
		for _, p := range mine {
			n += p.counts[k].Load()
		}
		st.Counters[counterNames[k].name] = n
	}
	for _, m := range s.models.all() {
		stats := m.Index.Stats()
		st.Models = append(st.Models, query.ModelStatus{
			Model: m.Name, BlockSize: m.BlockSize, Hasher: m.Hasher, Workers: stats.Workers, Blocks: stats.Blocks,
		})
	}
	slices.SortFunc(st.Models, func(a, b query.ModelStatus) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.BlockSize, b.BlockSize), cmp.Compare(a.Hasher, b.Hasher))
	})
	return st
}

// topicStatus names a topic, with its id once it has been seen.
func topicStatus(name string, seen *consumer.Topic) query.TopicStatus {
	st := query.TopicStatus{Name: name}
	if seen != nil && seen.ID != [16]byte{} {
		st.ID = fmt.Sprintf("%x", seen.ID)
	}
	return st
}
