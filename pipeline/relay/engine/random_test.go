// This file holds a Mapping to a naive model of what an engine holds.

package engine

import (
	"fmt"
	"hash/fnv"
	"maps"
	"testing"

	"pgregory.net/rapid"

	"kvindex/index"
)

// node is a block of the engine in the random test: a prefix by the engine's
// hash. Several nodes may be one prefix to kvindex.
type node struct {
	parent *node
	hash   uint64
	seq    index.SeqHash
	path   []*node // from the root, itself included
	event  Event   // that stores it alone, in the device tier
}

// universe makes all nodes there are: three variants (plain, salted, LoRA) of a
// tree that branches once, every block of it under two engine hashes.
func universe() (nodes []*node) {
	hasher := index.BlockHasher{BlockSize: 2}
	var grow func(parent *node, depth int, name string, tokens []uint32, x index.Extra)
	grow = func(parent *node, depth int, name string, tokens []uint32, x index.Extra) {
		if depth == 4 {
			return
		}
		branches := uint32(1)
		if depth == 1 {
			branches = 2
		}
		for branch := range branches {
			for alias := range 2 {
				n := &node{parent: parent}
				name := fmt.Sprintf("%s/%d.%d", name, branch, alias)
				f := fnv.New64a()
				f.Write([]byte(name))
				n.hash = f.Sum64()
				block := []uint32{uint32(depth), branch}
				tokens := append(append([]uint32(nil), tokens...), block...)
				seqs := index.Chain(nil, hasher.Append(nil, tokens, x))
				n.seq = seqs[len(seqs)-1]
				n.event = Event{Kind: Stored, Hashes: []uint64{n.hash}, Tokens: block, Usable: 2, BlockSize: 2, LoRAName: []byte(x.LoRA)}
				if parent != nil {
					n.path = append(n.path, parent.path...)
					n.event.Parent, n.event.HasParent = parent.hash, true
				} else if x.Salt != "" {
					n.event.Keys, n.event.KeyBlocks = []Key{{Kind: KeyText, ID: []byte(x.Salt)}}, 1
				}
				n.path = append(n.path, n)
				nodes = append(nodes, n)
				grow(n, depth+1, name, tokens, x)
			}
		}
	}
	for i, x := range []index.Extra{{}, {Salt: "tenant"}, {LoRA: "adapter"}} {
		grow(nil, 0, fmt.Sprint(i), nil, x)
	}
	return nodes
}

// naive is the model: every engine hash that was said to be held, and no
// cleverness. A removal ends a hash in its tier, however often it was stored.
type naive struct {
	held map[*node]*naiveBlock
	// copies are the engine's own, which it alone can count.
	copies [index.Tiers]map[*node]int
}

type naiveBlock struct {
	tiers   [index.Tiers]bool
	content bool // tokens and parent were said
	known   bool // and so was every block before, while the next was held
}

func newNaive() *naive {
	n := &naive{held: map[*node]*naiveBlock{}}
	for t := range n.copies {
		n.copies[t] = map[*node]int{}
	}
	return n
}

func (n *naive) store(b *node, t index.Tier, content bool) {
	h := n.held[b]
	if h == nil {
		h = &naiveBlock{}
		n.held[b] = h
	}
	h.tiers[t] = true
	h.content = h.content || content
}

func (n *naive) remove(b *node, t index.Tier) {
	if h := n.held[b]; h != nil {
		if h.tiers[t] = false; h.tiers == [index.Tiers]bool{} {
			delete(n.held, b)
		}
	}
}

// settle makes known what can be.
func (n *naive) settle() {
	for again := true; again; {
		again = false
		for b, h := range n.held {
			if h.known || !h.content {
				continue
			}
			if p := n.held[b.parent]; b.parent == nil || p != nil && p.known {
				h.known, again = true, true
			}
		}
	}
}

// holding is what kvindex is to hold.
func (n *naive) holding() (want holding) {
	for t := range want {
		want[t] = map[index.SeqHash]bool{}
		for b, h := range n.held {
			if h.known && h.tiers[t] {
				want[t][b.seq] = true
			}
		}
	}
	return want
}

// steps are what the random test does, the frequent ones several times.
var steps = []string{
	"store", "store", "store", "store", "store", "store", "remove", "remove", "remove", "remove",
	"placeholder", "evict", "move", "move", "restart", "clear",
}

