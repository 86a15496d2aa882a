package bench

import (
	"encoding/json"
	"math"
	"testing"
)

func TestFigures(t *testing.T) {
	for f, want := range map[figure]string{
		0: "0", 1.005: "1", 1.239: "1.24", -3.5: "-3.5", 99.994: "99.99", 100.4: "100", 123456.7: "123457", 1e15: "1000000000000000",
		figure(math.Inf(1)): "null",
	} {
		if got, err := json.Marshal(f); err != nil || string(got) != want {
			t.Errorf("%v is told as %s, %v; want %s", float64(f), got, err, want)
		}
	}
	if got, err := json.Marshal(hex(0xab)); err != nil || string(got) != `"00000000000000ab"` {
		t.Errorf("a digest is told as %s, %v", got, err)
	}
}

func TestMedian(t *testing.T) {
	self := func(x *float64) float64 { return *x }
	for _, c := range []struct {
		runs                  []float64
		median, least, spread figure
	}{
		{[]float64{4}, 4, 4, 0},
		{[]float64{9, 1}, 5, 1, 160},
		{[]float64{3, 1, 2}, 2, 1, 100},
	} {
		if m, l, s := median(c.runs, self), least(c.runs, self), spread(c.runs, self); m != c.median || l != c.least || s != c.spread {
			t.Errorf("%v: median %v, least %v, spread %v; want %v, %v, %v", c.runs, m, l, s, c.median, c.least, c.spread)
		}
	}
}
