package index

import (
	"slices"
	"strings"
	"testing"
)

// tokens returns from, from+1 ... to.
func tokens(from, to uint32) []uint32 {
	var t []uint32
	for ; from <= to; from++ {
		t = append(t, from)
	}
	return t
}

// both are the schemes that agree unless there is a LoRA.
var both = []Hasher{Flash, Dynamo}

func TestBlockHasherVectors(t *testing.T) {
	mm := func(hashes ...uint64) (out []MMHash) {
		for _, h := range hashes {
			out = append(out, MMHash{Hash: h, Start: 0, End: 4})
		}
		return out
	}
	for _, c := range []struct {
		name    string
		schemes []Hasher
		size    int
		tokens  []uint32
		x       Extra
		want    []LocalHash
	}{
		{"blocks of 4", both, 4, tokens(1, 12), Extra{}, []LocalHash{14643705804678351452, 16777012769546811212, 483935686894639516}},
		{"a partial last block is dropped", both, 4, tokens(1, 11), Extra{}, []LocalHash{14643705804678351452, 16777012769546811212}},
		{"blocks of 16", both, 16, tokens(1, 32), Extra{}, []LocalHash{16863443419780771464, 2287610619914608821}},
		{"a block of 64", both, 64, tokens(1, 64), Extra{}, []LocalHash{17732852320395450624}},
		{"base model", both, 4, tokens(0, 3), Extra{}, []LocalHash{9143094415614847814}},
		{"salt", both, 4, tokens(0, 3), Extra{Salt: "tenant-a"}, []LocalHash{17009624042690211646}},
		{"multimodal", both, 4, tokens(0, 3), Extra{MM: mm(42, 7)}, []LocalHash{4581426371996505827}},
		{"multimodal in another order", both, 4, tokens(0, 3), Extra{MM: mm(7, 42)}, []LocalHash{4581426371996505827}},
		{"multimodal, one twice", both, 4, tokens(0, 3), Extra{MM: mm(7, 42, 7)}, []LocalHash{4581426371996505827}},
		{"flash LoRA", []Hasher{Flash}, 4, tokens(0, 3), Extra{LoRA: "adapter-a"}, []LocalHash{12477417013998562333}},
		{"flash LoRA and salt", []Hasher{Flash}, 4, tokens(0, 3), Extra{LoRA: "adapter-a", Salt: "tenant-a"}, []LocalHash{13715790236060832003}},
		{"flash LoRA and multimodal", []Hasher{Flash}, 4, tokens(0, 3), Extra{LoRA: "adapter-a", MM: mm(42, 7)}, []LocalHash{7506468348977573821}},
		{"dynamo LoRA", []Hasher{Dynamo}, 4, tokens(0, 3), Extra{LoRA: "adapter-a"}, []LocalHash{6665157333201000639}},
		{"dynamo LoRA and salt", []Hasher{Dynamo}, 4, tokens(0, 3), Extra{LoRA: "adapter-a", Salt: "tenant-a"}, []LocalHash{8269515957840517240}},
		{"no tokens", both, 4, nil, Extra{}, nil},
		{"opaque hashes cannot be computed", []Hasher{Opaque}, 4, tokens(1, 12), Extra{}, nil},
		{"no block size", both, 0, tokens(1, 12), Extra{}, nil},
	} {
		for _, scheme := range c.schemes {
			t.Run(c.name+"/"+scheme.String(), func(t *testing.T) {
				h := BlockHasher{BlockSize: c.size, Scheme: scheme}
				if got := h.Append(nil, c.tokens, c.x); !slices.Equal(got, c.want) {
					t.Errorf("got %d, want %d", got, c.want)
				}
				if scheme != Opaque && h.Blocks(len(c.tokens)) != len(c.want) {
					t.Errorf("Blocks(%d) = %d, want %d", len(c.tokens), h.Blocks(len(c.tokens)), len(c.want))
				}
			})
		}
	}
}

