package pipeline

// This file has two stages write the same snapshots, lag, pause, die and take
// the duty from one another, and compares with the oracle all along.

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/consumer"
	"kvindex/index"
	"kvindex/pipeline/query"
	"kvindex/pipeline/verify"
	"kvindex/schemas"
	"kvindex/snapshot"
	"kvindex/testcontainers"
)

var replicasSeed = flag.Uint64("replicas.seed", 0, "seed of the interleavings of two stages, 0: a new one")

// gate stops one stage's work on one partition.
type gate struct {
	mu      sync.Mutex
	reading chan struct{} // not nil: the partition's goroutine stops before its next record
	writing chan struct{} // not nil: the saver stops after its next step
	dies    bool          // the writer dies after its next step
	at      int64         // offset that the partition's goroutine stands before, -1 if it does not
}

// replica is one of the two stages.
type replica struct {
	*instance
	gates []*gate
}

// pass is Stage.beforeRecord.
func (g *gate) pass(offset int64) {
	for {
		g.mu.Lock()
		c := g.reading
		g.at = offset
		if c == nil {
			g.at = -1
		}
		g.mu.Unlock()
		if c == nil {
			return
		}
		<-c
	}
}

// step is Stage.hook. A writer that stands still ends with its process.
func (g *gate) step(s *Stage) error {
	for {
		g.mu.Lock()
		c, dies := g.writing, g.dies
		g.dies = false
		g.mu.Unlock()
		switch {
		case dies:
			return errKilledByTest
		case c == nil:
			return nil
		}
		select {
		case <-c:
		case <-s.saving.Done():
			return errKilledByTest
		}
	}
}

// toggle closes an open one and opens a closed one.
func (g *gate) toggle(c *chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if *c != nil {
		close(*c)
		*c = nil
		return
	}
	*c = make(chan struct{})
}

// open lets both go on.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range []*chan struct{}{&g.reading, &g.writing} {
		if *c != nil {
			close(*c)
			*c = nil
		}
	}
}

// stands returns the offset that a stopped reader stands before, -1 if it is not stopped there.
func (g *gate) stands() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.reading == nil {
		return -1
	}
	return g.at
}

// duel is a pair of topics and two stages on them.
type duel struct {
	*rig
	rng    *rand.Rand
	cl     *kgo.Client
	lanes  []*lane
	stages [2]*replica
	totals [numCounters]int64 // of stages that are gone
}

// lane is one partition: what is in its log, and its truth.
type lane struct {
	*duel
	number    int32
	now       time.Time
	log       []*kgo.Record
	truth     *verify.Oracle // at the log's end
	producers []*producer

	// What was read of the snapshot topic.
	read  int64
	floor int64
	w     map[string]int64 // by manifest key
	epoch int16            // of the writer
	id    int64
}

func newDuel(t *testing.T, b *testcontainers.Kfake, seed uint64, lanes int) *duel {
	t.Helper()
	d := &duel{rig: newTimedRig(t, b, lanes), rng: rand.New(rand.NewPCG(seed, 1))}
	d.cfg.SnapshotMaxAge = 100 * time.Millisecond
	d.cfg.Tick, d.cfg.Watch = 10*time.Millisecond, 50*time.Millisecond
	d.cl = d.client()
	for n := range int32(lanes) {
		l := &lane{duel: d, number: n, now: time.Now().Add(-60 * 24 * time.Hour).Truncate(time.Second), truth: verify.New(timedGrace), floor: -1, w: map[string]int64{}}
		for worker, ranks := range []int32{2, 1, 3, 1} {
			for rank := range ranks {
				l.producers = append(l.producers, &producer{r: d.rig, cl: d.cl, partition: n, batch: schemas.Batch{
					Producer: []byte("producer-1"), Worker: fmt.Appendf(nil, "%c-%d", 'a'+worker, n), Rank: rank, Epoch: 1, Seq: -1,
					Model: []byte(testModel), BlockSize: testBlockSize,
				}})
			}
		}
		d.lanes = append(d.lanes, l)
	}
	for i := range d.stages {
		d.begin(i)
	}
	return d
}

// begin starts stage i.
func (d *duel) begin(i int) {
	d.t.Helper()
	in := &replica{}
	for range d.lanes {
		in.gates = append(in.gates, &gate{at: -1})
	}
	in.instance = d.start(func(s *Stage) {
		s.policy.MinBytes = 1
		s.beforeRecord = func(n int32, offset int64) { in.gates[n].pass(offset) }
		s.hook = func(n int32, _ snapshot.Step) error { return in.gates[n].step(s) }
	})
	d.t.Cleanup(in.openAll) // before the stage is stopped
	d.stages[i] = in
	in.caughtUp()
}

