// This file thins out the log: what goes wrong with every batch is said now and then.

package relay

import (
	"context"
	"log/slog"
	"time"
)

// sayEvery is the least time between two lines of the log that say the same.
const sayEvery = 10 * time.Second

// troubles says what goes wrong, each kind of it at most once in sayEvery, with
// the number of times that it was not said. It belongs to one goroutine.
type troubles struct {
	log  *slog.Logger
	now  func() time.Time
	said map[string]*trouble
}

// trouble is one kind, by its text.
type trouble struct {
	at     time.Time
	hidden int
}

// say logs text, which must be one of few, at level warn.
func (t *troubles) say(text string, args ...any) { t.tell(slog.LevelWarn, text, args...) }

// tell logs text, which must be one of few.
func (t *troubles) tell(level slog.Level, text string, args ...any) {
	now := t.now()
	one := t.said[text]
	switch {
	case one == nil:
		if t.said == nil {
			t.said = make(map[string]*trouble)
		}
		one = &trouble{}
		t.said[text] = one
	case since(now, one.at) < sayEvery:
		one.hidden++
		return
	}
	if one.hidden > 0 {
		args = append(args, "times since", one.hidden)
	}
	one.at, one.hidden = now, 0
	t.log.Log(context.Background(), level, text, args...)
}
