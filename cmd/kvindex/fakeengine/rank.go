// This file is one rank: what a request does to its cache, and publishing that.

package fakeengine

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
)

const (
	// stepTokens is how many tokens of a prompt a step computes, as engines' chunked prefill.
	stepTokens = 8192
	// The high-water marks of the engines' sockets, in messages.
	pubHWM    = 100_000
	replayHWM = 1000 // libzmq's default, which loses batches of longer replays
	maxBuffer = 1 << 18
)

// endMark is the sequence number of a replay's end.
var endMark = bytes.Repeat([]byte{0xff}, 8)

// rank is one data parallel rank. Its engine's lock guards it, but for what mu does.
type rank struct {
	cfg         *Config
	number      int
	format      format
	listen      string // address, with the port that was chosen once it was
	listenAgain string // likewise, of the replay; empty: none
	cache       *cache
	clearUnsaid bool // vLLM's cache was cleared, and no batch has said so yet
	serving     sync.WaitGroup

	changes []change // scratch
	events  []event  // of the step
	written []byte   // scratch

	mu      sync.Mutex // guards the next
	pub     *zmtp.Pub
	router  *zmtp.Router // nil: none
	seq     uint64       // of the next batch
	buffer  []batch      // the last BufferSteps, from first on and round
	first   int
	counts  Counts
	gapDue  bool
	badDue  bool
	badKind int
}

// batch is one that can be replayed.
type batch struct {
	seq     uint64
	payload []byte
}

// Counts are what a rank has done since the process began, in batches.
type Counts struct {
	Batches int `json:"batches"` // sent or not
	Gaps    int `json:"gaps"`    // of Batches, lost for good
	Garbage int `json:"garbage"` // of Batches, sent as what cannot be read
	Replays int `json:"replays"` // requests answered, in requests
}

// prompt is a request as a rank takes it.
type prompt struct {
	tokens []uint32
	locals []index.LocalHash
	seqs   []index.SeqHash
	class  class
	root   digest
}

// start makes r a rank that was just started, and listens. It tries for so long
// if a port is still in use.
func (r *rank) start(within time.Duration) error {
	r.cache = newCache(r.cfg.Capacity, r.cfg.HostCapacity)
	r.clearUnsaid = false
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seq, r.buffer, r.first = 0, nil, 0
	limits := zmtp.DefaultListenConfig()
	limits.HWM = pubHWM
	pub, err := patiently(within, func() (*zmtp.Pub, error) { return zmtp.ListenPub(r.listen, limits) })
	if err != nil {
		return fmt.Errorf("rank %d: %w", r.number, err)
	}
	r.pub = pub
	r.listen = r.pub.Endpoint()[len("tcp://"):]
	if r.listenAgain == "" {
		return nil
	}
	limits.HWM = replayHWM
	if r.cfg.Kind == VLLM && r.cfg.Shape == Map {
		limits.HWM = 2 * (r.cfg.BufferSteps + 1)
	}
	router, err := patiently(within, func() (*zmtp.Router, error) { return zmtp.ListenRouter(r.listenAgain, limits) })
	if err != nil {
		r.pub.Close()
		return fmt.Errorf("rank %d: %w", r.number, err)
	}
	r.router = router
	r.listenAgain = r.router.Endpoint()[len("tcp://"):]
	r.serving.Go(func() { r.replay(r.router) })
	return nil
}

// patiently tries once, and on for so long.
func patiently[T any](within time.Duration, listen func() (T, error)) (s T, err error) {
	for end := time.Now().Add(within); ; {
		if s, err = listen(); err == nil || time.Now().After(end) {
			return s, err
		}
		<-time.After(20 * time.Millisecond)
	}
}

// stop closes the sockets, with all that waits to be sent.
func (r *rank) stop() {
	if r.pub != nil {
		r.pub.Close()
	}
	if r.router != nil {
		r.router.Close()
	}
	r.serving.Wait()
}

// serve serves a prompt, as many full blocks of it as fit into the cache. Each
// step is a batch: first what had to go, then what was stored.
func (r *rank) serve(p *prompt) {
	size := r.cfg.BlockSize
	seqs := p.seqs[:min(len(p.seqs), r.cfg.Capacity)]
	at := r.cache.depth(seqs)
	r.cache.touch(seqs)
	var last *block
	if at > 0 {
		last = r.cache.blocks[seqs[at-1]]
	}
	r.events = r.unsaid(r.events[:0])
	for step := max(stepTokens/size, 1); at < len(seqs); {
		end := min(at+step, len(seqs))
		r.changes = r.cache.makeRoom(r.changes[:0], end-at)
		r.evicted()
		stored := event{
			kind: engine.Stored, tier: index.Device, class: p.class, blockSize: size,
			tokens: p.tokens[at*size : end*size],
		}
		for ; at < end; at++ {
			b := r.cache.blocks[seqs[at]] // in the CPU's memory
			if b == nil {
				b = p.block(at, last, size)
			}
			if len(stored.hashes) == 0 {
				stored.parent, stored.hasParent = b.parent, at > 0
			}
			r.cache.store(b, last)
			stored.hashes = append(stored.hashes, b.name)
			last = b
		}
		r.events = append(r.events, stored)
		r.publish()
		r.events = r.events[:0]
	}
	r.publish()
}

// block returns block i of a prompt, which follows last.
func (p *prompt) block(i int, last *block, size int) *block {
	b := &block{
		seq: p.seqs[i], local: p.locals[i], position: i, class: p.class,
		parent: p.root, tokens: slices.Clone(p.tokens[i*size : (i+1)*size]),
	}
	if last != nil {
		b.parent, b.before = last.name, last.seq
	}
	b.name = b.parent.chain(b.tokens, make([]byte, 0, 4*size+len(b.parent)))
	return b
}