func (in *replica) openAll() {
	for _, g := range in.gates {
		g.open()
	}
}

// replace abandons stage i, whatever it is doing, and starts another.
func (d *duel) replace(i int) {
	d.t.Helper()
	in := d.stages[i]
	in.cfg.DrainTimeout = time.Nanosecond
	in.cancel()
	for _, g := range in.gates { // a writer that stands still never goes on
		g.mu.Lock()
		if g.reading != nil {
			close(g.reading)
			g.reading = nil
		}
		g.mu.Unlock()
	}
	in.stop()
	d.count(in.instance)
	d.begin(i)
}

func (d *duel) count(in *instance) {
	for k := range counter(numCounters) {
		d.totals[k] += in.counted(k)
	}
}

func (in *replica) assign(n int32, has bool) { in.partitions()[n].saver.assign(has) }

// write appends records of these values to the partition.
func (l *lane) write(records ...*kgo.Record) {
	l.t.Helper()
	if len(records) == 0 {
		return
	}
	if err := l.cl.ProduceSync(l.t.Context(), records...).FirstErr(); err != nil {
		l.t.Fatal(err)
	}
	for _, r := range records {
		if r.Offset != int64(len(l.log)) {
			l.t.Fatalf("record went to offset %d, want %d", r.Offset, len(l.log))
		}
		l.log = append(l.log, r)
		l.truth.Apply(l.number, r.Timestamp.UnixMilli(), r.Key, r.Value)
	}
}

// happen makes one record of anything that can happen to a worker-rank.
func (l *lane) happen() *kgo.Record {
	rng := l.rng
	p := l.producers[rng.IntN(len(l.producers))]
	prompt := locals(uint64(rng.IntN(4)), 16)
	seqs := index.Chain(nil, prompt)
	from, to := rng.IntN(8), 8+rng.IntN(9)
	switch rng.IntN(24) {
	case 0:
		p.renew()
	case 1:
		return p.at(l.now, retired())
	case 2:
		return p.at(l.now, cleared(), stored(nil, prompt[:to]...))
	case 3:
		return p.at(l.now, schemas.Event{Kind: schemas.KindCleared})
	case 4:
		p.batch.Seq += 1 + int64(rng.IntN(2)) // a gap
	case 5:
		if p.batch.Seq > 0 {
			p.batch.Seq-- // a duplicate
		}
	case 6:
		return p.at(l.now)
	case 7, 8, 9, 10:
		return p.at(l.now, removed(seqs[from], seqs[to-1], seqs[rng.IntN(16)]))
	case 11, 12:
		return p.at(l.now, stored(&seqs[from], prompt[from+1:to]...))
	case 13:
		e := stored(nil, prompt[:to]...)
		e.Tier = index.Host
		return p.at(l.now, e)
	case 14:
		return &kgo.Record{Partition: l.number, Timestamp: l.now, Key: slices.Clone(p.batch.Worker), Value: []byte("nonsense")}
	case 15:
		mine := p.batch.Producer
		p.batch.Producer = []byte("another")
		defer func() { p.batch.Producer = mine; p.batch.Seq-- }()
	}
	return p.at(l.now, stored(nil, prompt[:to]...))
}

// live has some of the worker-ranks say so at the lane's time.
func (l *lane) live() {
	var records []*kgo.Record
	for i, p := range l.producers {
		// The last ones are idle more often than not.
		if l.rng.IntN(len(l.producers)) >= i {
			records = append(records, p.at(l.now))
		}
	}
	l.write(records...)
}

// step does one random thing.
func (l *lane) step() {
	l.t.Helper()
	rng := l.rng
	i := rng.IntN(2)
	in := l.stages[i]
	g := in.gates[l.number]
	switch k := rng.IntN(20); {
	case k < 8:
		var records []*kgo.Record
		for range 1 + rng.IntN(6) {
			records = append(records, l.happen())
		}
		l.write(records...)
	case k < 11:
		l.now = l.now.Add(timedStep * time.Duration(1+rng.IntN(3)))
		l.live()
	case k < 13:
		g.toggle(&g.reading)
	case k < 14:
		g.toggle(&g.writing)
	case k < 16:
		in.assign(l.number, true)
	case k < 17: // handed over in good order
		in.assign(l.number, false)
		l.stages[1-i].assign(l.number, true)
	case k < 18: // both believe to have it
		in.assign(l.number, true)
		l.stages[1-i].assign(l.number, true)
	case k < 19:
		g.mu.Lock()
		g.dies = true
		g.mu.Unlock()
	default:
		l.reach(in)
	}
}

