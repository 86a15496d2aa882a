// This file reduces answers to what two implementations can compare.

package bench

import (
	"errors"

	"kvindex/index"
)

var errDiffer = errors.New("two runs gave different answers")

// Answers is the sum of all answers to a workload's queries.
//
// The digest is the sum, over all workers that an answer has, of
//
//	mix(query*0x9e3779b97f4a7c15 ^ worker*0xc2b2ae3d27d4eb4f ^ depth*0x165667b19e3779f9)
//
// where query counts from 0, mix is splitmix64's finalizer and all wraps at 64
// bits. The order of the workers does not matter.
type Answers struct {
	Digest   hex   `json:"digest"`
	Scores   int64 `json:"scores"`    // workers in all answers
	DepthSum int64 `json:"depth_sum"` // blocks
}

func (a *Answers) add(query int, worker index.Slot, depth int) {
	x := uint64(query)*0x9e3779b97f4a7c15 ^ uint64(worker)*0xc2b2ae3d27d4eb4f ^ uint64(depth)*0x165667b19e3779f9
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	a.Digest += hex(x ^ x>>31)
	a.Scores++
	a.DepthSum += int64(depth)
}

func (a *Answers) addMatches(query int, m *index.SlotMatches) {
	for _, w := range m.Matches {
		a.add(query, w.Slot, w.Depth)
	}
}
