package schemas

// What a broken or malicious producer can send: each a typed error, and never
// an allocation out of proportion.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"testing"

	"kvindex/index"
)

func isTruncated(err error) bool { return errors.Is(err, ErrTruncated) }
func isLeftover(err error) bool  { return errors.Is(err, ErrLeftover) }

// raw builds the binary encoding of a record by hand.
type raw []byte

func (b raw) long(vs ...int64) raw {
	for _, v := range vs {
		b = appendLong(b, v)
	}
	return b
}
func (b raw) text(s string) raw   { return appendText(b, s) }
func (b raw) bytes(p ...byte) raw { return append(b, p...) }
func (b raw) hash(hs ...uint64) raw {
	for _, h := range hs {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

// head is a valid record up to its events.
func head() raw {
	b := raw(batchSchema.header[:]).text("p").text("w")
	return b.long(0, 1, 0, 0).text("m").long(16, 0)
}

func TestHostileBatches(t *testing.T) {
	big := append(head().long(-1, 1<<40), make([]byte, 100)...)
	for _, c := range []struct {
		name  string
		value []byte
		want  error
	}{
		{"empty value", nil, ErrTruncated},
		{"one byte of framing", []byte{0xC3}, ErrTruncated},
		{"framing alone", batchSchema.header[:], ErrTruncated},
		{"Confluent framing", []byte{0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7}, ErrMagic},
		{"JSON", []byte(`{"worker":"w"}`), ErrMagic},
		{"unknown fingerprint", []byte{0xC3, 1, 1, 2, 3, 4, 5, 6, 7, 8}, ErrUnknownSchema},
		{"another record's schema", AppendFloor(nil, &goldenFloor), ErrUnknownSchema},
		{"larger than the limit", make([]byte, DefaultLimits.MaxRecordBytes+1), ErrTooLarge},
		{"string of negative length", raw(batchSchema.header[:]).long(-1), ErrInvalid},
		{"string of 2^31-1 bytes", raw(batchSchema.header[:]).long(math.MaxInt32), ErrTruncated},
		{"string of 2^63-1 bytes", raw(batchSchema.header[:]).long(math.MaxInt64), ErrTruncated},
		{"string that is not UTF-8", raw(batchSchema.header[:]).text("\xff"), ErrInvalid},
		{"rank beyond 32 bits", raw(batchSchema.header[:]).text("p").text("w").long(1 << 31), ErrInvalid},
		{"integer of 11 bytes", raw(batchSchema.header[:]).bytes(bytes.Repeat([]byte{0x80}, 11)...), ErrInvalid},
		{"integer of 65 bits", raw(batchSchema.header[:]).bytes(0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2), ErrInvalid},
		{"hasher out of range", raw(batchSchema.header[:]).text("p").text("w").long(0, 1, 0, 0).text("m").long(16, 3), ErrInvalid},
		{"2^31-1 events", head().long(math.MaxInt32), ErrTooLarge},
		{"2^63-1 events", head().long(math.MaxInt64), ErrTooLarge},
		{"-2^63 events", head().long(math.MinInt64, 10), ErrTooLarge},
		{"-(2^31-1) events", head().long(-math.MaxInt32, 10), ErrTooLarge},
		{"more events than bytes", head().long(5, 3, 3, 0), ErrTruncated},
		{"block of negative size", head().long(-1, -1, 3, 0), ErrInvalid},
		{"block of a wrong size", head().long(-1, 2, 3, 0), ErrInvalid},
		{"block larger than the record", big, ErrTruncated},
		{"event kind out of range", head().long(1, 4, 0), ErrInvalid},
		{"event kind negative", head().long(1, -1, 0), ErrInvalid},
		{"tier out of range", head().long(1, 1, 4), ErrInvalid},
		{"null or tier out of range", head().long(1, 2, 2), ErrInvalid},
		{"2^31-1 hashes", head().long(1, 1, 0, math.MaxInt32), ErrTooLarge},
		{"-(2^31-1) hashes", head().long(1, 1, 0, -math.MaxInt32, math.MaxInt64), ErrTooLarge},
		{"more hashes than bytes", head().long(1, 1, 0, 400_000).hash(1, 2), ErrTruncated},
		{"array without end", head().long(1, 1, 0, 1).hash(1), ErrTruncated},
		{"byte left over", head().long(0, 0), ErrLeftover},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Batch
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := b.Decode(c.value)
			runtime.ReadMemStats(&after)
			if !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if len(b.Events) != 0 {
				t.Errorf("%d events left after an error", len(b.Events))
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
				t.Errorf("allocated %d bytes for a record of %d", n, len(c.value))
			}
			if _, err := GoavroDecode(c.value); err == nil && !isStricter(b.Decode(c.value)) {
				t.Errorf("goavro takes it")
			}
		})
	}
}

