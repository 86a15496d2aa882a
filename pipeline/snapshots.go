package pipeline

import (
	"context"
	"errors"
	"maps"
	"math"
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
	incarnation int          // of what the partition holds; a result of an older one only says that the round is over
	adopted     int64        // the saver's turn whose start was taken notice of
	told        *roundResult // what was on the topic at the start of a turn, until it is taken notice of
	busy        bool         // a round is with the saver
	candidates  []snapshot.Candidate
	picks       []snapshot.Pick
	free        []*snapshot.Packed   // to be used again
	passed      map[snapshot.ID]bool // on the topic but not loaded: neither written nor removed
}

// goner is a worker-rank that is forgotten but has a manifest on the topic. It
// can go once a replay no longer reaches the worker-rank's records, which
// would bring it back: once the floor is past them. A manifest that holds the
// floor below them is first replaced by one that says that it is forgotten.
type goner struct {
	manifest schemas.Manifest // to be written in its place, but for W; empty if it cannot be read
	w        int64            // of the manifest on the topic, -1 if there is none or it cannot be read
	first    int64            // without a manifest the floor must not pass this offset, unless it passes after
	after    int64            // the floor must be past this offset
	at       int64            // broker time when it was forgotten, unix milliseconds
}

// unsaved reports whether a replay could begin among the worker-rank's records with
// nothing to say that it was known before.
func (g *goner) unsaved(floor int64) bool {
	return g.w < 0 && floor <= g.after && g.manifest.Worker != ""
}

// newGoner takes what a manifest said last of a worker-rank.
func newGoner(m schemas.Manifest, after int64) *goner {
	w := m.W
	m.Retired, m.RetiredAt, m.Incomplete, m.LastOffset = true, forgottenAt, false, after
	return &goner{manifest: m, w: w, first: never, after: after}
}

// forgottenAt is the time of retirement of one that is forgotten: the next
// record after its W, whatever its time, finds it so long retired.
const forgottenAt = math.MinInt64 / 4

