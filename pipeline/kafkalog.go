package pipeline

import (
	"context"
	"log/slog"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/plugin/kslog"
)

// kafkaLog is a Kafka client's log in the stage's: its warnings and errors, and
// at debug level what it tells of itself, which at info would drown the rest.
type kafkaLog struct {
	to  *slog.Logger
	all kgo.Logger
}

func newKafkaLog(to *slog.Logger, role string) kafkaLog {
	to = to.With("client", role)
	return kafkaLog{to: to, all: kslog.New(to)}
}

// Level implements kgo.Logger.
func (l kafkaLog) Level() kgo.LogLevel {
	if l.to.Enabled(context.Background(), slog.LevelDebug) {
		return kgo.LogLevelInfo
	}
	return kgo.LogLevelWarn
}

// Log implements kgo.Logger.
func (l kafkaLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if level == kgo.LogLevelInfo {
		level = kgo.LogLevelDebug
	}
	l.all.Log(level, msg, keyvals...)
}
