package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const ok, bad = true, false
	for _, c := range []struct {
		name   string
		events string
		well   bool
		total  string
		says   string // somewhere in what is printed
	}{
		{"a test and two subtests are three lines, two of which count", `
{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"pass","Package":"p","Test":"A/y"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Elapsed":1.5}`, ok, "2 passed, 0 failed", "2 passed, 0 failed in 1.5 s"},
		{"a failed subtest counts once and is quoted", `
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"output","Package":"p","Test":"A/y","Output":"because\n"}
{"Action":"fail","Package":"p","Test":"A/y"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p"}`, bad, "1 passed, 1 failed", "because"},
		{"a test fails although its subtest passes", `
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p"}`, bad, "1 passed, 1 failed", "FAIL p"},
		{"a skipped test is a failure", `
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Test":"B","Output":"not today\n"}
{"Action":"skip","Package":"p","Test":"B"}
{"Action":"pass","Package":"p"}`, bad, "1 passed, 0 failed, 1 skipped (which counts as failed)", "not today"},
		{"a package that does not build", `
{"ImportPath":"p","Action":"build-output","Output":"undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p"}
{"Action":"pass","Package":"q","Test":"A"}
{"Action":"pass","Package":"q"}`, bad, "1 passed, 1 failed", "undefined: x"},
		{"a panic ends the process within a test", `
{"Action":"run","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Test":"A","Output":"panic: oh\n"}
{"Action":"fail","Package":"p"}`, bad, "0 passed, 1 failed", "panic: oh"},
		{"the output ends within a package", `
{"Action":"pass","Package":"p","Test":"A"}`, bad, "0 passed, 1 failed", "did not end"},
		{"nothing ran", `go: no such thing`, bad, "0 passed, 0 failed", "go: no such thing"},
		{"packages without tests do not count", `
{"Action":"skip","Package":"none"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}`, ok, "1 passed, 0 failed", ""},
		{"a package that runs again, to fuzz", `
{"Action":"pass","Package":"p","Test":"FuzzA"}
{"Action":"pass","Package":"p"}
{"Action":"pass","Package":"p","Test":"FuzzA"}
{"Action":"pass","Package":"p"}`, ok, "2 passed, 0 failed", ""},
		{"the end of the fuzzing time is no finding", `
{"Action":"output","Package":"p","Test":"FuzzA","Output":"--- FAIL: FuzzA (5.10s)\n"}
{"Action":"output","Package":"p","Test":"FuzzA","Output":"    context deadline exceeded\n"}
{"Action":"fail","Package":"p","Test":"FuzzA"}
{"Action":"fail","Package":"p"}`, ok, "1 passed, 0 failed", ""},
		{"a finding is one", `
{"Action":"output","Package":"p","Test":"FuzzA","Output":"--- FAIL: FuzzA (5.10s)\n"}
{"Action":"output","Package":"p","Test":"FuzzA","Output":"    a_test.go:3: context deadline exceeded\n    Failing input written\n"}
{"Action":"fail","Package":"p","Test":"FuzzA"}
{"Action":"fail","Package":"p"}`, bad, "0 passed, 1 failed", "Failing input"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			s := summary{w: &out, running: make(map[string]map[string]*test)}
			if err := s.read(strings.NewReader(strings.TrimSpace(c.events))); err != nil {
				t.Fatal(err)
			}
			well := s.total()
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := lines[len(lines)-1]; well != c.well || got != c.total {
				t.Errorf("got %q, well %v, want %q, %v", got, well, c.total, c.well)
			}
			if !strings.Contains(out.String(), c.says) {
				t.Errorf("%q does not say %q", out.String(), c.says)
			}
		})
	}
}
