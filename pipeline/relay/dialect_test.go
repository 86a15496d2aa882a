// This file has the prompts of the stories of depths_test.go, and how engines of
// all kinds and versions say them in events.

package relay

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
)

// family is what prompts have in common besides tokens. Two that differ in nothing
// but their engine hashes are the same prompts to kvindex.
type family struct {
	lora, salt string
	// image is a multimodal input that all blocks have but the first, which is the
	// one of family base.
	image string
	base  int
	hash  string // what the engine's hashes are made of; families may share it
}

func (f *family) extra() index.Extra {
	x := index.Extra{LoRA: f.lora, Salt: f.salt}
	if h, ok := index.MMIdentifier(f.image); ok {
		x.MM = []index.MMHash{{Hash: h, Start: depthsBlockSize, End: 1 << 20}}
	}
	return x
}

// The blocks of a family are a tree; parents are before their children.
var (
	treeParents = []int{-1, 0, 1, 2, 3, 1, 5, 2, 0, 8}
	treeLeaves  = []int{4, 6, 7, 9}
)

const depthsBlockSize = 2

// treeBlock is one of a family: its number in the tree.
type treeBlock struct{ family, at int }

// path returns the blocks of the tree from the root to at.
func path(at int) (p []int) {
	for ; at >= 0; at = treeParents[at] {
		p = append(p, at)
	}
	slices.Reverse(p)
	return p
}

// following is the token after a block, whichever comes next.
func following(at int) uint32 { return 70_000 + uint32(at) }

func treeTokens(blocks []int) (tokens []uint32) {
	for _, b := range blocks {
		tokens = append(tokens, following(treeParents[b]), uint32(b))
	}
	return tokens
}

// prompt is the tokens of a prompt to block at, with the one after it.
func prompt(at int) []uint32 { return append(treeTokens(path(at)), following(at)) }

// dialect is how an engine of some version talks.
type dialect struct {
	kind     engine.Engine
	polled   bool // it keeps events, in JSON, until they are read
	maps     bool // events are maps
	hashes   int  // as uint64, int64, 32 bytes, 16 bytes; in JSON as numbers or, the latter two, digits
	groups   bool // events say the attention group
	gentle   bool // it does nothing that an index cannot follow
	tiers    index.Tier
	hasher   index.BlockHasher
	families []family
	// collide: blocks of a prompt have one hash with and without adapter, so that
	// an index cannot know of both.
	collide bool
}

func newDialect(rng *rand.Rand) *dialect {
	d := &dialect{kind: engine.VLLM, gentle: rng.IntN(3) == 0, maps: rng.IntN(2) == 0, hashes: rng.IntN(4), groups: rng.IntN(3) == 0, tiers: 2}
	d.hasher = index.BlockHasher{BlockSize: depthsBlockSize, Scheme: index.Hasher(rng.IntN(2)), Eagle: rng.IntN(4) == 0}
	plain, salted, adapted := []family{{hash: "plain"}, {hash: "plain again"}}, family{salt: "tenant", hash: "salt"}, family{lora: "adapter", hash: "lora"}
	both := family{lora: "adapter", salt: "tenant", hash: "both"}
	image := family{image: strings.Repeat("ab", 32), hash: "image"}
	other := family{image: "an image", salt: "tenant", base: 2, hash: "other image"}
	d.families = append(plain, salted, adapted, both, image, other)
	switch rng.IntN(6) {
	case 0, 1:
		d.kind, d.hashes, d.groups = engine.SGLang, 1, false
		d.families = d.families[:5] // images are tokens
		if d.collide = d.maps && rng.IntN(3) == 0; d.collide {
			d.families[3].hash, d.families[4].hash = "plain", "salt"
		}
		if !d.maps { // these cannot name an adapter
			d.families = d.families[:3]
		}
	case 2: // streaming
		d.kind, d.maps, d.hashes, d.groups, d.hasher.Eagle, d.tiers = engine.TensorRTLLM, true, 1, false, false, 1
		other.salt, other.base = "", 0
		d.families = append(plain, image, other)
	case 3:
		d.kind, d.maps, d.polled, d.hasher.Eagle = engine.TensorRTLLM, true, true, false
		d.families = append(plain, salted, image, other)
	default:
		d.maps = d.maps || d.hasher.Eagle
	}
	return d
}

