// This file makes up traces of conversations.

package fleet

import (
	"container/heap"
	"io"
	"math"
	"math/rand/v2"
)

// Synthetic makes up a trace: conversations of several turns that begin at
// random moments (a Poisson process), each under one of a few shared system
// prompts of which some are much more popular than others. A turn's prompt is
// the whole conversation so far and a new message. Equal seeds give equal
// traces.
type Synthetic struct {
	left    int
	rng     *rand.Rand
	zipf    *rand.Zipf
	prompts [][]uint64 // the system prompts, in whole trace blocks
	nextID  uint64
	arrival float64 // of the next new conversation, seconds
	open    turns
	req     Request
}

// The shape of a synthetic trace.
const (
	conversationsPerSecond = 1.0
	meanTurns              = 5    // of a conversation; geometric
	meanThink              = 20.0 // seconds from one turn to the next; exponential, after thinkFloor
	thinkFloor             = 5.0  // seconds
	systemPrompts          = 12
	systemPromptBlocks     = 4 // at most, trace blocks
	meanMessage            = 500
	meanOutput             = 250
	maxPrompt              = 32 << 10 // tokens; a conversation that reaches it ends
)

// conversation is one that has a turn to come.
type conversation struct {
	at     float64 // seconds
	ids    []uint64
	tokens int // ids cover them, the last one perhaps in part
	turns  int // left
}

// turns is a heap of conversations, the next to speak first.
type turns []*conversation

func (t turns) Len() int           { return len(t) }
func (t turns) Less(i, j int) bool { return t[i].at < t[j].at }
func (t turns) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *turns) Push(x any)        { *t = append(*t, x.(*conversation)) }
func (t *turns) Pop() any {
	last := len(*t) - 1
	c := (*t)[last]
	*t = (*t)[:last]
	return c
}

// NewSynthetic returns a trace of n requests.
func NewSynthetic(n int, seed uint64) *Synthetic {
	s := &Synthetic{left: n, rng: rand.New(rand.NewPCG(seed, 0x6b76))}
	s.zipf = rand.NewZipf(s.rng, 1.3, 1, systemPrompts-1)
	for range systemPrompts {
		s.prompts = append(s.prompts, s.fresh(nil, 1+s.rng.IntN(systemPromptBlocks)))
	}
	s.arrival = s.rng.ExpFloat64() / conversationsPerSecond
	return s
}

// fresh appends n ids never used before.
func (s *Synthetic) fresh(ids []uint64, n int) []uint64 {
	for range n {
		ids = append(ids, s.nextID)
		s.nextID++
	}
	return ids
}

// about returns a length round mean, long ones being rare but possible.
func (s *Synthetic) about(mean float64) int {
	const sigma = 0.8
	return 1 + int(mean*math.Exp(sigma*s.rng.NormFloat64()-sigma*sigma/2))
}

// Next returns the next request, in the order of their timestamps.
func (s *Synthetic) Next() (*Request, error) {
	if s.left == 0 {
		return nil, io.EOF
	}
	s.left--
	for len(s.open) == 0 || s.arrival < s.open[0].at {
		system := s.prompts[s.zipf.Uint64()]
		c := &conversation{at: s.arrival, turns: 1, tokens: len(system) * TraceBlock}
		c.ids = append(c.ids, system...)
		for s.rng.IntN(meanTurns) > 0 {
			c.turns++
		}
		heap.Push(&s.open, c)
		s.arrival += s.rng.ExpFloat64() / conversationsPerSecond
	}
	c := s.open[0]
	s.grow(c, s.about(meanMessage))
	output := s.about(meanOutput)
	s.req = Request{
		Timestamp:    int64(c.at * 1000),
		InputLength:  c.tokens,
		OutputLength: output,
		HashIDs:      append(s.req.HashIDs[:0], c.ids...),
	}
	s.grow(c, output)
	c.turns--
	if c.turns == 0 || c.tokens > maxPrompt {
		heap.Pop(&s.open)
	} else {
		c.at += thinkFloor + s.rng.ExpFloat64()*meanThink
		heap.Fix(&s.open, 0)
	}
	return &s.req, nil
}

// grow adds tokens to a conversation. A block that was partial gets a new id,
// since what is in it has changed.
func (s *Synthetic) grow(c *conversation, tokens int) {
	whole := c.tokens / TraceBlock
	c.tokens += tokens
	c.ids = s.fresh(c.ids[:whole], (c.tokens+TraceBlock-1)/TraceBlock-whole)
}
