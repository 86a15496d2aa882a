package index_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"kvindex/index"
	"kvindex/index/indextest"
)

// Benchmarks for benchstat: go test -run '^$' -bench . -count 10 ./index
// Store and Remove report ns a block beside ns an event of 32 blocks.

const eventBlocks = 32

// structures are the structures that the tests of allocation and the benchmarks
// are run for.
var structures = []struct {
	name  string
	empty func() index.Structure
}{
	{"positional", func() index.Structure { return index.NewPositionalIndex(0) }},
	{"runs", func() index.Structure { return index.NewRunIndex() }},
	{"concurrent-radix", func() index.Structure { return index.NewConcurrentRadixTree() }},
}

// perStructure runs a benchmark for each structure.
func perStructure(b *testing.B, f func(b *testing.B, empty func() index.Structure)) {
	for _, s := range structures {
		b.Run("structure="+s.name, func(b *testing.B) { f(b, s.empty) })
	}
}

// events returns n chains of eventBlocks, a part of which share prefixes, and
// their sequence hashes leaf first.
func events(n int) (stores []index.Stored, removes [][]index.SeqHash) {
	load := indextest.NewWorkload(1, 16, 8)
	for range n {
		locals := load.Prompt(eventBlocks-8, eventBlocks)
		seqs := index.Chain(nil, locals)
		for i, j := 0, len(seqs)-1; i < j; i, j = i+1, j-1 {
			seqs[i], seqs[j] = seqs[j], seqs[i]
		}
		stores = append(stores, index.Stored{Position: 0, Locals: locals})
		removes = append(removes, seqs[:eventBlocks-8])
	}
	return stores, removes
}

// BenchmarkStore stores prompts of 32 blocks, 24 of them new, into 64 slots,
// starting over when they hold half a million.
func BenchmarkStore(b *testing.B) {
	perStructure(b, benchStore)
}

func benchStore(b *testing.B, empty func() index.Structure) {
	stores, _ := events(20_000)
	b.ReportAllocs()
	s := empty()
	for i := 0; b.Loop(); i++ {
		if i%len(stores) == 0 && i > 0 {
			b.StopTimer()
			s = empty()
			b.StartTimer()
		}
		_, _ = s.Store(index.Slot(i%64), stores[i%len(stores)])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*eventBlocks), "ns/block")
}

// BenchmarkStoreDuplicate stores what is there.
func BenchmarkStoreDuplicate(b *testing.B) {
	perStructure(b, benchStoreDuplicate)
}

func benchStoreDuplicate(b *testing.B, empty func() index.Structure) {
	stores, _ := events(1)
	s := empty()
	b.ReportAllocs()
	for b.Loop() {
		_, _ = s.Store(0, stores[0])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*eventBlocks), "ns/block")
}

// BenchmarkRemove removes the 24 new blocks of each prompt again, leaf first.
func BenchmarkRemove(b *testing.B) {
	perStructure(b, benchRemove)
}

func benchRemove(b *testing.B, empty func() index.Structure) {
	stores, removes := events(20_000)
	var s index.Structure
	fill := func() {
		s = empty()
		for i := range stores {
			_, _ = s.Store(index.Slot(i%64), stores[i])
		}
	}
	fill()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%len(stores) == 0 && i > 0 {
			b.StopTimer()
			fill()
			b.StartTimer()
		}
		s.Remove(index.Slot(i%len(stores)%64), removes[i%len(stores)])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*(eventBlocks-8)), "ns/block")
}

// BenchmarkRemoveRandom removes single blocks of 64 chains of 256 in random order,
// storing all of them again when none is left.
func BenchmarkRemoveRandom(b *testing.B) {
	perStructure(b, func(b *testing.B, empty func() index.Structure) {
		load := indextest.NewWorkload(1, 0, 0)
		rng := rand.New(rand.NewPCG(1, 1))
		var stores []index.Stored
		var seqs []index.SeqHash
		for range 64 {
			stores = append(stores, index.Stored{Locals: load.Fresh(256)})
			seqs = append(seqs, index.Chain(nil, stores[len(stores)-1].Locals)...)
		}
		rng.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
		s := empty()
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if i%len(seqs) == 0 {
				b.StopTimer()
				for _, ev := range stores {
					_, _ = s.Store(0, ev)
				}
				b.StartTimer()
			}
			s.Remove(0, seqs[i%len(seqs):][:1])
		}
	})
}