// reach waits until the stage has applied everything, or stands where it was
// stopped, and returns the offset.
func (l *lane) reach(in *replica) (at int64) {
	l.t.Helper()
	end := int64(len(l.log))
	deadline := time.Now().Add(patience)
	for {
		if at = in.gates[l.number].stands(); at >= 0 {
			return at
		}
		p := in.Stage.consumer.Partitions()[l.number]
		if p.State() == consumer.Live && p.Position() == end {
			return end
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("partition %d: %s at offset %d of %d", l.number, p.State(), p.Position(), end)
		}
		<-time.After(time.Millisecond)
	}
}

// at returns the truth at an offset.
func (l *lane) at(offset int64) *verify.Oracle {
	if offset == int64(len(l.log)) {
		return l.truth
	}
	o := verify.New(timedGrace)
	for _, r := range l.log[:offset] {
		o.Apply(l.number, r.Timestamp.UnixMilli(), r.Key, r.Value)
	}
	return o
}

// same compares the lane's part of what a stage says with the truth at the offset.
func (l *lane) same(in *instance, rows []query.WorkerStatus, offset int64) error {
	truth := l.at(offset)
	type row struct {
		verify.WorkerRank
		epoch, seq          int64
		retired, incomplete bool
		blocks              [index.Tiers]int
	}
	var got, want []row
	for _, w := range rows {
		if w.Partition == l.number {
			got = append(got, row{verify.WorkerRank{Worker: w.Worker, Rank: w.Rank}, w.Epoch, w.Seq, w.Retired, w.Incomplete, w.Blocks})
		}
	}
	for _, w := range truth.Workers() {
		want = append(want, row{w.WorkerRank, w.Epoch, w.Seq, w.Retired, w.Incomplete, w.Blocks})
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("partition %d at offset %d: worker-ranks are\n%+v\nwant\n%+v", l.number, offset, got, want)
	}
	suffix := fmt.Sprintf("-%d", l.number)
	for _, q := range truth.Queries(l.rng, 4) {
		depths := in.depths(q)
		for w := range depths {
			if !strings.HasSuffix(w.Worker, suffix) {
				delete(depths, w)
			}
		}
		if want := truth.Depths(q.Model, q.BlockSize, q.Locals); !maps.Equal(depths, want) {
			return fmt.Errorf("partition %d at offset %d: depths %v, want %v", l.number, offset, depths, want)
		}
	}
	return nil
}

// compare compares both stages with the truth, each at its own offset, and a
// fresh one that has only what Kafka has.
func (d *duel) compare() {
	d.t.Helper()
	for i, in := range d.stages {
		at := make([]int64, len(d.lanes))
		for n, l := range d.lanes {
			at[n] = l.reach(in)
		}
		rows := in.Workers("")
		for n, l := range d.lanes {
			if err := l.same(in.instance, rows, at[n]); err != nil {
				d.t.Fatalf("stage %d: %v", i, err)
			}
		}
	}
	fresh := d.start()
	fresh.caughtUp()
	rows := fresh.Workers("")
	for _, l := range d.lanes {
		if err := l.same(fresh, rows, int64(len(l.log))); err != nil {
			fresh.abandon()
			d.t.Fatalf("fresh stage: %v\n%s%s", err, fresh.partitions()[l.number].story(), l.story())
		}
	}
	fresh.undamaged()
	fresh.abandon()
}

