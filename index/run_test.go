package index_test

import (
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

func TestRunIndex(t *testing.T) {
	indextest.Run(t, func() index.Structure { return index.NewRunIndex() })
}

// What else takes thousands of blocks happens at a few.
func TestSmallRunIndex(t *testing.T) {
	for name, scan := range map[string]bool{"scanning": true, "tabled": false} {
		t.Run(name, func(t *testing.T) {
			empty := func() index.Structure { return index.NewSmallRunIndex(scan) }
			t.Run("Contract", func(t *testing.T) { indextest.RunContract(t, empty) })
			t.Run("Random", func(t *testing.T) { indextest.RunRandom(t, empty) })
			t.Run("Turnover", func(t *testing.T) { indextest.RunTurnover(t, empty) })
			t.Run("Concurrent", func(t *testing.T) { indextest.RunConcurrent(t, empty) })
		})
	}
}