// BenchmarkStoreOne stores block by block, as decoding does, in 64 chains of 256
// at a time of each of 8 slots, starting over when they are complete.
func BenchmarkStoreOne(b *testing.B) {
	perStructure(b, func(b *testing.B, empty func() index.Structure) {
		const slots, chains, length = 8, 64, 256
		load := indextest.NewWorkload(1, 0, 0)
		var events []index.Stored // all first blocks, all second ones, and so on
		locals := load.Fresh(slots * chains * length)
		seqs := make([]index.SeqHash, slots*chains)
		for at := range int32(length) {
			for c := range seqs {
				ev := index.Stored{Position: at, Locals: locals[:1]}
				if at > 0 {
					ev.Parent, ev.HasParent = seqs[c], true
					seqs[c] = index.Next(seqs[c], locals[0])
				} else {
					seqs[c] = index.SeqHash(locals[0])
				}
				events, locals = append(events, ev), locals[1:]
			}
		}
		s := empty()
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if i%len(events) == 0 && i > 0 {
				b.StopTimer()
				s = empty()
				b.StartTimer()
			}
			_, _ = s.Store(index.Slot(i%slots), events[i%len(events)])
		}
	})
}

// BenchmarkWriters has as many writers as processors (-cpu 1,2), each of a slot of
// its own, that store chains of 32 blocks and remove the one that came 500 before.
func BenchmarkWriters(b *testing.B) {
	perStructure(b, func(b *testing.B, empty func() index.Structure) {
		stores, removes := events(20_000)
		s := empty()
		var writers atomic.Uint32
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			slot := index.Slot(writers.Add(1))
			for i := int(slot) * 7919; pb.Next(); i++ {
				_, _ = s.Store(slot, stores[i%len(stores)])
				s.Remove(slot, removes[(i+len(stores)-500)%len(removes)])
			}
		})
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*eventBlocks), "ns/block")
	})
}

// BenchmarkRemoveMiddle takes a block out of the middle of a chain of 192 and
// puts it back: all blocks behind it leave the map and return.
func BenchmarkRemoveMiddle(b *testing.B) {
	perStructure(b, benchRemoveMiddle)
}

func benchRemoveMiddle(b *testing.B, empty func() index.Structure) {
	s := empty()
	a := chainOf("a", 192)
	seqs := index.Chain(nil, a)
	_, _ = s.Store(0, index.Stored{Position: 0, Locals: a})
	back := index.Stored{Parent: seqs[95], HasParent: true, Position: 96, Locals: a[96:97]}
	b.ReportAllocs()
	for b.Loop() {
		s.Remove(0, seqs[96:97])
		_, _ = s.Store(0, back)
	}
}

// fleet returns an index of workers that hold the query's blocks up to depths
// spread evenly, or all of them if same is set.
func fleet(b *testing.B, s index.Structure, workers int, same bool, query []index.LocalHash) *index.Index {
	x := index.New(s)
	load := indextest.NewWorkload(1, 0, 0)
	for i := range workers {
		w := x.AddWorker(fmt.Sprint(i), 0, nil)
		n := len(query)
		if !same {
			n = 1 + i*len(query)/workers
		}
		store(b, w, index.Device, query[:n]...)
		store(b, w, index.Device, load.Fresh(64)...)
	}
	return x
}

// BenchmarkFind asks for 192 blocks.
func BenchmarkFind(b *testing.B) {
	perStructure(b, benchFind)
}

func benchFind(b *testing.B, empty func() index.Structure) {
	query := chainOf("a", 192)
	for _, c := range []struct {
		name    string
		workers int
		same    bool
		q       index.Query
	}{
		{"workers=64/depths=all", 64, false, index.Query{}},
		{"workers=64/depths=one", 64, true, index.Query{}},
		{"workers=64/depths=all/top=3", 64, false, index.Query{TopK: 3}},
		{"workers=64/depths=all/early", 64, false, index.Query{EarlyExit: true}},
		{"workers=1000/depths=all", 1000, false, index.Query{}},
		{"workers=1000/depths=one", 1000, true, index.Query{}},
		{"workers=7000/depths=one", 7000, true, index.Query{}},
		{"workers=7000/depths=one/top=10", 7000, true, index.Query{TopK: 10}},
	} {
		b.Run(c.name, func(b *testing.B) {
			x := fleet(b, empty(), c.workers, c.same, query)
			c.q.Locals = query
			var r index.Result
			b.ReportAllocs()
			for b.Loop() {
				x.Find(&c.q, &r)
			}
		})
	}
	b.Run("workers=64/unknown prompt", func(b *testing.B) {
		x := fleet(b, empty(), 64, true, query)
		q := index.Query{Locals: chainOf("b", 192)}
		var r index.Result
		b.ReportAllocs()
		for b.Loop() {
			x.Find(&q, &r)
		}
	})
}

