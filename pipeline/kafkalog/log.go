// Package kafkalog puts what Kafka clients log into the log of the process.
package kafkalog

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/plugin/kslog"
)

// every is the least time between two lines that say the same: while brokers are
// away a client says so several times a second.
const every = 10 * time.Second

// most bounds the texts that are kept in mind.
const most = 256

// Log is a Kafka client's log: its warnings and errors, each at most once in ten
// seconds per broker, with the number of those left out; at debug level all of
// them, and also the client's info lines, which at info would drown the rest. Safe for
// concurrent use.
type Log struct {
	to  *slog.Logger
	all kgo.Logger
	now func() time.Time

	mu   sync.Mutex
	said map[string]said
}

// said is one text.
type said struct {
	at     time.Time
	hidden int // since
}

// New returns the log of the client that plays this role.
func New(to *slog.Logger, role string) *Log {
	to = to.With("client", role)
	return &Log{to: to, all: kslog.New(to), now: time.Now, said: map[string]said{}}
}

// Level implements kgo.Logger.
func (l *Log) Level() kgo.LogLevel {
	if l.debug() {
		return kgo.LogLevelInfo
	}
	return kgo.LogLevelWarn
}

func (l *Log) debug() bool { return l.to.Enabled(context.Background(), slog.LevelDebug) }

// Log implements kgo.Logger.
func (l *Log) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if level == kgo.LogLevelInfo {
		level = kgo.LogLevelDebug
	}
	if !l.debug() {
		hidden, ok := l.due(msg, keyvals)
		if !ok {
			return
		}
		if hidden > 0 {
			keyvals = append(keyvals[:len(keyvals):len(keyvals)], "times_since", hidden)
		}
	}
	l.all.Log(level, msg, keyvals...)
}

// due reports whether msg is to be said, and how often it was not.
func (l *Log) due(msg string, keyvals []any) (hidden int, ok bool) {
	key := msg
	for i := 0; i+1 < len(keyvals); i += 2 {
		if keyvals[i] == "addr" {
			key += fmt.Sprint(" ", keyvals[i+1])
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	one, known := l.said[key]
	if known && now.Sub(one.at) < every {
		one.hidden++
		l.said[key] = one
		return 0, false
	}
	if !known && len(l.said) >= most {
		clear(l.said)
	}
	l.said[key] = said{at: now}
	return one.hidden, true
}