// A manifest is refused for a value out of range whatever else is right with it,
// and goavro takes only what isStricter names.
func TestHostileManifests(t *testing.T) {
	// with is a manifest whose numbers, as they stand in it, are given; its
	// checksum is right.
	with := func(rank int64, retired byte, crcs ...int64) []byte {
		b := raw(manifestSchema.header[:]).long(SnapshotFormat).text("w").long(rank, 1, 2, 3).bytes(make([]byte, 16)...)
		b = b.long(8).text("m").long(16, 0, 1, 1, 0).text("p").long(1, 1).bytes(0).long(0).bytes(0, retired).long(0, 1, 10)
		b = b.long(int64(len(crcs))).long(crcs...)
		if len(crcs) > 0 {
			b = b.long(0)
		}
		return appendCheck(b, 0)
	}
	for _, c := range []struct {
		name  string
		value []byte
		want  error
	}{
		{"nothing wrong", with(0, 0, 0, 1, math.MaxUint32), nil},
		{"rank beyond 32 bits", with(1<<31, 0, 7), errInt},
		{"rank below 32 bits", with(-1<<31-1, 0, 7), errInt},
		{"boolean of 2", with(0, 2, 7), errBool},
		{"boolean of 255", with(0, 255, 7), errBool},
		{"CRC-32C of -1", with(0, 0, -1), errCRC},
		{"CRC-32C of 33 bits", with(0, 0, 7, 1<<32), errCRC},
		{"CRC-32C of -2^63", with(0, 0, math.MinInt64, 7), errCRC},
		{"CRC-32C of 2^63-1", with(0, 0, math.MaxInt64), errCRC},
	} {
		t.Run(c.name, func(t *testing.T) {
			var m Manifest
			err := DecodeManifest(&m, c.value)
			if !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if _, rest, goavroErr := manifestSchema.NativeFromBinary(c.value[headerBytes:]); (goavroErr == nil && len(rest) == 0) != (err == nil || isStricter(err)) {
				t.Errorf("goavro: %v and %d bytes left over, here: %v", goavroErr, len(rest), err)
			}
		})
	}
}

// isStricter reports whether err is one of the documented cases that only
// goavro takes.
func isStricter(err error) bool {
	for _, target := range []error{errVarint, errInt, errBlockSize, errUTF8, errCRC, ErrTooLarge} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

func TestUnknownSchemaTellsFingerprint(t *testing.T) {
	var b Batch
	var u *UnknownSchemaError
	err := b.Decode([]byte{0xC3, 1, 8, 7, 6, 5, 4, 3, 2, 1, 99})
	if !errors.As(err, &u) || u.Fingerprint != 0x0102030405060708 {
		t.Errorf("error %v", err)
	}
}

func TestTooManyEvents(t *testing.T) {
	retired := make([]Event, DefaultLimits.MaxEvents+1)
	for i := range retired {
		retired[i].Kind = KindRetired
	}
	if _, err := AppendBatch(nil, &Batch{Events: retired}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("encoding: %v", err)
	}
	value, err := AppendBatch(nil, &Batch{Events: retired[1:]})
	if err != nil {
		t.Fatal(err)
	}
	var b Batch
	if err := b.Decode(value); err != nil || len(b.Events) != DefaultLimits.MaxEvents {
		t.Errorf("decoding as many as allowed: %d events, %v", len(b.Events), err)
	}
	r := NewRegistry(Limits{MaxEvents: 10})
	if err := r.DecodeBatch(&b, value); !errors.Is(err, ErrTooLarge) {
		t.Errorf("decoding more than allowed: %v", err)
	}
}

// Avro lets a writer cut an array into blocks, and tell a block's size in
// bytes after a negated count.
func TestAllArrayEncodings(t *testing.T) {
	want := head().long(2, 1, 0, 3).hash(1, 2, 3).long(0, 3, 0)
	for _, c := range []struct {
		name  string
		value []byte
	}{
		{"one block each", want},
		{"blocks of one", head().long(1, 1, 0, 1).hash(1).long(1).hash(2).long(1).hash(3).long(0, 1, 3, 0)},
		{"sized blocks", head().long(-2, 30, 1, 0, -3, 24).hash(1, 2, 3).long(0, 3, 0)},
		{"mixed", head().long(-1, 31, 1, 0, 1).hash(1).long(-1, 8).hash(2).long(1).hash(3).long(0, 1, 3, 0)},
		{"zeros longer than need be", head().bytes(0x84, 0x00).long(1, 0, 3).hash(1, 2, 3).bytes(0x80, 0x80, 0x00).long(3).bytes(0x80, 0x00)},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Batch
			if err := b.Decode(c.value); err != nil {
				t.Fatal(err)
			}
			if len(b.Events) != 2 || b.Events[1].Kind != KindRetired {
				t.Fatalf("events %v", b.Events)
			}
			if got, err := AppendBatch(nil, &b); err != nil || !bytes.Equal(got, want) {
				t.Errorf("encodes again as (%v)\n% x\nwant\n% x", err, got, want)
			}
		})
	}
}

