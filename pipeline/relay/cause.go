// This file names why epochs begin.

package relay

// cause is why a feed began, or is to begin, an epoch.
type cause uint8

// The causes. Those of Kafka are told apart in settle.
const (
	causeNone       cause = iota
	causeStart            // the relay started and knew nothing
	causeRestored         // the relay started from a checkpoint whose epoch may have lost its end
	causeRestart          // the engine restarted
	causeGap              // events of the engine were lost
	causeConnection       // a connection without a past: there is no replay endpoint
	causePayload          // a payload, or a removal in one, could not be read
	causeRank             // a payload was another rank's
	causeWindow           // the main attention group turned out to be another
	causeSilence          // nothing was acknowledged for so long that the stage may have retired the epoch
	causeNoRoom           // the buffer was full: Kafka is away or slow
	causeFailed           // Kafka refused a record
	causeTopic            // the topic got more partitions, or lost records that it had acknowledged

	causes
)

var causeNames = [causes]string{
	"", "start", "restored", "engine_restart", "events_lost", "connection", "payload", "rank", "window",
	"silence", "no_room", "kafka_failed", "topic",
}

// String returns the cause's name for metrics, status and log.
func (c cause) String() string {
	if c < causes {
		return causeNames[c]
	}
	return ""
}
