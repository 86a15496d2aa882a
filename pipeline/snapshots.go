package pipeline

import (
	"context"
	"errors"
	"slices"
	"time"

	"kvindex/schemas"
	"kvindex/snapshot"
)

// This file is the partition goroutine's side of writing snapshots: between two
// batches it copies the worker-ranks that are due, each at its W, which is the
// partition's position at that moment. The saver's goroutine writes them.

// savedState is what a rank knows of its snapshot.
type savedState struct {
	manifest bool      // there is one on the topic, as far as known
	w        int64     // its W
	at       time.Time // when it was written; when the rank was first seen if there is none
	bytes    int64     // of the records applied since its W
	dirty    bool      // records were applied since its W
	force    bool      // write it now
	together bool      // retired with its siblings by a record of one of them, and not written since
	inFlight bool      // part of the round being written
	sent     struct {  // to be put back if that round fails
		w     int64
		bytes int64
		dirty bool
	}
}

// refused takes up why the writer did not write a part of a round. One that is
// behind what is on the topic waits, being due again at once.
func (s *savedState) refused(err error) {
	if errors.Is(err, snapshot.ErrChanged) || errors.Is(err, snapshot.ErrNoManifest) {
		s.force = true
	}
}

func (s *savedState) weigh(bytes int) {
	s.bytes += int64(bytes)
	s.dirty = true
}

// saving is the partition's side of its saver.
type saving struct {
	incarnation int  // of what the partition holds; a result of an older one only says that the round is over
	busy        bool // a round is with the saver
	candidates  []snapshot.Candidate
	picks       []snapshot.Pick
	free        []*snapshot.Packed   // to be used again
	passed      map[snapshot.ID]bool // on the topic but not loaded: neither written nor removed
}

// round is a snapshot.Round on its way to the saver and back.
type round struct {
	snapshot.Round
	incarnation int
	topicID     [16]byte // of the log that the positions are of
}

// manifests returns those that the round writes.
func (r *round) manifests() (all []*schemas.Manifest) {
	for i := range r.Dumps {
		all = append(all, &r.Dumps[i].Manifest)
	}
	for i := range r.Refreshes {
		all = append(all, &r.Refreshes[i].Manifest)
	}
	return all
}

// saveTick takes up what the saver has finished and gives it what is due.
func (p *partition) saveTick(now time.Time) {
	if p.saver == nil {
		return
	}
	select {
	case done := <-p.saver.results:
		p.saveDone(done, now)
	default:
	}
	if p.save.busy || !p.saver.ready.Load() {
		return
	}
	if r := p.nextRound(now, false); r != nil {
		p.save.busy = true
		p.saver.rounds <- r // there is room: no other round is under way
	}
}

