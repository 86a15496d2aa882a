// This file has the fuzz targets of the decoders and of a Mapping's state.

package engine

import (
	"bytes"
	"hash/crc32"
	"testing"

	"kvindex/index"
	"kvindex/schemas"
)

// checkBatch fails for an event that a reader could stumble over, and applies
// the batch to mappings of every kind.
func checkBatch(t *testing.T, b *Batch) {
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind < Stored || e.Kind > Created {
			t.Fatalf("kind %d", e.Kind)
		}
		if e.Usable < 0 || e.Usable > len(e.Tokens) || len(e.Seconds) > 0 && len(e.Seconds) != len(e.Tokens) {
			t.Fatalf("%d usable and %d second ones of %d tokens", e.Usable, len(e.Seconds), len(e.Tokens))
		}
		last := int32(0)
		for _, k := range e.Keys {
			if k.Block < last || int(k.Block) >= e.KeyBlocks || k.Kind == 0 {
				t.Fatalf("keys %+v of %d blocks", e.Keys, e.KeyBlocks)
			}
			last = k.Block
		}
	}
	for _, c := range []Config{
		{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 4}},
		{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 2, Scheme: index.Dynamo}, MaxBlocks: 3},
		{Engine: SGLang, Hasher: index.BlockHasher{BlockSize: 1}},
		{Engine: TensorRTLLM, Hasher: index.BlockHasher{BlockSize: 4, Eagle: true}, MaxAside: 10},
	} {
		m, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		var h holding
		h.apply(t, applied(m, b))
		h.apply(t, applied(m, b))
		checkDump(t, m, &h)
		checkReload(t, m, &h)
	}
}

// checkReload writes m and reads it back.
func checkReload(t tb, m *Mapping, want *holding) {
	t.Helper()
	loaded, err := New(m.cfg)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if err := loaded.Load(m.Append(nil)); err != nil {
		t.Fatalf("load: %v", err)
	}
	if len(loaded.aside) != len(m.aside) || loaded.asideLen != m.asideLen || loaded.held != m.held {
		t.Fatalf("what was loaded is not what was written")
	}
	checkDump(t, loaded, want)
}

func FuzzDecode(f *testing.F) {
	for _, p := range corpus(f, ".msgpack") {
		f.Add(p)
	}
	f.Add(blocksPayload(2, 3, 5))
	f.Add(removedPayload(3, 5))
	f.Fuzz(func(t *testing.T, p []byte) {
		whole := bytes.Clone(p)
		var b Batch
		_ = b.Decode(p, Limits{})
		checkBatch(t, &b)
		if !bytes.Equal(p, whole) {
			t.Fatal("the payload was written to")
		}
		events, counts := len(b.Events), b.Counts
		_ = b.Decode(p, Limits{})
		if len(b.Events) != events || b.Counts != counts {
			t.Fatal("decoding again gives something else")
		}
	})
}

func FuzzDecodeJSON(f *testing.F) {
	for _, p := range corpus(f, ".json") {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var b Batch
		_ = b.DecodeJSON(p, Limits{})
		checkBatch(t, &b)
	})
}

// FuzzLoad gives Load anything that has a right checksum.
func FuzzLoad(f *testing.F) {
	c := Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 4}}
	for _, name := range []string{"stored_root", "stored_child", "stored_salt_session", "stored_mm", "offload_placeholder"} {
		m, err := New(c)
		if err != nil {
			f.Fatal(err)
		}
		applied(m, decodeFile(f, "vllm-0.33.0/"+name))
		state := m.Append(nil)
		f.Add(state[:len(state)-4])
	}
	again := [...]string{"vllm-0.33.0/batch_mixed", "vllm-0.33.0/removed_all_lru", "vllm-0.33.0/stored_child"}
	f.Fuzz(func(t *testing.T, p []byte) {
		m, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		if m.Load(appendU32(bytes.Clone(p), crc32.Checksum(p, castagnoli))) != nil {
			checkEmpty(t, m)
			return
		}
		var h holding
		for tier, s := range m.Dump {
			h.apply(t, []schemas.Event{{Kind: schemas.KindStored, Tier: tier, Stored: s}})
		}
		checkReload(t, m, &h)
		for _, name := range again {
			h.apply(t, applied(m, decodeFile(t, name)))
			checkDump(t, m, &h)
		}
	})
}
