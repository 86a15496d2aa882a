package schemas

// The decoders take what goavro takes, apart from the documented stricter
// limits, and make the same of it.

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/linkedin/goavro/v2"
)

// fuzzItems is the most that an array of a fuzzed record may have: goavro
// allocates for all of them before it reads one, and the fuzzer would find
// nothing else.
const fuzzItems = 1 << 12

// fuzzDecoder feeds bodies, without framing, to decode and to goavro. decode
// returns the record in goavro's native form; same evens out what the record
// types cannot express.
func fuzzDecoder(f *testing.F, s compiled, decode func([]byte) (map[string]any, error), same func(map[string]any)) {
	for _, g := range goldens {
		if g.schema.Rabin == s.Rabin {
			f.Add(goavroSingle(f, s, g.native)[headerBytes:])
		}
	}
	maxItems := goavro.MaxBlockCount
	goavro.MaxBlockCount = fuzzItems
	f.Cleanup(func() { goavro.MaxBlockCount = maxItems })
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) > fuzzItems {
			return // it may have more items than goavro takes here
		}
		value := append(s.header[:], body...)
		before := bytes.Clone(value)
		got, err := decode(value)
		if !bytes.Equal(value, before) {
			t.Fatal("decoding wrote to its input")
		}
		datum, rest, goavroErr := s.NativeFromBinary(value[headerBytes:])
		if err != nil {
			if goavroErr == nil && len(rest) == 0 && !isStricter(err) {
				t.Fatalf("goavro takes what is refused: %v", err)
			}
			return
		}
		if goavroErr != nil || len(rest) > 0 {
			t.Fatalf("taken, but goavro: %v, %d bytes left over", goavroErr, len(rest))
		}
		want := datum.(map[string]any)
		same(want)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("decoded\n%v\ngoavro\n%v", got, want)
		}
	})
}

func FuzzDecodeBatch(f *testing.F) {
	f.Add([]byte(head().long(1, 1, 0, 1).hash(1).long(1).hash(2).long(0, 1, 3, 0)[headerBytes:]))
	f.Add([]byte(head().long(-2, 30, 1, 0, -3, 24).hash(1, 2, 3).long(0, 3, 0)[headerBytes:]))
	f.Add([]byte(head().long(1 << 31)[headerBytes:]))
	var b Batch
	fuzzDecoder(f, batchSchema, func(value []byte) (map[string]any, error) {
		err := b.Decode(value)
		return nativeBatch(&b), err
	}, func(m map[string]any) {
		for _, e := range m["events"].([]any) {
			if s, ok := e.(map[string]any)["kvindex.Stored"]; ok {
				forgetPositionMinusOne(s.(map[string]any))
			}
		}
	})
}

func FuzzDecodeChunk(f *testing.F) {
	var c Chunk
	fuzzDecoder(f, chunkSchema, func(value []byte) (map[string]any, error) {
		err := DecodeChunk(&c, value)
		return nativeChunk(&c), err
	}, func(m map[string]any) {
		for _, s := range m["chains"].([]any) {
			forgetPositionMinusOne(s.(map[string]any))
		}
	})
}

func FuzzDecodeManifest(f *testing.F) {
	var m Manifest
	fuzzDecoder(f, manifestSchema, func(value []byte) (map[string]any, error) {
		err := DecodeManifest(&m, value)
		return unchecked(nativeManifest(&m)), ignoreChecksum(err)
	}, func(m map[string]any) { unchecked(m) })
}

func FuzzDecodeFloor(f *testing.F) {
	var fl Floor
	fuzzDecoder(f, floorSchema, func(value []byte) (map[string]any, error) {
		err := DecodeFloor(&fl, value)
		return unchecked(nativeFloor(&fl)), ignoreChecksum(err)
	}, func(m map[string]any) { unchecked(m) })
}

// ignoreChecksum: goavro knows nothing of what the field is for. It is the last
// one, and everything else has been decoded by then.
func ignoreChecksum(err error) error {
	if errors.Is(err, ErrChecksum) {
		return nil
	}
	return err
}

func unchecked(m map[string]any) map[string]any {
	delete(m, "check")
	return m
}
