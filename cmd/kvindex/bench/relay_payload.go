// This file makes the payloads of the relay's measurements.

package bench

import (
	"context"
	"errors"
	"io"
	"math/bits"
	"time"

	"github.com/tinylib/msgp/msgp"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
	"kvindex/pipeline/relay/zmtp"
)

// prefillRequests are served for a circle, and prefillCapacity blocks are what the
// engine holds: much less than the requests have, so that a batch removes about as
// much as it stores.
const (
	prefillRequests = 600
	prefillCapacity = 16_384
)

// prefillPayloads are what a fake vLLM 0.33 publishes. They can be published in a
// circle: whatever was held at the end is what was said last of each block, and is
// so again at the next end.
func prefillPayloads(ctx context.Context) (payloads [][]byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, relayPatience)
	defer cancel()
	c := fakeengine.DefaultConfig()
	c.Listen, c.ReplayListen, c.BlockSize, c.Hasher = "127.0.0.1:0", "", benchBlock, index.Flash
	c.Capacity, c.BufferSteps = prefillCapacity, 1
	e, err := fakeengine.New(c)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	sub, err := zmtp.NewSub(zmtp.DefaultConfig(e.State().Ranks[0].Events))
	if err != nil {
		return nil, err
	}
	defer sub.Close()
	for connected := false; !connected; {
		ev, err := sub.Next(ctx)
		if err != nil {
			return nil, err
		}
		connected = ev.Kind == zmtp.Connected
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for e.State().Ranks[0].Subscribers == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	from := fleet.NewSynthetic(prefillRequests, 1)
	for {
		q, err := from.Next()
		if errors.Is(err, io.EOF) {
			return payloads, nil
		}
		if err != nil {
			return nil, err
		}
		if _, err := e.ServeAt(0, q); err != nil {
			return nil, err
		}
		for uint64(len(payloads)) < e.State().Ranks[0].NextSeq {
			ev, err := sub.Next(ctx)
			if err != nil {
				return nil, err
			}
			if ev.Kind != zmtp.Message || len(ev.Frames) != 3 {
				return nil, errors.New("the fake engine's connection was lost")
			}
			payloads = append(payloads, append([]byte(nil), ev.Frames[2]...))
		}
	}
}

// name is an engine's hash of a block: as good as random, another for each.
func (s *series) name(batch int64, block int) uint64 {
	x := uint64(batch)*uint64(s.Blocks) + uint64(block) + 1
	hi, lo := bits.Mul64(x*0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9)
	return hi ^ lo
}

// payload appends batch n, as vLLM 0.33 writes it: a chain stored, of tokens that
// no other has, and an event for each block removed, leaf first.
func (s *series) payload(b []byte, n int64) []byte {
	gone := n - int64(s.Live)
	if s.Circle > 0 && gone < 0 {
		gone += int64(s.Circle)
	}
	events := uint32(1)
	if gone >= 0 {
		events += uint32(s.Blocks)
	}
	b = msgp.AppendArrayHeader(b, 3)
	b = msgp.AppendFloat64(b, 1.7e9+float64(n)/1000)
	b = msgp.AppendArrayHeader(b, events)
	if gone >= 0 {
		for i := s.Blocks - 1; i >= 0; i-- {
			b = msgp.AppendMapHeader(b, 4)
			b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
			b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1)
			b = msgp.AppendUint64(b, s.name(gone, i))
			b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
			b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
		}
	}
	b = append(b, 0xde, 0, 11) // vLLM sets the size of the header aside for all fields
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(s.Blocks))
	for i := range s.Blocks {
		b = msgp.AppendUint64(b, s.name(n, i))
	}
	b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(s.Blocks*benchBlock))
	for i := range s.Blocks * benchBlock {
		token := uint32(i)
		switch i { // the first three tell the batch, and are below 2^17 each
		case 0, 1, 2:
			token = uint32(n>>(17*i)) & (1<<17 - 1)
		}
		b = msgp.AppendUint32(b, token)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), benchBlock)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(s.Blocks))
	for range s.Blocks {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	b = msgp.AppendString(msgp.AppendString(b, "kv_cache_spec_kind"), "full_attention")
	return msgp.AppendInt(b, 0)
}
