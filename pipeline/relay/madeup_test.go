// This file makes up the engines of the stories of depths_test.go: what they hold,
// and what their events let one know of it.

package relay

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// depthsTiers are the tiers that the engines have.
const depthsTiers = 2

// madeUp is one process of an engine: what it holds, and what of that its events
// let one know.
type madeUp struct {
	*dialect
	rng  *rand.Rand
	rank int32

	held [depthsTiers]map[treeBlock]int  // copies
	told [depthsTiers]map[treeBlock]bool // a removal of one copy is one of all
	said map[treeBlock]bool              // of told's, those whose tokens were said
	// known are those of said whose parent was known while they were told.
	known map[treeBlock]bool

	events [][]byte // of the next batch
	sent   *float64 // the time that batches say
}

func newMadeUp(d *dialect, rng *rand.Rand, rank int32, sent *float64) *madeUp {
	e := &madeUp{dialect: d, rng: rng, rank: rank, sent: sent}
	for t := range e.held {
		e.held[t] = map[treeBlock]int{}
	}
	e.forget()
	if d.polled {
		for n := range windows[:1+len(d.group(1))] {
			e.add("created", append([]named{{"num_blocks_per_cache_level", []int{8, 8}}}, d.group(n)...))
		}
	}
	return e
}

func (e *madeUp) forget() {
	for t := range e.told {
		e.told[t] = map[treeBlock]bool{}
	}
	e.said, e.known = map[treeBlock]bool{}, map[treeBlock]bool{}
}

func (e *madeUp) add(tag string, fields []named) { e.events = append(e.events, e.event(tag, fields)) }

func (e *madeUp) one(n int) bool { return e.rng.IntN(n) == 0 }

// some returns a block that is held in the tier, if any is. leaf: preferably one
// without held children.
func (e *madeUp) some(t index.Tier, leaf bool) (treeBlock, bool) {
	var all, leaves []treeBlock
	for f := range e.families {
		inner := map[int]bool{}
		for at := len(treeParents) - 1; at >= 0; at-- {
			if b := (treeBlock{f, at}); e.held[t][b] > 0 {
				all = append(all, b)
				if !inner[at] {
					leaves = append(leaves, b)
				}
				inner[treeParents[at]] = true
			}
		}
	}
	if leaf && len(leaves) > 0 {
		all = leaves
	}
	if len(all) == 0 {
		return treeBlock{}, false
	}
	return all[e.rng.IntN(len(all))], true
}

// know notes what an event says of blocks in a tier.
func (e *madeUp) know(t index.Tier, blocks []treeBlock, told, content bool) {
	for _, b := range blocks {
		if e.told[t][b] = told; !told {
			delete(e.told[t], b)
		}
		e.said[b] = e.said[b] || content
	}
	for f := range e.families {
		for at := range treeParents {
			b := treeBlock{f, at}
			if !e.told[index.Device][b] && !e.told[index.Host][b] {
				delete(e.said, b)
				delete(e.known, b)
			} else if e.said[b] && (at == 0 || e.known[e.parent(b)]) {
				e.known[b] = true
			}
		}
	}
}

// store stores a chain, in one event or in one for each block.
func (e *madeUp) store(t index.Tier, chain []treeBlock) {
	for _, b := range chain {
		e.held[t][b]++
	}
	e.say(t, chain)
}

// say says that a chain is stored.
func (e *madeUp) say(t index.Tier, chain []treeBlock) {
	if len(chain) > 1 && e.one(3) {
		for i := range chain {
			e.say(t, chain[i:i+1])
		}
		return
	}
	fields := e.stored(t, chain, e.one(8))
	other := append(slices.Clone(fields), e.group(1)...)
	also := e.polled && e.groups && e.one(2) // the other group has them as well
	if also && e.one(2) {
		e.add("BlockStored", other)
		also = false
	}
	// One bad event does not cost the batch, but what it says; with groups also all
	// placeholders until the next chain shows the main one.
	if e.one(40) && (e.polled || !e.groups) {
		e.spoil(fields)
		e.add("BlockStored", fields)
		return
	}
	e.add("BlockStored", fields)
	if also {
		e.add("BlockStored", other)
	}
	e.know(t, chain, true, true)
}

// prompt has the engine compute a prompt: what is not held of it is stored, and all
// that comes after the first such block.
func (e *madeUp) prompt() {
	f := e.rng.IntN(len(e.families))
	all := path(treeLeaves[e.rng.IntN(len(treeLeaves))])
	if e.polled {
		e.reuse(f, all[:1+e.rng.IntN(len(all))])
		return
	}
	var chain []treeBlock
	for _, at := range all[:1+e.rng.IntN(len(all))] {
		if b := e.block(f, at); len(chain) > 0 || e.held[index.Device][b] == 0 {
			chain = append(chain, b)
		}
	}
	switch {
	case len(chain) > 0:
		e.store(index.Device, chain)
	case e.one(2): // it is announced again
		for _, at := range all {
			if b := e.block(f, at); e.held[index.Device][b] > 0 {
				chain = append(chain, b)
			} else {
				break
			}
		}
		e.say(index.Device, chain)
	}
}

