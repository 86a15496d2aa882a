// This file maps an engine's blocks, named by its own hashes, to kvindex's.

package engine

import (
	"bytes"
	"errors"
	"unsafe"

	"kvindex/index"
)

// Engine names a family of engines.
type Engine uint8

// The engines. They differ in little that their events don't show themselves.
const (
	VLLM Engine = iota + 1
	SGLang
	TensorRTLLM
)

// Config is what a Mapping must know. Hasher is the model's.
type Config struct {
	Engine Engine
	Hasher index.BlockHasher     // of the model: Flash or Dynamo
	Media  map[string]index.Tier // words for kinds of memory besides those known, or in their place

	// MaxBlocks is the largest number of engine hashes that are known at a
	// time, a bound against an engine that only ever stores; a block takes
	// 110 to 170 bytes. Default 16 Mi.
	MaxBlocks int
	// MaxAside bounds what is kept of blocks aside, in tokens of 4 bytes; names,
	// salts and multimodal keys count too, by their bytes. Default 16 Mi.
	MaxAside int
}

// Errors of New.
var (
	ErrHasher = errors.New("hasher must be flash or dynamo, with a block size above 0")
	ErrEngine = errors.New("unknown engine")
)

const (
	defaultMaxBlocks = 16 << 20
	defaultMaxAside  = 16 << 20
)

// Mapping knows what one worker-rank's engine holds, and says it in kvindex's
// words. It belongs to one goroutine.
//
// An engine hash names a whole prefix, so it is held or not, by tier: a store of
// what is held changes nothing, and one removal ends it, however many copies
// the engine has (it announces a second copy and a re-announcement alike, and a
// removal of one of two copies like that of the last: so a block may be missed
// that is there, and none is credited that is not). Several engine hashes can
// be the same prefix to kvindex, which holds a block until the last of them goes.
//
// A block whose parent is unknown is kept aside, tokens and all, and comes in
// when the parent does; likewise one without tokens, until they are known.
// Nobody could find such a block before. A removal removes what it names and
// never what follows it.
type Mapping struct {
	// Counts counts what was left out or is worth knowing. The caller may
	// read and zero it between calls.
	Counts Counts

	cfg      Config
	engine   map[uint64]entry        // by engine hash: blocks whose prefix is known
	blocks   map[index.SeqHash]block // what engine's entries stand for
	aside    map[uint64]*aside       // by engine hash: blocks whose prefix is not known; never also in engine
	waiting  map[uint64]*aside       // by the parent's engine hash: the first of those in aside
	asideLen int                     // of aside, as MaxAside counts
	held     [index.Tiers]int        // of blocks, those that are held there
	salts    salts                   // of blocks
	group    int64                   // the main group, only if hasGroup
	window   int64                   // the main group's, 0 if engines don't say
	hasGroup bool
	chained  bool // hashes were proven to be those of prefixes, if that was in doubt

	// Scratch of one Apply.
	run     []index.LocalHash
	fresh   []uint64 // hashes that became known
	adopted []adopted
	queue   []uint64
	win     []uint32
	local   [1]index.LocalHash
	mm      []index.MMHash
	sum     []byte
}

// entry is an engine hash whose prefix is known.
type entry struct {
	seq   index.SeqHash
	tiers uint8 // bit by tier: where the engine holds it; not 0
}

// block is a block of kvindex that at least one engine hash stands for.
type block struct {
	parent   index.SeqHash // if position is not 0
	local    index.LocalHash
	position int32
	salt     uint32              // of the whole prefix
	refs     [index.Tiers]uint32 // engine hashes held there
}

// New returns a Mapping for an engine that holds nothing. Errors: ErrHasher, ErrEngine.
func New(c Config) (*Mapping, error) {
	if c.Hasher.BlockSize < 1 || c.Hasher.Scheme != index.Flash && c.Hasher.Scheme != index.Dynamo {
		return nil, ErrHasher
	}
	if c.Engine < VLLM || c.Engine > TensorRTLLM {
		return nil, ErrEngine
	}
	if c.MaxBlocks <= 0 {
		c.MaxBlocks = defaultMaxBlocks
	}
	if c.MaxAside <= 0 {
		c.MaxAside = defaultMaxAside
	}
	m := &Mapping{cfg: c}
	m.clear()
	return m, nil
}

