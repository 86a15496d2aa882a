// This file shows what goes on, line by line or in a line that is written over.

package main

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// screen writes lines that stay and, below them, one that shows how things are
// right now: in place on a terminal, else as a line of its own now and then.
type screen struct {
	w     io.Writer
	style style
	last  time.Time // the status was written
	shown bool      // there is one on the terminal
}

const (
	statusInPlace = 100 * time.Millisecond
	statusLines   = 3 * time.Second
)

// line writes a line that stays.
func (s *screen) line(format string, args ...any) {
	s.clear()
	fmt.Fprintf(s.w, format+"\n", args...)
	s.last = time.Now()
}

// status shows what text returns, unless something was shown a moment ago.
func (s *screen) status(text func() string) {
	every := statusLines
	if s.style.terminal {
		every = statusInPlace
	}
	if time.Since(s.last) < every {
		return
	}
	s.last = time.Now()
	t := text()
	if !s.style.terminal {
		fmt.Fprintln(s.w, t)
		return
	}
	if room := s.style.width() - 1; utf8.RuneCountInString(t) > room {
		t = string([]rune(t)[:room])
	}
	s.shown = true
	fmt.Fprint(s.w, "\r\x1b[K"+s.style.faint(t))
}

// clear takes the status off the terminal.
func (s *screen) clear() {
	if s.shown {
		s.shown = false
		fmt.Fprint(s.w, "\r\x1b[K")
	}
}

// thousands writes a number for people: 12,345.
func thousands[N int | int64](n N) string {
	digits := fmt.Sprint(n)
	sign := ""
	if n < 0 {
		sign, digits = "-", digits[1:]
	}
	var groups []string
	for len(digits) > 3 {
		groups = append([]string{digits[len(digits)-3:]}, groups...)
		digits = digits[:len(digits)-3]
	}
	return sign + strings.Join(append([]string{digits}, groups...), ",")
}
