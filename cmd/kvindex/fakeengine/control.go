// This file has what can be asked of an engine, and its HTTP.

package fakeengine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
)

// Held is the state of an engine.
type Held struct {
	Kind        string     `json:"kind"`
	Shape       string     `json:"shape"`
	BlockSize   int        `json:"block_size"` // tokens
	Hasher      string     `json:"hasher"`     // of the chains
	Incarnation int        `json:"incarnation"`
	Paused      bool       `json:"paused"`
	Requests    int        `json:"requests"` // served since the process began
	Ranks       []HeldRank `json:"ranks"`
}

// HeldRank is the state of a rank.
type HeldRank struct {
	Rank        int    `json:"rank"`
	Events      string `json:"events"`           // endpoint
	Replay      string `json:"replay,omitempty"` // endpoint
	NextSeq     uint64 `json:"next_seq"`         // of the next batch; those before are published, or lost
	ClearUnsaid bool   `json:"clear_unsaid"`     // the cache was cleared, and no batch says so yet
	Subscribers int    `json:"subscribers"`
	Dropped     uint64 `json:"dropped"` // messages not sent to a subscriber that was too slow
	Counts
	Tiers *HeldTiers `json:"tiers,omitempty"`
}

// HeldTiers is what a rank really holds.
type HeldTiers struct {
	Device HeldTier `json:"device"`
	Host   HeldTier `json:"host"`
}

// HeldTier is what one tier holds.
type HeldTier struct {
	Blocks int     `json:"blocks"`
	Chains []Chain `json:"chains"` // each block once, parents before their children
}

// Chain is blocks that follow each other, in kvindex's hashes, of which LoRA
// adapter and salt are part.
type Chain struct {
	Parent   uint64   `json:"parent,omitempty"` // sequence hash of the block before the first, if that is not at position 0
	Position int      `json:"position"`         // of the first
	Locals   []uint64 `json:"locals"`
}

// Prompt is a request's prompt, as a router would ask about it.
type Prompt struct {
	Tokens []uint32 `json:"tokens"`
	LoRA   string   `json:"lora"`
	Salt   string   `json:"salt"`
	Rank   int      `json:"rank"` // that served it
}

// State returns the engine's state without what it holds.
func (e *Engine) State() Held { return e.state(false) }

// Held returns the engine's state and all that it holds, at one moment: what
// was published by then says just that, unless a clear is still unsaid.
func (e *Engine) Held() Held { return e.state(true) }

func (e *Engine) state(whole bool) Held {
	e.mu.Lock()
	defer e.mu.Unlock()
	h := Held{
		Kind: e.cfg.Kind, Shape: e.cfg.Shape, BlockSize: e.cfg.BlockSize, Hasher: e.cfg.Hasher.String(),
		Incarnation: e.incarnation, Paused: e.resumed != nil, Requests: e.requests,
	}
	for _, r := range e.ranks {
		h.Ranks = append(h.Ranks, r.held(whole))
	}
	return h
}

func (r *rank) held(whole bool) HeldRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := HeldRank{
		Rank: r.number, Events: r.pub.Endpoint(), NextSeq: r.seq, ClearUnsaid: r.clearUnsaid,
		Subscribers: r.pub.Subscribers(), Dropped: r.pub.Dropped(), Counts: r.counts,
	}
	if r.router != nil {
		h.Replay = r.router.Endpoint()
	}
	if whole {
		tier := func(t index.Tier) HeldTier {
			return HeldTier{Blocks: r.cache.used[t].Len(), Chains: r.cache.chains(t)}
		}
		h.Tiers = &HeldTiers{Device: tier(index.Device), Host: tier(index.Host)}
	}
	return h
}

// Prompts returns the last n prompts served, the last first, of the 256 that are
// remembered.
func (e *Engine) Prompts(n int) []Prompt {
	e.mu.Lock()
	defer e.mu.Unlock()
	prompts := []Prompt{}
	for i := range min(n, len(e.recent)) {
		r := &e.recent[(e.oldest+len(e.recent)-1-i)%len(e.recent)]
		prompts = append(prompts, Prompt{fleet.AppendTokens(nil, &r.request), r.class.lora, r.class.salt, r.rank})
	}
	return prompts
}

// maxDown bounds how long a restart takes on request.
const maxDown = time.Minute

// Handler serves the control: POST /pause, /resume, /gap, /garbage, /clear,
// /restart (down=TIME) answer with the state, GET /held with that and all that is
// held, GET /prompts (n=N) with prompts.
func (e *Engine) Handler() http.Handler {
	mux := http.NewServeMux()
	for path, do := range map[string]func(){
		"/pause": e.Pause, "/resume": e.Resume, "/gap": e.Gap, "/garbage": e.Garbage, "/clear": e.Clear,
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, _ *http.Request) {
			do()
			answer(w, e.State())
		})
	}
	mux.HandleFunc("POST /restart", func(w http.ResponseWriter, q *http.Request) {
		down := time.Duration(0)
		if text := q.URL.Query().Get("down"); text != "" {
			var err error
			if down, err = time.ParseDuration(text); err != nil || down < 0 || down > maxDown {
				http.Error(w, fmt.Sprintf("down %q: want a time up to %v, as 2s", text, maxDown), http.StatusBadRequest)
				return
			}
		}
		if err := e.Restart(down); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		answer(w, e.State())
	})
	mux.HandleFunc("GET /held", func(w http.ResponseWriter, _ *http.Request) { answer(w, e.Held()) })
	mux.HandleFunc("GET /prompts", func(w http.ResponseWriter, q *http.Request) {
		n := 16
		if text := q.URL.Query().Get("n"); text != "" {
			var err error
			if n, err = strconv.Atoi(text); err != nil || n < 0 || n > maxRecent {
				http.Error(w, fmt.Sprintf("n %q: want a number up to %d", text, maxRecent), http.StatusBadRequest)
				return
			}
		}
		answer(w, e.Prompts(n))
	})
	return mux
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a client that is gone needs no answer
}