// story is what the lane's partitions say, for a failed test.
func (l *lane) story() string {
	var b strings.Builder
	for _, r := range testcontainers.ReadCommitted(l.t, l.broker, l.cfg.SnapshotTopic)[l.number] {
		fmt.Fprintf(&b, "snapshot %d by epoch %d: %s", r.Offset, r.ProducerEpoch, r.Key)
		var m schemas.Manifest
		var f schemas.Floor
		switch {
		case r.Value == nil:
			b.WriteString(" removed")
		case schemas.DecodeFloor(&f, r.Value) == nil:
			fmt.Fprintf(&b, " %d", f.Offset)
		case schemas.DecodeManifest(&m, r.Value) == nil:
			fmt.Fprintf(&b, " W %d, epoch %d, seq %d, last %d, retired %v, incomplete %v, chunks %d, generation %d", m.W, m.Epoch, m.Seq, m.LastOffset, m.Retired, m.Incomplete, m.Chunks, m.Generation)
		}
		b.WriteByte('\n')
	}
	for _, r := range l.log {
		var batch schemas.Batch
		if err := batch.Decode(r.Value); err != nil {
			fmt.Fprintf(&b, "%d %s %s: %v\n", r.Offset, r.Timestamp.Format(time.TimeOnly), r.Key, err)
			continue
		}
		fmt.Fprintf(&b, "%d %s %s rank %d epoch %d seq %d:", r.Offset, r.Timestamp.Format("02 15:04"), r.Key, batch.Rank, batch.Epoch, batch.Seq)
		for _, e := range batch.Events {
			fmt.Fprintf(&b, " %d(%d)", e.Kind, len(e.Stored.Locals)+len(e.Removed))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// story is what the partition of a stage that has ended holds, and since when.
func (p *partition) story() string {
	var b strings.Builder
	fmt.Fprintf(&b, "replayed from %d\n", p.stage.consumer.Partitions()[p.number].Start())
	for _, w := range p.workers {
		for _, k := range w.ranks {
			fmt.Fprintf(&b, "%v: restored at W %d, first %d, last %d, retired %v\n", k.id(), k.restoredW, k.firstOffset, k.lastOffset, k.retired)
		}
	}
	return b.String()
}

// undamaged fails the test if a restore found a snapshot that is damaged or of another log.
func (in *instance) undamaged() {
	in.r.t.Helper()
	for _, k := range []counter{restoresDamaged, snapshotsDiscarded} {
		if n := in.counted(k); n != 0 {
			in.r.t.Fatalf("%s is %d, want 0", counterNames[k].name, n)
		}
	}
}

// audit reads what was committed to the snapshot topic since: no W and no floor
// goes back, no floor is above a W, and whoever was succeeded writes no more.
func (d *duel) audit() {
	d.t.Helper()
	for n, records := range testcontainers.ReadCommitted(d.t, d.broker, d.cfg.SnapshotTopic) {
		l := d.lanes[n]
		for _, r := range records {
			if r.Offset < l.read {
				continue
			}
			l.read = r.Offset + 1
			if err := l.audit(r); err != nil {
				d.t.Fatalf("snapshot partition %d offset %d, key %s: %v", n, r.Offset, r.Key, err)
			}
		}
	}
}

func (l *lane) audit(r *kgo.Record) error {
	if r.ProducerID < l.id || r.ProducerID == l.id && r.ProducerEpoch < l.epoch {
		return fmt.Errorf("written by epoch %d of id %d after epoch %d of %d", r.ProducerEpoch, r.ProducerID, l.epoch, l.id)
	}
	l.id, l.epoch = r.ProducerID, r.ProducerEpoch
	switch key := string(r.Key); {
	case key == "floor":
		var f schemas.Floor
		if err := schemas.DecodeFloor(&f, r.Value); err != nil {
			return err
		}
		if f.Offset < l.floor {
			return fmt.Errorf("floor went from %d back to %d", l.floor, f.Offset)
		}
		l.floor = f.Offset
		for key, w := range l.w {
			if w < f.Offset {
				return fmt.Errorf("floor %d is above the W %d of %s", f.Offset, w, key)
			}
		}
	case !strings.HasPrefix(key, "manifest/"):
	case r.Value == nil:
		delete(l.w, key)
	default:
		var m schemas.Manifest
		if err := schemas.DecodeManifest(&m, r.Value); err != nil {
			return err
		}
		if w, ok := l.w[key]; ok && m.W < w {
			return fmt.Errorf("W went from %d back to %d", w, m.W)
		}
		if m.W < l.floor {
			return fmt.Errorf("W %d is below the floor %d", m.W, l.floor)
		}
		l.w[key] = m.W
	}
	return nil
}

// settle gives each lane one writer that nothing hinders, and waits until
// everything is on the topic as it is, and nothing else.
func (d *duel) settle() {
	d.t.Helper()
	var writers []*replica
	for _, l := range d.lanes {
		for _, in := range d.stages {
			in.gates[l.number].open()
			in.assign(l.number, false)
		}
		in := d.stages[d.rng.IntN(2)]
		in.assign(l.number, true)
		writers = append(writers, in)
	}
	for _, l := range d.lanes {
		var want []string
		for _, w := range l.truth.Workers() {
			want = append(want, fmt.Sprintf("manifest/%d/%s", w.Rank, w.Worker))
		}
		slices.Sort(want)
		testcontainers.Eventually(d.t, patience, func() error {
			d.audit()
			if in := writers[l.number]; !in.Status().Partitions[l.number].SnapshotDuty {
				in.assign(l.number, true) // the other may have been about to take it
			}
			var got []string
			for key := range l.w {
				got = append(got, key)
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				return fmt.Errorf("partition %d: on the topic are %v, want %v; W %v, floor %d of %d", l.number, got, want, l.w, l.floor, len(l.log))
			}
			if end := int64(len(l.log)); len(want) > 0 && l.floor < end {
				return fmt.Errorf("partition %d: floor %d of %d, duty %v, W %v", l.number, l.floor, end, writers[l.number].Status().Partitions[l.number].SnapshotDuty, l.w)
			}
			return nil
		})
	}
}

// compact has the broker compact the snapshot topic, at a moment when nobody
// writes: kfake lets a record of a transaction that is open, and may yet be
// aborted, supersede a committed one, which no real broker does.
func (d *duel) compact() {
	d.t.Helper()
	d.settle()
	for _, in := range d.stages {
		for n := range d.lanes {
			in.assign(int32(n), false)
		}
	}
	testcontainers.Eventually(d.t, patience, func() error {
		for _, in := range d.stages {
			for _, p := range in.Status().Partitions {
				if p.SnapshotDuty {
					return fmt.Errorf("partition %d has a writer", p.Partition)
				}
			}
		}
		stable, end := testcontainers.StableOffsets(d.t, d.broker, d.cfg.SnapshotTopic), testcontainers.EndOffsets(d.t, d.broker, d.cfg.SnapshotTopic)
		if !slices.Equal(stable, end) {
			return fmt.Errorf("stable up to %v of %v", stable, end)
		}
		return nil
	})
	d.audit()
	d.broker.(*testcontainers.Kfake).Cluster().Compact()
}

// trim deletes what lies below the floors of some partitions.
func (d *duel) trim() {
	d.t.Helper()
	for _, l := range d.lanes {
		if f, ok := d.table(l.number).Floor(); ok && d.rng.IntN(2) == 0 {
			testcontainers.DeleteRecords(d.t, d.broker, d.cfg.Topic, l.number, f.Offset)
		}
	}
}

// round takes so many steps on each lane, compares, and does something to all
// lanes, or nothing.
func (d *duel) round(steps int) {
	d.t.Helper()
	for range steps {
		for _, l := range d.lanes {
			l.step()
		}
	}
	d.compare()
	d.audit()
	switch d.rng.IntN(8) {
	case 0, 1:
		d.settle()
	case 2:
		d.compact()
	case 3:
		d.trim()
	case 4, 5:
		d.replace(d.rng.IntN(2))
	}
}

// Two stages with one group on the same topics, over a thousand interleavings: a
// lane is a partition, and an interleaving what happens to one between two
// comparisons. At each both stages' answers and listings are the truth's, those
// of a stage that lags at the offset where it stands, and so are those of a
// fresh stage.
func TestReplicasInterleaved(t *testing.T) {
	const worlds, lanes, steps = 4, 10, 9
	rounds := 25
	if testing.Short() {
		rounds = 8
	}
	seed := cmp.Or(*replicasSeed, rand.Uint64())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to try the same again: -replicas.seed=%d", seed)
		}
	})
	var mu sync.Mutex
	var totals [numCounters]int64
	t.Run("worlds", func(t *testing.T) {
		for world := range worlds {
			t.Run(strconv.Itoa(world), func(t *testing.T) {
				t.Parallel() // they mostly wait
				b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
				dealNoDuty(b)
				d := newDuel(t, b, seed+uint64(world), lanes)
				for range rounds {
					d.round(steps)
				}
				d.settle()
				d.compare()
				for _, in := range d.stages {
					d.count(in.instance)
				}
				mu.Lock()
				defer mu.Unlock()
				for k, n := range d.totals {
					totals[k] += n
				}
			})
		}
	})
	var said strings.Builder
	for _, k := range []counter{recordsApplied, recordsSkipped, recordsRetired, recordsDuplicate, gaps, epochs, workersRetired, workersForgotten, restores, snapshotRounds, snapshotFailures, snapshotFenced} {
		fmt.Fprintf(&said, "%s %d  ", counterNames[k].name, totals[k])
		// How many records are skipped hangs on where the last rounds ended.
		if totals[k] < 20 && k != recordsSkipped && !t.Failed() {
			t.Errorf("%s is %d: the test tests little", counterNames[k].name, totals[k])
		}
	}
	t.Log(said.String())
}

// dealNoDuty has the broker refuse the groups that deal the snapshot duty, so
// that tests deal it.
func dealNoDuty(b *testcontainers.Kfake) {
	b.Cluster().ControlKey(int16(kmsg.JoinGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		b.Cluster().KeepControl()
		resp := req.ResponseKind().(*kmsg.JoinGroupResponse)
		resp.ErrorCode = 30 // group authorization failed
		return resp, nil, true
	})
}