// TestMappingAgainstNaive plays random events of an engine with duplicates,
// re-announcements, several hashes of one prefix, orphans, blocks without tokens,
// tiers, moves and clears, and restarts from checkpoints.
func TestMappingAgainstNaive(t *testing.T) {
	nodes := universe()
	rapid.Check(t, func(t *rapid.T) {
		m, err := New(Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 2}})
		if err != nil {
			t.Fatal(err)
		}
		model := newNaive()
		var got holding
		var out Output
		media := [index.Tiers][]byte{[]byte("GPU"), []byte("CPU"), []byte("DISK"), []byte("EXTERNAL")}
		// Few nodes at a time, so that events are about the same ones.
		few := rapid.SliceOfN(rapid.SampledFrom(nodes), 1, 8).Draw(t, "nodes")
		drawNode := func(t *rapid.T) *node { return rapid.SampledFrom(few).Draw(t, "node") }
		drawTier := func(t *rapid.T) index.Tier { return rapid.SampledFrom([]index.Tier{0, 0, 1, 1, 2, 3}).Draw(t, "tier") }
		drawHeld := func(t *rapid.T) (*node, index.Tier) {
			tier := drawTier(t)
			var held []*node
			for _, b := range nodes {
				if model.copies[tier][b] > 0 {
					held = append(held, b)
				}
			}
			if len(held) == 0 {
				return nil, tier
			}
			return rapid.SampledFrom(held).Draw(t, "held"), tier
		}
		apply := func(e *Event) { m.Apply(e, &out) }
		remove := func(b *node, tier index.Tier) {
			model.copies[tier][b]--
			model.remove(b, tier)
			apply(&Event{Kind: Removed, Hashes: []uint64{b.hash}, Medium: media[tier]})
		}
		store := func() {
			path := drawNode(t).path
			path = path[rapid.IntRange(0, len(path)-1).Draw(t, "from"):]
			tier := drawTier(t)
			again := rapid.Bool().Draw(t, "re-announced")
			e := path[0].event
			e.Medium = media[tier]
			e.Hashes, e.Tokens, e.KeyBlocks = nil, nil, 0
			for _, b := range path {
				if !again || model.copies[tier][b] == 0 {
					model.copies[tier][b]++
				}
				model.store(b, tier, true)
				e.Hashes = append(e.Hashes, b.hash)
				e.Tokens = append(e.Tokens, b.event.Tokens...)
			}
			e.Usable = len(e.Tokens)
			if len(e.Keys) > 0 {
				e.KeyBlocks = len(path)
			}
			apply(&e)
		}
		check := func() {
			model.settle()
			got.apply(t, out.Events)
			out.Reset()
			want := model.holding()
			for tier := range want {
				if !maps.Equal(got[tier], want[tier]) || m.Len(index.Tier(tier)) != len(want[tier]) {
					t.Fatalf("%s: %d blocks, want %d", index.Tier(tier), len(got[tier]), len(want[tier]))
				}
				really := map[index.SeqHash]bool{}
				for b, n := range model.copies[tier] {
					really[b.seq] = really[b.seq] || n > 0
				}
				for seq := range got[tier] {
					if !really[seq] {
						t.Fatalf("%s: the engine does not hold %d", index.Tier(tier), seq)
					}
				}
			}
			checkDump(t, m, &got)
		}
		for range rapid.IntRange(20, 200).Draw(t, "steps") {
			switch rapid.SampledFrom(steps).Draw(t, "step") {
			case "store":
				store()
			case "placeholder":
				b, tier := drawNode(t), drawTier(t)
				model.copies[tier][b]++
				model.store(b, tier, false)
				apply(&Event{Kind: Stored, Hashes: []uint64{b.hash}, Medium: media[tier]})
			case "remove":
				if b, tier := drawHeld(t); b != nil {
					remove(b, tier)
				}
			case "evict": // leaf first, all copies
				b, tier := drawHeld(t)
				if b == nil {
					break
				}
				for i := len(b.path) - 1; i >= 0; i-- {
					for model.copies[tier][b.path[i]] > 0 {
						remove(b.path[i], tier)
					}
				}
			case "move":
				b, from := drawHeld(t)
				to := drawTier(t)
				if b == nil || model.copies[from][b] > 1 || to == from || model.held[b] == nil {
					break // no move that an engine makes
				}
				model.copies[from][b]--
				model.copies[to][b]++
				model.store(b, to, false)
				model.remove(b, from)
				apply(&Event{Kind: Moved, Hashes: []uint64{b.hash}, Medium: media[to], OldMedium: media[from]})
			case "clear":
				model = newNaive()
				apply(&Event{Kind: Cleared})
			case "restart":
				state := m.Append(nil)
				loaded, err := New(m.cfg)
				if err != nil {
					t.Fatal(err)
				}
				if err := loaded.Load(state); err != nil {
					t.Fatal(err)
				}
				m = loaded
			}
			check()
		}
		// What the engine lets go, the mapping lets go.
		for tier := range index.Tier(index.Tiers) {
			for _, b := range nodes {
				for model.copies[tier][b] > 0 {
					remove(b, tier)
				}
			}
		}
		checkEmpty(t, m)
	})
}

// checkEmpty fails if anything is left in a Mapping.
func checkEmpty(t tb, m *Mapping) {
	t.Helper()
	if len(m.engine)+len(m.blocks)+len(m.aside)+len(m.waiting)+m.asideLen+len(m.salts.ids) > 0 || m.held != [index.Tiers]int{} {
		t.Fatalf("left: %d hashes, %d blocks, %d aside for %d parents, %d tokens, %d salts",
			len(m.engine), len(m.blocks), len(m.aside), len(m.waiting), m.asideLen, len(m.salts.ids))
	}
}