// A multimodal input counts in the blocks that have tokens of it, and only there.
func TestMultimodalRanges(t *testing.T) {
	h := BlockHasher{BlockSize: 4}
	plain := h.Append(nil, tokens(1, 16), Extra{})
	for _, c := range []struct {
		name       string
		start, end int
		touched    []bool
	}{
		{"within a block", 5, 7, []bool{false, true, false, false}},
		{"a whole block", 4, 8, []bool{false, true, false, false}},
		{"over a border", 3, 5, []bool{true, true, false, false}},
		{"over all", 0, 16, []bool{true, true, true, true}},
		{"beyond the end", 12, 99, []bool{false, false, false, true}},
		{"empty", 5, 5, []bool{false, false, false, false}},
		{"backwards", 7, 5, []bool{false, false, false, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := h.Append(nil, tokens(1, 16), Extra{MM: []MMHash{{Hash: 9, Start: c.start, End: c.end}}})
			for i := range got {
				if (got[i] != plain[i]) != c.touched[i] {
					t.Errorf("block %d: changed is %v, want %v", i, got[i] != plain[i], c.touched[i])
				}
			}
		})
	}
}

// An EAGLE window is a block and the token after it.
func TestEagleWindows(t *testing.T) {
	eagle := BlockHasher{BlockSize: 4, Eagle: true}
	five := BlockHasher{BlockSize: 5}
	for n, want := range map[uint32]int{0: 0, 1: 0, 4: 0, 5: 1, 8: 1, 9: 2, 12: 2, 13: 3} {
		got := eagle.Append(nil, tokens(1, n), Extra{})
		if len(got) != want || eagle.Blocks(int(n)) != want {
			t.Errorf("%d tokens: %d windows, Blocks says %d, want %d", n, len(got), eagle.Blocks(int(n)), want)
		}
		for i, h := range got {
			first := uint32(1 + 4*i)
			if w := five.Append(nil, tokens(first, first+4), Extra{})[0]; h != w {
				t.Errorf("window %d: %d, want %d", i, h, w)
			}
		}
	}
}

func TestChainVectors(t *testing.T) {
	for _, c := range []struct {
		name   string
		locals []LocalHash
		want   []SeqHash
	}{
		{"none", nil, nil},
		{"blocks of 4", []LocalHash{14643705804678351452, 16777012769546811212, 483935686894639516}, []SeqHash{14643705804678351452, 4945711292740353085, 12583592247330656132}},
		{"blocks of 16", []LocalHash{16863443419780771464, 2287610619914608821}, []SeqHash{16863443419780771464, 12466389667045779788}},
		{"made up", []LocalHash{11, 22, 33}, []SeqHash{11, 750553365844651409, 3257565445809651757}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Chain(nil, c.locals); !slices.Equal(got, c.want) {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
	if got := Next(11, 22); got != 750553365844651409 {
		t.Errorf("Next(11, 22) = %d", got)
	}
}

func TestMMIdentifier(t *testing.T) {
	sha := "0123456789abcdef" + strings.Repeat("f", 48)
	for _, c := range []struct {
		name, id string
		want     uint64
		ok       bool
	}{
		{"none", "", 0, false},
		{"64 hexadecimal digits", sha, 0x0123456789abcdef, true},
		{"upper case too", strings.ToUpper(sha), 0x0123456789abcdef, true},
		{"63 digits are a name", sha[:63], 0x7bf9ccaf01fef7e6, true},
		{"a name", "image-1", 0x87830755ac4421e9, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, ok := MMIdentifier(c.id)
			if got != c.want || ok != c.ok {
				t.Errorf("got %#x, %v, want %#x, %v", got, ok, c.want, c.ok)
			}
		})
	}
}

func TestHashingAllocatesNothing(t *testing.T) {
	toks := tokens(1, 64*8)
	x := Extra{LoRA: "adapter-a", Salt: "tenant-a", MM: []MMHash{{1, 0, 100}, {2, 50, 400}}}
	locals := make([]LocalHash, 0, 64)
	seqs := make([]SeqHash, 0, 64)
	for _, scheme := range both {
		h := BlockHasher{BlockSize: 64, Scheme: scheme}
		if n := testing.AllocsPerRun(100, func() {
			locals = h.Append(locals[:0], toks, x)
			seqs = Chain(seqs[:0], locals)
		}); n != 0 {
			t.Errorf("%v: %v allocations a prompt, want 0", scheme, n)
		}
	}
}
