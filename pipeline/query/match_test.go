package query

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

// The prompt of the design's vectors: three blocks of four tokens.
var (
	prompt = []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	locals = []index.LocalHash{14643705804678351452, 16777012769546811212, 483935686894639516}
)

func hashes(l []index.LocalHash) []uint64 {
	out := make([]uint64, len(l))
	for i, h := range l {
		out[i] = uint64(h)
	}
	return out
}

// show writes matches as a specification can state them, in order of name.
func show(resp *pb.MatchResponse) string {
	ms := slices.Clone(resp.Matches)
	slices.SortFunc(ms, func(a, b *pb.WorkerMatch) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DpRank, b.DpRank))
	})
	var out []string
	for _, m := range ms {
		s := fmt.Sprintf("%s/%d:%d", m.Worker, m.DpRank, m.DepthBlocks)
		blocks := []uint32{m.DepthBlocks, m.DepthHostBlocks, m.DepthDiskBlocks, m.DepthExternalBlocks}
		if blocks[3] != blocks[0] {
			s += fmt.Sprintf("+%d+%d+%d", blocks[1], blocks[2], blocks[3])
		}
		for i, tokens := range []uint32{m.DepthTokens, m.DepthHostTokens, m.DepthDiskTokens, m.DepthExternalTokens} {
			if tokens != blocks[i]*resp.BlockSize {
				s += fmt.Sprintf("(%d tokens)", tokens)
			}
		}
		if m.Incomplete {
			s += "!"
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

// fleet is a source with workers of different depths in the vectors' prompt.
func fleet(t testing.TB) *fakeSource {
	f := newFake()
	f.holds(t, "deep", 0, locals, WorkerState{Partition: 3, Age: 1500 * time.Millisecond})
	f.holds(t, "deep", 1, locals[:2], WorkerState{})
	f.holds(t, "lossy", 0, locals[:1], WorkerState{Incomplete: true})
	f.holds(t, "silent", 0, locals, WorkerState{Hidden: true})
	f.holds(t, "other", 0, []index.LocalHash{42}, WorkerState{})
	extra := index.BlockHasher{BlockSize: 4}
	for worker, x := range map[string]index.Extra{
		"lora":  {LoRA: "adapter-a"},
		"salt":  {Salt: "tenant-a"},
		"image": {MM: []index.MMHash{{Hash: 1<<64 - 2, Start: 2, End: 6}}},
		"named": {MM: []index.MMHash{{Hash: 0x0123456789abcdef, Start: 0, End: 1}}},
	} {
		f.holds(t, worker, 0, extra.Append(nil, prompt, x), WorkerState{})
	}
	f.addModel("two", 4, index.Flash)
	f.addModel("two", 8, index.Flash)
	f.addModel("hashed", 4, index.Flash)
	f.addModel("hashed", 4, index.Dynamo)
	opaque := f.addModel("opaque", 4, index.Opaque).AddWorker("opaque", 0, nil)
	if _, err := opaque.Store(index.Device, index.Stored{Locals: locals[:2], Hashes: []index.SeqHash{8, 9}}); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.states[opaque] = WorkerState{}
	f.mu.Unlock()
	return f
}

func TestMatch(t *testing.T) {
	s := serve(t, fleet(t), Config{})
	cases := []struct {
		name string
		req  *pb.MatchRequest
		want string // matches
	}{
		{"by tokens", &pb.MatchRequest{Model: "m", Tokens: prompt}, "deep/0:3 deep/1:2 lossy/0:1!"},
		{"by local hashes", &pb.MatchRequest{Model: "m", LocalHashes: hashes(locals)}, "deep/0:3 deep/1:2 lossy/0:1!"},
		{"block size said", &pb.MatchRequest{Model: "m", BlockSize: 4, Tokens: prompt}, "deep/0:3 deep/1:2 lossy/0:1!"},
		{"a last block that is not full is left out", &pb.MatchRequest{Model: "m", Tokens: prompt[:11]}, "deep/0:2 deep/1:2 lossy/0:1!"},
		{"nobody holds it", &pb.MatchRequest{Model: "m", LocalHashes: []uint64{7}}, ""},
		{"a first block that differs ends it", &pb.MatchRequest{Model: "m", LocalHashes: []uint64{7, uint64(locals[1])}}, ""},
		{"LoRA", &pb.MatchRequest{Model: "m", Tokens: prompt, Lora: "adapter-a"}, "lora/0:3"},
		{"salt", &pb.MatchRequest{Model: "m", Tokens: prompt, Salt: "tenant-a"}, "salt/0:3"},
		{"multimodal by hash", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{Hash: 1<<64 - 2, FirstToken: 2, Tokens: 4}}}, "image/0:3"},
		{"multimodal elsewhere", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{Hash: 1<<64 - 2, FirstToken: 2, Tokens: 2}}}, "image/0:1"},
		{"multimodal by identifier", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{
			{Id: "0123456789abcdef" + strings.Repeat("0", 48), Tokens: 1}}}, "named/0:3"},
		{"only these workers", &pb.MatchRequest{Model: "m", Tokens: prompt, Workers: []string{"lossy", "other", "nobody"}}, "lossy/0:1!"},
		{"the hidden don't take a place in top_k", &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1}, "deep/0:3"},
		{"the filter works before top_k", &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1, Workers: []string{"lossy"}}, "lossy/0:1!"},
		{"a silent one is not answered even if asked for", &pb.MatchRequest{Model: "m", Tokens: prompt, Workers: []string{"silent"}}, ""},
		{"deep enough", &pb.MatchRequest{Model: "m", Tokens: prompt, MinDepthBlocks: 2}, "deep/0:3 deep/1:2"},
		{"nobody deep enough", &pb.MatchRequest{Model: "m", Tokens: prompt[:8], MinDepthBlocks: 3}, ""},
		{"deep enough before top_k", &pb.MatchRequest{Model: "m", Tokens: prompt, MinDepthBlocks: 3, TopK: 2}, "deep/0:3"},
		{"of two hashers the one said", &pb.MatchRequest{Model: "hashed", Hasher: "dynamo", Tokens: prompt}, ""},
		{"hasher said", &pb.MatchRequest{Model: "m", Hasher: "flash", Tokens: prompt[:4]}, "deep/0:1 deep/1:1 lossy/0:1!"},
		{"records that are there", &pb.MatchRequest{Model: "m", Tokens: prompt[:4], MinOffsets: map[int32]int64{0: 9, 3: 1<<60 - 1}}, "deep/0:1 deep/1:1 lossy/0:1!"},
		{"of two block sizes the one said", &pb.MatchRequest{Model: "two", BlockSize: 8, Tokens: prompt}, ""},
		{"opaque by local hashes", &pb.MatchRequest{Model: "opaque", LocalHashes: hashes(locals)}, "opaque/0:2"},
		{"opaque by tokens", &pb.MatchRequest{Model: "opaque", Tokens: prompt}, "opaque/0:2"},
	}
	for _, a := range askers(t, s) {
		for _, c := range cases {
			t.Run(a.name+"/"+c.name, func(t *testing.T) {
				resp, err := a.ask(c.req)
				if err != nil {
					t.Fatal(err)
				}
				if got := show(resp); got != c.want {
					t.Errorf("got %q, want %q", got, c.want)
				}
				if resp.Partial || len(resp.Missing) > 0 {
					t.Errorf("partial: %v", resp)
				}
			})
		}
	}
}

