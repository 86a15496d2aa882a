// This file measures whether a relay's memory stays that of what is held, however
// many batches come.

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// RelayMemory is a relay's memory over many batches of ever new blocks, of which a
// fixed number is held.
type RelayMemory struct {
	Impl        string       `json:"impl"`
	Mode        string       `json:"mode"`
	Kafka       string       `json:"kafka"`
	Batches     int64        `json:"batches"` // after those that bring what is held up to LiveBlocks
	LiveBlocks  int          `json:"live_blocks"`
	BufferBytes int64        `json:"buffer_bytes"` // the most on its way to Kafka
	Marks       []MemoryMark `json:"marks"`
	Anew        bool         `json:"began_anew"` // records were dropped, and later all that is held was said again
	Seconds     figure       `json:"seconds"`
	Flat        bool         `json:"flat"`
}

// MemoryMark is the process's memory after some of the batches, all of them read,
// and a collection: of live objects, and resident.
type MemoryMark struct {
	Percent       int   `json:"percent"` // of the batches
	HeapBytes     int64 `json:"heap_bytes"`
	ResidentBytes int64 `json:"resident_bytes"`
	InFlight      int64 `json:"in_flight_bytes"` // on its way to Kafka
}

// ErrGrew is the error of mode memory if memory was not flat.
var ErrGrew = errors.New("memory grew with the number of batches")

// What mode memory publishes, and the relay's buffer: the smallest there is, so
// that a Kafka that stalls fills it soon.
const (
	memoryBlocks = 2   // of a batch
	memoryLive   = 500 // batches
	memoryBuffer = 8 << 20
)

// Memory is flat if its live objects take no more than at the first mark, but for
// memorySlack, within which Go's maps grow: as keys come and go their tables split
// now and then, and are never joined again, up to some twice the size; twice what is on its way to Kafka, for what a record takes besides
// its value; and, once Kafka has stalled, what saying all anew takes, which is kept
// for the next time: the events and bytes of the largest record.
const (
	memorySlack = 512 << 10 // bytes
	memoryAnew  = 512 << 10 // bytes
)

// flat reports whether memory was.
func flat(marks []MemoryMark, stalls bool) bool {
	for _, m := range marks {
		room := marks[0].HeapBytes + memorySlack + 2*m.InFlight
		if stalls && m.Percent > stallTo {
			room += memoryAnew
		}
		if m.HeapBytes > room {
			return false
		}
	}
	return true
}

// When Kafka stalls, in percent of the batches.
const (
	stallFrom = 30
	stallTo   = 70
)

// memoryMarks are when memory is looked at, likewise.
var memoryMarks = []int{10, stallFrom, 50, stallTo, 100}

func (b *relayBench) memory() error {
	for _, stalls := range []bool{false, true} {
		line, err := b.memoryOf(stalls)
		if err != nil {
			return fmt.Errorf("with a Kafka that %s: %w", line.Kafka, err)
		}
		if err := b.out.Encode(line); err != nil {
			return err
		}
		if !line.Flat {
			return ErrGrew
		}
	}
	return nil
}

func (b *relayBench) memoryOf(stalls bool) (line RelayMemory, err error) {
	line = RelayMemory{
		Impl: "kvindex", Mode: b.Mode, Kafka: "takes everything", Batches: b.Batches,
		LiveBlocks: memoryLive * memoryBlocks, BufferBytes: memoryBuffer,
	}
	if stalls {
		line.Kafka = fmt.Sprintf("stalls from %d to %d percent", stallFrom, stallTo)
	}
	start := time.Now()
	o, err := b.publisher.open(series{Kind: chains, Blocks: memoryBlocks, Live: memoryLive})
	if err != nil {
		return line, err
	}
	kafka := &gate{}
	r, err := b.startRelay(o.Endpoint, kafka, memoryBuffer)
	if err != nil {
		return line, err
	}
	// The relay's last records are let go.
	defer func() { kafka.stall(false); err = errors.Join(err, r.stop()) }()
	b.progress.Start("batches", memoryLive+b.Batches)
	var epoch int64
	for _, percent := range memoryMarks {
		if err := b.advance(stalledReader{r}, memoryLive+b.Batches*int64(percent)/100); err != nil {
			return line, err
		}
		m := memoryNow()
		line.Marks = append(line.Marks, MemoryMark{percent, int64(m.heap), int64(m.resident), r.rank().InFlight})
		switch {
		case percent == memoryMarks[0]:
			epoch = r.epoch()
		case percent == stallFrom && stalls:
			kafka.stall(true)
		case percent == stallTo:
			kafka.stall(false)
		}
	}
	if err := b.holds(r, line.LiveBlocks); err != nil {
		return line, err
	}
	line.Anew = r.epoch() != epoch
	if line.Anew && !stalls {
		return line, errors.New("records were dropped")
	}
	line.Flat = flat(line.Marks, stalls)
	line.Seconds = figure(time.Since(start).Seconds())
	return line, nil
}

// stalledReader is a relay that need not wait for Kafka.
type stalledReader struct{ *relayReader }

func (stalledReader) settled() bool { return true }

// holds waits until the relay writes, and says that it holds so many blocks.
func (b *relayBench) holds(r *relayReader, blocks int) error {
	ctx, cancel := context.WithTimeout(b.ctx, relayPatience)
	defer cancel()
	tick := time.NewTicker(20 * lookEvery)
	defer tick.Stop()
	for {
		st := r.rank()
		if r.epoch() != 0 && r.settled() && st.Blocks["device"] == blocks {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the relay is %s and holds %v blocks, should be writing and hold %d: %s", st.State, st.Blocks, blocks, st.Problem)
		}
	}
}

// gate takes records and forgets them, unless it stalls: then it keeps them as a
// client does of a broker that does not answer.
type gate struct {
	mu      sync.Mutex
	stalled bool
	waiting []func()
}

// TryProduce implements relay.Producer.
func (g *gate) TryProduce(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	g.mu.Lock()
	if g.stalled {
		g.waiting = append(g.waiting, func() { done(r, nil) })
		g.mu.Unlock()
		return
	}
	g.mu.Unlock()
	done(r, nil)
}

// stall makes it stall, or go on with what waits.
func (g *gate) stall(on bool) {
	g.mu.Lock()
	g.stalled = on
	waiting := g.waiting
	g.waiting = nil
	g.mu.Unlock()
	for _, done := range waiting {
		done()
	}
}
