package index

// NewSmallRunIndex returns a RunIndex that does at a handful of blocks what else
// takes thousands: runs fill up, journals are written anew, and, if scan is false,
// all blocks go into their slot's table.
func NewSmallRunIndex(scan bool) *RunIndex {
	x := NewRunIndex()
	x.maxRun, x.slack = 3, 4
	if !scan {
		x.scanFree, x.scanEach = 0, 0
	}
	return x
}