// unsaid appends the clear that is still to be said.
func (r *rank) unsaid(events []event) []event {
	if r.clearUnsaid {
		events = append(events, event{kind: engine.Cleared})
	}
	r.clearUnsaid = false
	return events
}

// clear empties the cache in both tiers. SGLang says so at once, vLLM in the
// batch of the next step that has a request.
func (r *rank) clear() {
	r.cache = newCache(r.cfg.Capacity, r.cfg.HostCapacity)
	r.clearUnsaid = true
	if r.cfg.Kind == SGLang {
		r.events = r.unsaid(r.events[:0])
		r.publish()
	}
}

// evicted appends the events of r.changes.
func (r *rank) evicted() {
	if r.cfg.Kind == SGLang {
		r.evictedNodes()
		return
	}
	for _, c := range r.changes { // one event a block, leaves first
		e := event{kind: engine.Removed, tier: c.tier, hashes: []digest{c.block.name}}
		if c.stored {
			e.kind = engine.Stored // without tokens or parent
		}
		r.events = append(r.events, e)
	}
}

// evictedNodes appends SGLang's events: what leaves the CPU's memory, what comes
// there, what leaves the GPU, each by nodes, which list their blocks parents
// first. What comes and goes within the step is not said.
func (r *rank) evictedNodes() {
	net := map[*block]int{}
	for _, c := range r.changes {
		if c.tier == index.Host {
			net[c.block] += sign(c.stored)
		}
	}
	var lists [3][]*block // gone from the CPU, come there, gone from the GPU
	for _, c := range r.changes {
		switch {
		case c.tier == index.Device:
			lists[2] = append(lists[2], c.block)
		case net[c.block] == sign(c.stored):
			lists[(net[c.block]+1)/2] = append(lists[(net[c.block]+1)/2], c.block)
			net[c.block] = 0 // said
		}
	}
	for i, list := range lists {
		for len(list) > 0 {
			n := 1
			for n < len(list) && list[n-1].position > 0 && list[n].seq == list[n-1].before {
				n++
			}
			e := event{kind: engine.Removed, tier: index.Host, class: list[0].class}
			switch i {
			case 1:
				top := list[n-1]
				e.kind, e.blockSize = engine.Stored, r.cfg.BlockSize
				e.parent, e.hasParent = top.parent, top.position > 0
			case 2:
				e.tier = index.Device
			}
			for _, b := range slices.Backward(list[:n]) {
				e.hashes = append(e.hashes, b.name)
				if i == 1 {
					e.tokens = append(e.tokens, b.tokens...)
				}
			}
			r.events = append(r.events, e)
			list = list[n:]
		}
	}
}

func sign(stored bool) int {
	if stored {
		return 1
	}
	return -1
}

// publish sends r.events, if there are any, as one batch, unless a fault is due.
func (r *rank) publish() {
	if len(r.events) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts.Batches++
	due := func(each int) bool { return each > 0 && r.counts.Batches%each == 0 }
	seq := r.seq
	r.seq++
	if r.gapDue || due(r.cfg.GapEach) {
		r.gapDue = false
		r.counts.Gaps++
		return
	}
	if r.badDue || due(r.cfg.BadEach) {
		r.badDue = false
		r.counts.Garbage++
		r.written = r.garbage(r.written[:0])
	} else {
		r.written = r.format.payload(r.written[:0], now(), r.events, r.number)
	}
	payload := bytes.Clone(r.written) // no larger than it must be, as many are kept
	r.keep(batch{seq, payload})
	r.pub.Send([]byte(r.cfg.Topic), binary.BigEndian.AppendUint64(nil, seq), payload)
}

func now() float64 { return float64(time.Now().UnixNano()) / 1e9 }

// garbage appends in turn what is no msgpack, and the batch with its removals,
// or if it has none with one more, that cannot be read.
func (r *rank) garbage(b []byte) []byte {
	if r.badKind++; r.badKind%2 == 1 {
		return append(b, "\xc1no msgpack"...)
	}
	events := r.events
	if !slices.ContainsFunc(events, func(e event) bool { return e.kind == engine.Removed }) {
		events = append(slices.Clip(events), event{kind: engine.Removed})
	}
	f := r.format
	f.spoil = true
	return f.payload(b, now(), events, r.number)
}

// keep puts a batch where it can be replayed from, in place of the oldest.
func (r *rank) keep(b batch) {
	if len(r.buffer) < r.cfg.BufferSteps {
		r.buffer = append(r.buffer, b)
		return
	}
	r.buffer[r.first] = b
	r.first = (r.first + 1) % len(r.buffer)
}

// replay answers requests until the socket is closed. As in the engines, no
// batch is published meanwhile, and what is no request is passed over.
func (r *rank) replay(router *zmtp.Router) {
	between := [][]byte{nil}
	if r.cfg.Shape == Map { // newer versions repeat the topic
		between = append(between, nil)
	}
	for {
		q, err := router.Recv(context.Background())
		if err != nil {
			return
		}
		if len(q.Frames) != 2 || len(q.Frames[0]) != 0 || len(q.Frames[1]) != 8 {
			continue
		}
		start := binary.BigEndian.Uint64(q.Frames[1])
		r.mu.Lock()
		r.counts.Replays++
		send := func(topic string, seq, payload []byte) {
			if len(between) > 1 {
				between[1] = []byte(topic)
			}
			router.Send(q.From, append(slices.Clip(between), seq, payload)...)
		}
		for i := range r.buffer {
			if b := r.buffer[(r.first+i)%len(r.buffer)]; b.seq >= start {
				send(r.cfg.Topic, binary.BigEndian.AppendUint64(nil, b.seq), b.payload)
			}
		}
		send("", endMark, nil)
		r.mu.Unlock()
	}
}
