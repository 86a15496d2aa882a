package main

import (
	"strings"
	"testing"
)

// A name that is no plain text, which any producer can give its worker, does not
// reach the terminal as it is.
func TestTableOfHostileNames(t *testing.T) {
	var b strings.Builder
	if err := table(&b, []string{"worker", "depth"}, [][]string{{"gpu-1", "3"}, {"wörker 2", "2"}, {"\x1b[2J\tgone\n", "1"}}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"worker             depth",
		"gpu-1              3",
		"wörker 2           2",
		`"\x1b[2J\tgone\n"  1`,
	}
	if got := strings.TrimRight(b.String(), "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s", got)
	}
}
