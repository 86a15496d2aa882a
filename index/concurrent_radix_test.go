package index_test

import (
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

func TestConcurrentRadixTree(t *testing.T) {
	indextest.Run(t, func() index.Structure { return index.NewConcurrentRadixTree() })
}

func TestConcurrentRadixTreeOpaque(t *testing.T) {
	indextest.RunOpaque(t, false, func() index.Structure { return index.NewConcurrentRadixTree() })
}
