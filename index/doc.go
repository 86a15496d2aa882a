// Package index keeps in memory which worker-rank of a fleet holds which
// KV-cache blocks of one model, and answers how many leading blocks of a prompt
// each of them already has.
//
// # Layers
//
// A BlockHasher turns a prompt's tokens into local hashes, and Chain turns those into
// sequence hashes, each of which names a whole prefix. An Index knows workers:
// it gives each worker-rank a slot for every tier that it uses and for what tiers hold
// together (tiers.go), and turns the answers of a Structure, which knows only slots, into
// answers about workers. The Structures are RunIndex, the fast one, PositionalIndex,
// ConcurrentRadixTree, which takes opaque hashes, and RadixTree, which counts recent
// queries; package indextest says what a Structure must do, and checks it.
//
//	x := index.New(index.NewRunIndex())
//	w := x.AddWorker("worker-7", 0, nil)
//	w.Store(index.Device, index.Stored{Position: 0, Locals: locals})
//	var r index.Result
//	x.Find(&index.Query{Locals: prompt, TopK: 3}, &r)
//
// The package knows nothing of Kafka or clocks, and uses contexts only in Pool, which has
// goroutines of its own for programs without a goroutine for each worker.
//
// # What holds
//
//   - A worker-rank holds, per tier, a set of sequence hashes. Its depth for a
//     query is the largest n such that the query's first n blocks are all in the
//     set. Nothing past a hole counts; it stays in the set, and counts again when
//     the hole is filled. (Trees that drop the descendants of a removed block
//     would then answer differently.)
//   - Parent and position of an event only place its blocks. A block whose parent
//     is not held, an orphan, is kept out of reach until all its ancestors are
//     held. Only then is its claimed position checked; it is never trusted.
//   - A block with the right local hash but another prefix is never credited: a
//     search compares sequence hashes, and sets of slots as sets.
//   - An opaque hash is an engine's own and cannot be computed from local hashes. A
//     slot's depth is then the largest n such that n of its blocks follow each other,
//     the first without a parent, each of the others with the one before as its parent,
//     and their local hashes are the query's first n. Trees answer this; the other
//     structures refuse such blocks. A hash that is already held is a duplicate, whatever
//     parent and local hash it comes with.
//   - An answer gives cumulative depths by tier: of the device tier, of device and
//     host together, and so on, where each block is in one of these tiers. Several
//     tiers together are a set like a single one; an opaque hash must have the same parent
//     and local hash in each tier, as it does if it identifies the whole prefix: the place
//     that the first tier gave a block counts for as long as any tier has it.
//   - A worker-rank without lower tiers has one slot. Each lower tier in use costs two
//     more, one of which holds what that tier and all before it hold; that slot's blocks
//     are neither counted nor dumped.
//   - A slot is handed out again only after it was cleared, and a Find during which
//     slots changed hands starts over: nobody is credited with what another held.
//   - Memory is that of what is live. There is no limit on the number of workers, of
//     blocks of a worker, or of holders of a block. What stays after a peak: of a
//     PositionalIndex the shared map's table, 13 to 34 bytes a block of the peak,
//     until less than about a hundredth of it is left; of a RunIndex its table, some
//     40 bytes a run of the peak, until less than a sixteenth of that is left; of a tree
//     a map of each node's children, until less than a quarter of them is left; and
//     some 200 or 300 bytes for each slot that was ever in use at a time.
//
// # Concurrency
//
// Find and Stats may be called by any goroutine at any moment, take no lock that a
// writer holds during an event, and never wait for one. (With a filter by name, or
// after losing to reused slots three times, Find takes the lock under which workers are
// added and retired, and under which lower tiers come into use and go out of it. In a tree,
// it takes read locks of nodes with several children; a writer holds these while it adds or
// removes one child or, once most of many are gone, copies the others.) A Worker is written by one
// goroutine at a time; different workers go on at once and wait for each other only
// for the moment in which they touch the same block, or while the shared map grows. A
// reader may see half of an event, but each block that it counts for a worker was held
// by that worker at some moment during the call.
//
// Locks, in the order in which they are taken: Index.mu, then those of the
// Structure; in a PositionalIndex a bucket of heads, then a head, then a bucket of
// more; in a RunIndex a run, then regions of the table; in a tree a node, then its
// child, and of either its further children last. RunIndex's own comment has its layout
// and why it is right; a tree's is in radix.go.
//
// # Costs of PositionalIndex
//
// Measured on two cores of a busy server, so these are upper bounds, on event traces of a
// conversation workload (512 tokens a block; 8 and 64 workers that share little, 7,000 in
// groups of seven that are equal), and with
//
//	go test -run '^$' -bench . -count 10 ./index
//
//	a block stored          750 to 960 ns, of which 4 to 7 ns hash; 18 ns if it is there
//	a block removed         470 to 510 ns
//	a query                 3.6 µs (8 or 64 workers), 34 µs with up to 7,000 answers; 20 ns if its first block is unknown
//	192 blocks, all held    1.3 µs by 64 workers, 4.2 µs by 1,000, 23 µs by 7,000
//	192 blocks, 64 depths   4.2 µs
//	a (worker, block) pair  151 to 153 bytes shared with nobody, 90 shared by seven
//	hashing 4,096 tokens    7 to 15 µs
//
// A warm Find allocates nothing, nor does an event that changes nothing. A block
// new to all allocates its entry and the map's; another holder of a block a share
// of a list that doubles. Taking a block out of the middle of a chain, or putting it
// back, costs as much as removing or storing all blocks behind it.
//
// # Costs of RunIndex
//
// On the same files, CPU time of one thread on such a machine, including hashing and
// the time for fresh memory:
//
//	a block stored          17 to 33 ns; 7 ns if it is there; 390 ns in an event of its own
//	a block removed         10 to 17 ns leaf first, 6 ns where seven slots are equal; 220 ns one by one in random order
//	a query                 0.7 to 1.4 µs (8 to 256 workers), 14 µs with up to 7,000 answers
//	the best of 7,000       2.4 µs; the best ten 11 µs
//	192 blocks, 64 depths   0.35 µs
//	a (worker, block) pair  17 to 24 bytes shared with nobody, 2.4 shared by seven
//	a dump, a restore       1 to 4 ns and 22 to 29 ns a block
//
// A warm Find allocates nothing, nor does an event that changes nothing. Blocks that
// come and go in runs that are there cost now and then an array of the slot's own,
// new ones a share of a run too. Taking a block out of the middle of a chain, or
// putting it back, is 0.7 µs however many are behind it.
//
// # Costs of the trees
//
// On the same files as RunIndex, by kvindex bench index --mode seq and --mode mem:
//
//	a block stored          250 to 430 ns; 12 ns if it is there
//	a block removed         175 to 235 ns
//	a query                 3 to 4.2 µs (8 to 256 workers), 18 µs with up to 7,000 answers
//	192 blocks, all held    1.2 µs by 64 workers, 3.3 µs by 1,000, 28 µs by 7,000
//	192 blocks, 64 depths   3.3 µs
//	a (worker, block) pair  120 bytes shared with nobody, 99 shared by seven
//
// That is 0.7 to 1.7 times the uncompressed tree of the crate dynamo-kv-router 1.5.0
// for a store, 0.4 to 2.1 times for a removal and 0.1 to 0.25 times for a query, in one
// interleaved run. A warm Find allocates nothing, nor does an event that changes
// nothing. A block new to all allocates its node; another holder of a block, or one
// less, a list. Taking a block out of the middle of a chain, or putting it back, costs
// as much as removing or storing all blocks behind it.
//
// # Why xsync v3
//
// The shared map of a PositionalIndex is a MapOf of github.com/puzpuzpuz/xsync/v3: reads
// without locks or writes to memory, Compute to free an entry without a race with whoever
// wants it, and a table that shrinks. v4 offers nothing more that is needed here.
package index