// BenchmarkFindTiers asks for 192 blocks that workers hold up to depths spread evenly in
// device, with the next 30 in host.
func BenchmarkFindTiers(b *testing.B) {
	perStructure(b, func(b *testing.B, empty func() index.Structure) {
		query := chainOf("a", 192)
		for _, workers := range []int{64, 1000} {
			x := index.New(empty())
			for i := range workers {
				w := x.AddWorker(fmt.Sprint(i), 0, nil)
				n := i * len(query) / workers
				if n > 0 {
					store(b, w, index.Device, query[:n]...)
				}
				s := index.Stored{Position: int32(n), Locals: query[n:min(n+30, len(query))]}
				if n > 0 {
					s.Parent, s.HasParent = index.Chain(nil, query)[n-1], true
				}
				if _, err := w.Store(index.Host, s); err != nil {
					b.Fatal(err)
				}
			}
			for _, k := range []int{0, 3} {
				b.Run(fmt.Sprintf("workers=%d/top=%d", workers, k), func(b *testing.B) {
					q := index.Query{Locals: query, TopK: k}
					var r index.Result
					b.ReportAllocs()
					for b.Loop() {
						x.Find(&q, &r)
					}
				})
			}
		}
	})
}

// BenchmarkOffload has a worker store prompts of 32 blocks, 24 of them new, whose blocks
// move to host after 500 others and leave it after 1,500 more; alone is the same
// without a host tier.
func BenchmarkOffload(b *testing.B) {
	perStructure(b, func(b *testing.B, empty func() index.Structure) {
		for _, tiers := range []string{"alone", "host"} {
			b.Run("tiers="+tiers, func(b *testing.B) {
				stores, removes := events(4_000)
				x := index.New(empty())
				w := x.AddWorker("w", 0, nil)
				at := func(i int) int { return (i + len(stores)) % len(stores) }
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					_, _ = w.Store(index.Device, stores[at(i)])
					old := at(i - 500)
					if tiers == "host" {
						_, _ = w.Store(index.Host, stores[old])
						w.Remove(index.Host, removes[at(i-2000)])
					}
					w.Remove(index.Device, removes[old])
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*eventBlocks), "ns/block")
			})
		}
	})
}

// BenchmarkFindParallel has a writer at work on its own blocks of the same
// prompts while all processors ask.
func BenchmarkFindParallel(b *testing.B) {
	perStructure(b, benchFindParallel)
}

func benchFindParallel(b *testing.B, empty func() index.Structure) {
	query := chainOf("a", 192)
	x := fleet(b, empty(), 64, false, query)
	w := x.AddWorker("writer", 0, nil)
	seqs := index.Chain(nil, query)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = w.Store(index.Device, index.Stored{Position: 0, Locals: query})
				w.Remove(index.Device, seqs[50:])
			}
		}
	}()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		q := index.Query{Locals: query}
		var r index.Result
		for pb.Next() {
			x.Find(&q, &r)
		}
	})
	close(stop)
	<-stopped
}

// BenchmarkChain computes 192 sequence hashes.
func BenchmarkChain(b *testing.B) {
	locals := chainOf("a", 192)
	var seqs []index.SeqHash
	b.ReportAllocs()
	for b.Loop() {
		seqs = index.Chain(seqs[:0], locals)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(locals)), "ns/block")
}

// BenchmarkBlockHasher hashes a prompt of 4,096 tokens.
func BenchmarkBlockHasher(b *testing.B) {
	tokens := make([]uint32, 4096)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	for _, size := range []int{16, 64, 512} {
		for _, x := range []struct {
			name  string
			extra index.Extra
		}{{"base", index.Extra{}}, {"lora+salt+mm", index.Extra{LoRA: "adapter-a", Salt: "tenant-a", MM: []index.MMHash{{Hash: 42, End: 4096}, {Hash: 7, Start: 100, End: 200}}}}} {
			b.Run(fmt.Sprintf("block=%d/%s", size, x.name), func(b *testing.B) {
				h := index.BlockHasher{BlockSize: size}
				var locals []index.LocalHash
				b.ReportAllocs()
				for b.Loop() {
					locals = h.Append(locals[:0], tokens, x.extra)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(locals)), "ns/block")
			})
		}
	}
}

// BenchmarkDump dumps and restores a worker of 16,384 blocks.
func BenchmarkDump(b *testing.B) {
	perStructure(b, benchDump)
}

func benchDump(b *testing.B, empty func() index.Structure) {
	x := index.New(empty())
	w := x.AddWorker("w", 0, nil)
	load := indextest.NewWorkload(1, 0, 0)
	for range 128 {
		store(b, w, index.Device, load.Fresh(128)...)
	}
	b.Run("dump", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			n := 0
			w.Dump(func(_ index.Tier, s index.Stored) bool { n += len(s.Locals); return true })
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*128*128), "ns/block")
	})
	b.Run("dump and store", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			to := index.New(empty()).AddWorker("w", 0, nil)
			w.Dump(func(t index.Tier, s index.Stored) bool {
				_, err := to.Store(t, s)
				return err == nil
			})
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*128*128), "ns/block")
	})
}