// Clear makes m that of an engine that holds nothing and was just started.
func (m *Mapping) Clear() {
	m.clear()
	m.hasGroup, m.window, m.chained = false, 0, false
}

func (m *Mapping) clear() {
	m.engine = make(map[uint64]entry)
	m.blocks = make(map[index.SeqHash]block)
	m.aside = make(map[uint64]*aside)
	m.waiting = make(map[uint64]*aside)
	m.asideLen = 0
	m.held = [index.Tiers]int{}
	m.salts = salts{}
}

// Len returns how many blocks kvindex is told of in a tier.
func (m *Mapping) Len(t index.Tier) int { return m.held[t] }

// Hashes returns how many engine hashes are known, and how many kept aside.
func (m *Mapping) Hashes() (known, aside int) { return len(m.engine), len(m.aside) }

// Apply adds to out what e changes. It costs a few hundred nanoseconds a block.
func (m *Mapping) Apply(e *Event, out *Output) {
	switch e.Kind {
	case Cleared:
		m.clear()
		out.cleared()
	case Created:
		m.grow(e.Window, out)
	case Stored:
		m.stored(e, out)
	case Removed:
		m.removed(e, out)
	case Moved:
		m.moved(e, out)
	}
}

// grow takes note of a window. The main group is the one with the largest; if
// it turns out to be another one than was taken for it, all is cleared.
func (m *Mapping) grow(window int64, out *Output) {
	if window <= m.window {
		return
	}
	if len(m.engine)+len(m.aside) > 0 {
		m.Counts[WindowGrown]++
		m.clear()
		out.cleared()
	}
	m.window, m.hasGroup = window, false
}

// main reports whether the event is about the main attention group, the one
// whose blocks are all of a prefix's. Where events don't say what a group is,
// it is group 0. Of several that would do it is the first that stores.
func (m *Mapping) main(e *Event, out *Output) bool {
	m.grow(e.Window, out)
	if e.Window != 0 && e.Window < m.window {
		return false
	}
	switch string(e.Spec) {
	case "", "full_attention", "mla_attention", "sink_full_attention":
	default:
		return false
	}
	switch {
	case !e.HasGroup:
		return true
	case m.hasGroup:
		return e.Group == m.group
	case e.Kind != Stored:
		return true // nothing of a group is held
	case len(e.Tokens) == 0:
		return false
	}
	return len(e.Spec) > 0 || e.Window > 0 || e.Group == 0
}

// stored maps a store.
func (m *Mapping) stored(e *Event, out *Output) {
	n := len(e.Hashes)
	if n == 0 {
		return
	}
	t, ok := m.tier(e.Medium, e.Locality)
	if !ok {
		m.leaveOut(OtherMedium, n)
		return
	}
	if !m.main(e, out) {
		if len(e.Tokens) == 0 {
			m.leaveOut(Placeholder, n)
		} else {
			m.leaveOut(OtherGroup, n)
		}
		return
	}
	if len(e.Tokens) == 0 {
		m.placeholders(e, t, out)
		return
	}
	full, why := m.admit(e)
	if full < n {
		m.leaveOut(why, n-full)
	}
	if full == 0 {
		return
	}
	if e.HasGroup && !m.hasGroup {
		m.group, m.hasGroup = e.Group, true
	}
	m.walk(e, t, full, out)
}

func (m *Mapping) leaveOut(why Reason, blocks int) { m.Counts[why] += uint64(blocks) }

// admit returns how many leading blocks of a store can be mapped, going by its
// shape, and why the others cannot.
func (m *Mapping) admit(e *Event) (int, Reason) {
	bs, n := m.cfg.Hasher.BlockSize, len(e.Hashes)
	switch {
	case e.BlockSize != 0 && e.BlockSize != bs:
		return 0, OtherBlockSize
	case len(e.LoRAName) == 0 && e.HasLoRAID:
		return 0, UnnamedLoRA
	case e.KeyBlocks != 0 && e.KeyBlocks != n:
		return 0, UnknownKey
	case (len(e.Seconds) > 0 || len(e.Ahead) > 0) != m.cfg.Hasher.Eagle:
		return 0, EagleMismatch
	case len(e.Tokens) > n*bs:
		return 0, Masked
	case len(e.Tokens) <= (n-1)*bs:
		return 0, TooFewTokens
	case !m.proven(e):
		return 0, Unchained
	}
	if usable := e.Usable / bs; usable < len(e.Tokens)/bs {
		return usable, BadToken
	}
	return len(e.Tokens) / bs, Partial // the last block is the only one that may not be full
}

