// This file has the configuration.

package fakeengine

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/index"
)

// The values of Config's Kind, Shape and Hashes.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	Map    = "map"   // vLLM 0.33, SGLang 0.5.23
	Array  = "array" // vLLM 0.23, SGLang 0.5.19
	Int    = "int"
	Bytes  = "bytes"
)

// Config says what an Engine is. [DefaultConfig] has the defaults.
type Config struct {
	Kind   string // VLLM or SGLang
	Shape  string // of events and replies, by version: Map or Array
	Hashes string // Int or, only VLLM, Bytes

	BlockSize    int          // tokens; must divide [fleet.TraceBlock]
	Hasher       index.Hasher // of the answers about what is held: Flash or Dynamo
	Ranks        int
	Capacity     int // blocks of a rank's GPU cache
	HostCapacity int // blocks of a rank's CPU cache; 0: none

	Listen       string // host:port of rank 0; each rank adds itself to the port unless that is 0, which is any
	ReplayListen string // likewise; empty: no replay
	Topic        string // first frame of every message
	BufferSteps  int    // batches that can be replayed, a rank

	Rate    float64 // requests a second; 0: as fast as possible
	LoRA    float64 // share of requests with a LoRA adapter, 0 to 1
	Salt    float64 // share of requests with a cache salt, 0 to 1
	Seed    uint64  // of everything random
	GapEach int     // every GapEach-th batch of a rank is lost for good; 0: none
	BadEach int     // every BadEach-th batch of a rank is garbage; 0: none

	Logger *slog.Logger
}

// DefaultConfig returns the defaults. BufferSteps is less than the engines' own
// 10,000, as a batch of a synthetic trace takes some 9 kB.
func DefaultConfig() Config {
	return Config{
		Kind: VLLM, Shape: Map, Hashes: Int,
		BlockSize: 64, Ranks: 1, Capacity: 4096,
		Listen: "127.0.0.1:5557", ReplayListen: "127.0.0.1:5657", BufferSteps: 1000,
		Rate: 10, Seed: 1,
		Logger: slog.Default(),
	}
}

// maxRanks bounds Ranks, and maxBlocks the blocks of a cache.
const (
	maxRanks  = 256
	maxBlocks = 1 << 24
)

// Validate returns what is wrong with the configuration, all of it.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Kind != VLLM && c.Kind != SGLang {
		bad("kind %q is neither %s nor %s", c.Kind, VLLM, SGLang)
	}
	if c.Shape != Map && c.Shape != Array {
		bad("shape %q is neither %s nor %s", c.Shape, Map, Array)
	}
	switch {
	case c.Hashes != Int && c.Hashes != Bytes:
		bad("hashes %q are neither %s nor %s", c.Hashes, Int, Bytes)
	case c.Hashes == Bytes && c.Kind == SGLang:
		bad("SGLang's hashes are integers always")
	}
	if c.Kind == SGLang && c.Shape == Array && c.LoRA > 0 {
		bad("SGLang says the LoRA adapter from 0.5.22 on only, in maps: with arrays the share of LoRA must be 0")
	}
	if c.BlockSize < 1 || fleet.TraceBlock%c.BlockSize != 0 {
		bad("block size %d does not divide the %d tokens of a trace's block", c.BlockSize, fleet.TraceBlock)
	}
	if c.Hasher != index.Flash && c.Hasher != index.Dynamo {
		bad("hasher %v: want flash or dynamo", c.Hasher)
	}
	for _, n := range []struct {
		name        string
		n, from, to int
	}{
		{"ranks", c.Ranks, 1, maxRanks},
		{"capacity", c.Capacity, 1, maxBlocks},
		{"host capacity", c.HostCapacity, 0, maxBlocks},
		{"buffer steps", c.BufferSteps, 1, maxBuffer},
		{"gap every", c.GapEach, 0, math.MaxInt},
		{"garbage every", c.BadEach, 0, math.MaxInt},
	} {
		switch {
		case n.n >= n.from && n.n <= n.to:
		case n.to == math.MaxInt:
			bad("%s is %d, must be %d or more", n.name, n.n, n.from)
		default:
			bad("%s is %d, must be %d to %d", n.name, n.n, n.from, n.to)
		}
	}
	for _, s := range []struct {
		name  string
		share float64
	}{{"LoRA", c.LoRA}, {"salt", c.Salt}} {
		if !(s.share >= 0 && s.share <= 1) {
			bad("share of %s is %v, must be 0 to 1", s.name, s.share)
		}
	}
	if !(c.Rate >= 0 && c.Rate <= 1e6) {
		bad("rate is %v, must be 0 to 1,000,000 requests a second", c.Rate)
	}
	for rank := range min(max(c.Ranks, 1), maxRanks) {
		for _, base := range []string{c.Listen, c.ReplayListen} {
			if _, err := address(base, rank); base != "" && err != nil {
				errs = append(errs, err)
				return errors.Join(errs...)
			}
		}
	}
	if c.Listen == "" {
		bad("no address to listen on")
	}
	return errors.Join(errs...)
}

// address returns where a rank listens.
func address(base string, rank int) (string, error) {
	host, text, err := net.SplitHostPort(base)
	if err != nil {
		return "", err
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 0 || port > 65535 || port > 0 && port+rank > 65535 {
		return "", fmt.Errorf("address %s: no port for rank %d", base, rank)
	}
	if port > 0 {
		port += rank
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), nil
}