// reuse is prompt of an engine that holds each block once and takes from the host
// what is there.
func (e *madeUp) reuse(f int, path []int) {
	var chain []treeBlock
	store := func() {
		if len(chain) > 0 {
			e.store(index.Device, chain)
		}
		chain = nil
	}
	for _, at := range path {
		b := e.block(f, at)
		switch {
		case e.held[index.Device][b] > 0:
			store()
		case e.held[index.Host][b] > 0:
			store()
			e.move(b, index.Host, index.Device)
		default:
			chain = append(chain, b)
		}
	}
	store()
}

// move moves a block from tier to tier.
func (e *madeUp) move(b treeBlock, from, to index.Tier) {
	delete(e.held[from], b)
	e.held[to][b] = 1
	e.add("updated", e.moved(b, from, to))
	if e.told[from][b] {
		e.know(to, []treeBlock{b}, true, false)
		e.know(from, []treeBlock{b}, false, false)
	}
}

// offload copies a block to the host, maybe just after it left the device, or moves
// it there.
func (e *madeUp) offload() {
	b, ok := e.some(index.Device, false)
	switch {
	case !ok || e.tiers <= index.Host || e.held[index.Host][b] > 0:
		return
	case e.polled:
		e.move(b, index.Device, index.Host)
		return
	}
	if e.one(3) {
		e.evict(index.Device, b)
	}
	if e.kind == engine.SGLang || e.one(2) {
		e.store(index.Host, []treeBlock{b})
		return
	}
	e.held[index.Host][b]++
	e.add("BlockStored", append([]named{
		{"block_hashes", e.names([]treeBlock{b})}, {"parent_block_hash", nil}, {"token_ids", []any{}}, {"block_size", 0}, {"lora_id", nil},
		{"medium", e.medium(index.Host)}, {"lora_name", nil}, {"extra_keys", nil},
	}, e.group(0)...))
	e.know(index.Host, []treeBlock{b}, true, false)
}

// load copies a block from the host to the device, or moves it there.
func (e *madeUp) load() {
	b, ok := e.some(index.Host, false)
	switch {
	case !ok || e.held[index.Device][b] > 0:
	case e.polled:
		e.move(b, index.Host, index.Device)
	default:
		e.store(index.Device, []treeBlock{b})
	}
}

// evict evicts blocks, in an event each or all in one.
func (e *madeUp) evict(t index.Tier, blocks ...treeBlock) {
	for _, b := range blocks {
		if e.held[t][b]--; e.held[t][b] == 0 {
			delete(e.held[t], b)
		}
	}
	each := len(blocks)
	if e.kind == engine.VLLM {
		each = 1
	}
	for part := range slices.Chunk(blocks, each) {
		e.add("BlockRemoved", e.removed(t, part))
		e.know(t, part, false, false)
	}
}

// full evicts for want of room: a leaf, a page and those above it (SGLang, parents
// first), or whatever.
func (e *madeUp) full() {
	t := index.Tier(e.rng.IntN(int(e.tiers)))
	b, ok := e.some(t, !e.one(5))
	if !ok {
		return
	}
	blocks := []treeBlock{b}
	for e.held[t][e.parent(b)] > 0 && e.one(2) {
		b = e.parent(b)
		blocks = append(blocks, b)
	}
	if e.kind == engine.SGLang {
		slices.Reverse(blocks)
	}
	e.evict(t, blocks...)
}

// clear has the cache cleared. What is on the host may stay; the event says of no
// tier that it does. TensorRT-LLM's buffer has no such event.
func (e *madeUp) clear() {
	if e.polled {
		for t := range index.Tier(depthsTiers) {
			for b, ok := e.some(t, true); ok; b, ok = e.some(t, true) {
				e.evict(t, b)
			}
		}
		return
	}
	clear(e.held[index.Device])
	if e.one(2) {
		clear(e.held[index.Host])
	}
	e.add("AllBlocksCleared", nil)
	e.forget()
}

// noise says what changes nothing.
func (e *madeUp) noise() {
	strange := []any{e.hash(treeBlock{0, 2000})}
	b, ok := e.some(index.Device, true)
	if e.polled {
		e.noiseJSON(b, ok)
		return
	}
	switch e.rng.IntN(5) {
	case 0:
		e.add("BlocksDefragmented", []named{{"block_hashes", strange}})
	case 1:
		e.add("BlockRemoved", []named{{"block_hashes", strange}, {"medium", "GPU"}})
	case 2:
		if ok {
			e.add("BlockRemoved", []named{{"block_hashes", e.names([]treeBlock{b})}, {"medium", "MYSTERY"}})
		}
	case 3: // of another block size, or with a token that is none
		tokens := [][]any{{1, 2, 3, 4}, {1, "x"}}[e.rng.IntN(2)]
		e.add("BlockStored", []named{
			{"block_hashes", strange}, {"parent_block_hash", nil}, {"token_ids", tokens}, {"block_size", len(tokens)}, {"lora_id", nil}, {"medium", "GPU"},
		})
	case 4:
		if ok && e.groups { // groups share hashes
			e.add("BlockRemoved", append([]named{{"block_hashes", e.names([]treeBlock{b})}, {"medium", "GPU"}}, e.group(1)[:1]...))
		}
	}
}

