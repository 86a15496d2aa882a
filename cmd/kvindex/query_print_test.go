package main

import (
	"bytes"
	"regexp"
	"testing"
	"time"

	pb "kvindex/pipeline/query/kvindexpb"
)

// A lower tier has a column when it adds something, and orders what is equal before.
func TestPrintMatchByTier(t *testing.T) {
	match := func(worker string, device, host, disk, external uint32) *pb.WorkerMatch {
		return &pb.WorkerMatch{Worker: worker, DepthBlocks: device, DepthTokens: 4 * device,
			DepthHostBlocks: host, DepthDiskBlocks: disk, DepthExternalBlocks: external}
	}
	for _, c := range []struct {
		name    string
		matches []*pb.WorkerMatch
		want    string // of each line its words
	}{
		{"device alone", []*pb.WorkerMatch{match("a", 1, 1, 1, 1), match("b", 2, 2, 2, 2)},
			"worker rank blocks tokens heard|b 0 2 8 0s|a 0 1 4 0s|"},
		{"host and external", []*pb.WorkerMatch{match("a", 1, 1, 1, 4), match("b", 1, 3, 3, 3), match("c", 0, 5, 5, 5)},
			"worker rank blocks tokens +host +external heard|b 0 1 4 3 3 0s|a 0 1 4 1 4 0s|c 0 0 0 5 5 0s|"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			if err := printMatch(&console{out: &out}, &pb.MatchResponse{Blocks: 5, BlockSize: 4, Matches: c.matches}, false, time.Millisecond); err != nil {
				t.Fatal(err)
			}
			_, table, _ := bytes.Cut(out.Bytes(), []byte("\n\n"))
			got := regexp.MustCompile(` *\n`).ReplaceAllString(string(table), "|")
			if got = regexp.MustCompile(` +`).ReplaceAllString(got, " "); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}
