package main

import (
	"bytes"
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// story is a stage whose answers follow each other; after the last the watching ends.
type story struct {
	answers []*pb.MatchResponse // nil: an error
	end     func()
}

func (s *story) Match(context.Context, *pb.MatchRequest) (*pb.MatchResponse, error) {
	if len(s.answers) == 0 {
		s.end()
		return nil, context.Canceled
	}
	a := s.answers[0]
	s.answers = s.answers[1:]
	if a == nil {
		return &pb.MatchResponse{Partial: true, Missing: []string{"no answer"}}, status.Error(codes.Unavailable, "catching up")
	}
	return a, nil
}

func depth(worker string, blocks uint32, age int64) *pb.WorkerMatch {
	return &pb.WorkerMatch{Worker: worker, DepthBlocks: blocks, DepthHostBlocks: blocks, DepthDiskBlocks: blocks, DepthExternalBlocks: blocks + 1, AgeMs: age}
}

func watching(t *testing.T, output string, terminal bool) string {
	t.Helper()
	answer := func(ms ...*pb.WorkerMatch) *pb.MatchResponse {
		return &pb.MatchResponse{Blocks: 3, BlockSize: 4, Matches: ms}
	}
	var out bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &story{[]*pb.MatchResponse{
			answer(),
			answer(depth("a", 1, 5)),
			answer(depth("a", 1, 900)),
			answer(depth("a", 1, 3), depth("b", 2, 3)),
			answer(depth("b", 2, 3), depth("a", 1, 3)),
			nil,
			nil,
			answer(depth("a", 1, 5)),
		}, cancel}
		c := queryConfig{output: output, watch: time.Second, stage: stageAccess{address: "stage"}}
		con := &console{out: &out, outStyle: style{terminal: terminal, width: func() int { return 80 }}}
		if err := c.watchMatch(ctx, con, s); err != nil {
			t.Fatal(err)
		}
	})
	return out.String()
}

// Where there is no terminal a line is a change, and no change is lost.
func TestWatchPrintsChanges(t *testing.T) {
	got := regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d `).ReplaceAllString(watching(t, "text", false), "")
	want := `3 blocks: nobody holds any
3 blocks: a/0 1 +external 2
3 blocks: b/0 2 +external 3, a/0 1 +external 2
stage at stage: catching up (Unavailable)
3 blocks: a/0 1 +external 2
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

func TestWatchPrintsJSON(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(watching(t, "json", true)), "\n")
	if len(lines) != 5 {
		t.Fatalf("%d lines, want 5:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	for _, line := range lines {
		var a struct{ Matches []struct{ Worker string } }
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Errorf("%v: %s", err, line)
		}
	}
}

func TestWatchRedrawsTheTable(t *testing.T) {
	pages := strings.Split(watching(t, "text", true), "\x1b[H\x1b[J")
	if len(pages) != 9 || pages[0] != "" {
		t.Fatalf("%d pages, want one an answer", len(pages)-1)
	}
	for i, want := range map[int]string{1: "0 workers hold some", 3: "900ms", 6: "catching up", 8: "1 worker holds some"} {
		if !strings.Contains(pages[i], want) {
			t.Errorf("page %d lacks %q:\n%s", i, want, pages[i])
		}
	}
}

func TestOffsetsAreRead(t *testing.T) {
	got, err := offsets([]string{"3=81920", "0=0"})
	if err != nil || len(got) != 2 || got[3] != 81920 {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"3", "=1", "x=1", "1=x", "4294967296=1"} {
		if _, err := offsets([]string{bad}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
