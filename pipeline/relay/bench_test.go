// This file measures one worker-rank's way from the socket to Kafka's client,
// beside reading the socket alone.

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/tinylib/msgp/msgp"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline/relay/engine"
	"kvindex/pipeline/relay/zmtp"
	"kvindex/testcontainers"
)

const (
	benchBlocks = 4 // stored by a batch, and as many removed
	benchTokens = 16
	benchSets   = 4096
)

// benchPayloads are batches that can be published in a circle: each stores a
// chain and removes the one of half a circle ago.
func benchPayloads() [][]byte {
	hash := func(set, i int) uint64 { return uint64(set)<<32 | 0xabcd0000 | uint64(i) }
	out := make([][]byte, benchSets)
	for set := range out {
		b := msgp.AppendArrayHeader(nil, 3)
		b = msgp.AppendFloat64(b, float64(set)+0.25)
		b = msgp.AppendArrayHeader(b, 2)
		b = msgp.AppendMapHeader(b, 5)
		b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), benchBlocks)
		for i := range benchBlocks {
			b = msgp.AppendUint64(b, hash(set, i))
		}
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), benchBlocks*benchTokens)
		for i := range benchBlocks * benchTokens {
			b = msgp.AppendInt(b, (set*7919+i*104729)%128000)
		}
		b = msgp.AppendInt(msgp.AppendString(b, "block_size"), benchTokens)
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
		b = msgp.AppendMapHeader(b, 3)
		b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), benchBlocks)
		for i := benchBlocks - 1; i >= 0; i-- {
			b = msgp.AppendUint64(b, hash((set+benchSets/2)%benchSets, i))
		}
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
		out[set] = msgp.AppendInt(b, 0)
	}
	return out
}

// ahead is how far a publisher may be ahead of what was read, in steps.
const (
	ahead     = 10
	aheadStep = 1000
)

// reading counts what is read and lets the publisher go on.
type reading struct {
	n    int64
	room chan struct{}
}

func newReading() *reading {
	r := &reading{room: make(chan struct{}, ahead)}
	for range ahead {
		r.room <- struct{}{}
	}
	return r
}

func (r *reading) add() {
	if r.n++; r.n%aheadStep == 0 {
		r.room <- struct{}{}
	}
}

// publishing publishes b.N batches to the one subscriber.
func publishing(b *testing.B, pub *zmtp.Pub, payloads [][]byte, r *reading) {
	testcontainers.Eventually(b, patience, func() error {
		if pub.Subscribers() == 0 {
			return errors.New("nobody has subscribed")
		}
		return nil
	})
	for n := range b.N {
		if n%aheadStep == 0 {
			<-r.room
		}
		pub.Send(nil, binary.BigEndian.AppendUint64(nil, uint64(n)), payloads[n%benchSets])
	}
}

func benchPub(b *testing.B) *zmtp.Pub {
	cfg := zmtp.DefaultListenConfig()
	cfg.HWM = 1 << 16
	pub, err := zmtp.ListenPub("127.0.0.1:0", cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { pub.Close() })
	return pub
}

// BenchmarkSocket reads batches and looks at none.
func BenchmarkSocket(b *testing.B) {
	pub, payloads := benchPub(b), benchPayloads()
	sub, err := zmtp.NewSub(zmtp.DefaultConfig(pub.Endpoint()))
	if err != nil {
		b.Fatal(err)
	}
	defer sub.Close()
	read := newReading()
	go publishing(b, pub, payloads, read)
	b.ReportAllocs()
	for read.n < int64(b.N) {
		e, err := sub.Next(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if e.Kind == zmtp.Message {
			read.add()
		}
	}
}

// acknowledging takes records and forgets them.
type acknowledging struct{}

func (acknowledging) TryProduce(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
	done(r, nil)
}

// countingFeed tells how many batches came.
type countingFeed struct {
	*feed
	read  *reading
	n     int64
	ended func()
}

func (f countingFeed) apply(p []byte) {
	f.feed.apply(p)
	if f.read.add(); f.read.n == f.n {
		f.ended()
	}
}

// BenchmarkStream is everything but Kafka's client.
func BenchmarkStream(b *testing.B) {
	pub, payloads := benchPub(b), benchPayloads()
	sub, err := zmtp.NewSub(zmtp.DefaultConfig(pub.Endpoint()))
	if err != nil {
		b.Fatal(err)
	}
	out, err := newOutlet(acknowledging{}, "events", "relay-bench", 64<<20)
	if err != nil {
		b.Fatal(err)
	}
	f, err := newFeed(feedConfig{
		worker: "w", model: "m", logger: silent,
		engine: engine.Config{Engine: engine.VLLM, Hasher: index.BlockHasher{BlockSize: benchTokens}},
	}, out)
	if err != nil {
		b.Fatal(err)
	}
	read := newReading()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	go publishing(b, pub, payloads, read)
	b.ReportAllocs()
	s := newStream(silent, countingFeed{f, read, int64(b.N), cancel}, sub, nil, position{next: -1}, &streamCounts{}, newStreamStatus())
	s.run(ctx)
	took := b.Elapsed().Seconds()
	b.ReportMetric(float64(b.N)/took, "batches/s")
	b.ReportMetric(float64(2*benchBlocks*b.N)/took, "blocks/s")
	if s.pos.next != int64(b.N) || f.counts.blocksStored.Load() != int64(b.N*benchBlocks) {
		b.Errorf("at %d of %d, %d blocks stored", s.pos.next, b.N, f.counts.blocksStored.Load())
	}
}
