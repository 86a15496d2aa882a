// Command testsum reads the output of one or more runs of "go test -json" and prints one line a package, everything that failed
// tests said, and last the total: "N passed, M failed". It exits with 1 when anything failed, when a test was skipped (the
// project has no optional tests), or when nothing ran.
//
// Counted are tests without subtests and the subtests themselves; a test that fails although its subtests pass counts too, and
// so does a package that fails without any failed test (it does not build, or its process ended early).
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is one line of go test -json; see go doc test2json.
type event struct {
	Action  string
	Package string
	Test    string // empty: of the package
	Elapsed float64
	Output  string
}

// test is what is known of one test of a running package.
type test struct {
	name   string
	result string // pass, fail, skip; empty: has not ended
	output strings.Builder
}

// fuzzRace reports whether t is a fuzz target that found nothing and yet failed: before Go 1.27 (https://go.dev/issue/75804) the
// end of -fuzztime may count as an error of the target. A finding of the target itself names a file and line.
func (t *test) fuzzRace() bool {
	return t.result == "fail" && strings.HasPrefix(t.name, "Fuzz") && strings.Contains(t.output.String(), "\n    context deadline exceeded\n") &&
		!strings.Contains(t.output.String(), "Failing input")
}

// summary counts what has run.
type summary struct {
	w                       io.Writer
	running                 map[string]map[string]*test // by package, then by name; "" is the package itself
	passed, failed, skipped int
}

func main() {
	s := summary{w: os.Stdout, running: make(map[string]map[string]*test)}
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	if !s.total() {
		os.Exit(1)
	}
}

// read takes in events up to the end of r. A line that is no event is printed as it is.
func (s *summary) read(r io.Reader) error {
	lines := bufio.NewReader(r) // a Scanner would refuse a long line
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				fmt.Fprintln(s.w, strings.TrimSuffix(line, "\n"))
			} else {
				s.add(e)
			}
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (s *summary) add(e event) {
	if e.Package == "" { // of a build: build-output, build-fail
		fmt.Fprint(s.w, e.Output)
		return
	}
	tests := s.running[e.Package]
	if tests == nil {
		tests = make(map[string]*test)
		s.running[e.Package] = tests
	}
	t := tests[e.Test]
	if t == nil {
		t = &test{name: e.Test}
		tests[e.Test] = t
	}
	switch e.Action {
	case "output":
		t.output.WriteString(e.Output)
	case "pass", "fail", "skip":
		t.result = e.Action
		if e.Action == "pass" {
			t.output.Reset()
		}
		if e.Test == "" {
			s.end(e.Package, e.Elapsed)
		}
	}
}

// end counts and prints a package that has ended.
func (s *summary) end(pkg string, seconds float64) {
	whole := s.running[pkg][""]
	delete(s.running[pkg], "")
	tests := make([]*test, 0, len(s.running[pkg]))
	for _, t := range s.running[pkg] {
		tests = append(tests, t)
	}
	delete(s.running, pkg)
	if whole.result == "skip" && len(tests) == 0 {
		return // it has no test files
	}
	slices.SortFunc(tests, func(a, b *test) int { return cmp.Compare(a.name, b.name) })

	// In this order a test comes before its subtests, so going backwards, what a test's subtests did is known before the test.
	hasSub, subFailed := make(map[string]bool), make(map[string]bool)
	var passed, failed, skipped int
	var raced bool
	said := []string{whole.output.String()} // of what failed, last to first
	for _, t := range slices.Backward(tests) {
		if t.fuzzRace() {
			t.result, raced = "pass", true
		}
		parent := ""
		if i := strings.LastIndexByte(t.name, '/'); i >= 0 {
			parent = t.name[:i]
			hasSub[parent] = true
		}
		switch t.result {
		case "pass":
			if !hasSub[t.name] {
				passed++
			}
			continue
		case "skip":
			skipped++
		default: // failed, or did not end because the process did
			if !subFailed[t.name] {
				failed++
			}
			subFailed[parent] = true
		}
		said = append(said, t.output.String())
	}
	if whole.result == "fail" && !raced {
		failed = max(failed, 1)
	}
	verdict := "ok  "
	if failed+skipped > 0 {
		verdict = "FAIL"
		for _, o := range slices.Backward(said) {
			fmt.Fprint(s.w, o)
		}
	}
	label := pkg
	if len(tests) == 1 {
		label += " " + tests[0].name // a fuzz target, most often
	}
	fmt.Fprintf(s.w, "%s %-48s %5d passed, %d failed%s in %.1f s\n", verdict, label, passed, failed, skips(skipped), seconds)
	s.passed, s.failed, s.skipped = s.passed+passed, s.failed+failed, s.skipped+skipped
}

// total prints the last line and reports whether all is well.
func (s *summary) total() bool {
	for pkg := range s.running {
		fmt.Fprintf(s.w, "FAIL %-48s did not end\n", pkg)
		s.failed++
	}
	fmt.Fprintf(s.w, "%d passed, %d failed%s\n", s.passed, s.failed, skips(s.skipped))
	return s.passed > 0 && s.failed == 0 && s.skipped == 0
}

func skips(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(", %d skipped (which counts as failed)", n)
}
