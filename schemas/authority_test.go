package schemas

// Helpers that turn records into goavro's native form, so that tests can compare
// what is decoded and encoded here with what goavro makes of it.

import (
	"encoding/binary"
	"testing"

	"kvindex/index"
)

func nativeHash[H ~uint64](h H) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(h))
}

func nativeList[H ~uint64](hs []H) []any {
	list := []any{}
	for _, h := range hs {
		list = append(list, nativeHash(h))
	}
	return list
}

func nativeStored(t index.Tier, s index.Stored) map[string]any {
	m := map[string]any{
		"tier":     t.String(),
		"parent":   nil,
		"position": nil,
		"locals":   nativeList(s.Locals),
		"hashes":   nativeList(s.Hashes),
	}
	if s.HasParent {
		m["parent"] = map[string]any{"kvindex.Hash64": nativeHash(s.Parent)}
	}
	if s.Position != index.NoPosition {
		m["position"] = map[string]any{"int": s.Position}
	}
	return m
}

func nativeBatch(b *Batch) map[string]any {
	events := []any{}
	for _, e := range b.Events {
		switch e.Kind {
		case KindStored:
			events = append(events, map[string]any{"kvindex.Stored": nativeStored(e.Tier, e.Stored)})
		case KindRemoved:
			events = append(events, map[string]any{"kvindex.Removed": map[string]any{"tier": e.Tier.String(), "hashes": nativeList(e.Removed)}})
		case KindCleared:
			var tier any
			if !e.AllTiers {
				tier = map[string]any{"kvindex.Tier": e.Tier.String()}
			}
			events = append(events, map[string]any{"kvindex.Cleared": map[string]any{"tier": tier}})
		case KindRetired:
			events = append(events, map[string]any{"kvindex.Retired": map[string]any{}})
		}
	}
	return map[string]any{
		"producer":   string(b.Producer),
		"worker":     string(b.Worker),
		"dp_rank":    b.Rank,
		"epoch":      b.Epoch,
		"seq":        b.Seq,
		"timestamp":  b.Timestamp,
		"model":      string(b.Model),
		"block_size": b.BlockSize,
		"hasher":     b.Hasher.String(),
		"events":     events,
	}
}

func nativeChunk(c *Chunk) map[string]any {
	chains := []any{}
	for _, ch := range c.Chains {
		chains = append(chains, nativeStored(ch.Tier, ch.Stored))
	}
	return map[string]any{
		"worker":     c.Worker,
		"dp_rank":    c.Rank,
		"generation": c.Generation,
		"index":      c.Index,
		"chains":     chains,
	}
}

func nativeManifest(m *Manifest) map[string]any {
	crcs := []any{}
	for _, c := range m.CRC32C {
		crcs = append(crcs, int64(c))
	}
	return map[string]any{
		"format":        m.Format,
		"worker":        m.Worker,
		"dp_rank":       m.Rank,
		"generation":    m.Generation,
		"w":             m.W,
		"leader_epoch":  m.LeaderEpoch,
		"topic_id":      m.TopicID[:],
		"partitions":    m.Partitions,
		"model":         m.Model,
		"block_size":    m.BlockSize,
		"hasher":        m.Hasher.String(),
		"epoch":         m.Epoch,
		"epoch_started": m.EpochStarted,
		"seq":           m.Seq,
		"producer":      m.Producer,
		"last_heard":    m.LastHeard,
		"last_offset":   m.LastOffset,
		"incomplete":    m.Incomplete,
		"past_lost_at":  m.PastLostAt,
		"disputed":      m.Disputed,
		"retired":       m.Retired,
		"retired_at":    m.RetiredAt,
		"chunks":        m.Chunks,
		"bytes":         m.Bytes,
		"crc32c":        crcs,
		"check":         lastFour(AppendManifest(nil, m)),
	}
}

func nativeFloor(f *Floor) map[string]any {
	return map[string]any{
		"format":       f.Format,
		"offset":       f.Offset,
		"topic_id":     f.TopicID[:],
		"partitions":   f.Partitions,
		"past_lost_at": f.PastLostAt,
		"written":      f.Written,
		"check":        lastFour(AppendFloor(nil, f), nil),
	}
}

// lastFour is the checksum at the end of a value; that it is right is another
// test's matter.
func lastFour(value []byte, err error) []byte {
	if err != nil {
		return make([]byte, 4)
	}
	return value[len(value)-4:]
}

// goavroSingle encodes native with goavro, framed.
func goavroSingle(tb testing.TB, s compiled, native map[string]any) []byte {
	tb.Helper()
	b, err := s.SingleFromNative(nil, native)
	if err != nil {
		tb.Fatalf("goavro refuses to encode: %v", err)
	}
	return b
}

// forgetPositionMinusOne makes of the positions that goavro decoded what they
// mean: -1 is unknown, as null is.
func forgetPositionMinusOne(stored map[string]any) {
	if p, ok := stored["position"].(map[string]any); ok && p["int"] == index.NoPosition {
		stored["position"] = nil
	}
}