// round is a snapshot.Round on its way to the saver and back.
type round struct {
	snapshot.Round
	incarnation int
	turn        int64    // of the saver that it is for
	topicID     [16]byte // of the log that its offsets are of
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

// hasDuty reports whether rounds are wanted: the saver has taken up the duty,
// and the partition has taken notice of what was on the topic then.
func (p *partition) hasDuty() bool {
	return p.saver != nil && p.save.adopted != 0 && p.save.adopted == p.saver.turn.Load()
}

// saveTick takes up what the saver has finished and gives it what is due.
func (p *partition) saveTick(now time.Time) error {
	if p.saver == nil {
		return nil
	}
	for {
		select {
		case done := <-p.saver.results:
			if err := p.saveDone(done, now); err != nil {
				return err
			}
			continue
		default:
		}
		break
	}
	if told := p.save.told; told != nil && p.position >= told.end {
		p.save.told = nil
		if err := p.adopt(told); err != nil {
			return err
		}
	}
	if !p.save.busy && p.hasDuty() {
		p.give(p.nextRound(now, p.stage.budget, false))
	}
	return nil
}

// give hands a round to the saver, if there is one.
func (p *partition) give(r *round) {
	if r != nil {
		p.save.busy = true
		p.saver.rounds <- r // there is room: no other round is under way
	}
}

// saveLast writes everything that has changed, for the next start to have
// little to replay, as far as the context lets it.
func (p *partition) saveLast(ctx context.Context) {
	wake := time.NewTicker(100 * time.Millisecond)
	defer wake.Stop()
	for p.hasDuty() && ctx.Err() == nil {
		if !p.save.busy {
			p.give(p.nextRound(time.Now(), snapshot.NewBudget(0, 0), true))
		}
		if !p.save.busy {
			return
		}
		select {
		case done := <-p.saver.results:
			// Who is behind, or cannot write now, will not get further here.
			if err := p.saveDone(done, time.Now()); err != nil || done.err != nil || done.round != nil && len(done.Written) == 0 {
				return
			}
		case <-wake.C: // the saver may have lost the duty
		case <-ctx.Done():
		}
	}
}

// nextRound copies what is due into a round, or returns nil. With all set,
// whatever had a record since its W is due.
func (p *partition) nextRound(now time.Time, budget *snapshot.Budget, all bool) *round {
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
			c := snapshot.Counters{
				EventBytes:  k.saved.bytes,
				Blocks:      k.held(),
				Changed:     k.changedAt > k.saved.w,
				HasManifest: k.saved.manifest,
				Saved:       k.saved.at,
				Force:       k.saved.force,
			}
			if all {
				c.Saved = time.Time{} // older than any age
			}
			s.candidates = append(s.candidates, snapshot.Candidate{ID: k.id(), Counters: c})
		}
	}
	s.picks = policy.Plan(s.picks, s.candidates, budget, now)
	r := &round{Round: snapshot.Round{Position: p.position, PastLostAt: p.lostAll.told()}, incarnation: s.incarnation, turn: s.adopted, topicID: p.topicID}
	workers := map[string]bool{} // of which anything is written
	for _, pick := range s.picks {
		workers[pick.ID.Worker] = true
	}
	floor := p.saver.floor.Load()
	replaced := 0 // manifests; they have room of their own, or who is due at all times would leave none
	for _, id := range slices.SortedFunc(maps.Keys(p.forgotten), snapshot.ID.Compare) {
		g := p.forgotten[id]
		switch {
		case floor > g.after && p.outlived(id):
			r.Deletes = append(r.Deletes, id)
		case g.manifest.Worker != "" && g.w <= g.after && replaced < policy.RoundCount:
			workers[id.Worker] = true
			replaced++
		}
	}
	if len(workers) == 0 && len(r.Deletes) == 0 {
		return nil
	}
	// One that stays for a loss must not hold the floor. If it has a sibling, that
	// one's manifest does, and both are written at once.
	if len(workers) > 0 {
		for id := range p.forgotten {
			if !p.outlived(id) && p.workers[id.Worker] == nil {
				workers[id.Worker] = true
			}
		}
	}
	for id, g := range p.forgotten {
		if g.manifest.Worker != "" && workers[id.Worker] && (floor <= g.after || !p.outlived(id)) {
			m := g.manifest
			m.W, m.LeaderEpoch = p.position, p.leaderEpoch
			if l := p.lossOf(id); l != nil {
				m.PastLostAt = l.at
			}
			r.Dumps = append(r.Dumps, snapshot.Dump{Manifest: m})
		}
	}
	s.picks = p.withSiblings(s.picks, workers)
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
		packed := s.packed(p.stage.chunkBytes)
		if k.blocks != nil {
			k.blocks.Dump(packed.Add)
		}
		r.Dumps = append(r.Dumps, snapshot.Dump{Manifest: m, Blocks: packed})
	}
	for id, g := range p.forgotten {
		if g.unsaved(floor) {
			r.Unsaved = append(r.Unsaved, snapshot.Unsaved{ID: id, First: g.first})
		}
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

// withSiblings adds to the picks the other ranks of the workers of which
// anything is written, so that all ranks of a worker have one W. A record that
// retires a worker is of one of its ranks, and a replay passes it over for that
// rank once its W is past it: a sibling whose W is not would come back to life.
func (p *partition) withSiblings(picks []snapshot.Pick, workers map[string]bool) []snapshot.Pick {
	picked := make(map[snapshot.ID]bool, len(picks))
	for _, pick := range picks {
		picked[pick.ID] = true
	}
	for name := range workers {
		w := p.workers[name]
		if w == nil {
			continue // all its ranks are forgotten
		}
		for _, k := range w.ranks {
			if picked[k.id()] {
				continue
			}
			action := snapshot.RefreshNow
			if k.changedAt > k.saved.w || !k.saved.manifest || k.saved.force {
				action = snapshot.DumpNow
			}
			picks = append(picks, snapshot.Pick{ID: k.id(), Action: action})
		}
	}
	return picks
}

func (s *saving) packed(chunkBytes int) *snapshot.Packed {
	if n := len(s.free); n > 0 {
		packed := s.free[n-1]
		s.free = s.free[:n-1]
		packed.Reset()
		return packed
	}
	return &snapshot.Packed{ChunkBytes: chunkBytes}
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
		PastLostAt:   k.past.told(),
		Disputed:     k.disputed,
		Retired:      k.retired,
		RetiredAt:    k.retiredAt,
	}
}

