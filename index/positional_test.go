package index_test

import (
	"fmt"
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

func TestPositionalIndex(t *testing.T) {
	for _, jump := range []int{1, 2, 3, 7, index.DefaultJump, 1000} {
		t.Run(fmt.Sprintf("jump=%d", jump), func(t *testing.T) {
			indextest.Run(t, func() index.Structure { return index.NewPositionalIndex(jump) })
		})
	}
}

// The oracle passes its own suite.
func TestOracle(t *testing.T) {
	indextest.RunRandom(t, func() index.Structure { return indextest.NewOracle() })
}
