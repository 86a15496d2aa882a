// This file measures dumping a structure and filling another one from the dump.

package bench

import (
	"runtime"
	"slices"
	"time"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Dump is what dumping all slots into events in memory took, and storing those
// into an empty structure; on one goroutine.
type Dump struct {
	heading
	Runs             int     `json:"runs"`
	Events           int     `json:"events"` // chains of blocks
	Blocks           int     `json:"blocks"`
	DumpMs           figure  `json:"dump_ms"`
	DumpBlocks       figure  `json:"dump_blocks_per_s"`
	RestoreMs        figure  `json:"restore_ms"`
	RestoreBlocks    figure  `json:"restore_blocks_per_s"`
	Differing        int     `json:"queries_answered_differently_after"`
	AnswersOfQueries Answers `json:"answers"` // of all queries after all events
}

// chain is consecutive blocks of one slot.
type chain struct {
	slot   index.Slot
	stored index.Stored
}

// packer keeps what a structure dumps, single blocks that follow each other as
// one chain.
type packer struct {
	chains []chain
	blocks int
	slab   []index.LocalHash // has the chains' local hashes, the last chain's at its end
	slot   index.Slot
	single bool          // the last chain was dumped block by block
	last   index.SeqHash // of it, then
}

const slabBlocks = 1 << 16

func (p *packer) add(s index.Stored) bool {
	n := len(s.Locals)
	p.blocks += n
	grown := cap(p.slab)-len(p.slab) < n
	if grown {
		p.slab = make([]index.LocalHash, 0, max(slabBlocks, n))
	}
	at := len(p.slab)
	p.slab = append(p.slab, s.Locals...)
	follows := p.single && !grown && n == 1 && s.HasParent && s.Parent == p.last
	if p.single = n == 1 && len(s.Hashes) == 0; p.single {
		for p.last = range kvw.Seqs(&s) {
		}
	}
	if follows && p.single {
		c := &p.chains[len(p.chains)-1].stored
		c.Locals = c.Locals[:len(c.Locals)+1]
		return true
	}
	s.Locals, s.Hashes = p.slab[at:], slices.Clone(s.Hashes)
	p.chains = append(p.chains, chain{p.slot, s})
	return true
}

// dumpAll dumps all slots below a number.
func dumpAll(s index.Structure, slots index.Slot) ([]chain, int) {
	var p packer
	for slot := range slots {
		p.slot, p.single = slot, false
		s.Dump(slot, p.add)
	}
	return p.chains, p.blocks
}

// answersNow asks all queries of a workload.
func answersNow(s index.Structure, w *kvw.Workload) []Answers {
	var m index.SlotMatches
	all := make([]Answers, len(w.Queries))
	for i, q := range w.Queries {
		s.Find(q, index.FindOptions{}, &m)
		all[i].addMatches(i, &m)
	}
	return all
}

func (b *bench) dump() error {
	w := b.workload
	s, err := b.filled()
	if err != nil {
		return err
	}
	before := answersNow(s, w)
	line := Dump{heading: b.heading(), Runs: b.Runs}
	for _, a := range before {
		line.AnswersOfQueries.Digest += a.Digest
		line.AnswersOfQueries.Scores += a.Scores
		line.AnswersOfQueries.DepthSum += a.DepthSum
	}
	type times struct{ dump, restore float64 } // seconds
	var runs []times
	for range b.Runs {
		if err := b.ctx.Err(); err != nil {
			return err
		}
		runtime.GC()
		begun := time.Now()
		chains, blocks := dumpAll(s, index.Slot(w.Header.Workers))
		took := times{dump: time.Since(begun).Seconds()}
		line.Events, line.Blocks = len(chains), blocks

		to := b.structure.empty()
		runtime.GC()
		begun = time.Now()
		for i := range chains {
			if _, err := to.Store(chains[i].slot, chains[i].stored); err != nil {
				return err
			}
		}
		took.restore = time.Since(begun).Seconds()
		runs = append(runs, took)
		line.Differing = 0
		for i, a := range answersNow(to, w) {
			if a != before[i] {
				line.Differing++
			}
		}
	}
	dump := median(runs, func(t *times) float64 { return t.dump })
	restore := median(runs, func(t *times) float64 { return t.restore })
	line.DumpMs, line.DumpBlocks = dump*1e3, figure(line.Blocks)/dump
	line.RestoreMs, line.RestoreBlocks = restore*1e3, figure(line.Blocks)/restore
	return b.tell(line)
}