// saveLast writes everything that has changed, for the next start to have
// little to replay, as far as the context lets it.
func (p *partition) saveLast(ctx context.Context) {
	if p.saver == nil {
		return
	}
	for p.saver.ready.Load() {
		if !p.save.busy {
			r := p.nextRound(time.Now(), true)
			if r == nil {
				return
			}
			p.save.busy = true
			p.saver.rounds <- r
		}
		select {
		case done := <-p.saver.results:
			p.saveDone(done, time.Now())
			if done.err != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// nextRound copies what is due into a round, or returns nil. With all set, what
// has changed at all is due.
func (p *partition) nextRound(now time.Time, all bool) *round {
	s := &p.save
	s.candidates, s.picks = s.candidates[:0], s.picks[:0]
	policy := p.stage.policy
	for _, w := range p.workers {
		for _, k := range w.ranks {
			if k.saved.at.IsZero() {
				k.saved.at = now
			}
			if all && !k.saved.dirty {
				continue
			}
			s.candidates = append(s.candidates, snapshot.Candidate{ID: k.id(), Counters: snapshot.Counters{
				EventBytes:  k.saved.bytes,
				Blocks:      k.held(),
				Changed:     k.changedAt > k.saved.w,
				HasManifest: k.saved.manifest,
				Saved:       k.saved.at,
				Force:       k.saved.force || all,
			}})
		}
	}
	s.picks = policy.Plan(s.picks, s.candidates, p.stage.budget, now)
	r := &round{Round: snapshot.Round{Position: p.position}, incarnation: s.incarnation, topicID: p.topicID}
	floor := p.saver.floor.Load()
	for id, last := range p.forgotten {
		if floor > last {
			r.Deletes = append(r.Deletes, id)
		}
	}
	if len(s.picks) == 0 && len(r.Deletes) == 0 {
		return nil
	}
	s.picks = p.withSiblings(s.picks)
	for _, pick := range s.picks {
		k := p.rank(pick.ID)
		k.saved.inFlight = true
		k.saved.sent.w, k.saved.sent.bytes, k.saved.sent.dirty = p.position, k.saved.bytes, k.saved.dirty
		k.saved.bytes, k.saved.dirty = 0, false
		m := p.manifest(k)
		if pick.Action == snapshot.RefreshNow {
			r.Refreshes = append(r.Refreshes, snapshot.Refresh{Manifest: m, Changed: k.changedAt})
			continue
		}
		packed := s.packed()
		if k.blocks != nil {
			k.blocks.Dump(packed.Add)
		}
		r.Dumps = append(r.Dumps, snapshot.Dump{Manifest: m, Blocks: packed})
	}
	for _, w := range p.workers {
		for _, k := range w.ranks {
			if !k.saved.manifest {
				r.Unsaved = append(r.Unsaved, snapshot.Unsaved{ID: k.id(), First: k.firstOffset})
			}
		}
	}
	return r
}

// withSiblings adds to the picks the worker-ranks that must not be left behind
// by them. A record that retires a worker is of one of its ranks, and a replay
// passes it over for that rank once its W is past it: a sibling whose W is not
// would come back to life.
func (p *partition) withSiblings(picks []snapshot.Pick) []snapshot.Pick {
	picked := make(map[snapshot.ID]bool, len(picks))
	for _, pick := range picks {
		picked[pick.ID] = true
	}
	for _, pick := range picks {
		for _, k := range p.workers[pick.ID.Worker].ranks {
			if k.saved.together && !picked[k.id()] {
				picked[k.id()] = true
				picks = append(picks, snapshot.Pick{ID: k.id(), Action: snapshot.DumpNow})
			}
		}
	}
	return picks
}

func (s *saving) packed() *snapshot.Packed {
	if n := len(s.free); n > 0 {
		packed := s.free[n-1]
		s.free = s.free[:n-1]
		packed.Reset()
		return packed
	}
	return new(snapshot.Packed)
}

// freePacked bounds the buffers kept for the next round.
const freePacked = 4

// manifest describes a rank at the partition's position.
func (p *partition) manifest(k *rank) schemas.Manifest {
	return schemas.Manifest{
		Worker:       k.worker.name,
		Rank:         k.number,
		W:            p.position,
		LeaderEpoch:  p.leaderEpoch,
		Model:        k.model.Name,
		BlockSize:    int32(k.model.BlockSize),
		Hasher:       k.model.Hasher,
		Epoch:        k.epoch,
		EpochStarted: k.epochStarted,
		Seq:          k.seq.Load(),
		Producer:     k.producer,
		LastHeard:    k.lastHeard.Load(),
		LastOffset:   k.lastOffset,
		Incomplete:   k.incomplete.Load(),
		Retired:      k.retired,
		RetiredAt:    k.retiredAt,
	}
}

// saveDone books what became of a round.
func (p *partition) saveDone(done roundResult, now time.Time) {
	if done.round == nil { // the saver took up the duty and read what is on the topic
		p.adopt(done.onTopic)
		return
	}
	s := &p.save
	s.busy = false
	for _, d := range done.round.Dumps {
		if len(s.free) < freePacked {
			s.free = append(s.free, d.Blocks)
		}
	}
	if done.round.incarnation != s.incarnation {
		return
	}
	if done.err == nil {
		for _, id := range done.round.Deletes {
			delete(p.forgotten, id) // removed, or not there
		}
	}
	for _, id := range done.Written {
		if k := p.rank(id); k != nil && k.saved.inFlight {
			k.saved.inFlight, k.saved.force = false, false
			k.saved.together = k.changedAt > k.saved.sent.w && k.saved.together
			k.saved.manifest, k.saved.w, k.saved.at = true, k.saved.sent.w, now
		}
	}
	// A rank that was forgotten while its snapshot was being written has left
	// one behind.
	for _, m := range done.round.manifests() {
		id := snapshot.ID{Worker: m.Worker, Rank: m.Rank}
		if p.rank(id) == nil && slices.Contains(done.Written, id) {
			p.forgotten[id] = m.LastOffset
		}
	}
	// Everything else of the round is as it was before.
	for _, w := range p.workers {
		for _, k := range w.ranks {
			if k.saved.inFlight {
				k.saved.inFlight = false
				k.saved.bytes += k.saved.sent.bytes
				k.saved.dirty = k.saved.dirty || k.saved.sent.dirty
			}
		}
	}
	for _, refused := range done.Refused {
		if k := p.rank(refused.ID); k != nil {
			k.saved.refused(refused.Err)
		}
	}
}

// adopt learns what is on the topic when the duty is taken up: a manifest of a
// worker-rank that is forgotten here is to go, one that another instance wrote
// is there.
func (p *partition) adopt(onTopic []schemas.Manifest) {
	there := make(map[snapshot.ID]int64, len(onTopic))
	clear(p.forgotten) // another instance may have removed them, or written them anew
	for _, m := range onTopic {
		id := snapshot.ID{Worker: m.Worker, Rank: m.Rank}
		there[id] = m.W
		if p.blind && p.rank(id) == nil {
			p.log.Error("a snapshot appeared that was not there at the restore: it is neither answered from nor removed until a restart",
				"worker", m.Worker, "rank", m.Rank)
			p.save.passed[id] = true
		}
		if p.rank(id) == nil && m.W <= p.position && !p.save.passed[id] {
			p.forgotten[id] = m.LastOffset
		}
	}
	for _, w := range p.workers {
		for _, k := range w.ranks {
			w, ok := there[k.id()]
			if k.saved.manifest && !ok {
				k.saved.force = true
			}
			k.saved.manifest, k.saved.w = ok, w
		}
	}
}

func (p *partition) rank(id snapshot.ID) *rank {
	if w := p.workers[id.Worker]; w != nil {
		return w.rank(id.Rank)
	}
	return nil
}