// noiseJSON is noise of TensorRT-LLM's buffer, always one event.
func (e *madeUp) noiseJSON(b treeBlock, ok bool) {
	strange := treeBlock{0, 2000}
	switch n := e.rng.IntN(6); {
	case n == 0 && ok && e.groups:
		e.add("removed", append([]named{{"block_hashes", e.names([]treeBlock{b})}}, e.group(1)...))
	case n == 1 && ok: // of the priority only
		e.add("updated", []named{
			{"block_hash", e.hash(b)}, {"cache_level", nil}, {"priority", map[string]any{"type": "event_diff", "new_value": 1, "old_value": 2}},
		})
	case n == 2:
		e.add("updated", e.moved(strange, index.Device, index.Host))
	case n == 3: // a block that is not full, or one with a token that is none
		fields := e.stored(index.Device, []treeBlock{{0, 0}}, false)
		block := fields[1].value.([]any)[0].(map[string]any)
		block["block_hash"], block["tokens"] = e.hash(strange), block["tokens"].([]any)[:1]
		if e.one(2) {
			block["tokens"] = append(block["tokens"].([]any), map[string]any{"token_id": "x", "token_extra_id": 0})
		}
		e.add("stored", fields)
	case n == 4:
		e.add("dreamt", []named{{"block_hashes", e.names([]treeBlock{strange})}})
	default:
		e.add("removed", []named{{"block_hashes", e.names([]treeBlock{strange})}})
	}
}

// step is what the engine does before it says it.
func (e *madeUp) step() {
	for range e.rng.IntN(5) {
		switch n := e.rng.IntN(40); {
		case n < 14:
			e.prompt()
		case n < 20:
			e.offload()
		case n < 24:
			e.load()
		case n < 34:
			e.full()
		case n < 35:
			e.clear()
		default:
			e.noise()
		}
	}
}

// removal is one that cannot be read.
func (e *madeUp) removal() {
	if b, ok := e.some(index.Device, true); ok {
		e.evict(index.Device, b)
		e.events[len(e.events)-1] = e.event("BlockRemoved", []named{{"block_hashes", 1}, {"medium", "GPU"}})
	}
}

// batch is what the engine publishes after a step.
func (e *madeUp) batch() string {
	e.step()
	rank, fault := int64(e.rank), e.rng.IntN(100)
	if e.gentle {
		fault = -1
	}
	switch fault {
	case 0:
		e.removal()
	case 1:
		rank++
	}
	*e.sent += 0.001
	p := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), *e.sent)
	p = msgp.AppendArrayHeader(p, uint32(len(e.events)))
	p = append(p, slices.Concat(e.events...)...)
	p = msgp.AppendInt64(p, rank)
	e.events = nil
	if fault == 2 { // it ends too early
		p = p[:1+e.rng.IntN(len(p)-1)]
	}
	return string(p)
}

// numbered returns the events of a step, one at least, from number first on, as
// TensorRT-LLM keeps them.
func (e *madeUp) numbered(first int64, ranks int) (events []string) {
	if e.step(); !e.gentle && e.one(100) {
		e.removal()
	}
	if len(e.events) == 0 {
		e.noise()
	}
	for i, event := range e.events {
		of := ""
		if ranks > 1 {
			of = fmt.Sprintf(`"attention_dp_rank": %d, `, e.rank)
		}
		events = append(events, fmt.Sprintf(`{"event_id": %d, %s%s}`, first+int64(i), of, event))
	}
	e.events = nil
	return events
}

// depths returns how many leading blocks of a prompt of a family the engine holds
// up to the tier, and how many its events let one know of.
func (e *madeUp) depths(of *family, blocks []int, last index.Tier) (held, told int) {
	leading := func(in func(t int, b treeBlock) bool) int {
		for n, at := range blocks {
			found := false
			for i, f := range e.families {
				same := f.lora == of.lora && f.salt == of.salt && (at == 0 || f.image == of.image)
				for t := range min(int(last)+1, depthsTiers) {
					found = found || same && in(t, treeBlock{i, at})
				}
			}
			if !found {
				return n
			}
		}
		return len(blocks)
	}
	return leading(func(t int, b treeBlock) bool { return e.held[t][b] > 0 }),
		leading(func(t int, b treeBlock) bool { return e.told[t][b] && e.known[b] })
}
