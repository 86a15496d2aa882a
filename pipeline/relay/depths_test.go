// This file plays relays, all of them but sockets and Kafka, against engines that
// it makes up, and holds the depths that the records mean to what the engines
// hold. Engines, what happens on the way to them, Kafka, and the relay's ends are
// all at random; a seed gives the same story again.

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	flags "flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tinylib/msgp/msgp"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/zeebo/xxh3"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
)

var (
	depthsSeed    = flags.Uint64("depths.seed", 1, "seed of the first story of engines, a relay and depths")
	depthsStories = flags.Int("depths.stories", 40, "how many stories of engines, a relay and depths")
)

// family is what prompts have in common besides tokens. Two that differ in nothing
// but their engine hashes are the same prompts to kvindex.
type family struct {
	extra index.Extra
	hash  string // what the engine's hashes are made of; families may share it
}

// The blocks of a family are a tree; parents are before their children.
var (
	treeParents = []int{-1, 0, 1, 2, 3, 1, 5, 2, 0, 8}
	treeLeaves  = []int{4, 6, 7, 9}
)

const depthsBlockSize = 2

// block is one of a family: its number in the tree.
type treeBlock struct{ family, at int }

func (b treeBlock) parent() treeBlock { return treeBlock{b.family, treeParents[b.at]} }

// path returns the blocks of the tree from the root to at.
func path(at int) (p []int) {
	for ; at >= 0; at = treeParents[at] {
		p = append(p, at)
	}
	slices.Reverse(p)
	return p
}

func treeTokens(blocks []int) (tokens []uint32) {
	for _, b := range blocks {
		tokens = append(tokens, uint32(b), 70_000)
	}
	return tokens
}

// dialect is how an engine of some version talks.
type dialect struct {
	kind     engine.Engine
	maps     bool // events are maps
	hashes   int  // as uint64, int64, 32 bytes, 16 bytes
	groups   bool // events say the attention group
	gentle   bool // it does nothing that an index cannot follow
	families []family
	// collide: blocks of a prompt have one hash with and without adapter, so that
	// an index cannot know of both.
	collide bool
}

func newDialect(rng *rand.Rand) *dialect {
	d := &dialect{kind: engine.VLLM, gentle: rng.IntN(3) == 0, maps: rng.IntN(2) == 0, hashes: rng.IntN(4), groups: rng.IntN(3) == 0}
	d.families = []family{
		{hash: "plain"}, {hash: "plain again"}, {index.Extra{Salt: "tenant"}, "salt"}, {index.Extra{LoRA: "adapter"}, "lora"},
		{index.Extra{LoRA: "adapter", Salt: "tenant"}, "both"},
	}
	if rng.IntN(2) == 0 {
		d.kind, d.hashes, d.groups = engine.SGLang, 1, false
		if d.collide = d.maps && rng.IntN(3) == 0; d.collide {
			d.families[3].hash, d.families[4].hash = "plain", "salt"
		}
		if !d.maps { // these cannot name an adapter
			d.families = d.families[:3]
		}
	}
	return d
}

