// This file tests that damaged or foreign state is refused.

package engine

import (
	"bytes"
	"errors"
	"hash/crc32"
	"testing"

	"kvindex/index"
)

func TestLoadRefuses(t *testing.T) {
	c := Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 4}}
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"stored_salt_session", "stored_child", "stored_mm", "offload_placeholder"} {
		applied(m, decodeFile(t, "vllm-0.33.0/"+name))
	}
	state := m.Append([]byte("before"))[len("before"):]
	signed := func(p []byte) []byte { return appendU32(bytes.Clone(p), crc32.Checksum(p, castagnoli)) }
	body := state[:len(state)-4]
	if !bytes.Equal(signed(body), state) {
		t.Fatal("the checksum is not that of the state")
	}
	version := bytes.Clone(body)
	version[4]++
	refused := func(c Config, p []byte, want error) {
		t.Helper()
		m, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Load(p); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
		checkEmpty(t, m)
	}
	for n := range state {
		refused(c, state[:n], ErrState)
		flipped := bytes.Clone(state)
		flipped[n] ^= 0x10
		refused(c, flipped, ErrState)
	}
	// With a right checksum a cut is still seen.
	for n := range body {
		refused(c, signed(body[:n]), ErrState)
	}
	refused(c, signed(append(bytes.Clone(body), 0)), ErrState)
	refused(c, signed(version), ErrVersion)
	for _, change := range []func(*Config){
		func(c *Config) { c.Engine = SGLang },
		func(c *Config) { c.Hasher.BlockSize = 8 },
		func(c *Config) { c.Hasher.Scheme = index.Dynamo },
		func(c *Config) { c.Hasher.Eagle = true },
	} {
		other := c
		change(&other)
		refused(other, state, ErrConfig)
	}
}
