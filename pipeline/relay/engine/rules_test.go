// This file tests a Mapping's rules with events made for each.

package engine

import (
	"testing"

	"kvindex/index"
)

// store is a store of blocks of two tokens: block h has the tokens h and h.
func store(parent uint64, hashes ...uint64) Event {
	e := Event{Kind: Stored, Hashes: hashes, Parent: parent, HasParent: parent != 0, BlockSize: 2}
	for _, h := range hashes {
		e.Tokens = append(e.Tokens, uint32(h), uint32(h))
	}
	e.Usable = len(e.Tokens)
	return e
}

func remove(hashes ...uint64) Event { return Event{Kind: Removed, Hashes: hashes} }

// with returns e changed.
func (e Event) with(change func(*Event)) Event {
	change(&e)
	return e
}

func in(medium string, e Event) Event {
	e.Medium = []byte(medium)
	return e
}

// prompt is the tokens of those blocks.
func prompt(blocks ...uint64) []uint32 { return store(0, blocks...).Tokens }

func TestRules(t *testing.T) {
	group := func(g int64, spec string, e Event) Event {
		e.Group, e.HasGroup, e.Spec = g, true, []byte(spec)
		return e
	}
	windowed := func(w int64, e Event) Event {
		e.Window = w
		return e
	}
	placeholder := func(hashes ...uint64) Event { return Event{Kind: Stored, Hashes: hashes, Medium: []byte("CPU")} }
	move := func(h uint64, from, to string) Event {
		return Event{Kind: Moved, Hashes: []uint64{h}, OldMedium: []byte(from), Medium: []byte(to)}
	}
	pairs := func(parent uint64, second ...uint32) Event {
		e := store(parent, 1, 2)
		e.Seconds = second
		return e
	}
	// other is a store of block 1's hash with other content.
	other := store(0, 1).with(func(e *Event) { e.Tokens = []uint32{9, 9} })
	salted := store(0, 1).with(func(e *Event) { e.Keys, e.KeyBlocks = []Key{{Kind: KeyText, ID: []byte("s")}}, 1 })
	adapted := func(e Event) Event { e.LoRAName = []byte("a"); return e }
	alias := func(parent, alias, h uint64) Event {
		return store(parent, h).with(func(e *Event) { e.Hashes = []uint64{alias} })
	}
	type is struct {
		blocks []uint64
		depth  int
	}
	tests := []struct {
		name   string
		engine Engine // VLLM if not given
		eagle  bool
		media  map[string]index.Tier
		events []Event
		counts string
		device is
		host   is
		extra  index.Extra
	}{
		{name: "a hole", events: []Event{store(0, 1, 2, 3), remove(2)}, device: is{[]uint64{1, 2, 3}, 1}},
		{name: "a hole filled", events: []Event{store(0, 1, 2, 3), remove(2), store(1, 2)}, device: is{[]uint64{1, 2, 3}, 3}},
		{name: "nothing goes with its parent", events: []Event{store(0, 1, 2), remove(1), store(2, 3), store(0, 1)}, device: is{[]uint64{1, 2, 3}, 3}},
		{name: "parent gone: its child waits until it is back", events: []Event{store(0, 1, 2), remove(1, 2), store(2, 3), store(0, 1, 2)},
			counts: "orphan=1 adopted=1", device: is{[]uint64{1, 2, 3}, 3}},
		{name: "a chain waits", events: []Event{store(2, 3, 4), store(4, 5), store(1, 2), store(0, 1)},
			counts: "orphan=4 adopted=4", device: is{[]uint64{1, 2, 3, 4, 5}, 5}},
		{name: "what waited goes", events: []Event{store(2, 3), remove(3), store(0, 1, 2)}, counts: "orphan=1", device: is{[]uint64{1, 2, 3}, 2}},
		{name: "twice aside", events: []Event{store(2, 3), store(2, 3), store(0, 1, 2)}, counts: "duplicate=1 orphan=1 adopted=1", device: is{[]uint64{1, 2, 3}, 3}},
		{name: "aside in two tiers", events: []Event{store(2, 3), in("CPU", store(2, 3)), store(0, 1, 2), remove(3)},
			counts: "orphan=1 adopted=1", device: is{[]uint64{1, 2, 3}, 2}, host: is{[]uint64{1, 2, 3}, 0}},
		{name: "a known block places the rest", events: []Event{store(0, 1, 2), remove(1), in("CPU", store(1, 2, 3)), in("CPU", store(0, 1))},
			device: is{[]uint64{1, 2, 3}, 0}, host: is{[]uint64{1, 2, 3}, 3}},
		{name: "demoted after the device copy went", events: []Event{store(0, 1, 2), remove(2, 1), in("CPU", store(0, 1, 2))}, host: is{[]uint64{1, 2}, 2}},
		{name: "two hashes of one prefix", events: []Event{store(0, 1), alias(0, 11, 1), remove(1), store(11, 2)}, device: is{[]uint64{1, 2}, 2}},
		{name: "the last of two hashes", events: []Event{store(0, 1), alias(0, 11, 1), remove(1), remove(11)}, device: is{[]uint64{1}, 0}},
		{name: "stored twice, removed once", events: []Event{store(0, 1), store(0, 1), remove(1)}, counts: "duplicate=1", device: is{[]uint64{1}, 0}},
		{name: "salt is inherited", events: []Event{salted, store(1, 2)}, device: is{[]uint64{1, 2}, 2}, extra: index.Extra{Salt: "s"}},
		{name: "salt is inherited from aside", events: []Event{store(1, 2), salted}, counts: "orphan=1 adopted=1", device: is{[]uint64{1, 2}, 2}, extra: index.Extra{Salt: "s"}},
		{name: "salt outlives its first block", events: []Event{salted, store(1, 2), remove(1), store(2, 3), salted}, device: is{[]uint64{1, 2, 3}, 3}, extra: index.Extra{Salt: "s"}},
		{name: "placeholder of a known block", events: []Event{store(0, 1, 2), placeholder(1, 2), remove(1, 2)}, device: is{[]uint64{1}, 0}, host: is{[]uint64{1, 2}, 2}},
		{name: "placeholder before the block", events: []Event{placeholder(1), store(0, 1)}, counts: "placeholder=1 adopted=1",
			device: is{[]uint64{1}, 1}, host: is{[]uint64{1}, 1}},
		{name: "placeholder of an orphan", events: []Event{placeholder(2), store(1, 2), store(0, 1)}, counts: "placeholder=1 adopted=1",
			device: is{[]uint64{1, 2}, 2}, host: is{[]uint64{1, 2}, 0}},
		{name: "placeholder gone", events: []Event{placeholder(1), in("CPU", remove(1)), store(0, 1)}, counts: "placeholder=1", device: is{[]uint64{1}, 1}, host: is{[]uint64{1}, 0}},
		{name: "placeholder of a group before it is known", events: []Event{group(0, "", placeholder(1)), store(0, 1)}, counts: "placeholder=1", host: is{[]uint64{1}, 0}},
		{name: "moved", engine: TensorRTLLM, events: []Event{store(0, 1, 2), move(2, "GPU", "CPU")}, device: is{[]uint64{1, 2}, 1}, host: is{[]uint64{2}, 0}},
		{name: "moved to a place unknown", engine: TensorRTLLM, events: []Event{store(0, 1, 2), move(2, "GPU", "?")}, counts: "other_medium=1", device: is{[]uint64{1, 2}, 1}},
		{name: "moved aside", engine: TensorRTLLM, events: []Event{store(1, 2), move(2, "GPU", "CPU"), store(0, 1)}, counts: "orphan=1 adopted=1", device: is{[]uint64{1, 2}, 1}},
		{name: "moved unknown", engine: TensorRTLLM, events: []Event{move(2, "GPU", "CPU")}, counts: "unknown_removed=1"},
		{name: "removed everywhere", engine: TensorRTLLM, events: []Event{store(0, 1), in("CPU", store(0, 1)), remove(1).with(func(e *Event) { e.AllMedia = true })},
			device: is{[]uint64{1}, 0}, host: is{[]uint64{1}, 0}},
		{name: "cleared everywhere", events: []Event{store(0, 1), in("CPU", store(0, 1)), {Kind: Cleared}}, device: is{[]uint64{1}, 0}, host: is{[]uint64{1}, 0}},
		{name: "a larger window", engine: TensorRTLLM, events: []Event{windowed(128, store(0, 1)), {Kind: Created, Window: 4096}, windowed(128, store(0, 1))},
			counts: "other_group=1 window_grown=1", device: is{[]uint64{1}, 0}},
		{name: "the main group is the first", events: []Event{group(2, "sliding_window", store(0, 1)), group(1, "full_attention", store(0, 1, 2)), group(3, "mla_attention", store(2, 3)), group(2, "", remove(1)), group(1, "", remove(2))},
			counts: "other_group=3", device: is{[]uint64{1, 2, 3}, 1}},
		{name: "group 0 if groups are not told", events: []Event{group(1, "", store(0, 1)), group(0, "", store(0, 2))}, counts: "other_group=1", device: is{[]uint64{2}, 1}},
		{name: "masked", events: []Event{store(0, 1, 2).with(func(e *Event) { e.Hashes = e.Hashes[1:] })}, counts: "masked=1"},
		{name: "partial", events: []Event{store(0, 1, 2).with(func(e *Event) { e.Tokens, e.Usable = e.Tokens[:3], 3 })}, counts: "partial=1", device: is{[]uint64{1, 2}, 1}},
		{name: "too few tokens", events: []Event{store(0, 1, 2).with(func(e *Event) { e.Tokens, e.Usable = e.Tokens[:2], 2 })}, counts: "too_few_tokens=2"},
		{name: "other size", events: []Event{store(0, 1, 2).with(func(e *Event) { e.BlockSize = 4 })}, counts: "other_block_size=2"},
		{name: "a token that is none", events: []Event{store(0, 1, 2, 3).with(func(e *Event) { e.Usable = 3 })}, counts: "bad_token=2", device: is{[]uint64{1, 2}, 1}},
		{name: "a LoRA by number", events: []Event{store(0, 1).with(func(e *Event) { e.HasLoRAID = true })}, counts: "unnamed_lora=1"},
		{name: "a key unknown", events: []Event{store(0, 1, 2).with(func(e *Event) { e.Keys, e.KeyBlocks = []Key{{Block: 1, Kind: KeyOther}}, 2 })}, counts: "unknown_key=1", device: is{[]uint64{1, 2}, 1}},
		{name: "a text that is neither salt nor LoRA", events: []Event{store(0, 1, 2).with(func(e *Event) { e.Keys, e.KeyBlocks = []Key{{Block: 1, Kind: KeyText, ID: []byte("s")}}, 2 })},
			counts: "unknown_key=1", device: is{[]uint64{1, 2}, 1}},
		{name: "keys of another number of blocks", events: []Event{store(0, 1, 2).with(func(e *Event) { e.KeyBlocks = 3 })}, counts: "unknown_key=2"},
		{name: "LoRA and salt of one name", events: []Event{store(0, 1).with(func(e *Event) {
			e.LoRAName, e.KeyBlocks = []byte("s"), 1
			e.Keys = []Key{{Kind: KeyText, ID: []byte("s")}, {Kind: KeyText, ID: []byte("s")}}
		})}, device: is{[]uint64{1}, 1}, extra: index.Extra{LoRA: "s", Salt: "s"}},
		{name: "bigrams", engine: SGLang, eagle: true, events: []Event{pairs(0, 1, 2, 2, 7)}, device: is{[]uint64{1, 2, 7}, 2}},
		{name: "bigrams: another token after", engine: SGLang, eagle: true, events: []Event{pairs(0, 1, 2, 2, 7)}, device: is{[]uint64{1, 2, 8}, 1}},
		{name: "bigrams that don't fit", engine: SGLang, eagle: true, events: []Event{pairs(0, 1, 2, 3, 7)}, counts: "bad_token=1", device: is{[]uint64{1, 2, 7}, 1}},
		{name: "bigrams for a plain model", engine: SGLang, events: []Event{pairs(0, 1, 2, 2, 7)}, counts: "eagle_mismatch=2"},
		{name: "two tokens of lookahead", eagle: true, events: []Event{store(0, 1, 2).with(func(e *Event) {
			e.Ahead = []Ahead{{Block: 0, Token: 2}, {Block: 1, Token: 7}, {Block: 1, Token: 7}}
		})}, counts: "eagle_mismatch=1", device: is{[]uint64{1, 2, 7}, 1}},
		{name: "other content", events: []Event{store(0, 1), other}, counts: "contradiction=1", device: is{[]uint64{1}, 1}},
		{name: "base and adapter of one hash, as SGLang has it", engine: SGLang, events: []Event{store(0, 1, 2), adapted(store(0, 1, 2)), adapted(store(2, 3)), store(2, 3), remove(2)},
			counts: "contradiction=3", device: is{[]uint64{1, 2, 3}, 1}},
		{name: "other content aside", events: []Event{store(5, 1), store(6, 1)}, counts: "contradiction=1 orphan=1"},
		{name: "other content than aside", events: []Event{store(5, 1), store(0, 1)}, counts: "contradiction=1 orphan=1"},
		{name: "its own parent", events: []Event{store(0, 1), store(1, 1)}, counts: "contradiction=1", device: is{[]uint64{1, 1}, 1}},
		{name: "its own parent, unknown", events: []Event{store(1, 1), store(0, 1)}, counts: "contradiction=1 orphan=1", device: is{[]uint64{1}, 0}},
		{name: "own words for memory", media: map[string]index.Tier{"LocalCPU": index.Host}, events: []Event{in("LocalCPU", store(0, 1)), in("Mars", store(0, 1)), in("Mars", remove(1))},
			counts: "other_medium=2", host: is{[]uint64{1}, 1}},
		{name: "another machine's memory", events: []Event{store(0, 1).with(func(e *Event) { e.Locality = []byte("REMOTE") })}, device: is{[]uint64{1}, 0}},
		{name: "no hashes", events: []Event{store(0)}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			engine := test.engine
			if engine == 0 {
				engine = VLLM
			}
			hasher := index.BlockHasher{BlockSize: 2, Eagle: test.eagle}
			m, err := New(Config{Engine: engine, Hasher: hasher, Media: test.media})
			if err != nil {
				t.Fatal(err)
			}
			var h holding
			var out Output
			for i := range test.events {
				out.Reset()
				m.Apply(&test.events[i], &out)
				h.apply(t, out.Events)
				checkDump(t, m, &h)
				checkReload(t, m, &h)
			}
			if got := counted(&m.Counts); got != test.counts {
				t.Errorf("counts %q, want %q", got, test.counts)
			}
			for tier, want := range []is{test.device, test.host} {
				if got := h.depth(index.Tier(tier), hasher.Append(nil, prompt(want.blocks...), test.extra)); got != want.depth {
					t.Errorf("%s: depth %d, want %d", index.Tier(tier), got, want.depth)
				}
			}
		})
	}
}