// content is what of an event goes into one block's local hash. Its parts are
// good until the next call.
type content struct {
	window []uint32 // tokens, one more than a block's with EAGLE
	lora   string
	salt   string // if the event says it
	mm     []index.MMHash
}

// reader goes through the blocks of a store.
type reader struct {
	m           *Mapping
	e           *Event
	keys, ahead int // next of the event's
}

// next returns the content of block i, to be called for each in turn.
func (r *reader) next(i int) (c content, why Reason) {
	e, m := r.e, r.m
	bs := m.cfg.Hasher.BlockSize
	c.window = e.Tokens[i*bs : (i+1)*bs]
	c.lora, c.salt = view(e.LoRAName), view(e.Salt)
	if m.cfg.Hasher.Eagle {
		next := uint32(0)
		if len(e.Seconds) > 0 {
			seconds := e.Seconds[i*bs : (i+1)*bs]
			for j, s := range seconds[:bs-1] {
				if s != c.window[j+1] {
					return c, BadToken
				}
			}
			next = seconds[bs-1]
		} else {
			first := r.ahead
			for r.ahead < len(e.Ahead) && e.Ahead[r.ahead].Block == int32(i) {
				r.ahead++
			}
			if r.ahead != first+1 {
				return c, EagleMismatch
			}
			if e.Ahead[first].Bad {
				return c, BadToken
			}
			next = e.Ahead[first].Token
		}
		m.win = append(append(m.win[:0], c.window...), next)
		c.window = m.win
	}
	m.mm = m.mm[:0]
	named := len(c.lora) == 0
	for ; r.keys < len(e.Keys) && e.Keys[r.keys].Block == int32(i); r.keys++ {
		k := &e.Keys[r.keys]
		switch {
		case k.Kind == KeyMM:
			h, ok := index.MMIdentifier(string(k.ID))
			if !ok {
				return c, UnknownKey
			}
			m.mm = append(m.mm, index.MMHash{Hash: h, Start: 0, End: bs})
		case k.Kind == KeyText && !named && bytes.Equal(k.ID, e.LoRAName):
			named = true
		case k.Kind == KeyText && i == 0 && !e.HasParent && c.salt == "" && len(k.ID) > 0:
			c.salt = view(k.ID)
		default:
			return c, UnknownKey
		}
	}
	c.mm = m.mm
	return c, reasonNone
}

// view is b as a string, good as long as b is.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// hash returns a block's local hash.
func (m *Mapping) hash(c *content, salt string) index.LocalHash {
	h := m.cfg.Hasher.Append(m.local[:0], c.window, index.Extra{LoRA: c.lora, Salt: salt, MM: c.mm})
	return h[0]
}

// walk stores the first n blocks of e.
func (m *Mapping) walk(e *Event, t index.Tier, n int, out *Output) {
	r := reader{m: m, e: e}
	parent := e.Parent // engine hash of the block before
	prev, known := prefix{position: -1}, !e.HasParent
	if e.HasParent {
		if en, ok := m.engine[parent]; ok {
			prev, known = m.prefixOf(en.seq), true
		}
	}
	m.run, m.fresh, m.adopted = m.run[:0], m.fresh[:0], m.adopted[:0]
	var before, tail prefix // before the first block of run, and its last new one
	length := 0             // of run, to its last new block
	for i := range n {
		h := e.Hashes[i]
		c, why := r.next(i)
		if why == reasonNone && len(m.engine)+len(m.aside) >= m.cfg.MaxBlocks && !m.has(h) {
			why = Full
		}
		var now prefix
		news := false
		if why == reasonNone {
			en, held := m.engine[h]
			switch {
			case held:
				now, news, why = m.confirm(h, en, &c, prev, known, t)
				if why == reasonNone && !known {
					b := m.blocks[en.seq]
					prev, known = m.prefixBefore(&b), true
				}
			case known:
				now, news, why = m.know(h, &c, prev, t, parent)
			default:
				why = m.setAside(h, parent, &c, t)
			}
		}
		if why != reasonNone {
			m.leaveOut(why, n-i)
			break
		}
		parent = h
		if !known {
			continue
		}
		if news && len(m.run) == 0 {
			before = prev
		}
		if news || len(m.run) > 0 {
			m.run = append(m.run, now.local)
		}
		if news {
			length, tail = len(m.run), now
		}
		prev = now
	}
	if length > 0 {
		out.stored(t, before.stored(m.run[:length]), tail.seq)
		if m.blind(e) {
			m.Counts[BlindBlocks] += uint64(length)
		}
	}
	m.adopt(out)
}