func TestEncodersRefuse(t *testing.T) {
	for _, c := range []struct {
		name   string
		encode func(dst []byte) ([]byte, error)
		want   error
	}{
		{"worker not UTF-8", func(d []byte) ([]byte, error) { return AppendBatch(d, &Batch{Worker: []byte("\xff")}) }, ErrInvalid},
		{"no such hasher", func(d []byte) ([]byte, error) { return AppendBatch(d, &Batch{Hasher: index.Opaque + 1}) }, ErrInvalid},
		{"no such kind", func(d []byte) ([]byte, error) { return AppendBatch(d, &Batch{Events: []Event{{Kind: kinds}}}) }, ErrInvalid},
		{"no such tier", func(d []byte) ([]byte, error) { return AppendBatch(d, &Batch{Events: []Event{{Tier: index.Tiers}}}) }, ErrInvalid},
		{"batch too large", func(d []byte) ([]byte, error) {
			return AppendBatch(d, &Batch{Events: []Event{{Kind: KindRemoved, Removed: make([]index.SeqHash, maxBlockCount)}}})
		}, ErrTooLarge},
		{"chunk of no such tier", func(d []byte) ([]byte, error) { return AppendChunk(d, &Chunk{Chains: []Chain{{Tier: index.Tiers}}}) }, ErrInvalid},
		{"chunk's worker not UTF-8", func(d []byte) ([]byte, error) { return AppendChunk(d, &Chunk{Worker: "\xff"}) }, ErrInvalid},
		{"manifest of no such hasher", func(d []byte) ([]byte, error) { return AppendManifest(d, &Manifest{Hasher: index.Opaque + 1}) }, ErrInvalid},
		{"manifest's model not UTF-8", func(d []byte) ([]byte, error) { return AppendManifest(d, &Manifest{Model: "\xff"}) }, ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.encode([]byte("before"))
			if !errors.Is(err, c.want) || string(got) != "before" {
				t.Errorf("%d bytes, error %v, want %v", len(got), err, c.want)
			}
		})
	}
}

// Manifests and floors say which events to pass over: whatever bit of one is
// wrong, it is refused.
func TestEveryFlippedBitIsRefused(t *testing.T) {
	for _, g := range goldens {
		if g.schema.Rabin != manifestSchema.Rabin && g.schema.Rabin != floorSchema.Rabin {
			continue // a chunk's checksum is in its manifest
		}
		value, err := g.encode()
		if err != nil {
			t.Fatal(err)
		}
		for bit := range len(value) * 8 {
			flipped := bytes.Clone(value)
			flipped[bit/8] ^= 1 << (bit % 8)
			if _, err := g.decode(flipped); err == nil {
				t.Errorf("%s: bit %d flipped is not noticed", g.file, bit)
			}
		}
	}
}
