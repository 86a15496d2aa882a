package index_test

import (
	"fmt"
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

func TestPositionalIndex(t *testing.T) {
	indextest.Run(t, func() index.Structure { return index.NewPositionalIndex(0) })
}

// The jump size changes what a search looks at, never what it answers.
func TestPositionalIndexJumps(t *testing.T) {
	for _, jump := range []int{1, 3, 1000} {
		t.Run(fmt.Sprint(jump), func(t *testing.T) {
			empty := func() index.Structure { return index.NewPositionalIndex(jump) }
			t.Run("Contract", func(t *testing.T) { indextest.RunContract(t, empty) })
			t.Run("Random", func(t *testing.T) { indextest.RunRandom(t, empty) })
		})
	}
}

// The oracle answers the contract's cases too.
func TestOracle(t *testing.T) {
	indextest.RunContract(t, func() index.Structure { return indextest.NewOracle() })
}

// So it does those of opaque hashes.
func TestOpaqueOracle(t *testing.T) {
	indextest.RunOpaqueContract(t, func() index.Structure { return indextest.NewOpaqueOracle() })
}