// Depths go on through lower tiers; who has blocks in those alone is answered too.
func TestMatchByTier(t *testing.T) {
	f := newFake()
	f.holds(t, "device", 0, locals[:2], WorkerState{})
	for name, tiers := range map[string][]index.Tier{
		"host": {index.Device, index.Host}, "far": {index.External, index.Disk, index.Host}, "mixed": {index.Device, index.Device, index.Disk},
	} {
		w := f.holds(t, name, 0, locals[:1], WorkerState{})
		w.Clear()
		for i, tier := range tiers {
			s := index.Stored{Position: int32(i), Locals: locals[i : i+1]}
			if i > 0 {
				s.Parent, s.HasParent = index.Chain(nil, locals)[i-1], true
			}
			if _, err := w.Store(tier, s); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, a := range askers(t, serve(t, f, Config{})) {
		t.Run(a.name, func(t *testing.T) {
			for _, c := range []struct {
				req  *pb.MatchRequest
				want string
			}{
				{&pb.MatchRequest{}, "device/0:2 far/0:0+0+0+3 host/0:1+2+2+2 mixed/0:2+2+3+3"},
				{&pb.MatchRequest{TopK: 1}, "mixed/0:2+2+3+3"},
				{&pb.MatchRequest{TopK: 3}, "device/0:2 host/0:1+2+2+2 mixed/0:2+2+3+3"},
				{&pb.MatchRequest{Workers: []string{"far", "device"}}, "device/0:2 far/0:0+0+0+3"},
			} {
				c.req.Model, c.req.Tokens = "m", prompt
				resp, err := a.ask(c.req)
				if err != nil {
					t.Fatal(err)
				}
				if got := show(resp); got != c.want {
					t.Errorf("got %q, want %q", got, c.want)
				}
			}
		})
	}
}

func TestMatchFields(t *testing.T) {
	want := &pb.MatchResponse{Blocks: 3, BlockSize: 4, Matches: []*pb.WorkerMatch{{
		Worker: "deep", DepthBlocks: 3, DepthTokens: 12, DepthHostBlocks: 3, DepthHostTokens: 12,
		DepthDiskBlocks: 3, DepthDiskTokens: 12, DepthExternalBlocks: 3, DepthExternalTokens: 12, AgeMs: 1500, Partition: 3, Offset: 1 << 60,
	}}}
	for _, a := range askers(t, serve(t, fleet(t), Config{})) {
		t.Run(a.name, func(t *testing.T) {
			got, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 1})
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestTopKIsDeepestFirst(t *testing.T) {
	for _, a := range askers(t, serve(t, fleet(t), Config{})) {
		t.Run(a.name, func(t *testing.T) {
			got, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 10})
			if err != nil {
				t.Fatal(err)
			}
			var depths []uint32
			for _, m := range got.Matches {
				depths = append(depths, m.DepthBlocks)
			}
			if !slices.Equal(depths, []uint32{3, 2, 1}) {
				t.Errorf("depths %v", depths)
			}
		})
	}
}

func TestEarlyExitSaysLowerBounds(t *testing.T) {
	f := newFake()
	f.holds(t, "deep", 0, locals, WorkerState{})
	f.holds(t, "shallow", 0, locals[:1], WorkerState{})
	for _, a := range askers(t, serve(t, f, Config{})) {
		t.Run(a.name, func(t *testing.T) {
			got, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, EarlyExit: true})
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range got.Matches {
				truth := map[string]uint32{"deep": 3, "shallow": 1}[m.Worker]
				if m.DepthBlocks > truth || (m.DepthBlocks < truth && !got.LowerBounds) {
					t.Errorf("%v of a true depth of %d, lower bounds %v", m, truth, got.LowerBounds)
				}
			}
		})
	}
}