// blind reports whether the event is of a version that can't say the cache salt:
// vLLM before extra_keys, the eighth field, SGLang before metadata, the seventh.
func (m *Mapping) blind(e *Event) bool {
	least := 9 // with the tag
	if m.cfg.Engine == SGLang {
		least = 8
	}
	return e.Blind || e.Fields > 0 && e.Fields < least
}

// has reports whether the engine hash is known or aside.
func (m *Mapping) has(h uint64) bool {
	if _, ok := m.engine[h]; ok {
		return true
	}
	_, ok := m.aside[h]
	return ok
}

// prefix is a chain of blocks whose hash is known, told by its last one;
// position -1: the empty one.
type prefix struct {
	seq      index.SeqHash
	local    index.LocalHash // if needed
	position int32
	salt     uint32
}

func (m *Mapping) prefixOf(seq index.SeqHash) prefix {
	b := m.blocks[seq]
	return prefix{seq: seq, position: b.position, salt: b.salt}
}

// prefixBefore is what b follows, which need not be held.
func (m *Mapping) prefixBefore(b *block) prefix {
	return prefix{seq: b.parent, position: b.position - 1, salt: b.salt}
}

// follows reports whether b comes right after p.
func (b *block) follows(p prefix) bool {
	return b.position == p.position+1 && (b.position == 0 || b.parent == p.seq)
}

// stored is the event of blocks after p.
func (p prefix) stored(locals []index.LocalHash) index.Stored {
	return index.Stored{Parent: p.seq, HasParent: p.position >= 0, Position: p.position + 1, Locals: locals}
}

// after returns the sequence hash of a block with that local hash after p.
func (p prefix) after(l index.LocalHash) (index.SeqHash, bool) {
	if p.position < 0 {
		return index.SeqHash(l), l != 0
	}
	seq := index.Next(p.seq, l)
	return seq, seq != 0 && seq != p.seq && p.position < 1<<31-2
}

// confirm holds the content of a block whose engine hash is known to what it
// was, and notes that it is held in t. prev counts only if known.
func (m *Mapping) confirm(h uint64, en entry, c *content, prev prefix, known bool, t index.Tier) (now prefix, news bool, why Reason) {
	b := m.blocks[en.seq]
	salt := m.salts.name(b.salt)
	if c.salt != "" && c.salt != salt || m.hash(c, salt) != b.local || known && !b.follows(prev) {
		return now, false, Contradiction
	}
	if en.tiers&(1<<t) != 0 {
		m.Counts[Duplicate]++
	} else {
		news = m.add(h, en, t)
	}
	return prefix{seq: en.seq, local: b.local, position: b.position, salt: b.salt}, news, reasonNone
}

// know makes known the block of an engine hash that was not, or was aside, as one
// after prev, held in t. parent is the engine hash of the block before.
func (m *Mapping) know(h uint64, c *content, prev prefix, t index.Tier, parent uint64) (now prefix, news bool, why Reason) {
	now = prefix{position: prev.position + 1, salt: prev.salt}
	salt := m.salts.name(prev.salt)
	if c.salt != "" && c.salt != salt {
		if !m.salts.room(c.salt) {
			return now, false, Full
		}
		salt = c.salt
		now.salt = m.salts.id(salt)
		defer m.salts.unused(now.salt)
	}
	local := m.hash(c, salt)
	seq, ok := prev.after(local)
	if !ok {
		return now, false, NullHash
	}
	now.seq, now.local = seq, local
	if a := m.aside[h]; a != nil {
		if a.content && (prev.position < 0 || a.parent != parent || a.salt != "" && a.salt != salt || !a.same(c)) {
			return now, false, Contradiction
		}
		m.adopted = append(m.adopted, adopted{h, a.tiers})
		m.takeBack(a)
		m.Counts[Adopted]++
	}
	news = m.ref(seq, t, &block{parent: prev.seq, local: local, position: now.position, salt: now.salt})
	m.engine[h] = entry{seq: seq, tiers: 1 << t}
	m.fresh = append(m.fresh, h)
	return now, news, reasonNone
}

