// This file is how figures are told: rounded, as JSON.

package bench

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// figure is told in whole numbers from 100 on, below with two decimals.
type figure float64

// MarshalJSON implements json.Marshaler. What cannot be told (nothing was
// measured) is null.
func (f figure) MarshalJSON() ([]byte, error) {
	x := float64(f)
	switch {
	case math.IsNaN(x) || math.IsInf(x, 0):
		return []byte("null"), nil
	case math.Abs(x) < 100:
		x = math.Round(x*100) / 100
	default:
		x = math.Round(x)
	}
	return strconv.AppendFloat(nil, x, 'f', -1, 64), nil
}

// hex is told as 16 hexadecimal digits.
type hex uint64

// MarshalJSON implements json.Marshaler.
func (h hex) MarshalJSON() ([]byte, error) { return fmt.Appendf(nil, `"%016x"`, uint64(h)), nil }

// median returns the middle of what f says of the runs.
func median[T any](runs []T, f func(*T) float64) figure {
	var all []float64
	for i := range runs {
		all = append(all, f(&runs[i]))
	}
	slices.Sort(all)
	n := len(all)
	return figure((all[(n-1)/2] + all[n/2]) / 2)
}

// least returns the least of what f says of the runs.
func least[T any](runs []T, f func(*T) float64) figure {
	best := slices.MinFunc(runs, func(a, b T) int { return cmp.Compare(f(&a), f(&b)) })
	return figure(f(&best))
}

// spread returns the distance between the extremes in percent of the median.
func spread[T any](runs []T, f func(*T) float64) figure {
	most := slices.MaxFunc(runs, func(a, b T) int { return cmp.Compare(f(&a), f(&b)) })
	return (figure(f(&most)) - least(runs, f)) / median(runs, f) * 100
}
