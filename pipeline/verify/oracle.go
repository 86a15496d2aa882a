package verify

// This file folds records into what each partition knows of each worker-rank.

import (
	"encoding/binary"
	"maps"
	"math"
	"time"

	"kvindex/index"
	"kvindex/schemas"
)

// WorkerRank names what holds blocks.
type WorkerRank struct {
	Worker string
	Rank   int32
}

// Oracle holds what the records applied so far mean. It is for one goroutine.
type Oracle struct {
	grace      int64 // milliseconds
	partitions map[int32]*partition
	blocks     map[index.SeqHash]block // of hashes that are computed, whoever stored them
	counts     map[string]int
	resolved   *resolution // nil: to be made again
}

// block is how a sequence hash came about.
type block struct {
	parent    index.SeqHash
	hasParent bool
	local     index.LocalHash
}

type partition struct {
	ranks map[WorkerRank]*rank
	due   int64 // no worker-rank is to be retired or forgotten before
}

type rank struct {
	WorkerRank
	identity
	epoch      int64
	since      int64 // timestamp of the epoch's first record
	seq        int64
	incomplete bool
	retired    bool
	retiredAt  int64
	heard      int64
	tiers      [index.Tiers]map[index.SeqHash]struct{}
	own        [index.Tiers]map[index.SeqHash]block // of tiers' opaque hashes, as they were first stored
}

// identity is what must not change within an epoch.
type identity struct {
	producer  string
	model     string
	blockSize int32
	hasher    string
}

// New returns an empty Oracle. grace is how long a worker-rank may be silent
// before it is retired, and retired before it is forgotten.
func New(grace time.Duration) *Oracle {
	return &Oracle{
		grace:      grace.Milliseconds(),
		partitions: make(map[int32]*partition),
		blocks:     make(map[index.SeqHash]block),
		counts:     make(map[string]int),
	}
}

// Counts returns how many records, and of events and worker-ranks how many,
// came to what: applied, heartbeat, gap, duplicate, stale_epoch, retired,
// second_producer, identity_change, wrong_key, undecodable, invalid (records), rejected
// (stored events), silent, forgotten (worker-ranks). A record with a gap counts
// as applied or heartbeat too.
func (o *Oracle) Counts() map[string]int { return maps.Clone(o.counts) }

// Apply folds one record. Those of a partition come in the order of their
// offsets. timestamp is the broker's, in Unix milliseconds. What cannot be
// decoded is counted and passed over.
func (o *Oracle) Apply(partition int32, timestamp int64, key, value []byte) {
	o.resolved = nil
	p := o.partition(partition)
	o.expire(p, timestamp)
	m, err := schemas.GoavroDecode(value)
	if err != nil {
		o.counts["undecodable"]++
		return
	}
	events := m["events"].([]any)
	if len(events) > schemas.DefaultLimits.MaxEvents {
		o.counts["undecodable"]++
		return
	}
	worker := m["worker"].(string)
	if worker != string(key) {
		o.counts["wrong_key"]++
		return
	}
	wr := WorkerRank{worker, m["dp_rank"].(int32)}
	epoch, seq := m["epoch"].(int64), m["seq"].(int64)
	id := identity{m["producer"].(string), m["model"].(string), m["block_size"].(int32), m["hasher"].(string)}
	if worker == "" || id.model == "" || id.blockSize < 1 || wr.Rank < 0 || seq < -1 || seq == -1 && len(events) > 0 {
		o.counts["invalid"]++
		return
	}

	r := p.ranks[wr]
	if r == nil {
		r = &rank{WorkerRank: wr, epoch: math.MinInt64}
		p.ranks[wr] = r
		r.begin(epoch, id, timestamp)
		r.heard = timestamp
		p.due = min(p.due, timestamp+o.grace)
	}
	if epoch > r.epoch {
		r.begin(epoch, id, timestamp)
	}
	switch {
	case epoch < r.epoch:
		o.counts["stale_epoch"]++
	case r.retired:
		o.counts["retired"]++
	case id.producer != r.producer:
		o.counts["second_producer"]++
		r.incomplete = true
	case id != r.identity:
		o.counts["identity_change"]++
		r.incomplete = true
	default:
		// Only what the worker-rank says next shows that it is alive.
		if next := seq > r.seq || seq == r.seq && len(events) == 0; next {
			r.heard = timestamp
		}
		o.sequence(p, r, seq, events, timestamp)
	}
}

func (o *Oracle) partition(n int32) *partition {
	p := o.partitions[n]
	if p == nil {
		p = &partition{ranks: make(map[WorkerRank]*rank), due: math.MaxInt64}
		o.partitions[n] = p
	}
	return p
}

func (r *rank) begin(epoch int64, id identity, timestamp int64) {
	*r = rank{WorkerRank: r.WorkerRank, identity: id, epoch: epoch, since: timestamp, seq: -1, heard: r.heard}
	r.clear()
}

