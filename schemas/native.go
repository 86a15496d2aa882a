package schemas

// This file maps what goavro decodes, of any writer schema, to a Batch.

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"kvindex/index"
)

// fields reads goavro's native form of one record by field name. The first
// error stays.
type fields struct {
	m   map[string]any
	err error
}

func (f *fields) fail(name string, v any) {
	if f.err == nil {
		f.err = fmt.Errorf("%w: field %s: %T", ErrInvalid, name, v)
	}
}

// get returns the field's value out of its union, if it is one; nil if the
// field is null or missing.
func (f *fields) get(name string) any {
	v := f.m[name]
	if u, ok := v.(map[string]any); ok && len(u) == 1 {
		for _, v = range u {
		}
	}
	return v
}

// require fails unless the writer wrote each of the fields.
func (f *fields) require(names ...string) {
	for _, name := range names {
		if f.get(name) == nil {
			f.fail(name, nil)
		}
	}
}

func (f *fields) long(name string) int64 {
	switch v := f.get(name).(type) {
	case nil:
	case int64:
		return v
	case int32:
		return int64(v)
	case time.Time: // the logical types timestamp-millis and -micros
		return v.UnixMilli()
	default:
		f.fail(name, v)
	}
	return 0
}

func (f *fields) int(name string) int32 {
	v := f.long(name)
	if v < math.MinInt32 || v > math.MaxInt32 {
		f.fail(name, v)
	}
	return int32(v)
}

func (f *fields) text(name string) []byte {
	var b []byte
	switch v := f.get(name).(type) {
	case nil:
	case string:
		b = []byte(v)
	case []byte:
		b = v
	default:
		f.fail(name, v)
	}
	if !utf8.Valid(b) {
		f.fail(name, b)
	}
	return b
}

// hash converts one Hash64.
func (f *fields) hash(name string, v any) uint64 {
	b, ok := v.([]byte)
	if !ok || len(b) != 8 {
		f.fail(name, v)
		return 0
	}
	return binary.LittleEndian.Uint64(b)
}

// list returns an array, which goavro never wraps in a union of one member.
func (f *fields) list(name string) []any {
	switch v := f.get(name).(type) {
	case nil:
	case []any:
		return v
	default:
		f.fail(name, v)
	}
	return nil
}

func (f *fields) tier() index.Tier {
	switch v := f.get("tier").(type) {
	case nil:
	case string:
		for t := range index.Tier(index.Tiers) {
			if t.String() == v {
				return t
			}
		}
		f.fail("tier", v)
	default:
		f.fail("tier", v)
	}
	return index.Device
}

func (f *fields) hasher() index.Hasher {
	switch v := f.get("hasher").(type) {
	case nil:
	case string:
		h, err := index.ParseHasher(v)
		if err != nil {
			f.fail("hasher", v)
		}
		return h
	default:
		f.fail("hasher", v)
	}
	return index.Flash
}

// fromNative fills b, which must be reset.
func (b *Batch) fromNative(m map[string]any, l Limits) error {
	f := fields{m: m}
	f.require("worker", "epoch", "seq", "model", "block_size", "events")
	b.Producer = f.text("producer")
	b.Worker = f.text("worker")
	b.Rank = f.int("dp_rank")
	b.Epoch = f.long("epoch")
	b.Seq = f.long("seq")
	b.Timestamp = f.long("timestamp")
	b.Model = f.text("model")
	b.BlockSize = f.int("block_size")
	b.Hasher = f.hasher()
	events := f.list("events")
	if len(events) > l.MaxEvents {
		return fmt.Errorf("%w: %d events, limit %d", ErrTooLarge, len(events), l.MaxEvents)
	}
	for i, v := range events {
		e, err := nativeEvent(v)
		if err != nil {
			return fmt.Errorf("event %d: %w", i, err)
		}
		b.Events = append(b.Events, e)
	}
	return f.err
}

// nativeEvent converts a member of the union of events.
func nativeEvent(v any) (e Event, err error) {
	u, _ := v.(map[string]any)
	if len(u) != 1 {
		return e, fmt.Errorf("%w: events are not a union", ErrInvalid)
	}
	for name, body := range u {
		m, ok := body.(map[string]any)
		if !ok {
			return e, fmt.Errorf("%w: %s is not a record", ErrInvalid, name)
		}
		f := fields{m: m}
		switch short(name) {
		case "Stored":
			f.require("locals")
			e.Kind = KindStored
			e.Tier = f.tier()
			if p := f.get("parent"); p != nil {
				e.Stored.HasParent = true
				e.Stored.Parent = index.SeqHash(f.hash("parent", p))
			}
			e.Stored.Position = index.NoPosition
			if f.get("position") != nil {
				e.Stored.Position = f.int("position")
			}
			e.Stored.Locals = nativeHashes[index.LocalHash](&f, "locals")
			e.Stored.Hashes = nativeHashes[index.SeqHash](&f, "hashes")
		case "Removed":
			f.require("hashes")
			e.Kind = KindRemoved
			e.Tier = f.tier()
			e.Removed = nativeHashes[index.SeqHash](&f, "hashes")
		case "Cleared":
			e.Kind = KindCleared
			e.AllTiers = f.get("tier") == nil
			e.Tier = f.tier()
		case "Retired":
			e.Kind = KindRetired
		default:
			return e, fmt.Errorf("%w: unknown event %s", ErrInvalid, name)
		}
		if f.err != nil {
			return e, fmt.Errorf("%s: %w", name, f.err)
		}
	}
	return e, nil
}

func nativeHashes[H ~uint64](f *fields, name string) []H {
	list := f.list(name)
	hs := slices.Grow([]H(nil), len(list))
	for _, v := range list {
		hs = append(hs, H(f.hash(name, v)))
	}
	return hs
}
