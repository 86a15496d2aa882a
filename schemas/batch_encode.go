package schemas

// This file encodes event records.

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"kvindex/index"
)

// AppendBatch appends b as a framed record of the current schema to dst and
// returns the extended slice; it allocates only to grow dst. On an error it
// returns dst as it was. Errors: ErrInvalid for a kind, tier or hasher that
// there is none of and for text that is not UTF-8; ErrTooLarge beyond
// DefaultLimits.
func AppendBatch(dst []byte, b *Batch) ([]byte, error) {
	if !utf8.Valid(b.Producer) || !utf8.Valid(b.Worker) || !utf8.Valid(b.Model) {
		return dst, fmt.Errorf("event record: %w", errUTF8)
	}
	if b.Hasher > index.Opaque {
		return dst, fmt.Errorf("event record: %w: %v", ErrInvalid, b.Hasher)
	}
	if len(b.Events) > DefaultLimits.MaxEvents {
		return dst, fmt.Errorf("event record: %w: %d events, limit %d", ErrTooLarge, len(b.Events), DefaultLimits.MaxEvents)
	}
	out := append(dst, batchSchema.header[:]...)
	out = appendText(out, b.Producer)
	out = appendText(out, b.Worker)
	out = appendLong(out, int64(b.Rank))
	out = appendLong(out, b.Epoch)
	out = appendLong(out, b.Seq)
	out = appendLong(out, b.Timestamp)
	out = appendText(out, b.Model)
	out = appendLong(out, int64(b.BlockSize))
	out = appendLong(out, int64(b.Hasher))
	if len(b.Events) > 0 {
		out = appendLong(out, int64(len(b.Events)))
	}
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind >= kinds || e.Tier >= index.Tiers {
			return dst, fmt.Errorf("event record: %w: event %d: kind %d, tier %d", ErrInvalid, i, e.Kind, e.Tier)
		}
		out = appendLong(out, int64(e.Kind))
		switch e.Kind {
		case KindStored:
			out = appendStored(out, e.Tier, &e.Stored)
		case KindRemoved:
			out = appendLong(out, int64(e.Tier))
			out = appendHashes(out, e.Removed)
		case KindCleared:
			if e.AllTiers {
				out = append(out, 0)
			} else {
				out = appendLong(append(out, 2), int64(e.Tier))
			}
		}
	}
	return sized(dst, append(out, 0), "event record")
}

// appendStored appends a chain as events and chunks hold it.
func appendStored(dst []byte, t index.Tier, s *index.Stored) []byte {
	dst = appendLong(dst, int64(t))
	if s.HasParent {
		dst = binary.LittleEndian.AppendUint64(append(dst, 2), uint64(s.Parent))
	} else {
		dst = append(dst, 0)
	}
	if s.Position == index.NoPosition {
		dst = append(dst, 0)
	} else {
		dst = appendLong(append(dst, 2), int64(s.Position))
	}
	dst = appendHashes(dst, s.Locals)
	return appendHashes(dst, s.Hashes)
}

// sized returns out, or dst and ErrTooLarge if what it appended to dst is more
// than a reader takes.
func sized(dst, out []byte, what string) ([]byte, error) {
	if n := len(out) - len(dst); n > DefaultLimits.MaxRecordBytes {
		return dst, fmt.Errorf("%s: %w: %d bytes, limit %d", what, ErrTooLarge, n, DefaultLimits.MaxRecordBytes)
	}
	return out, nil
}