// block returns a block of a family, which may be another family's.
func (d *dialect) block(f, at int) treeBlock {
	if at == 0 && d.families[f].image != "" {
		f = d.families[f].base
	}
	return treeBlock{f, at}
}

func (d *dialect) parent(b treeBlock) treeBlock { return d.block(b.family, treeParents[b.at]) }

func (d *dialect) hash(b treeBlock) any {
	if b.at < 0 {
		return nil
	}
	h := xxh3.HashString(fmt.Sprint(d.families[b.family].hash, b.at))
	switch {
	case d.polled && d.hashes > 1:
		return fmt.Sprintf("%048d%016x", 7, h)
	case d.polled || d.hashes == 0:
		return h
	case d.hashes == 1:
		return int64(h)
	case d.hashes == 2:
		return binary.BigEndian.AppendUint64(make([]byte, 24, 32), h)
	default:
		return binary.BigEndian.AppendUint64(make([]byte, 8, 16), h)
	}
}

// named is a field of an event.
type named struct {
	name  string
	value any
}

// event encodes an event: all fields in their order, or those that are not nil. In
// JSON it is what follows the number.
func (d *dialect) event(tag string, fields []named) []byte {
	if d.polled {
		return d.json(tag, fields)
	}
	var p []byte
	n := 1
	for _, f := range fields {
		if !d.maps || f.value != nil {
			n++
			if d.maps {
				p = msgp.AppendString(p, f.name)
			}
			var err error
			if p, err = msgp.AppendIntf(p, f.value); err != nil {
				panic("BUG: " + err.Error())
			}
		}
	}
	if !d.maps {
		return append(msgp.AppendString(msgp.AppendArrayHeader(nil, uint32(n)), tag), p...)
	}
	return append(msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, uint32(n)), "type"), tag), p...)
}

// jsonTags are TensorRT-LLM's.
var jsonTags = map[string]string{"BlockStored": "stored", "BlockRemoved": "removed"}

// windows are those of TensorRT-LLM's attention groups.
var windows = []int{4096, 128}

func (d *dialect) json(tag string, fields []named) []byte {
	if t, ok := jsonTags[tag]; ok {
		tag = t
	}
	data, group := map[string]any{"type": tag}, 0
	for _, f := range fields {
		if f.name == "group_idx" {
			group = f.value.(int)
		} else {
			data[f.name] = f.value
		}
	}
	p, err := json.Marshal(data)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	p = fmt.Appendf(nil, `"data": %s, "window_size": %d`, p, windows[group])
	if d.groups {
		p = fmt.Appendf(p, `, "layer_group_id": %d`, group)
	}
	return p
}

func (d *dialect) medium(t index.Tier) any {
	switch {
	case t == index.Device:
		return "GPU"
	case d.kind == engine.SGLang:
		return "CPU_PINNED"
	}
	return "CPU"
}

func (d *dialect) names(blocks []treeBlock) (hashes []any) {
	for _, b := range blocks {
		hashes = append(hashes, d.hash(b))
	}
	return hashes
}

