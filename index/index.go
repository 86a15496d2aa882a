package index

// Index answers for one model.
type Index struct{}

// New returns an empty Index over an empty structure.
func New(s Structure) *Index { panic("seam") }

// AddWorker makes a worker-rank known. tag is the caller's own, kept as given in Worker.Tag.
func (x *Index) AddWorker(name string, rank int32, tag any) *Worker { panic("seam") }

// Worker is one worker-rank of an Index. Its methods are called by one goroutine at a time.
type Worker struct {
	Name string
	Rank int32
	Tag  any
}

func (w *Worker) Store(t Tier, s Stored) (Effect, error) { panic("seam") }
func (w *Worker) Remove(t Tier, hashes []SeqHash) Effect { panic("seam") }
func (w *Worker) Clear() int                             { panic("seam") }
func (w *Worker) ClearTier(t Tier) int                   { panic("seam") }
func (w *Worker) Retire() int                            { panic("seam") } // clears, and gives the slots back; w is dead afterwards
func (w *Worker) Len(t Tier) int                         { panic("seam") }
func (w *Worker) Dump(yield func(t Tier, s Stored) bool) { panic("seam") }
func (x *Index) Find(q *Query, r *Result)                { panic("seam") }
func (x *Index) Stats() Stats                            { panic("seam") }

// Query asks for the leading blocks that workers hold.
type Query struct {
	Locals    []LocalHash
	Workers   []string           // if not empty, only these workers (all their ranks)
	Keep      func(*Worker) bool // if not nil, workers it refuses are left out, before TopK
	TopK      int                // if > 0, only the k deepest, ties rotating from query to query
	EarlyExit bool
}

// Match is how deep one worker-rank's device tier matches.
type Match struct {
	Worker *Worker
	Depth  int // leading blocks held, > 0
}

// Result is a caller-owned, reusable answer.
type Result struct {
	Matches     []Match // deepest first if TopK was given, else in no order
	LowerBounds bool    // EarlyExit stopped the search: depths are lower bounds
}

type SlotMatches struct{}
type SlotSet struct{}

// Stats is an index's size.
type Stats struct {
	Workers int   // worker-ranks
	Blocks  int64 // (block, worker-rank, tier) pairs held
	Entries int64 // distinct blocks
}
