package pipeline

// This file watches for transactions on the snapshot topic that are not the stage's own
// and do not end. Committed records past one are not seen by anybody who restores.

import (
	"context"
	"fmt"
	"time"

	"kvindex/consumer"
	"kvindex/snapshot"
)

// held is an open transaction on a snapshot partition, as it was last looked at.
type held struct {
	stable, end int64     // last stable offset, and the log's end
	since       time.Time // when the last stable offset was first seen there, below the end
	told        bool      // in the log
}

// look takes up where a partition's log is stable and where it ends. It returns nil if
// no transaction is open.
func (h *held) look(stable, end int64, now time.Time) *held {
	switch {
	case stable >= end:
		return nil
	case h != nil && h.stable == stable:
		return &held{stable, end, h.since, h.told}
	}
	return &held{stable: stable, end: end, since: now}
}

// heldLimit is more than a transaction of a stage's own can last: the brokers end it after
// snapshot.TransactionTimeout, and look for such every 10 s by default.
const heldLimit = snapshot.TransactionTimeout + 30*time.Second

// problem says that the transaction is another's.
func (h *held) problem(now time.Time) (string, bool) {
	if h == nil || now.Sub(h.since) <= heldLimit {
		return "", false
	}
	return fmt.Sprintf("a transaction that no stage has begun holds the last stable offset at %d, the log ends at %d: a restart sees nothing that was written between until it ends",
		h.stable, h.end), true
}

// heldPause is between two looks: what is looked for lasts minutes.
const heldPause = 10 * time.Second

// lookForHeld looks at all partitions of the snapshot topic.
func (s *Stage) lookForHeld(ctx context.Context, now time.Time) {
	place := s.place.Load()
	if place == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var numbers []int32
	for _, p := range s.partitions() {
		if p.number < place.Partitions {
			numbers = append(numbers, p.number)
		}
	}
	// What could not be asked is absent; whoever writes says that brokers are away.
	ends, _ := consumer.ListEnds(ctx, s.aux, place.Name, numbers)
	bounds, _ := consumer.ListBounds(ctx, s.aux, place.Name, numbers)
	for _, p := range s.partitions() {
		end, ok := ends[p.number]
		b, also := bounds[p.number]
		if !ok || !also {
			continue
		}
		h := p.held.Load().look(b.End, end, now)
		if text, foreign := h.problem(now); foreign && !h.told {
			h.told = true
			s.log.Warn("snapshot partition: "+text, "topic", place.Name, "partition", p.number, "last_stable_offset", h.stable, "end", h.end)
		}
		p.held.Store(h)
	}
}

// heldFor is for how long the last stable offset of the partition's snapshots has
// stood still below the log's end.
func (p *partition) heldFor(now time.Time) time.Duration {
	if h := p.held.Load(); h != nil {
		return now.Sub(h.since)
	}
	return 0
}