func (d *dialect) hash(b treeBlock) any {
	if b.at < 0 {
		return nil
	}
	h := xxh3.HashString(fmt.Sprint(d.families[b.family].hash, b.at))
	switch d.hashes {
	case 0:
		return h
	case 1:
		return int64(h)
	case 2:
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

// event encodes an event: all fields in their order, or those that are not nil.
func (d *dialect) event(tag string, fields []named) []byte {
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

// stored is the event that stores a chain. partial: one more block follows that is
// not full.
func (d *dialect) stored(t index.Tier, chain []treeBlock, partial bool) []named {
	var tokens []any
	for _, b := range chain {
		for _, token := range treeTokens([]int{b.at}) {
			tokens = append(tokens, token)
		}
	}
	hashes := d.names(chain)
	if partial {
		hashes, tokens = append(hashes, d.hash(treeBlock{chain[0].family, 1000})), append(tokens, uint32(7))
	}
	x := d.families[chain[0].family].extra
	fields := []named{
		{"block_hashes", hashes}, {"parent_block_hash", d.hash(chain[0].parent())}, {"token_ids", tokens},
		{"block_size", depthsBlockSize}, {"lora_id", nil}, {"medium", d.medium(t)},
	}
	text := func(s string) any {
		if s == "" {
			return nil
		}
		return s
	}
	switch {
	case d.kind == engine.SGLang && d.maps:
		return append(fields, named{"cache_salt", text(x.Salt)}, named{"session_id", "s"}, named{"lora_name", text(x.LoRA)})
	case d.kind == engine.SGLang:
		return append(fields, named{"metadata", map[string]any{"cache_salt": text(x.Salt)}})
	}
	var keys any
	if x.LoRA != "" || x.Salt != "" {
		var all []any
		for i := range hashes {
			var of []any
			if x.LoRA != "" {
				of = append(of, x.LoRA)
			}
			if x.Salt != "" && i == 0 && chain[0].at == 0 {
				of = append(of, x.Salt)
			}
			if of == nil {
				all = append(all, nil)
			} else {
				all = append(all, of)
			}
		}
		keys = all
	}
	return append(append(fields, named{"lora_name", text(x.LoRA)}, named{"extra_keys", keys}), d.group(0)...)
}

// group is how an event says the attention group.
func (d *dialect) group(n int) []named {
	if !d.groups {
		return nil
	}
	return []named{{"group_idx", n}, {"kv_cache_spec_kind", []string{"full_attention", "sliding_window"}[n]}}
}

func (d *dialect) removed(t index.Tier, blocks []treeBlock) []named {
	fields := []named{{"block_hashes", d.names(blocks)}, {"medium", d.medium(t)}}
	if d.groups {
		fields = append(fields, named{"group_idx", 0})
	}
	return fields
}

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
			} else if e.said[b] && (at == 0 || e.known[b.parent()]) {
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
	// One bad event does not cost the batch, but what it says; with groups also all
	// placeholders until the next chain shows the main one.
	if e.one(40) && !e.groups {
		fields[2].value = []any{2.5}
		e.add("BlockStored", fields)
		return
	}
	e.add("BlockStored", fields)
	e.know(t, chain, true, true)
}

// prompt has the engine compute a prompt: what is not held of it is stored, and all
// that comes after the first such block.
func (e *madeUp) prompt() {
	f := e.rng.IntN(len(e.families))
	all := path(treeLeaves[e.rng.IntN(len(treeLeaves))])
	var chain []treeBlock
	for _, at := range all[:1+e.rng.IntN(len(all))] {
		if b := (treeBlock{f, at}); len(chain) > 0 || e.held[index.Device][b] == 0 {
			chain = append(chain, b)
		}
	}
	switch {
	case len(chain) > 0:
		e.store(index.Device, chain)
	case e.one(2): // it is announced again
		for _, at := range all {
			if b := (treeBlock{f, at}); e.held[index.Device][b] > 0 {
				chain = append(chain, b)
			} else {
				break
			}
		}
		e.say(index.Device, chain)
	}
}

// offload copies a block to the host, maybe just after it left the device.
func (e *madeUp) offload() {
	b, ok := e.some(index.Device, false)
	if !ok || e.held[index.Host][b] > 0 {
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

// load copies a block from the host to the device.
func (e *madeUp) load() {
	if b, ok := e.some(index.Host, false); ok && e.held[index.Device][b] == 0 {
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
	if e.kind != engine.SGLang {
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
	t := index.Tier(e.rng.IntN(depthsTiers))
	b, ok := e.some(t, !e.one(5))
	if !ok {
		return
	}
	blocks := []treeBlock{b}
	for e.held[t][b.parent()] > 0 && e.one(2) {
		b = b.parent()
		blocks = append(blocks, b)
	}
	if e.kind == engine.SGLang {
		slices.Reverse(blocks)
	}
	e.evict(t, blocks...)
}

// clear has the cache cleared. What is on the host may stay; the event says of no
// tier that it does.
func (e *madeUp) clear() {
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
	switch e.rng.IntN(5) {
	case 0:
		e.add("BlocksDefragmented", []named{{"block_hashes", strange}})
	case 1:
		e.add("BlockRemoved", []named{{"block_hashes", strange}, {"medium", "GPU"}})
	case 2:
		if b, ok := e.some(index.Device, true); ok {
			e.add("BlockRemoved", []named{{"block_hashes", e.names([]treeBlock{b})}, {"medium", "MYSTERY"}})
		}
	case 3:
		e.add("BlockStored", []named{
			{"block_hashes", strange}, {"parent_block_hash", nil}, {"token_ids", []any{1, 2, 3, 4}}, {"block_size", 4}, {"lora_id", nil}, {"medium", "GPU"},
		})
	case 4:
		if b, ok := e.some(index.Device, true); ok && e.groups { // groups share hashes
			e.add("BlockRemoved", []named{{"block_hashes", e.names([]treeBlock{b})}, {"medium", "GPU"}, {"group_idx", 1}})
		}
	}
}

// batch is what the engine publishes after a step.
func (e *madeUp) batch() string {
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
	rank, fault := int64(e.rank), e.rng.IntN(100)
	if e.gentle {
		fault = -1
	}
	switch fault {
	case 0: // a removal that cannot be read
		if b, ok := e.some(index.Device, true); ok {
			e.evict(index.Device, b)
			e.events[len(e.events)-1] = e.event("BlockRemoved", []named{{"block_hashes", 1}, {"medium", "GPU"}})
		}
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

// depthsRank is a worker-rank.
type depthsRank struct {
	*world
	story   *depthsStory
	number  int32
	replay  bool // there is a replay endpoint
	engines map[int]*madeUp
	feed    *feed
	counts  streamCounts // of all lives
	old     [][]byte     // checkpoints
	reader  reader
}

// depthsStory is the world of one story. What the ranks' goroutines do in it is
// never at one moment of the bubble's clock, so that a seed gives one story.
type depthsStory struct {
	*testing.T
	*dialect
	dir   string
	ranks []*depthsRank
	room  int64 // of records in flight, bytes
	pace  int
	mix   []int // of what happens, more or less often
	stage *verify.Oracle
	read  int // records of the log that stage and readers have

	mu    sync.Mutex // of what follows, and of what happens in worlds
	rng   *rand.Rand
	sent  float64
	kafka fakeKafka
	away  time.Time       // until then Kafka answers nothing
	full  bool            // the disk is
	late  []pendingRecord // of relays that are gone
	calm  bool            // nothing more happens
	dead  bool            // the relay is: nothing that it does has an effect
	dieIn int             // it dies with that effect, if not 0
	kill  context.CancelFunc
	lives sync.WaitGroup
}

var errDead = errors.New("the relay is dead")

// effect reports whether what the relay does now has one.
func (s *depthsStory) effect() bool {
	if s.dieIn > 0 && !s.dead {
		if s.dieIn--; s.dieIn == 0 {
			s.die()
		}
	}
	return !s.dead
}

func (s *depthsStory) die() {
	s.dead = true
	s.kill()
}

// TryProduce implements Producer.
func (s *depthsStory) TryProduce(ctx context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.effect() {
		s.kafka.direct = s.calm
		s.kafka.TryProduce(ctx, r, done)
	}
}

// kafkaActs has Kafka take or refuse some of what is on its way to it, and reports
// whether it did.
func (s *depthsStory) kafkaActs() bool {
	if n := len(s.late); n > 0 && s.rng.IntN(3) == 0 {
		s.kafka.write(s.late[0])
		s.late = s.late[1:]
	}
	n := len(s.kafka.pending)
	if n == 0 || s.dead || time.Now().Before(s.away) {
		return false
	}
	some := 1 + s.rng.IntN(n)
	if s.rng.IntN(20) == 0 {
		s.kafka.fail(some, s.rng.IntN(some+1), errRefused)
	} else {
		s.kafka.ack(some)
	}
	return true
}

// start starts a relay.
func (s *depthsStory) start() {
	s.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out := &outlet{to: s, topic: "t", name: fmt.Appendf(nil, "relay-a-%d", time.Now().UnixMilli()), limit: s.room * int64(len(s.ranks)) * 3 / 4}
	out.await = func(stop <-chan struct{}, seen int64, _ time.Duration) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for out.done.Load() == seen {
			if s.rng.IntN(10) == 0 || !s.kafkaActs() {
				return false
			}
		}
		return true
	}
	s.dead, s.dieIn, s.kill = false, 0, cancel
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("STREAM_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for i, r := range s.ranks {
		c := testConfig(nil)
		c.rank, c.engine.Engine, c.stateDir, c.logger = r.number, s.kind, s.dir, log.With("rank", r.number)
		f, err := newFeed(c, out)
		if err != nil {
			s.Fatal(err)
		}
		f.split.maxBytes, f.split.maxEvents, f.flight.limit = 150, 3, s.room
		f.files.sync = func(*os.File) error { return nil }
		f.files.fault = func(string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.full || !s.effect() {
				return errDead
			}
			return nil
		}
		r.feed = f
		pos, _ := f.restore()
		var dealer asker
		if r.replay {
			dealer = fakeDealer{r.world}
		}
		stream := newStream(c.logger, f, fakeSub{r.world}, dealer, pos, &r.counts, newStreamStatus())
		r.before = func(string) { s.happens(r) }
		s.lives.Go(func() {
			time.Sleep(time.Duration(i+1) * time.Millisecond)
			stream.run(ctx)
		})
	}
}

// happenings is how many kinds of things happens knows.
const happenings = 19

// happens is called by a stream's goroutine at each of its steps.
func (s *depthsStory) happens(r *depthsRank) {
	if c := r.feed.saving; c != nil { // what the other goroutine does is not to depend on chance
		err := <-c
		c <- err
	}
	time.Sleep(time.Duration(1 + s.drawn(10_000))) // so that no two things are at one moment
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calm || s.dead {
		return
	}
	if s.rng.IntN(2) == 0 {
		s.kafkaActs()
	}
	if s.rng.IntN(s.pace) > 0 {
		return
	}
	n := s.rng.IntN(8)
	switch s.mix[s.rng.IntN(len(s.mix))] {
	case 0:
		r.publish(n / 2)
	case 1:
		r.world.restart()
		r.publish(n / 2)
	case 2:
		r.world.kill()
	case 3:
		r.world.start()
	case 4:
		r.cut()
	case 5:
		r.do(func() { r.loseLive = n })
		r.publish(n + 1)
	case 6:
		r.do(func() { r.slowJoin = n })
	case 7:
		fault := replayFault(s.rng.IntN(int(numFaults)))
		if s.gentle {
			fault = faultGarbage + fault%2 // or faultTwice
		}
		r.do(func() { r.fault, r.faults = fault, 1+n/3 })
	case 8:
		r.do(func() { r.noRouter = !r.noRouter && !s.gentle })
	case 9: // a number is used up
		r.do(func() {
			if r.up != nil && !s.gentle {
				r.up.next++
			}
		})
	case 10:
		r.forward(n)
	case 11:
		r.do(func() { r.oldForm = !r.oldForm })
	case 12:
		r.do(func() {
			if r.unreachable = nil; n < 4 {
				r.unreachable = errUnreachable
			}
		})
	case 13:
		r.do(func() { r.frozen = n < 4 })
	case 14:
		r.inject([]byte{}, number(int64(n))[:n], []byte("x"))
	case 15: // said twice
		if r.up != nil && len(r.up.kept) > 0 {
			it := r.up.kept[s.rng.IntN(len(r.up.kept))]
			r.inject([]byte{}, number(it.seq), []byte(it.payload))
		}
	case 16:
		s.away = time.Now().Add(time.Duration([]int{1, 5, 60, 2000, 4000}[s.rng.IntN(5)]) * time.Second)
	case 17:
		s.full = !s.full
	case 18:
		if s.dieIn == 0 {
			s.dieIn = 1 + s.rng.IntN(12)
		}
	}
}

// engine returns a process's engine.
func (r *depthsRank) engine(p *process) *madeUp {
	if r.engines[p.number] == nil {
		r.engines[p.number] = newMadeUp(r.story.dialect, r.story.rng, r.number, &r.story.sent)
	}
	return r.engines[p.number]
}

// end ends the relay, in order or not.
func (s *depthsStory) end(orderly bool) {
	if orderly {
		s.kill()
		s.lives.Wait()
		if s.rng.IntN(4) > 0 && !s.dead {
			s.kafka.ack(len(s.kafka.pending))
		}
		for _, r := range s.ranks {
			r.feed.out.await = func(<-chan struct{}, int64, time.Duration) bool { return false }
			r.feed.close(ended)
		}
	} else {
		s.mu.Lock()
		s.die()
		s.mu.Unlock()
		s.lives.Wait()
	}
	s.dead = true
	for _, r := range s.ranks {
		if c := r.feed.saving; c != nil {
			<-c
		}
		if p, err := os.ReadFile(r.feed.files.checkpoint); err == nil {
			r.old = append(r.old, p)
		}
	}
	// What is on its way gets there at some time, up to some record.
	s.late = append(s.late, s.kafka.pending[:s.rng.IntN(len(s.kafka.pending)+1)]...)
	s.kafka.pending = nil
}

// between is what happens while no relay is there.
func (s *depthsStory) between() {
	seconds := []int{1, 2, 40, 100, 2000}[s.rng.IntN(5)]
	s.full = s.full && s.rng.IntN(2) == 0
	for _, r := range s.ranks {
		switch s.rng.IntN(6) {
		case 0:
			r.world.restart()
		case 1:
			r.world.kill()
		case 2:
			r.world.start()
		}
		r.publish(s.rng.IntN(12))
		if s.rng.IntN(3) == 0 && !s.gentle {
			r.do(func() { r.fault, r.faults = replayFault(s.rng.IntN(int(numFaults))), 1+s.rng.IntN(5) })
		}
		f := r.feed.files
		switch s.rng.IntN(10) {
		case 0:
			os.Remove(f.checkpoint)
			os.Remove(f.ledger)
		case 1:
			os.Remove(f.ledger)
		case 2:
			if n := len(r.old); n > 1 {
				s.write(f.checkpoint, r.old[s.rng.IntN(n-1)])
			}
		case 3:
			if n := len(r.old); n > 0 {
				p := slices.Clone(r.old[n-1])
				if s.rng.IntN(2) == 0 {
					p[s.rng.IntN(len(p))] ^= 4
				}
				s.write(f.checkpoint, p[:len(p)-s.rng.IntN(2)*s.rng.IntN(len(p))])
			}
		case 4:
			s.write(f.checkpoint+".tmp", []byte("torn"))
		case 5:
			if o := s.ranks[0]; o != r && len(o.old) > 0 {
				s.write(f.checkpoint, o.old[0])
			}
		}
	}
	time.Sleep(time.Duration(seconds) * time.Second)
}

func (s *depthsStory) write(file string, p []byte) {
	s.Helper()
	if err := os.WriteFile(file, p, 0o600); err != nil {
		s.Fatal(err)
	}
}

// quiet lets all that goes wrong end, and all that is known be said.
func (s *depthsStory) quiet() {
	s.Helper()
	s.mu.Lock()
	dead := s.dead
	s.calm, s.away, s.full, s.dieIn = true, time.Time{}, false, 0
	s.mu.Unlock()
	if dead {
		s.end(false)
		s.between()
		s.start()
	}
	s.mu.Lock()
	for _, r := range s.ranks {
		r.heal()
		if s.rng.IntN(5) > 0 {
			r.world.start()
		}
	}
	for _, p := range s.late {
		s.kafka.write(p)
	}
	s.late = nil
	s.kafka.ack(len(s.kafka.pending))
	s.mu.Unlock()
	time.Sleep(7 * time.Minute) // a replay endpoint that did not answer is asked seldom
	for range 2 {
		s.mu.Lock()
		for _, r := range s.ranks {
			r.publish(1)
		}
		s.mu.Unlock()
		settled()
	}
	s.compare()
	s.mu.Lock()
	s.calm = false
	s.mu.Unlock()
}

// compare holds what the records mean to what the engines hold.
func (s *depthsStory) compare() {
	s.Helper()
	for _, w := range s.kafka.log[s.read:] {
		var b schemas.Batch
		if err := b.Decode(w.value); err != nil {
			s.Fatal(err)
		}
		s.stage.Apply(0, w.at.UnixMilli(), b.Worker, w.value)
		s.ranks[b.Rank].reader.read(s, w)
	}
	s.read = len(s.kafka.log)
	counts := s.stage.Counts()
	for _, never := range []string{"undecodable", "wrong_key", "invalid", "rejected", "identity_change", "second_producer", "duplicate"} {
		if counts[never] > 0 {
			s.Fatalf("%d: %s", counts[never], never)
		}
	}
	for _, r := range s.ranks {
		s.compareRank(r)
	}
}

func (s *depthsStory) compareRank(r *depthsRank) {
	s.Helper()
	e := newMadeUp(s.dialect, s.rng, r.number, &s.sent) // nothing is held if none runs
	if r.up != nil {
		e = r.engine(r.up)
	}
	mind := heldBy(r.feed.mapping)
	switch whole := r.feed.whole; {
	case r.feed.state != writing:
		s.Fatalf("rank %d: still %s for %s", r.number, r.feed.state, r.feed.why)
	case r.reader.refused > 0:
		s.Fatalf("rank %d: %d records of the epoch are refused", r.number, r.reader.refused)
	case r.reader.incomplete == whole && !r.reader.retired:
		s.Fatalf("rank %d: incomplete: %t, whole: %t", r.number, r.reader.incomplete, whole)
	case !r.reader.held.equal(&mind):
		s.Fatalf("rank %d: the records say %v, the feed %v", r.number, r.reader.held, mind)
	case !whole && s.gentle && r.counts[replaysDistrusted].Load() == 0:
		s.Errorf("rank %d: incomplete, though nothing is lost", r.number)
	}
	exact := r.feed.whole && !s.collide
	h := index.BlockHasher{BlockSize: depthsBlockSize}
	for _, f := range s.families {
		for _, leaf := range treeLeaves {
			blocks := path(leaf)
			locals := h.Append(nil, treeTokens(blocks), f.extra)
			got := s.stage.Depths("m", depthsBlockSize, locals)[verify.WorkerRank{Worker: "wörker", Rank: r.number}]
			for t := range index.Tier(index.Tiers) {
				most, want := e.depths(f.extra, blocks, t)
				if got[t] > most || exact && got[t] != want {
					s.Errorf("rank %d, %q to block %d: depth to tier %s is %d; the engine holds %d, of which its events told %d (whole: %t)",
						r.number, f.hash, leaf, t, got[t], most, want, r.feed.whole)
				}
			}
		}
	}
	if s.collide {
		return
	}
	var holds, told heldBlocks = newHeld(), newHeld()
	for i, f := range s.families {
		for at := range treeParents {
			b := treeBlock{i, at}
			chain := index.Chain(nil, h.Append(nil, treeTokens(path(at)), f.extra))
			seq := chain[len(chain)-1]
			for t := range e.held {
				if e.held[t][b] > 0 {
					holds[t][seq] = true
				}
				if e.told[t][b] && e.known[b] {
					told[t][seq] = true
				}
			}
		}
	}
	if !r.reader.held.within(&holds) || exact && !r.reader.held.equal(&told) {
		s.Errorf("rank %d: the records say %v; the engine holds %v, of which its events told %v (whole: %t)", r.number, r.reader.held, holds, told, r.feed.whole)
	}
}

// depths returns how many leading blocks of a prompt the engine holds up to the
// tier, and how many its events let one know of.
func (e *madeUp) depths(x index.Extra, blocks []int, last index.Tier) (held, told int) {
	leading := func(in func(t int, b treeBlock) bool) int {
		for n, at := range blocks {
			found := false
			for i, f := range e.families {
				for t := range min(int(last)+1, depthsTiers) {
					found = found || f.extra.LoRA == x.LoRA && f.extra.Salt == x.Salt && in(t, treeBlock{i, at})
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

func playDepths(t *testing.T, dir string, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	s := &depthsStory{
		T: t, dialect: newDialect(rng), dir: dir, rng: rng, stage: verify.New(testGrace),
		room: 1200 + rng.Int64N(5000), pace: 4 << rng.IntN(6),
	}
	s.mix = []int{0, 0, 0, 0}
	for what := range happenings {
		for range rng.IntN(3) * rng.IntN(2) {
			s.mix = append(s.mix, what)
		}
	}
	s.kafka.now = time.Now
	for n := range 1 + rng.IntN(2) {
		r := &depthsRank{world: newWorld(), number: int32(n), replay: s.gentle || rng.IntN(5) > 0, engines: map[int]*madeUp{}}
		r.reader = reader{grace: testGrace, held: newHeld()}
		r.hwm = 1 + rng.IntN(30)
		if r.keep = 1 << 20; !s.gentle && rng.IntN(3) == 0 {
			r.keep = 1 + rng.IntN(30)
		}
		r.story = s
		r.payload = func(p *process) string { return r.engine(p).batch() }
		if r.world.start(); rng.IntN(2) == 0 {
			r.publish(rng.IntN(20))
		}
		s.ranks = append(s.ranks, r)
	}
	s.start()
	defer func() {
		s.kill()
		s.lives.Wait()
	}()
	for range 1 + rng.IntN(8) {
		time.Sleep(time.Duration([]int{1, 3, 10, 10, 40, 40, 40, 100, 100, 3000}[s.drawn(10)]) * time.Second)
		switch s.drawn(4) {
		case 0:
			s.quiet()
		case 1:
			s.end(true)
			s.between()
			s.start()
		case 2:
			s.end(false)
			s.between()
			s.start()
		}
		if t.Failed() {
			break
		}
	}
	if !t.Failed() {
		s.quiet()
	}
	s.end(true)
}

// drawn returns a number below n.
func (s *depthsStory) drawn(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n)
}

// TestDepths: whatever happens to engines, their messages, the relay and Kafka, the
// index credits a worker-rank with no block more than its engine holds, and if it
// calls it complete, with none less than the engine's events told.
func TestDepths(t *testing.T) {
	for i := range uint64(*depthsStories) {
		seed := *depthsSeed + i
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) { playDepths(t, dir, seed) })
		})
		if !ok {
			t.Fatalf("again: go test -run TestDepths ./pipeline/relay -depths.seed %d -depths.stories 1", seed)
		}
	}
}