// saveDone books what became of a round.
func (p *partition) saveDone(done roundResult, now time.Time) error {
	if done.round == nil { // the saver took up the duty and read what is on the topic
		p.save.told = &done
		return nil
	}
	s := &p.save
	s.busy = false
	for _, d := range done.round.Dumps {
		if d.Blocks != nil && len(s.free) < freePacked {
			s.free = append(s.free, d.Blocks)
		}
	}
	if done.round.incarnation != s.incarnation {
		return nil
	}
	if done.err == nil {
		refused := func(id snapshot.ID) bool {
			return slices.ContainsFunc(done.Refused, func(r snapshot.Refusal) bool { return r.ID == id })
		}
		for _, id := range done.round.Deletes {
			if !refused(id) {
				delete(p.forgotten, id) // removed, or not there
			}
		}
	}
	for _, id := range done.Written {
		if k := p.rank(id); k != nil && k.saved.inFlight {
			k.saved.inFlight, k.saved.force = false, false
			k.saved.manifest, k.saved.w, k.saved.at = true, k.saved.sent.w, now
			delete(p.spoiled, id)
		}
	}
	// A rank that was forgotten while its snapshot was being written has left
	// one behind.
	for _, m := range done.round.manifests() {
		id := snapshot.ID{Worker: m.Worker, Rank: m.Rank}
		if p.rank(id) != nil || !slices.Contains(done.Written, id) {
			continue
		}
		if g := p.forgotten[id]; g != nil {
			g.w = m.W
		} else {
			p.forgotten[id] = newGoner(*m, p.position-1)
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
		p.counts.add(snapshotRefused, 1)
		if passed, more := p.limiter.allow(snapshotRefused, now); passed {
			p.log.Warn("snapshot of a worker-rank was not written, it will be tried again", "worker", refused.ID.Worker, "rank", refused.ID.Rank,
				"offset", done.round.Position, "error", refused.Err, "not_logged", more)
		}
		if k := p.rank(refused.ID); k != nil {
			k.saved.refused(refused.Err)
		}
	}
	return nil
}

// errSnapshotsAppeared has a partition restored again that was restored without
// the snapshot topic.
var errSnapshotsAppeared = errors.New("the snapshot topic, which was missing at the restore, is there and holds snapshots")

// adopt learns what is on the topic when the duty is taken up: a manifest of a
// worker-rank that is forgotten here is to go, one that another instance wrote
// is there, one that cannot be read is as good as none.
//
// It waits until the partition is where the log ended then: no manifest is of a
// later moment. To one that is behind, a worker-rank that comes back, and one that
// another instance has forgotten, would look alike.
func (p *partition) adopt(done *roundResult) error {
	there := make(map[snapshot.ID]int64, len(done.onTopic))
	floor := p.saver.floor.Load()
	for id, g := range p.forgotten {
		// Another instance may have removed the manifests, or written them anew.
		if g.w >= 0 || floor > g.after {
			delete(p.forgotten, id)
		}
	}
	for _, x := range done.onTopic {
		var m schemas.Manifest
		if x.manifest != nil {
			if m = *x.manifest; p.blind {
				return errSnapshotsAppeared
			}
			there[x.id] = m.W
		}
		if p.rank(x.id) != nil || p.save.passed[x.id] {
			continue
		}
		// Where its last record is, nobody remembers.
		g := newGoner(m, p.position-1)
		if x.manifest == nil {
			g.w = -1 // what cannot be read holds nothing
		}
		p.forgotten[x.id] = g
	}
	for _, w := range p.workers {
		for _, k := range w.ranks {
			w, ok := there[k.id()]
			if k.saved.manifest && !ok || p.spoiled[k.id()] {
				k.saved.force = true
			}
			k.saved.manifest, k.saved.w = ok, w
		}
	}
	p.save.adopted = done.turn
	return nil
}

func (p *partition) rank(id snapshot.ID) *rank {
	if w := p.workers[id.Worker]; w != nil {
		return w.rank(id.Rank)
	}
	return nil
}
