// This file gives everything that workers hold, for those who look into it.

package pipeline

import (
	"context"
	"fmt"
	"slices"

	"kvindex/index"
	"kvindex/pipeline/query"
)

// dumpAsk has a partition's goroutine dump some of its worker-ranks.
type dumpAsk struct {
	ctx    context.Context // nobody waits for the answer any more when it ends
	filter query.DumpFilter
	answer chan dumped // takes one without waiting for anybody
}

type dumped struct {
	held []query.Held
	err  error
}

// Dump implements query.Source. Each partition's goroutine copies what its
// worker-ranks hold, at the next Tick, so that all of a partition are of one moment.
func (s *Stage) Dump(ctx context.Context, f query.DumpFilter) (all []query.Held, err error) {
	parts := s.partitions()
	answers := make([]chan dumped, len(parts))
	for i, p := range parts {
		answers[i] = make(chan dumped, 1)
		select {
		case p.dumps <- dumpAsk{ctx, f, answers[i]}:
		case <-ctx.Done():
			return nil, fmt.Errorf("partition %d: asking for a dump: %w", p.number, ctx.Err())
		}
	}
	for i, p := range parts {
		select {
		case d := <-answers[i]:
			if d.err != nil {
				return nil, d.err
			}
			all = append(all, d.held...)
		case <-ctx.Done():
			return nil, fmt.Errorf("partition %d: waiting for its dump: %w", p.number, ctx.Err())
		}
		if n := query.Blocks(all); n > f.MaxBlocks {
			return nil, fmt.Errorf("%w: there are more than %d", query.ErrDumpTooLarge, f.MaxBlocks)
		}
	}
	return all, nil
}

// serveDump answers one who waits for a dump.
func (p *partition) serveDump() {
	select {
	case ask := <-p.dumps:
		if ask.ctx.Err() == nil {
			ask.answer <- p.dump(ask.filter)
		}
	default:
	}
}

func (p *partition) dump(f query.DumpFilter) (d dumped) {
	blocks := 0
	for _, w := range p.workers {
		if f.Worker != "" && f.Worker != w.name {
			continue
		}
		for _, k := range w.ranks {
			if k.blocks == nil || k.elsewhere.Load() || k.model == nil || k.model.Name != f.Model || k.model.BlockSize != f.BlockSize {
				continue
			}
			k.blocks.Dump(func(t index.Tier, s index.Stored) bool {
				if blocks += len(s.Locals); blocks > f.MaxBlocks {
					d = dumped{err: fmt.Errorf("%w: there are more than %d", query.ErrDumpTooLarge, f.MaxBlocks)}
					return false
				}
				s.Locals, s.Hashes = slices.Clone(s.Locals), slices.Clone(s.Hashes)
				d.held = append(d.held, query.Held{Worker: w.name, Rank: k.number, Tier: t, Chain: s})
				return true
			})
			if d.err != nil {
				return d
			}
		}
	}
	return d
}
