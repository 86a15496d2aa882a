package kvw_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"kvindex/cmd/kvindex/kvw"
	"kvindex/index"
)

// golden is a file of each kind of operation, worked out by hand: sequence hashes
// of the local hashes 11, 22, 33 are 11, 750553365844651409, 3257565445809651757.
const golden = "4b565731" + "02000000" + "40000000" + "0400000000000000" +
	"03" + "02000000" + "0b00000000000000" + "1600000000000000" +
	"01" + "01000000" + "00" + "0000000000000000" + "02000000" +
	"0b00000000000000" + "0b00000000000000" + "1600000000000000" + "91ed24444f806a0a" +
	"01" + "00000000" + "01" + "91ed24444f806a0a" + "01000000" + "2100000000000000" + "2d40127e8332352d" +
	"02" + "01000000" + "01000000" + "91ed24444f806a0a"

func goldenOps() []kvw.Op {
	const second = 750553365844651409
	return []kvw.Op{
		{Kind: kvw.Query, Query: []index.LocalHash{11, 22}},
		{Kind: kvw.Store, Worker: 1, Stored: index.Stored{Position: index.NoPosition, Locals: []index.LocalHash{11, 22}}},
		{Kind: kvw.Store, Worker: 0, Stored: index.Stored{Position: index.NoPosition, Parent: second, HasParent: true, Locals: []index.LocalHash{33}}},
		{Kind: kvw.Remove, Worker: 1, Hashes: []index.SeqHash{second}},
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// write writes operations as a file and returns what is in it.
func write(t testing.TB, h kvw.Header, ops []kvw.Op) []byte {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "w.kvw"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := kvw.NewWriter(f, h.Workers, h.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	for i := range ops {
		if err := w.Write(&ops[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGolden(t *testing.T) {
	w, err := kvw.Read(bytes.NewReader(unhex(t, golden)))
	if err != nil {
		t.Fatal(err)
	}
	if want := (kvw.Header{Workers: 2, BlockSize: 64, Ops: 4}); w.Header != want {
		t.Errorf("header is %+v, want %+v", w.Header, want)
	}
	if want := (kvw.Totals{Stores: 2, Removes: 1, Queries: 1, Stored: 3, Removed: 1, Queried: 2}); w.Totals != want {
		t.Errorf("totals are %+v, want %+v", w.Totals, want)
	}
	if want := goldenOps(); !reflect.DeepEqual(w.Ops, want) {
		t.Errorf("operations are %+v, want %+v", w.Ops, want)
	}
	if got := hex.EncodeToString(write(t, w.Header, w.Ops)); got != golden {
		t.Errorf("written again it is\n%s, not\n%s", got, golden)
	}
}

func TestReaderRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		file   string
		offset int64
		err    string
	}{
		"empty":               {"", 0, "0 bytes into a field of 4, magic"},
		"half a header":       {golden[:20], 4, "6 bytes into a field of 16, header"},
		"another file":        {"7f454c46" + golden[8:], 0, `begins with "\x7fELF"`},
		"another short file":  {"0102030405", 0, `begins with "\x01\x02\x03\x04"`},
		"a later version":     {"4b565732" + golden[8:], 0, `begins with "KVW2"`},
		"too many workers":    {"4b565731ffffffff" + golden[16:], 4, "4294967295 workers"},
		"no operation":        {golden[:40], 20, "operation 0 of 4"},
		"a million million":   {golden[:24] + "000000ffffffffff" + golden[40:], 142, "operation 4 of"},
		"unknown kind":        {golden[:40] + "04" + golden[42:], 20, "of kind 4"},
		"huge query":          {golden[:42] + "ffffffff" + golden[50:], 25, "number 0 of 4294967295"},
		"worker out of range": {golden[:84] + "02" + golden[86:], 42, "worker 2 of 2"},
		"parent without flag": {golden[:94] + "01" + golden[96:], 46, "has-parent 0 with parent"},
		"flag of 2":           {golden[:92] + "02" + golden[94:], 46, "has-parent 2"},
		"wrong chain":         {strings.Replace(golden, "160000000000000091ed", "160000000000000090ed", 1), 75, "make 0a6a804f4424ed91"},
		"truncated":           {golden[:len(golden)-2], 134, "7 bytes into a field of 8, sequence hash to remove"},
		"bytes after the end": {golden + "00", 142, "after the last of 4"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := kvw.Read(bytes.NewReader(unhex(t, c.file)))
			var format *kvw.FormatError
			if !errors.As(err, &format) || !strings.Contains(err.Error(), c.err) {
				t.Fatalf("%v, want a FormatError with %q", err, c.err)
			}
			if format.Offset != c.offset {
				t.Errorf("at byte %d, want %d: %v", format.Offset, c.offset, err)
			}
			if short := strings.Contains(err.Error(), "bytes into a field"); short != errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%v: wraps %v: %v", err, io.ErrUnexpectedEOF, !short)
			}
		})
	}
}

func TestReaderPassesErrorsOn(t *testing.T) {
	broken := errors.New("broken disk")
	_, err := kvw.Read(io.MultiReader(bytes.NewReader(unhex(t, golden[:50])), iotestErr{broken}))
	if !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
}

type iotestErr struct{ error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.error }

// What the reader takes is what the writer writes, byte for byte.
func FuzzReader(f *testing.F) {
	f.Add(unhex(f, golden))
	f.Add(unhex(f, golden[:40]))
	f.Add(unhex(f, golden[:24]+"0000000000000000"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := kvw.Read(bytes.NewReader(b))
		if err != nil {
			var format *kvw.FormatError
			if !errors.As(err, &format) || format.Offset < 0 || format.Offset > int64(len(b)) {
				t.Fatalf("%v of %d bytes", err, len(b))
			}
			return
		}
		if got := write(t, w.Header, w.Ops); !bytes.Equal(got, b) {
			t.Fatalf("written again it is\n%x, not\n%x", got, b)
		}
	})
}

func TestPlace(t *testing.T) {
	w := &kvw.Workload{Ops: goldenOps()}
	w.Ops = append(w.Ops, kvw.Op{Kind: kvw.Store, Stored: index.Stored{Position: index.NoPosition, Parent: 5, HasParent: true, Locals: []index.LocalHash{1}}})
	w.Place()
	for i, want := range map[int]int32{1: 0, 2: 2, 4: index.NoPosition} {
		if got := w.Ops[i].Stored.Position; got != want {
			t.Errorf("operation %d is at position %d, want %d", i, got, want)
		}
	}
}

// A ring's events leave its worker as it was, and none is a duplicate or misses
// what it needs.
func TestRings(t *testing.T) {
	w, err := kvw.Read(bytes.NewReader(generated(t, kvw.Config{Workers: 3, Replicas: 2, BlockSize: 128, Capacity: 40, Route: kvw.Best, Seed: 1})))
	if err != nil {
		t.Fatal(err)
	}
	pairs, distinct := w.Live()
	if pairs != 240 || distinct > pairs/2 {
		t.Errorf("%d pairs and %d blocks are live, want 6 full workers of 40, by two alike", pairs, distinct)
	}
	s := index.NewRunIndex()
	for _, ring := range w.Rings(16) {
		for range 3 {
			for i, op := range ring {
				if op.Kind == kvw.Store {
					if e, err := s.Store(op.Worker, op.Stored); err != nil || e.Stored != op.Blocks() || e.Orphan > 0 {
						t.Fatalf("event %d of worker %d: %+v, %v", i, op.Worker, e, err)
					}
				} else if e := s.Remove(op.Worker, op.Hashes); e.Unknown > 0 || op.Blocks() == 0 {
					t.Fatalf("event %d of worker %d: %+v", i, op.Worker, e)
				}
			}
			if n := s.Stats().Blocks; n != 0 {
				t.Fatalf("%d blocks are left", n)
			}
		}
	}
}
