// This file is one rank's prefix cache, on the GPU and in the CPU's memory.

package fakeengine

import (
	"cmp"
	"container/list"
	"slices"

	"kvindex/index"
)

// block is a block that a cache holds.
type block struct {
	name     digest // the engine's
	parent   digest // of the block before; only if position > 0
	seq      index.SeqHash
	before   index.SeqHash // of the block before; only if position > 0
	local    index.LocalHash
	position int
	tokens   []uint32
	class    class
	in       [tiers]*list.Element // nil where it is not held
}

// The tiers that an engine has are the first two of kvindex's.
const tiers = 2

// class is what besides tokens goes into a prompt's hashes.
type class struct {
	lora string
	id   int // of lora, from 1
	salt string
}

// cache holds blocks in each tier, the least recently used going first and
// never before the blocks that follow it: of a prompt, the first block counts as
// used last. It does so in the CPU's tier too, where parents may be missing all
// the same, being on the GPU.
type cache struct {
	capacity [tiers]int
	blocks   map[index.SeqHash]*block // held in any tier
	used     [tiers]*list.List        // of *block, most recently used first
}

// change is what happened to a block.
type change struct {
	block  *block
	tier   index.Tier
	stored bool // else removed
}

func newCache(capacity, host int) *cache {
	return &cache{
		capacity: [tiers]int{capacity, host},
		blocks:   map[index.SeqHash]*block{},
		used:     [tiers]*list.List{list.New(), list.New()},
	}
}

// depth returns how many leading blocks of a prompt are on the GPU.
func (c *cache) depth(seqs []index.SeqHash) int {
	for i, s := range seqs {
		if b := c.blocks[s]; b == nil || b.in[index.Device] == nil {
			return i
		}
	}
	return len(seqs)
}

// touch makes a prompt's blocks the most recently used, wherever they are.
func (c *cache) touch(seqs []index.SeqHash) {
	for _, s := range slices.Backward(seqs) {
		b := c.blocks[s]
		for t := range tiers {
			if b != nil && b.in[t] != nil {
				c.used[t].MoveToFront(b.in[t])
			}
		}
	}
}

// makeRoom evicts from the GPU until n more blocks have room there, least
// recently used first, and appends what that changes, in order.
func (c *cache) makeRoom(changes []change, n int) []change {
	gpu := c.used[index.Device]
	for gpu.Len()+n > c.capacity[index.Device] {
		b := gpu.Back().Value.(*block)
		if c.capacity[index.Host] > 0 {
			changes = c.demote(changes, b)
		}
		changes = c.remove(changes, b, index.Device)
	}
	return changes
}

// demote makes the CPU's memory hold a block too.
func (c *cache) demote(changes []change, b *block) []change {
	cpu := c.used[index.Host]
	if e := b.in[index.Host]; e != nil {
		cpu.MoveToFront(e)
		return changes
	}
	if cpu.Len() == c.capacity[index.Host] {
		changes = c.remove(changes, cpu.Back().Value.(*block), index.Host)
	}
	b.in[index.Host] = cpu.PushFront(b)
	return append(changes, change{b, index.Host, true})
}

func (c *cache) remove(changes []change, b *block, t index.Tier) []change {
	c.used[t].Remove(b.in[t])
	b.in[t] = nil
	if b.in == [tiers]*list.Element{} {
		delete(c.blocks, b.seq)
	}
	return append(changes, change{b, t, false})
}

// store puts a block on the GPU, as used right before the block that it follows
// there, or as the last used if it follows none.
func (c *cache) store(b, after *block) {
	c.blocks[b.seq] = b
	if after == nil {
		b.in[index.Device] = c.used[index.Device].PushFront(b)
		return
	}
	b.in[index.Device] = c.used[index.Device].InsertAfter(b, after.in[index.Device])
}

// chains returns what a tier holds, parents first, each block once.
func (c *cache) chains(t index.Tier) (chains []Chain) {
	var held []*block
	for e := c.used[t].Front(); e != nil; e = e.Next() {
		held = append(held, e.Value.(*block))
	}
	slices.SortStableFunc(held, func(a, b *block) int { return cmp.Compare(b.position, a.position) })
	said := map[index.SeqHash]bool{}
	for _, b := range held {
		var ch Chain
		for b != nil && b.in[t] != nil && !said[b.seq] {
			said[b.seq] = true
			ch.Position, ch.Parent = b.position, uint64(b.before)
			ch.Locals = append(ch.Locals, uint64(b.local))
			if b.position == 0 {
				break
			}
			b = c.blocks[b.before]
		}
		if len(ch.Locals) > 0 {
			slices.Reverse(ch.Locals)
			chains = append(chains, ch)
		}
	}
	return chains
}