func TestShortPromptMatchesNothing(t *testing.T) {
	for _, a := range askers(t, serve(t, fleet(t), Config{})) {
		t.Run(a.name, func(t *testing.T) {
			got, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt[:3]})
			if err != nil {
				t.Fatal(err)
			}
			if want := (&pb.MatchResponse{BlockSize: 4}); !proto.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	limits := Limits{MaxTokens: 40, MaxBlocks: 8, MaxNameBytes: 16, MaxMultimodal: 1, MaxWorkersFilter: 2, MaxRequestBytes: 2000}
	s := serve(t, fleet(t), Config{Limits: limits})
	cases := []struct {
		name string
		req  *pb.MatchRequest
		code codes.Code
		text string // within the message
	}{
		{"no model", &pb.MatchRequest{Tokens: prompt}, codes.InvalidArgument, "model"},
		{"no prompt", &pb.MatchRequest{Model: "m"}, codes.InvalidArgument, "either tokens or local_hashes"},
		{"both", &pb.MatchRequest{Model: "m", Tokens: prompt, LocalHashes: []uint64{1}}, codes.InvalidArgument, "either tokens or local_hashes"},
		{"local hashes with LoRA", &pb.MatchRequest{Model: "m", LocalHashes: []uint64{1}, Lora: "a"}, codes.InvalidArgument, "go with tokens"},
		{"unknown model", &pb.MatchRequest{Model: "x", Tokens: prompt}, codes.NotFound, `"x"`},
		{"unknown block size", &pb.MatchRequest{Model: "m", BlockSize: 16, Tokens: prompt}, codes.NotFound, `"m"`},
		{"ambiguous model", &pb.MatchRequest{Model: "two", Tokens: prompt}, codes.FailedPrecondition, "block size 4 with hasher flash, block size 8 with hasher flash: give block_size or hasher"},
		{"ambiguous hasher", &pb.MatchRequest{Model: "hashed", BlockSize: 4, Tokens: prompt}, codes.FailedPrecondition, "block size 4 with hasher dynamo: give block_size or hasher"},
		{"unknown hasher of the model", &pb.MatchRequest{Model: "m", Hasher: "dynamo", Tokens: prompt}, codes.NotFound, `"m"`},
		{"no such hasher", &pb.MatchRequest{Model: "m", Hasher: "sha256", Tokens: prompt}, codes.InvalidArgument, "flash, dynamo, opaque"},
		{"early exit and a minimum", &pb.MatchRequest{Model: "m", EarlyExit: true, MinDepthBlocks: 1, Tokens: prompt}, codes.InvalidArgument, "min_depth_blocks"},
		{"unknown partition", &pb.MatchRequest{Model: "m", Tokens: prompt, MinOffsets: map[int32]int64{4: 0}}, codes.InvalidArgument, "unknown partition 4"},
		{"too many tokens", &pb.MatchRequest{Model: "m", Tokens: make([]uint32, 41)}, codes.InvalidArgument, "41 tokens are above the limit of 40"},
		{"too many blocks of tokens", &pb.MatchRequest{Model: "m", Tokens: make([]uint32, 36)}, codes.InvalidArgument, "9 blocks are above the limit of 8"},
		{"too many hashes", &pb.MatchRequest{Model: "m", LocalHashes: make([]uint64, 9)}, codes.InvalidArgument, "9 blocks are above the limit of 8"},
		{"too many workers", &pb.MatchRequest{Model: "m", Tokens: prompt, Workers: []string{"a", "b", "c"}}, codes.InvalidArgument, "3 workers are above the limit of 2"},
		{"long LoRA name", &pb.MatchRequest{Model: "m", Tokens: prompt, Lora: strings.Repeat("x", 17)}, codes.InvalidArgument, "lora: 17 bytes are above the limit of 16"},
		{"long salt", &pb.MatchRequest{Model: "m", Tokens: prompt, Salt: strings.Repeat("x", 17)}, codes.InvalidArgument, "salt: 17 bytes"},
		{"too many images", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{}, {}}}, codes.InvalidArgument, "mm: 2 multimodal entries are above the limit of 1"},
		{"image of no tokens", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{Hash: 1}}}, codes.InvalidArgument, "mm[0]: tokens is 0"},
		{"image past the prompt", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{Hash: 1, FirstToken: 1<<32 - 1, Tokens: 1<<32 - 1}}}, codes.InvalidArgument, "mm[0]: ends at token"},
		{"image of two names", &pb.MatchRequest{Model: "m", Tokens: prompt, Mm: []*pb.Multimodal{{Hash: 1, Id: "a", Tokens: 1}}}, codes.InvalidArgument, "either hash or id"},
		{"too many bytes", &pb.MatchRequest{Model: "m", Salt: strings.Repeat("x", 3000)}, codes.ResourceExhausted, "2000"},
	}
	for _, a := range askers(t, s) {
		for _, c := range cases {
			t.Run(a.name+"/"+c.name, func(t *testing.T) {
				resp, err := a.ask(c.req)
				if status.Code(err) != c.code {
					t.Fatalf("got %v, %v, want %v", resp, err, c.code)
				}
				if text := status.Convert(err).Message(); !strings.Contains(text, c.text) {
					t.Errorf("%q does not say %q", text, c.text)
				}
			})
		}
	}
}

