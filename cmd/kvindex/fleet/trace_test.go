package fleet

import (
	"bytes"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// all reads requests to their end, copied.
func all(t *testing.T, from Requests) []*Request {
	t.Helper()
	var rs []*Request
	for {
		r, err := from.Next()
		if err == io.EOF {
			return rs
		}
		if err != nil {
			t.Fatal(err)
		}
		c := *r
		c.HashIDs = slices.Clone(r.HashIDs)
		rs = append(rs, &c)
	}
}

func mustBlocks(t *testing.T, size int) *Blocks {
	t.Helper()
	b, err := NewBlocks(size, 0)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReader(t *testing.T) {
	const good = `{"timestamp": 5, "input_length": 513, "output_length": 9, "hash_ids": [0, 7]}`
	for name, c := range map[string]struct {
		trace string
		want  int
		err   string // "" if the trace is read to its end
	}{
		"empty":             {"", 0, ""},
		"no last newline":   {good, 1, ""},
		"empty lines":       {"\n" + good + "\n  \n" + good + "\r\n\n", 2, ""},
		"unknown field":     {`{"type":"x",` + good[1:], 1, ""},
		"not JSON":          {good + "\nhello\n", 1, "t.jsonl:2: invalid character"},
		"wrong type":        {`{"timestamp": "now"}`, 0, "t.jsonl:1: json: cannot unmarshal string"},
		"negative id":       {strings.Replace(good, "7", "-7", 1), 0, "t.jsonl:1: json: cannot unmarshal number -7"},
		"negative time":     {strings.Replace(good, "5,", "-5,", 1), 0, "t.jsonl:1: timestamp -5 is negative"},
		"no tokens":         {`{"timestamp": 1}`, 0, "t.jsonl:1: input_length 0 is not positive"},
		"negative output":   {strings.Replace(good, "9", "-9", 1), 0, "t.jsonl:1: output_length -9 is negative"},
		"too few ids":       {strings.Replace(good, "513", "1025", 1), 0, "t.jsonl:1: input_length 1025 needs 3 hash_ids of 512 tokens, not 2"},
		"too many ids":      {strings.Replace(good, "513", "512", 1), 0, "t.jsonl:1: input_length 512 needs 1 hash_ids of 512 tokens, not 2"},
		"line without end":  {good + "\n" + strings.Repeat(" ", maxTraceLine+1), 1, "t.jsonl:2: longer than 1048576 bytes"},
		"truncated in line": {good + "\n" + good[:20], 1, "t.jsonl:2: unexpected end of JSON input"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReader(strings.NewReader(c.trace), "t.jsonl")
			n := 0
			for {
				_, err := r.Next()
				if err == nil {
					n++
					continue
				}
				if c.err == "" && err != io.EOF || c.err != "" && !strings.HasPrefix(err.Error(), c.err) {
					t.Errorf("error %q, want %q", err, c.err)
				}
				break
			}
			if n != c.want {
				t.Errorf("%d requests, want %d", n, c.want)
			}
		})
	}
}

func TestSyntheticTrace(t *testing.T) {
	const n = 3000
	want := all(t, NewSynthetic(n, 3))
	if len(want) != n {
		t.Fatalf("%d requests, want %d", len(want), n)
	}
	if reflect.DeepEqual(want, all(t, NewSynthetic(n, 4))) {
		t.Error("two seeds give the same trace")
	}
	var file bytes.Buffer
	if _, err := WriteTrace(&file, NewSynthetic(n, 3)); err != nil {
		t.Fatal(err)
	}
	// The reader checks every request, so this also says that they are sound.
	if !reflect.DeepEqual(want, all(t, newReader(&file, "synthetic"))) {
		t.Error("the same seed, written and read, gives another trace")
	}
	for i := 1; i < n; i++ {
		if want[i].Timestamp < want[i-1].Timestamp {
			t.Fatalf("request %d is earlier than the one before", i)
		}
	}
}

func TestBlocksShareWhatRequestsShare(t *testing.T) {
	a := &Request{InputLength: 1100, HashIDs: []uint64{1, 2, 3}}
	b := &Request{InputLength: 1300, HashIDs: []uint64{1, 2, 4}}
	blocks := mustBlocks(t, 64)
	clone := func(p Prompt) Prompt { return Prompt{slices.Clone(p.Locals), slices.Clone(p.Seqs)} }
	pa, pb := clone(blocks.Of(a)), clone(blocks.Of(b))
	if len(pa.Seqs) != 1100/64 || len(pb.Seqs) != 1300/64 {
		t.Fatalf("%d and %d blocks, want the full ones only: %d and %d", len(pa.Seqs), len(pb.Seqs), 1100/64, 1300/64)
	}
	for i := range pa.Seqs {
		if same := pa.Seqs[i] == pb.Seqs[i]; same != (i < 16) {
			t.Errorf("block %d: equal is %v", i, same)
		}
	}
	if seen := slices.Compact(slices.Sorted(slices.Values(pb.Locals))); len(seen) != len(pb.Locals) {
		t.Error("different blocks have equal local hashes")
	}
	for _, size := range []int{0, -16, 48, 1024} {
		if _, err := NewBlocks(size, 0); err == nil {
			t.Errorf("block size %d is accepted", size)
		}
	}
}