func (r *rank) clear() {
	for t := range r.tiers {
		r.clearTier(index.Tier(t))
	}
}

func (r *rank) clearTier(t index.Tier) {
	r.tiers[t] = make(map[index.SeqHash]struct{})
	r.own[t] = make(map[index.SeqHash]block)
}

func (r *rank) retire(at int64) {
	r.clear()
	r.retired, r.retiredAt, r.incomplete = true, at, false
}

// expire retires and forgets worker-ranks that were silent up to now.
func (o *Oracle) expire(p *partition, now int64) {
	if now < p.due {
		return
	}
	p.due = math.MaxInt64
	for wr, r := range p.ranks {
		if !r.retired && r.heard+o.grace <= now {
			r.retire(r.heard + o.grace)
			o.counts["silent"]++
		}
		switch {
		case !r.retired:
			p.due = min(p.due, r.heard+o.grace)
		case r.retiredAt+o.grace <= now:
			delete(p.ranks, wr)
			o.counts["forgotten"]++
		default:
			p.due = min(p.due, r.retiredAt+o.grace)
		}
	}
}

// sequence decides by a record's seq, and applies it.
func (o *Oracle) sequence(p *partition, r *rank, seq int64, events []any, timestamp int64) {
	next := r.seq + 1 // what an unbroken sequence has here
	if len(events) == 0 {
		next = r.seq
		o.counts["heartbeat"]++
	} else if seq <= r.seq {
		o.counts["duplicate"]++
		return
	} else {
		o.counts["applied"]++
	}
	if seq > next {
		o.counts["gap"]++
		r.incomplete = true
	}
	r.seq = max(r.seq, seq)
	for _, e := range events {
		for name, body := range e.(map[string]any) {
			o.event(p, r, name, body.(map[string]any), timestamp)
		}
		if r.retired {
			return
		}
	}
}

func (o *Oracle) event(p *partition, r *rank, name string, m map[string]any, timestamp int64) {
	switch name {
	case "kvindex.Stored":
		if !o.store(r, m) {
			o.counts["rejected"]++
			r.incomplete = true
		}
	case "kvindex.Removed":
		for _, h := range m["hashes"].([]any) {
			t := tier(m["tier"])
			delete(r.tiers[t], index.SeqHash(hash(h)))
			delete(r.own[t], index.SeqHash(hash(h)))
		}
	case "kvindex.Cleared":
		if one, ok := m["tier"].(map[string]any); ok {
			r.clearTier(tier(one["kvindex.Tier"]))
			return
		}
		r.clear()
		r.incomplete = false
	case "kvindex.Retired":
		for wr, other := range p.ranks {
			if wr.Worker == r.Worker && !other.retired {
				other.retire(timestamp)
				p.due = min(p.due, timestamp+o.grace)
			}
		}
	default:
		panic("BUG: event " + name)
	}
}

// store reports whether the index takes the chain, and if so adds it.
func (o *Oracle) store(r *rank, m map[string]any) bool {
	locals, hashes := m["locals"].([]any), m["hashes"].([]any)
	opaque := r.hasher == index.Opaque.String()
	if len(locals) == 0 || opaque && len(hashes) != len(locals) || !opaque && len(hashes) > 0 {
		return false
	}
	if u, ok := m["position"].(map[string]any); ok {
		first := int64(u["int"].(int32))
		if first < int64(index.NoPosition) || first+int64(len(locals))-1 > math.MaxInt32 {
			return false
		}
	}
	var prev index.SeqHash
	u, hasPrev := m["parent"].(map[string]any)
	if hasPrev {
		prev = index.SeqHash(hash(u["kvindex.Hash64"]))
		if prev == 0 {
			return false
		}
	}
	chain := make(map[index.SeqHash]block, len(locals))
	for i, l := range locals {
		local := index.LocalHash(hash(l))
		seq := index.SeqHash(local)
		switch {
		case opaque:
			seq = index.SeqHash(hash(hashes[i]))
		case hasPrev:
			seq = index.Next(prev, local)
		}
		if seq == 0 || hasPrev && seq == prev {
			return false
		}
		if _, again := chain[seq]; !again {
			chain[seq] = block{prev, hasPrev, local}
		}
		prev, hasPrev = seq, true
	}
	t := tier(m["tier"])
	for seq, b := range chain {
		_, held := r.tiers[t][seq]
		switch {
		case !opaque:
			o.blocks[seq] = b
		case !held:
			r.own[t][seq] = b
		}
		r.tiers[t][seq] = struct{}{}
	}
	return true
}

func hash(v any) uint64 { return binary.LittleEndian.Uint64(v.([]byte)) }

func tier(v any) index.Tier {
	for t := range index.Tier(index.Tiers) {
		if t.String() == v {
			return t
		}
	}
	panic("BUG: tier")
}