// add notes that a known engine hash is held in t too, and reports whether
// kvindex's block is new there.
func (m *Mapping) add(h uint64, en entry, t index.Tier) bool {
	en.tiers |= 1 << t
	m.engine[h] = en
	return m.ref(en.seq, t, nil)
}

// ref counts an engine hash for a block, which is made if it is not there, and
// reports whether it is the first in that tier.
func (m *Mapping) ref(seq index.SeqHash, t index.Tier, made *block) bool {
	b, ok := m.blocks[seq]
	if !ok {
		b = *made
		m.salts.hold(b.salt)
	}
	b.refs[t]++
	m.blocks[seq] = b
	if b.refs[t] > 1 {
		return false
	}
	m.held[t]++
	return true
}

// removed maps a removal.
func (m *Mapping) removed(e *Event, out *Output) {
	mask := uint8(1<<index.Tiers - 1)
	if !e.AllMedia {
		t, ok := m.tier(e.Medium, e.Locality)
		if !ok {
			m.leaveOut(OtherMedium, len(e.Hashes))
			return
		}
		mask = 1 << t
	}
	if !m.main(e, out) {
		m.leaveOut(OtherGroup, len(e.Hashes))
		return
	}
	for _, h := range e.Hashes {
		if !m.drop(h, mask, out) {
			m.Counts[UnknownRemoved]++
		}
	}
}

// drop takes an engine hash out of the tiers of mask, and reports whether it
// was in any.
func (m *Mapping) drop(h uint64, mask uint8, out *Output) bool {
	en, ok := m.engine[h]
	if !ok {
		return m.dropAside(h, mask)
	}
	gone := en.tiers & mask
	if gone == 0 {
		return false
	}
	b := m.blocks[en.seq]
	for t := range index.Tier(index.Tiers) {
		if gone&(1<<t) == 0 {
			continue
		}
		if b.refs[t]--; b.refs[t] == 0 {
			m.held[t]--
			out.remove(t, en.seq)
		}
	}
	if b.refs == [index.Tiers]uint32{} {
		m.salts.release(b.salt)
		delete(m.blocks, en.seq)
	} else {
		m.blocks[en.seq] = b
	}
	if en.tiers &^= mask; en.tiers == 0 {
		delete(m.engine, h)
	} else {
		m.engine[h] = en
	}
	return true
}

// moved maps a move from tier to tier: the block is in both for a moment.
func (m *Mapping) moved(e *Event, out *Output) {
	if !m.main(e, out) {
		m.leaveOut(OtherGroup, len(e.Hashes))
		return
	}
	to, toOK := m.tier(e.Medium, nil)
	from, fromOK := m.tier(e.OldMedium, nil)
	if !toOK {
		m.leaveOut(OtherMedium, len(e.Hashes))
	}
	for _, h := range e.Hashes {
		if !m.has(h) {
			m.Counts[UnknownRemoved]++
			continue
		}
		if toOK {
			m.hold(h, to, out)
		}
		if fromOK && (!toOK || from != to) {
			m.drop(h, 1<<from, out)
		}
	}
}

// hold notes that an engine hash, known or aside, is held in t.
func (m *Mapping) hold(h uint64, t index.Tier, out *Output) {
	en, ok := m.engine[h]
	switch {
	case !ok:
		a := m.aside[h]
		if a.tiers&(1<<t) != 0 {
			m.Counts[Duplicate]++
		}
		a.tiers |= 1 << t
	case en.tiers&(1<<t) != 0:
		m.Counts[Duplicate]++
	case m.add(h, en, t):
		m.single(en.seq, t, out)
	}
}

// single adds the store of one block that is known.
func (m *Mapping) single(seq index.SeqHash, t index.Tier, out *Output) {
	b := m.blocks[seq]
	m.run = append(m.run[:0], b.local)
	out.stored(t, m.prefixBefore(&b).stored(m.run), seq)
}
