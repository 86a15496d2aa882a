// This file reads the events that TensorRT-LLM keeps in a buffer, over HTTP, for
// all ranks of an engine.

package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"syscall"
	"time"

	"kvindex/pipeline/relay/engine"
)

const (
	pollEvery   = 100 * time.Millisecond
	pollRest    = 5 * time.Second // the longest pause after errors
	pollWithin  = 5 * time.Second // for a whole answer
	maxPollBody = 64 << 20        // bytes
)

// pollLimits bound one rank's events of an answer.
var pollLimits = engine.Limits{MaxBytes: maxPollBody, MaxEvents: 1 << 18}

// batchFollower is what a poller needs of a feed.
type batchFollower interface {
	applyBatch(*engine.Batch)
	unreadable(error)
	empty(whole bool, why cause)
	at(position)
	release()
	tick(now time.Time, alive bool)
	pending() bool
}

// poller asks one engine for its events. An answer takes them out of the
// engine's buffer, so nobody else may ask, and an answer that is not read whole
// is lost. Events are numbered for each rank; a jump is a loss, a step back a
// restart. One goroutine runs it.
//
// Nothing tells the incarnation. A restart in which nobody listened for a moment,
// or after which numbers start anew, is noticed; a relay that was down meanwhile
// is misled only if the engine's oldest event has exactly the next number.
type poller struct {
	troubles
	client *http.Client
	url    string
	method string
	ranks  []*pollRank // by rank from first
	first  int32

	answered time.Time
	pause    time.Duration
}

// pollRank is one rank of a polled engine.
type pollRank struct {
	feed   batchFollower
	counts *streamCounts
	status *streamStatus
	next   int64 // number of the next event, -1 if not known
	ready  bool  // the feed was told how to begin

	raw   []byte // events to apply, a JSON array without its end
	batch engine.Batch
}

// newPollRank returns the rank of a feed, which was restored or not to pos. Where its
// epoch does not go on, nothing is left of what was read after the checkpoint.
func newPollRank(f *feed, pos position, restored bool, counts *streamCounts, status *streamStatus) *pollRank {
	r := &pollRank{feed: f, counts: counts, status: status, next: pos.next}
	if restored && f.state != writing {
		f.empty(false, causeRestored)
		r.next, r.ready = -1, true
	}
	return r
}

func newPoller(log *slog.Logger, url string, first int32, ranks []*pollRank) *poller {
	transport := &http.Transport{
		DialContext:     (&net.Dialer{Timeout: pollWithin}).DialContext,
		IdleConnTimeout: 2 * time.Second, // less than servers' own
	}
	return &poller{
		troubles: troubles{log: log, now: time.Now},
		client:   &http.Client{Transport: transport, Timeout: pollWithin},
		url:      url, method: http.MethodPost, ranks: ranks, first: first, pause: pollEvery,
	}
}

// run follows the engine until ctx ends.
func (p *poller) run(ctx context.Context) {
	defer p.client.CloseIdleConnections()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var tickAt time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		// Not with ctx: an answer on its way would be lost with the request.
		if err := p.poll(context.WithoutCancel(ctx)); err == nil {
			p.pause = pollEvery
		} else {
			p.say("the engine's events cannot be read", "error", err)
			p.show(stateConnecting, err.Error())
			p.pause = min(2*p.pause, pollRest)
		}
		now := time.Now()
		due := !now.Before(tickAt)
		if due {
			tickAt = now.Add(tickEvery)
		}
		for _, r := range p.ranks {
			if due || r.feed.pending() {
				r.feed.tick(now, now.Sub(p.answered) <= aliveFor)
			}
		}
		timer.Reset(p.pause)
	}
}

func (p *poller) show(st linkState, problem string) {
	for _, r := range p.ranks {
		r.status.set(st, problem)
		r.status.heard(p.answered)
	}
}

// poll asks once. After an error that leaves open whether the engine gave events
// away, they count as lost.
func (p *poller) poll(ctx context.Context) error {
	body, err := p.ask(ctx)
	switch {
	case err == nil:
	case errors.Is(err, syscall.ECONNREFUSED):
		for _, r := range p.ranks {
			r.counts.add(connectFailures, 1)
			r.begin(0, causeRestart) // its process is gone, and its cache with it
		}
		return err
	case errors.Is(err, errNotAsked):
		return err
	default:
		p.lose(err)
		return err
	}
	p.answered = time.Now()
	if err := p.take(body); err != nil {
		p.lose(err)
		return err
	}
	for _, r := range p.ranks {
		r.start()
	}
	p.show(stateLive, "")
	return nil
}

// lose begins anew at all ranks.
func (p *poller) lose(err error) {
	p.log.Warn("events of the engine may be lost", "error", err)
	for _, r := range p.ranks {
		r.counts.add(disconnects, 1)
		r.forget()
	}
}

// errNotAsked: the engine gave no events away.
var errNotAsked = errors.New("nothing was read")

