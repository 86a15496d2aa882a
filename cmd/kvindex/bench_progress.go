// This file shows how far a measurement is.

package main

import (
	"log/slog"
	"time"

	"github.com/schollz/progressbar/v3"
)

// benchProgress shows, of what takes longer than two seconds, how far it is: a
// bar on a terminal, else a log line every few seconds. It is for one goroutine.
type benchProgress struct {
	con   *console
	what  string
	total int64 // 0: not known
	done  int64

	bar  *progressbar.ProgressBar
	next time.Time // to show something
}

// Start begins something new, with total of what it counts; 0 if that is not known.
func (p *benchProgress) Start(what string, total int64) {
	p.end()
	p.what, p.total, p.done, p.next = what, total, 0, time.Now().Add(2*time.Second)
}

// Add says that n more are done.
func (p *benchProgress) Add(n int64) {
	p.done += n
	if time.Now().Before(p.next) {
		return
	}
	if !p.con.errStyle.terminal {
		args := []any{p.what, p.done}
		if p.total > 0 {
			args = append(args, "of", p.total)
		}
		slog.Info("at work", args...)
		p.next = time.Now().Add(progressEvery)
		return
	}
	p.next = time.Now().Add(100 * time.Millisecond)
	if p.bar == nil {
		total := p.total
		if total == 0 {
			total = -1
		}
		p.bar = progressbar.NewOptions64(total,
			progressbar.OptionSetWriter(p.con.err),
			progressbar.OptionSetDescription(p.what),
			progressbar.OptionShowCount(),
			progressbar.OptionClearOnFinish(),
			progressbar.OptionEnableColorCodes(p.con.errStyle.colour))
	}
	_ = p.bar.Set64(p.done) // a terminal that is gone is no reason to stop
}

// end clears what is shown.
func (p *benchProgress) end() {
	if p.bar != nil {
		_ = p.bar.Finish()
		p.bar = nil
	}
}
