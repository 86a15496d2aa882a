package kvw_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"kvindex/cmd/kvindex/fleet"
	"kvindex/cmd/kvindex/kvw"
)

// generated makes the workload of 200 made-up requests.
func generated(t testing.TB, c kvw.Config) []byte {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "w.kvw"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	g, err := kvw.Generate(f, fleet.NewSynthetic(200, 1), c, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if w, err := kvw.Load(f.Name()); err != nil {
		t.Fatal(err)
	} else if w.Name != "w" || w.Header.Ops != g.Ops || w.Totals.Stored != g.Stored || w.Totals.Removed != g.Removed ||
		w.Totals.Queried != g.Queried || w.Totals.Queries != g.Requests || int(w.Header.Workers) != g.Workers {
		t.Errorf("%+v was generated, and the file has %+v, %+v", g, w.Header, w.Totals)
	}
	return b
}

// Files stay what they were, byte for byte, or figures of different times could
// not be compared.
func TestGenerateGolden(t *testing.T) {
	for name, c := range map[string]struct {
		config kvw.Config
		sha256 string // first eight bytes
	}{
		"best":     {kvw.Config{Workers: 8, Replicas: 1, BlockSize: 64, Capacity: 500, Route: kvw.Best, Seed: 42}, "3491a23d5ca04e44"},
		"random":   {kvw.Config{Workers: 8, Replicas: 1, BlockSize: 64, Capacity: 500, Route: kvw.Random, Seed: 42}, "39727eda8ddb2cc9"},
		"replicas": {kvw.Config{Workers: 4, Replicas: 3, BlockSize: 16, Capacity: 2000, Route: kvw.Random, Seed: 42, Limit: 50}, "77a0fd13af9845d5"},
	} {
		t.Run(name, func(t *testing.T) {
			sum := sha256.Sum256(generated(t, c.config))
			if got := hex.EncodeToString(sum[:8]); got != c.sha256 {
				t.Errorf("SHA-256 begins with %s, want %s", got, c.sha256)
			}
		})
	}
}

func TestConfigValidate(t *testing.T) {
	for name, change := range map[string]func(*kvw.Config){
		"workers":  func(c *kvw.Config) { c.Workers = 0 },
		"replicas": func(c *kvw.Config) { c.Replicas = -1 },
		"too many": func(c *kvw.Config) { c.Replicas = kvw.MaxWorkers },
		"capacity": func(c *kvw.Config) { c.Capacity = 0 },
		"block":    func(c *kvw.Config) { c.BlockSize = 48 },
		"no block": func(c *kvw.Config) { c.BlockSize = 0 },
		"route":    func(c *kvw.Config) { c.Route = "worst" },
		"limit":    func(c *kvw.Config) { c.Limit = -1 },
	} {
		c := kvw.DefaultConfig()
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&c)
		if err := c.Validate(); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
