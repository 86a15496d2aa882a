// This file measures how a structure grows, with made-up conversations.

package bench

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"time"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// Scale is a structure of so many blocks, told at each power of ten on the way.
//
// Workers store conversations of 512 blocks in turns of 64, a turn of each worker
// after another. The first 32 blocks of a conversation are a system prompt that the
// eight workers of a group share. Queries are for conversations that are there, drawn
// at random, and checked.
type Scale struct {
	heading
	Workers        int    `json:"workers"`
	LivePairs      int64  `json:"live_pairs"` // of worker and block
	HeapPair       figure `json:"heap_bytes_per_pair"`
	ResidentPair   figure `json:"resident_bytes_per_pair"`
	HeapMiB        figure `json:"heap_mib"`
	StoredBlock    figure `json:"ns_per_stored_block"` // since the line before, of wall time
	GCCycles       int64  `json:"gc_cycles"`           // since the line before
	LongestPauseMs figure `json:"longest_gc_pause_ms"` // of a cycle's stops together, since the line before
	Queries        int    `json:"queries"`
	QueriedBlocks  int    `json:"blocks_per_query"`
	queryLatencies
}

// The shape of the conversations, in blocks.
const (
	scaleConversation = 512
	scaleTurn         = 64
	scaleSystem       = 32
	scaleGroup        = 8         // workers
	scaleFirst        = 1_000_000 // blocks at the first line
)

// scaleLocal returns the local hash of a block of a conversation: no two are
// equal but those of the system prompts.
func scaleLocal(worker, conversation, block int) index.LocalHash {
	if block < scaleSystem {
		worker, conversation = worker/scaleGroup, 1<<24-1
	}
	// splitmix64's finalizer, which is a bijection.
	x := uint64(worker+1)<<40 | uint64(conversation)<<16 | uint64(block)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return index.LocalHash(x ^ x>>31)
}

// scaleFleet is what the workers have stored.
type scaleFleet struct {
	s      index.Structure
	placed bool // events say their positions
	round  int  // turns that each worker has stored
	last   []index.SeqHash
	system []index.SeqHash // by worker, the end of its system prompt
	locals []index.LocalHash
}

// turn has a worker store its next turn and returns what of that took how long.
func (f *scaleFleet) turn(worker int) (blocks int, took time.Duration, err error) {
	conversation, first := f.round/(scaleConversation/scaleTurn), f.round%(scaleConversation/scaleTurn)*scaleTurn
	end := first + scaleTurn
	s := index.Stored{Parent: f.last[worker], HasParent: true, Position: index.NoPosition}
	if first == 0 {
		s.Parent, s.HasParent = 0, false
		if conversation > 0 { // the system prompt is there
			s.Parent, s.HasParent, first = f.system[worker], true, scaleSystem
		}
	}
	if f.placed {
		s.Position = int32(first)
	}
	f.locals = f.locals[:0]
	for i := first; i < end; i++ {
		f.locals = append(f.locals, scaleLocal(worker, conversation, i))
	}
	s.Locals = f.locals
	begun := time.Now()
	e, err := f.s.Store(index.Slot(worker), s)
	took = time.Since(begun)
	if err == nil && (e.Orphan > 0 || e.Stored != len(s.Locals)) {
		err = fmt.Errorf("worker %d, conversation %d, block %d: %+v", worker, conversation, first, e)
	}
	at := first
	for seq := range kvw.Seqs(&s) {
		f.last[worker] = seq
		if at == scaleSystem-1 {
			f.system[worker] = seq
		}
		at++
	}
	return len(s.Locals), took, err
}

func (b *bench) scale() error {
	base := memoryNow()
	f := scaleFleet{
		s:      b.structure.empty(),
		placed: b.Positions,
		last:   make([]index.SeqHash, b.Workers),
		system: make([]index.SeqHash, b.Workers),
	}
	b.progress.Start("blocks", b.Blocks)
	var took time.Duration
	var stored, since, told int64
	cycles := collections()
	for target := min(scaleFirst, b.Blocks); ; target = min(10*target, b.Blocks) {
		for stored < target {
			for worker := range b.Workers {
				n, t, err := f.turn(worker)
				if err != nil {
					return err
				}
				stored += int64(n)
				took += t
			}
			f.round++
			b.progress.Add(stored - told)
			told = stored
			if err := b.ctx.Err(); err != nil {
				return err
			}
		}
		line := Scale{heading: b.heading(), Workers: b.Workers, StoredBlock: figure(took) / figure(stored-since)}
		line.GCCycles, line.LongestPauseMs = longestPause(cycles)
		now := memoryNow()
		line.LivePairs = f.s.Stats().Blocks
		if line.LivePairs != stored {
			return fmt.Errorf("the structure holds %d blocks, and %d were stored", line.LivePairs, stored)
		}
		pairs := figure(stored)
		line.HeapPair = figure(now.heap-base.heap) / pairs
		line.ResidentPair = figure(now.resident-base.resident) / pairs
		line.HeapMiB = figure(now.heap-base.heap) / (1 << 20)
		if err := f.ask(b, &line); err != nil {
			return err
		}
		if err := b.tell(line); err != nil {
			return err
		}
		if target == b.Blocks {
			return nil
		}
		took, since, cycles = 0, stored, collections()
	}
}

// ask asks for conversations that are there.
func (f *scaleFleet) ask(b *bench, line *Scale) error {
	rng := rand.New(rand.NewPCG(1, 1))
	all := newLatencies()
	var m index.SlotMatches
	const turns = scaleConversation / scaleTurn
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Whole conversations, so that queries are as long at each line.
	whole, blocks := f.round/turns, scaleConversation
	if whole == 0 {
		whole, blocks = 1, f.round*scaleTurn
	}
	for range b.Queries {
		worker, conversation := rng.IntN(b.Workers), rng.IntN(whole)
		f.locals = f.locals[:0]
		for i := range blocks {
			f.locals = append(f.locals, scaleLocal(worker, conversation, i))
		}
		begun := time.Now()
		f.s.Find(f.locals, index.FindOptions{}, &m)
		all.record(time.Since(begun))
		for _, w := range m.Matches {
			want := scaleSystem
			if int(w.Slot) == worker {
				want = blocks
			} else if int(w.Slot)/scaleGroup != worker/scaleGroup {
				want = 0
			}
			if w.Depth != want {
				return fmt.Errorf("worker %d, conversation %d: worker %d was said to hold %d blocks of %d", worker, conversation, w.Slot, w.Depth, want)
			}
		}
		if want := min(scaleGroup, b.Workers-worker/scaleGroup*scaleGroup); len(m.Matches) != want {
			return fmt.Errorf("worker %d, conversation %d: %d workers were said to hold it, not %d", worker, conversation, len(m.Matches), want)
		}
		if err := b.ctx.Err(); err != nil {
			return err
		}
	}
	line.Queries, line.QueriedBlocks = b.Queries, blocks
	line.queryLatencies = tellLatencies(all)
	return nil
}

// collections returns how many collections there were.
func collections() int64 {
	var st debug.GCStats
	debug.ReadGCStats(&st)
	return st.NumGC
}

// longestPause returns how many collections there were since so many, and how
// long all was stopped in one of them, at most; of the last 256.
func longestPause(since int64) (cycles int64, ms figure) {
	var st debug.GCStats
	debug.ReadGCStats(&st)
	cycles = st.NumGC - since
	var longest time.Duration
	for _, p := range st.Pause[:min(cycles, int64(len(st.Pause)))] {
		longest = max(longest, p)
	}
	return cycles, figure(longest) / 1e6
}
