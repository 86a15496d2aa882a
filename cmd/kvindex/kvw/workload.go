// This file is a whole workload in memory.

package kvw

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvindex/index"
)

// Workload is a file in memory.
type Workload struct {
	Name    string // the file's, without folder and extension
	Header  Header
	Ops     []Op
	Queries [][]index.LocalHash // of Ops, in order
	Totals  Totals
}

// Totals counts a workload's operations, and the hashes in them.
type Totals struct {
	Stores, Removes, Queries int
	Stored, Removed, Queried int
}

// LogicalOps returns how many events and queries there are, whatever their length.
func (t Totals) LogicalOps() int { return t.Stores + t.Removes + t.Queries }

// BlockOps returns how many hashes there are in events and queries.
func (t Totals) BlockOps() int { return t.Stored + t.Removed + t.Queried }

// Load reads a file whole. Errors name the file.
func Load(name string) (*Workload, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	w, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	w.Name = strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
	return w, nil
}

// Read reads a workload that has no name.
func Read(r io.Reader) (*Workload, error) {
	in, err := NewReader(r)
	if err != nil {
		return nil, err
	}
	w := &Workload{Header: in.Header}
	var op Op // its slices are reused
	for {
		switch err := in.Next(&op); err {
		case nil:
			w.add(&op)
		case io.EOF:
			return w, nil
		default:
			return nil, err
		}
	}
}

// add adds a copy of an operation.
func (w *Workload) add(op *Op) {
	t := &w.Totals
	c := Op{Kind: op.Kind, Worker: op.Worker}
	switch op.Kind {
	case Store:
		c.Stored = op.Stored
		c.Stored.Locals = slices.Clone(op.Stored.Locals)
		t.Stores++
		t.Stored += op.Blocks()
	case Remove:
		c.Hashes = slices.Clone(op.Hashes)
		t.Removes++
		t.Removed += op.Blocks()
	case Query:
		c.Worker, c.Query = 0, slices.Clone(op.Query)
		w.Queries = append(w.Queries, c.Query)
		t.Queries++
		t.Queried += op.Blocks()
	}
	w.Ops = append(w.Ops, c)
}

// Place gives every store the position that its producer would have known: that
// of its parent and one, if the parent was stored anywhere before.
func (w *Workload) Place() {
	at := make(map[index.SeqHash]int32)
	for i := range w.Ops {
		op := &w.Ops[i]
		if op.Kind != Store {
			continue
		}
		s := &op.Stored
		next := int32(0)
		if s.HasParent {
			parent, ok := at[s.Parent]
			if !ok {
				continue
			}
			next = parent + 1
		}
		s.Position = next
		for seq := range Seqs(s) {
			at[seq] = next
			next++
		}
	}
}

// ofWorkers returns, by worker, the numbers in Ops of its events.
func (w *Workload) ofWorkers() [][]int {
	events := make([][]int, w.Header.Workers)
	for i := range w.Ops {
		if op := &w.Ops[i]; op.Kind != Query {
			events[op.Worker] = append(events[op.Worker], i)
		}
	}
	return events
}

// held returns what a worker holds after its events, by hash: the event that
// stored it last, and its place among that one's blocks.
func (w *Workload) held(events []int, into map[index.SeqHash]place) {
	clear(into)
	for _, i := range events {
		op := &w.Ops[i]
		if op.Kind == Remove {
			for _, h := range op.Hashes {
				delete(into, h)
			}
			continue
		}
		n := 0
		for seq := range Seqs(&op.Stored) {
			into[seq] = place{i, n}
			n++
		}
	}
}

type place struct{ op, block int }

// Live returns how many (worker, block) pairs are held once all events are
// applied, and how many blocks that any worker holds.
func (w *Workload) Live() (pairs, distinct int) {
	all := make(map[index.SeqHash]struct{})
	held := make(map[index.SeqHash]place)
	for _, events := range w.ofWorkers() {
		w.held(events, held)
		pairs += len(held)
		for h := range held {
			all[h] = struct{}{}
		}
	}
	return pairs, len(all)
}

// Rings returns an endless stream of events for each worker, as a ring: the
// worker's events and then the removal of all that it still holds, last stored
// first, at most chunk blocks an event. Going round a ring leaves its worker as it
// was.
func (w *Workload) Rings(chunk int) [][]*Op {
	rings := make([][]*Op, w.Header.Workers)
	held := make(map[index.SeqHash]place)
	for worker, events := range w.ofWorkers() {
		ring := &rings[worker]
		for _, i := range events {
			*ring = append(*ring, &w.Ops[i])
		}
		w.held(events, held)
		left := make([]index.SeqHash, 0, len(held))
		for h := range held {
			left = append(left, h)
		}
		slices.SortFunc(left, func(a, b index.SeqHash) int {
			x, y := held[a], held[b]
			if x.op != y.op {
				return y.op - x.op
			}
			return y.block - x.block
		})
		for some := range slices.Chunk(left, chunk) {
			*ring = append(*ring, &Op{Kind: Remove, Worker: index.Slot(worker), Hashes: some})
		}
	}
	return rings
}
