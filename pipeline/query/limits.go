// This file bounds what a request may ask: what is above is refused by name.

package query

import (
	"errors"
	"math"
	"runtime"
	"time"
)

// Limits bound what one request may ask. A zero field takes its default.
type Limits struct {
	MaxRequestBytes      int           // of a gRPC message or an HTTP body; default 4 MiB
	MaxTokens            int           // in a prompt; default 1,048,576
	MaxBlocks            int           // in a prompt, and in all prompts of a batch; default 65,536
	MaxNameBytes         int           // of lora and of salt, which are hashed with every block; default 1,024
	MaxMultimodal        int           // entries of mm, which every block looks through; default 256
	MaxWorkersFilter     int           // entries of workers; default 4,096
	MaxOffsets           int           // entries of min_offsets; default 1,024
	MaxBatch             int           // requests in a batch; default 256
	MaxBatchMatches      int           // matches in a batch's answers; default 65,536
	MaxWaiting           int           // queries that wait for min_offsets at a time; default 1,024
	Deadline             time.Duration // for a request's work, if its caller set no nearer one, and for its arrival, if others need the room; default 1 s
	MaxConcurrentStreams uint32        // requests at a time on one gRPC connection, beyond which they wait with the client; default 100
	MaxStreams           int           // MatchStreams open at once, as many of all others, and as many other requests whose message is on its way, on all connections; default 4,096

	MaxConcurrent  int           // queries worked on at once; default twice GOMAXPROCS
	MaxQueue       int           // queries that wait behind them; default 16 times MaxConcurrent
	QueueTimeout   time.Duration // for which one may wait; default 100 ms
	MaxRunnable    int           // goroutines that wait for each processor, beyond which, after some ms, queries are refused; default 16
	MaxUnreadBytes int           // of answers that their callers have not taken yet, on all connections; default 128 MiB
	MaxConnections int           // open at once, on each port; default 4,096
	MaxHeaderBytes int           // of a request's headers, which over gRPC are kept as long as it is open; default 16 KiB
	HeaderTimeout  time.Duration // for an HTTP request's headers, and a TLS handshake, to arrive; default 5 s
	IdleTimeout    time.Duration // after which a connection that asks nothing is closed; default 15 min
	RequestTimeout time.Duration // for a whole request to arrive, and for its answer to be taken; default 15 s
}

// Validate reports every field that is out of range, by the name of its flag if it has one.
func (l Limits) Validate() error {
	var errs []error
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"max-request-bytes", l.MaxRequestBytes < 0},
		{"max-tokens", l.MaxTokens < 0},
		{"max-blocks", l.MaxBlocks < 0},
		{"max-name-bytes", l.MaxNameBytes < 0},
		{"max-multimodal-entries", l.MaxMultimodal < 0},
		{"max-workers-filter", l.MaxWorkersFilter < 0},
		{"max-offsets", l.MaxOffsets < 0},
		{"max-batch", l.MaxBatch < 0},
		{"max-batch-matches", l.MaxBatchMatches < 0},
		{"max-waiting", l.MaxWaiting < 0},
		{"query-deadline", l.Deadline < 0},
		{"max-streams", l.MaxStreams < 0},
		{"max-concurrent", l.MaxConcurrent < 0},
		{"max-queue", l.MaxQueue < 0},
		{"queue-timeout", l.QueueTimeout < 0},
		{"max-runnable", l.MaxRunnable < 0},
		{"max-unread-bytes", l.MaxUnreadBytes < 0},
		{"max-connections", l.MaxConnections < 0},
		{"max-header-bytes", l.MaxHeaderBytes < 0 || l.MaxHeaderBytes > math.MaxInt32},
		{"header-timeout", l.HeaderTimeout < 0},
		{"idle-timeout", l.IdleTimeout < 0},
		{"request-timeout", l.RequestTimeout < 0},
	} {
		if f.bad {
			errs = append(errs, errors.New(f.name+": out of range"))
		}
	}
	return errors.Join(errs...)
}

func (l Limits) withDefaults() Limits {
	setDefault(&l.MaxRequestBytes, 4<<20)
	setDefault(&l.MaxTokens, 1<<20)
	setDefault(&l.MaxBlocks, 65536)
	setDefault(&l.MaxNameBytes, 1024)
	setDefault(&l.MaxMultimodal, 256)
	setDefault(&l.MaxWorkersFilter, 4096)
	setDefault(&l.MaxOffsets, 1024)
	setDefault(&l.MaxBatch, 256)
	setDefault(&l.MaxBatchMatches, 65536)
	setDefault(&l.MaxWaiting, 1024)
	setDefault(&l.Deadline, time.Second)
	setDefault(&l.MaxConcurrentStreams, 100)
	setDefault(&l.MaxStreams, 4096)
	setDefault(&l.MaxConcurrent, 2*runtime.GOMAXPROCS(0))
	setDefault(&l.MaxQueue, 16*l.MaxConcurrent)
	setDefault(&l.QueueTimeout, 100*time.Millisecond)
	setDefault(&l.MaxRunnable, 16)
	setDefault(&l.MaxUnreadBytes, 128<<20)
	setDefault(&l.MaxConnections, 4096)
	setDefault(&l.MaxHeaderBytes, 16<<10)
	setDefault(&l.HeaderTimeout, 5*time.Second)
	setDefault(&l.IdleTimeout, 15*time.Minute)
	setDefault(&l.RequestTimeout, 15*time.Second)
	return l
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