func TestNotReady(t *testing.T) {
	f := fleet(t)
	missing := []string{"kv-events/3: catching up, 1200 records behind"}
	f.setReady(Readiness{Missing: missing})
	for _, a := range askers(t, serve(t, f, Config{})) {
		t.Run(a.name, func(t *testing.T) {
			resp, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
			if status.Code(err) != codes.Unavailable || !strings.Contains(status.Convert(err).Message(), missing[0]) {
				t.Errorf("got %v, %v, want Unavailable and what is missing", resp, err)
			}
			resp, err = a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt, AllowPartial: true, TopK: 1})
			if err != nil {
				t.Fatal(err)
			}
			if got := show(resp); got != "deep/0:3" || !resp.Partial || !slices.Equal(resp.Missing, missing) {
				t.Errorf("allowed to be partial: %v", resp)
			}
			// What is missing may hold the model.
			resp, err = a.ask(&pb.MatchRequest{Model: "x", Tokens: prompt, AllowPartial: true})
			if status.Code(err) != codes.Unavailable {
				t.Errorf("unknown model: %v, %v, want Unavailable", resp, err)
			}
		})
	}
}

// A partition that is dropped while the index is searched is missing from the answer.
func TestNotReadyAnyMore(t *testing.T) {
	f := fleet(t)
	f.onModel = func() { f.setReady(Readiness{Missing: []string{"kv-events/3: restoring"}}) }
	svc := NewService(f, Limits{})
	if resp, err := svc.Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, %v, want Unavailable", resp, err)
	}
	f.setReady(Readiness{Ready: true})
	if resp, err := svc.Match(t.Context(), &pb.MatchRequest{Model: "m", Tokens: prompt, AllowPartial: true}); err != nil || !resp.Partial {
		t.Errorf("got %v, %v, want a partial answer", resp, err)
	}
}

