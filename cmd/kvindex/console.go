// This file is what commands read from and write to, plain or coloured.

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"unicode"

	"golang.org/x/term"
)

// console is where a command's input and output go.
type console struct {
	in       io.Reader
	out, err io.Writer
	outStyle style
	errStyle style
	settings []setting // of the command, in the order of its flags
}

func newConsole(in, out, err *os.File) *console {
	return &console{in: in, out: out, err: err, outStyle: styleOf(out), errStyle: styleOf(err)}
}

// checkedWriter remembers that a write failed, so that not every place that prints
// has to: a full disk must not look like success. Safe for concurrent use if w is.
type checkedWriter struct {
	w   io.Writer
	mu  sync.Mutex
	err error // the first
}

func (c *checkedWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.err = cmp.Or(c.err, err)
	}
	return n, err
}

func (c *checkedWriter) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// given returns the names of the settings that are not the default's.
func (c *console) given() map[string]bool {
	names := map[string]bool{}
	for _, s := range c.settings {
		if s.from != "default" {
			names[s.name] = true
		}
	}
	return names
}

// printSettings writes each setting, its value and where that is from.
func (c *console) printSettings() {
	for _, s := range c.settings {
		fmt.Fprintf(c.out, "%-21s %-40s %s\n", s.name, s.value, s.from)
	}
}

// style is how a file may be written to.
type style struct {
	terminal bool // lines may be written over
	colour   bool
	width    func() int // of the terminal, in columns
}

// styleOf uses colour on terminals only, unless NO_COLOR is set (to anything).
func styleOf(f *os.File) style {
	if !term.IsTerminal(int(f.Fd())) {
		return style{}
	}
	width := func() int {
		w, _, err := term.GetSize(int(f.Fd()))
		if err != nil || w <= 0 {
			return 80
		}
		return w
	}
	return style{terminal: true, colour: os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb", width: width}
}

func (s style) paint(code, text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (s style) red(text string) string    { return s.paint("31", text) }
func (s style) green(text string) string  { return s.paint("32", text) }
func (s style) yellow(text string) string { return s.paint("33", text) }
func (s style) bold(text string) string   { return s.paint("1", text) }
func (s style) faint(text string) string  { return s.paint("2", text) }

// printJSON writes v on standard output, indented.
func (c *console) printJSON(v any) error {
	enc := json.NewEncoder(c.out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table writes rows under a header, columns aligned. A cell that is not plain text,
// as a worker may be named, is quoted: a terminal would obey it.
func table(w io.Writer, header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{header}, rows...) {
		cells := make([]string, len(row))
		for i, cell := range row {
			if cells[i] = cell; strings.ContainsFunc(cell, func(r rune) bool { return !unicode.IsPrint(r) }) {
				cells[i] = strconv.Quote(cell)
			}
		}
		fmt.Fprintln(tw, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
	}
	return tw.Flush()
}