// TestBounds holds a Mapping to its largest numbers.
func TestBounds(t *testing.T) {
	m, err := New(Config{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 2}, MaxBlocks: 4, MaxAside: 3})
	if err != nil {
		t.Fatal(err)
	}
	var out Output
	for _, e := range []Event{store(9, 3), store(9, 4), store(0, 1, 2), store(2, 5, 6), store(0, 1, 2)} {
		m.Apply(&e, &out)
	}
	if known, aside := m.Hashes(); known != 3 || aside != 1 {
		t.Errorf("%d known, %d aside", known, aside)
	}
	if got := counted(&m.Counts); got != "full=2 duplicate=2 orphan=1" {
		t.Error(got)
	}
}

// TestOutputMerges keeps the events few: what continues a chain, and removals that
// follow each other.
func TestOutputMerges(t *testing.T) {
	m := newMapping(t, VLLM, 2)
	var out Output
	for _, e := range []Event{store(0, 1), store(1, 2), store(2, 3), store(1, 4), remove(3), remove(4), in("CPU", store(0, 1)), remove(2), in("CPU", remove(1))} {
		m.Apply(&e, &out)
	}
	var got []int
	for _, e := range out.Events {
		got = append(got, len(e.Stored.Locals)-len(e.Removed))
	}
	want := []int{3, 1, -2, 1, -1, -1}
	if len(got) != len(want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{
		{},
		{Engine: VLLM},
		{Engine: VLLM, Hasher: index.BlockHasher{BlockSize: 4, Scheme: index.Opaque}},
		{Hasher: index.BlockHasher{BlockSize: 4}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}