// text is s, or nil if that is empty.
func text(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// stored is the event that stores a chain. partial: one more block follows that is
// not full.
func (d *dialect) stored(t index.Tier, chain []treeBlock, partial bool) []named {
	if d.polled {
		return d.storedJSON(t, chain, partial)
	}
	var tokens, ahead []any
	for _, b := range chain {
		of := append(treeTokens([]int{b.at}), following(b.at))
		for i, token := range of[:depthsBlockSize] {
			if d.hasher.Eagle && d.kind == engine.SGLang {
				tokens = append(tokens, []any{token, of[i+1]})
			} else {
				tokens = append(tokens, token)
			}
		}
		ahead = append(ahead, []any{following(b.at)})
	}
	hashes := d.names(chain)
	if partial {
		hashes, ahead = append(hashes, d.hash(treeBlock{chain[0].family, 1000})), append(ahead, nil)
		if d.hasher.Eagle && d.kind == engine.SGLang {
			tokens = append(tokens, []any{uint32(7), uint32(8)})
		} else {
			tokens = append(tokens, uint32(7))
		}
	}
	f := d.families[chain[0].family]
	fields := []named{
		{"block_hashes", hashes}, {"parent_block_hash", d.hash(d.parent(chain[0]))}, {"token_ids", tokens},
		{"block_size", depthsBlockSize}, {"lora_id", nil}, {"medium", d.medium(t)},
	}
	switch {
	case d.kind == engine.SGLang && d.maps:
		return append(fields, named{"cache_salt", text(f.salt)}, named{"session_id", "s"}, named{"lora_name", text(f.lora)})
	case d.kind == engine.SGLang:
		return append(fields, named{"metadata", map[string]any{"cache_salt": text(f.salt)}})
	case d.kind == engine.TensorRTLLM:
		return append(fields, named{"lora_name", nil}, named{"mm_keys", d.keys(chain, len(hashes))})
	}
	fields = append(append(fields, named{"lora_name", text(f.lora)}, named{"extra_keys", d.keys(chain, len(hashes))}), d.group(0)...)
	if d.hasher.Eagle {
		fields = append(fields, named{"lookahead_token_ids", ahead})
	}
	return fields
}

// keys says by block, n of them, what besides tokens is in it; nil if nothing is.
func (d *dialect) keys(chain []treeBlock, n int) any {
	all, some := make([]any, n), false
	for i, b := range chain {
		f := d.families[b.family]
		var of []any
		if f.lora != "" {
			of = append(of, f.lora)
		}
		switch {
		case f.image == "":
		case d.kind == engine.TensorRTLLM:
			of = append(of, map[string]any{"type": "mm_key", "hash": f.image, "start_offset": b.at})
		default:
			of = append(of, []any{f.image, -b.at})
		}
		if f.salt != "" && b.at == 0 && d.kind != engine.TensorRTLLM {
			of = append(of, f.salt)
		}
		if of != nil {
			all[i], some = of, true
		}
	}
	if !some {
		return nil
	}
	return all
}

func (d *dialect) storedJSON(t index.Tier, chain []treeBlock, partial bool) []named {
	var blocks []any
	add := func(b treeBlock, tokens []uint32) {
		of := []any{}
		for _, token := range tokens {
			of = append(of, map[string]any{"type": "unique_token", "token_id": token, "token_extra_id": 0})
		}
		f := d.families[b.family]
		keys := []any{}
		if f.image != "" {
			keys = append(keys, map[string]any{"type": "mm_key", "hash": f.image, "start_offset": b.at})
		}
		blocks = append(blocks, map[string]any{
			"type": "stored_block", "block_hash": d.hash(b), "tokens": of, "cache_level": t, "priority": 35, "mm_keys": keys, "cache_salt": text(f.salt),
		})
	}
	for _, b := range chain {
		add(b, treeTokens([]int{b.at}))
	}
	if partial {
		add(treeBlock{chain[0].family, 1000}, []uint32{7})
	}
	return []named{{"parent_hash", d.hash(d.parent(chain[0]))}, {"blocks", blocks}}
}

// spoil makes an event of stored one that cannot be read.
func (d *dialect) spoil(fields []named) {
	if d.polled {
		fields[1].value = 7
	} else {
		fields[2].value = []any{2.5}
	}
}

// group is how an event says the attention group.
func (d *dialect) group(n int) []named {
	switch {
	case !d.groups:
		return nil
	case d.polled:
		return []named{{"group_idx", n}}
	}
	return []named{{"group_idx", n}, {"kv_cache_spec_kind", []string{"full_attention", "sliding_window"}[n]}}
}

func (d *dialect) removed(t index.Tier, blocks []treeBlock) []named {
	fields := []named{{"block_hashes", d.names(blocks)}}
	if !d.polled { // that is from everywhere
		fields = append(fields, named{"medium", d.medium(t)})
	}
	if d.groups {
		fields = append(fields, named{"group_idx", 0})
	}
	return fields
}

// moved is TensorRT-LLM's event of a block that went from tier to tier.
func (d *dialect) moved(b treeBlock, from, to index.Tier) []named {
	return []named{{"block_hash", d.hash(b)}, {"cache_level", map[string]any{"type": "event_diff", "new_value": to, "old_value": from}}, {"priority", nil}}
}
