// This file is one worker's prefix cache.

package fleet

import "kvindex/index"

// cache is a worker's prefix cache: a fixed number of blocks, the least
// recently used going first and never before the blocks that follow it.
//
// Each request uses its whole prefix, so keeping the blocks of a request in
// order, first block most recent, is enough: of a block and one after it, the
// latter is always nearer the end of the list.
type cache struct {
	capacity int
	at       map[index.SeqHash]int32
	nodes    []node // nodes[0] is the ring's head: next is most, prev least recently used
	free     []int32
}

type node struct {
	hash       index.SeqHash
	prev, next int32
}

// newCache returns an empty cache of that many blocks.
func newCache(capacity int) *cache {
	return &cache{capacity: capacity, at: map[index.SeqHash]int32{}, nodes: make([]node, 1)}
}

// depth returns how many leading blocks of a prompt are cached.
func (c *cache) depth(prompt []index.SeqHash) int {
	for i, h := range prompt {
		if _, ok := c.at[h]; !ok {
			return i
		}
	}
	return len(prompt)
}

// use serves a prompt: its leading hit blocks were cached, the blocks up to
// stored are now, and those appended to removed had to go before, least
// recently used first. A prompt larger than the cache is cached as far as it
// fits.
func (c *cache) use(prompt []index.SeqHash, removed []index.SeqHash) (hit, stored int, _ []index.SeqHash) {
	prompt = prompt[:min(len(prompt), c.capacity)]
	last := int32(0)
	for _, h := range prompt {
		n, ok := c.at[h]
		if !ok {
			break
		}
		c.unlink(n)
		c.linkAfter(last, n)
		last = n
		hit++
	}
	for len(c.at)+len(prompt)-hit > c.capacity {
		n := c.nodes[0].prev
		c.unlink(n)
		h := c.nodes[n].hash
		delete(c.at, h)
		c.free = append(c.free, n)
		removed = append(removed, h)
	}
	for _, h := range prompt[hit:] {
		n := c.alloc(h)
		c.at[h] = n
		c.linkAfter(last, n)
		last = n
	}
	return hit, len(prompt), removed
}

func (c *cache) alloc(h index.SeqHash) int32 {
	if last := len(c.free) - 1; last >= 0 {
		n := c.free[last]
		c.free = c.free[:last]
		c.nodes[n].hash = h
		return n
	}
	c.nodes = append(c.nodes, node{hash: h})
	return int32(len(c.nodes) - 1)
}

func (c *cache) unlink(n int32) {
	x := c.nodes[n]
	c.nodes[x.prev].next = x.next
	c.nodes[x.next].prev = x.prev
}

func (c *cache) linkAfter(prev, n int32) {
	next := c.nodes[prev].next
	c.nodes[n].prev, c.nodes[n].next = prev, next
	c.nodes[prev].next = n
	c.nodes[next].prev = n
}
