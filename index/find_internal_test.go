package index

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Depths are in order as long as they fit, and never against it.
func TestDepthsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.SampledFrom([]int{1, 2, 7, 8, 192, 32767, 32768, 1<<21 - 1, 1 << 21, 1<<31 - 1}).Draw(t, "blocks")
		draw := func(name string) (d Depths) {
			least := 0
			for i := range d {
				d[i] = rapid.IntRange(least, blocks).Draw(t, name)
				least = d[i]
			}
			return d
		}
		a, b := draw("a"), draw("b")
		if rapid.Bool().Draw(t, "alike") {
			b = a
			b[3] = rapid.IntRange(b[2], blocks).Draw(t, "last")
		}
		want := slices.Compare(a[:], b[:])
		got := slices.Compare([]int{a.order(blocks)}, []int{b.order(blocks)})
		if got != want && (got != 0 || blocks < 32768 || a[0] != b[0] || a[1] != b[1]) || a.order(blocks) < 0 {
			t.Fatalf("%v and %v of %d blocks compare as %d, want %d", a, b, blocks, got, want)
		}
	})
}