func TestMissingTextIsShort(t *testing.T) {
	var r Readiness
	for i := range 1000 {
		r.Missing = append(r.Missing, fmt.Sprintf("kv-events/%d: restoring", i))
	}
	text := missingText(r)
	if len(text) > 400 || !strings.HasSuffix(text, "and 992 more") {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}

func TestDeadline(t *testing.T) {
	t.Run("ours", func(t *testing.T) {
		for _, a := range askers(t, serve(t, fleet(t), Config{Limits: Limits{Deadline: 1}})) {
			if resp, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("%s: got %v, %v", a.name, resp, err)
			}
		}
	})
	t.Run("the caller's", func(t *testing.T) {
		f := fleet(t)
		svc := NewService(f, Limits{})
		ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		defer cancel()
		if resp, err := svc.Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("got %v, %v", resp, err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		f.onModel = cancel // the caller leaves in the middle
		if resp, err := svc.Match(ctx, &pb.MatchRequest{Model: "m", Tokens: prompt}); status.Code(err) != codes.Canceled {
			t.Errorf("got %v, %v", resp, err)
		}
	})
}

func TestPanicIsAnsweredAndTheNextRequestWorks(t *testing.T) {
	f := fleet(t)
	provider, metrics, err := SetupMetrics()
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, f, Config{Meters: provider, Metrics: metrics})
	for i, a := range askers(t, s) {
		t.Run(a.name, func(t *testing.T) {
			f.onModel = func() { panic("BUG: secret") }
			_, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt})
			if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %v, want Internal without the panic's text", err)
			}
			f.onModel = nil
			if _, err := a.ask(&pb.MatchRequest{Model: "m", Tokens: prompt}); err != nil {
				t.Error(err)
			}
			if _, text := get(t, s, "/metrics"); !strings.Contains(text, fmt.Sprintf("kvindex_query_panics_total %d", i+1)) {
				t.Errorf("panics not counted in %s", text)
			}
		})
	}
}

// A query allocates its answer: the message, the rows and the list of them.
func TestMatchAllocates(t *testing.T) {
	f := newFake()
	for i := range 64 {
		f.holds(t, fmt.Sprintf("w%02d", i), 0, locals[:1+i%3], WorkerState{})
	}
	svc := NewService(f, Limits{})
	for _, c := range []struct {
		name string
		req  *pb.MatchRequest
		want float64
	}{
		{"64 matches", &pb.MatchRequest{Model: "m", Tokens: prompt}, 3},
		{"top 4 of them", &pb.MatchRequest{Model: "m", Tokens: prompt, TopK: 4}, 3},
		{"by hashes", &pb.MatchRequest{Model: "m", LocalHashes: hashes(locals)}, 3},
		{"with records that are there, deep enough", &pb.MatchRequest{Model: "m", Tokens: prompt, Hasher: "flash", MinDepthBlocks: 2, MinOffsets: map[int32]int64{0: 1, 2: 3}, FailOpen: true}, 3},
		{"no match", &pb.MatchRequest{Model: "m", LocalHashes: []uint64{7}}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := t.Context()
			got := c.want + 1
			for range 50 { // under the race detector a sync.Pool forgets at random
				got = min(got, testing.AllocsPerRun(1, func() {
					if _, err := svc.Match(ctx, c.req); err != nil {
						t.Fatal(err)
					}
				}))
			}
			if got > c.want {
				t.Errorf("more than %v allocations a query", c.want)
			}
		})
	}
}

// Tokens that are more than fit are as many as fit, and not what is left over.
func TestDepthOfHugeBlocks(t *testing.T) {
	f := newFake()
	f.models[0].BlockSize = 1 << 30
	f.holds(t, "w", 0, []index.LocalHash{1, 2, 3, 4, 5}, WorkerState{})
	resp, err := NewService(f, Limits{}).Match(t.Context(), &pb.MatchRequest{Model: "m", LocalHashes: []uint64{1, 2, 3, 4, 5}})
	if err != nil {
		t.Fatal(err)
	}
	if m := resp.Matches[0]; m.DepthBlocks != 5 || m.DepthTokens != 1<<32-1 || m.DepthExternalTokens != 1<<32-1 {
		t.Errorf("got %v", m)
	}
}