// ask returns what the engine answers.
func (p *poller) ask(ctx context.Context) ([]byte, error) {
	for tries := 0; ; tries++ {
		req, err := http.NewRequestWithContext(ctx, p.method, p.url, nil)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errNotAsked, err)
		}
		// A GET that fails on a used connection is asked again by the client itself,
		// and what the engine gave away the first time would be lost unnoticed.
		req.Close = p.method == http.MethodGet
		resp, err := p.client.Do(req)
		if err != nil {
			if dial := (*net.OpError)(nil); errors.As(err, &dial) && dial.Op == "dial" {
				return nil, fmt.Errorf("%w: %w", errNotAsked, err)
			}
			return nil, err
		}
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxPollBody+1))
		resp.Body.Close()
		switch {
		case resp.StatusCode == http.StatusMethodNotAllowed && tries == 0:
			p.method = map[string]string{http.MethodPost: http.MethodGet, http.MethodGet: http.MethodPost}[p.method]
			continue
		case resp.StatusCode >= 300 && resp.StatusCode < 500:
			return nil, fmt.Errorf("%w: %s %s: %s", errNotAsked, p.method, p.url, resp.Status)
		case resp.StatusCode != http.StatusOK:
			return nil, fmt.Errorf("%s %s: %s", p.method, p.url, resp.Status)
		case err != nil:
			return nil, fmt.Errorf("%s %s: %w", p.method, p.url, err)
		case len(body) > maxPollBody:
			return nil, fmt.Errorf("%s %s: the answer is larger than %d bytes", p.method, p.url, maxPollBody)
		}
		return body, nil
	}
}

// take applies the events of an answer. An error is about all of it from some
// event on.
func (p *poller) take(body []byte) error {
	for _, r := range p.ranks {
		r.counts.add(messages, 1)
	}
	p.ranks[0].counts.add(messageBytes, len(body))
	defer func() {
		for _, r := range p.ranks {
			r.flush()
		}
	}()
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return errors.New("the answer is not a JSON array")
	}
	for d.More() {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return fmt.Errorf("the answer is not JSON: %w", err)
		}
		var head struct {
			ID   *int64 `json:"event_id"`
			Rank *int32 `json:"attention_dp_rank"`
		}
		if err := json.Unmarshal(raw, &head); err != nil || head.ID == nil || *head.ID < 0 || *head.ID == math.MaxInt64 {
			return fmt.Errorf("an event without a number: %.100s", raw)
		}
		rank := p.first
		if head.Rank != nil {
			rank = *head.Rank
		}
		i := int64(rank) - int64(p.first)
		if i < 0 || i >= int64(len(p.ranks)) {
			p.ranks[0].counts.add(malformed, 1)
			p.say("event of a rank that is not configured", "rank", rank)
			continue
		}
		p.event(p.ranks[i], *head.ID, raw)
	}
	if _, err := d.Token(); err != nil {
		return fmt.Errorf("the answer is not JSON: %w", err)
	}
	return nil
}

// event takes one event of a rank.
func (p *poller) event(r *pollRank, id int64, raw []byte) {
	switch {
	case id == r.next:
	case r.next < 0:
		r.begin(id, causeStart)
	case id < r.next:
		r.flush()
		r.counts.add(restarts, 1)
		p.say("the engine has restarted", "event", id, "expected", r.next)
		r.begin(id, causeRestart)
	default:
		r.flush()
		r.counts.add(gaps, 1)
		p.say("events missing", "from", r.next, "before", id)
		r.begin(id, causeGap)
	}
	r.start()
	r.raw = append(append(r.raw, ','), raw...)
	r.next = id + 1
}

// flush applies the events gathered.
func (r *pollRank) flush() {
	if len(r.raw) == 0 {
		return
	}
	r.raw[0] = '['
	r.raw = append(r.raw, ']')
	r.counts.add(batches, 1)
	if err := r.batch.DecodeJSON(r.raw, pollLimits); err != nil {
		r.feed.unreadable(err)
	} else {
		r.batch.HasRank = false
		r.feed.applyBatch(&r.batch)
	}
	r.at()
	if cap(r.raw) > 1<<20 {
		r.raw = nil
	}
	r.raw = r.raw[:0]
}

// begin begins anew at event id.
func (r *pollRank) begin(id int64, why cause) {
	r.feed.empty(id == 0, why)
	r.next, r.ready = id, true
	r.at()
}

// forget gives up what is known.
func (r *pollRank) forget() {
	r.feed.empty(false, causeGap)
	r.next, r.ready = -1, true
	r.at()
}

// start has the feed begin, if it has not.
func (r *pollRank) start() {
	if !r.ready {
		r.ready = true
		if r.next < 0 {
			r.feed.empty(false, causeStart)
		} else {
			r.feed.release()
		}
		r.at()
	}
}

func (r *pollRank) at() {
	r.feed.at(position{next: r.next})
	r.status.next(r.next)
}
