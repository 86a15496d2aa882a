// This file names the states of a partition.

package consumer

// State is where a partition stands in its life.
type State int32

// The states, in the order a partition walks through them.
const (
	// Restoring: the handler brings back what was saved.
	Restoring State = iota
	// CatchingUp: records are applied, but the end is not reached yet.
	CatchingUp
	// Live: the end was reached; what is answered is what the log says.
	Live
	// Draining: the consumer is stopping.
	Draining
)

var stateNames = [...]string{"restoring", "catching-up", "live", "draining"}

// String returns the state's name as status and metrics spell it.
func (s State) String() string {
	if s >= 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "unknown"
}
