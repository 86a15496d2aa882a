package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

// patience bounds every wait of these tests.
const patience = 2 * time.Minute

// handler is a Handler that keeps what it is told. The hooks are set before the
// consumer runs; nil ones do nothing.
type handler struct {
	partition int32
	restore   func(attempt int) (int64, error) // attempts are counted from 1
	apply     func()                           // before a batch is kept

	inside atomic.Int32 // calls under way, to be one at most

	mu       sync.Mutex
	calls    []string // names, without Apply, Current and Tick
	restores int
	reasons  []error
	records  []*kgo.Record // since the last Drop
	next     int64         // position after the last Apply
	broken   string        // what went against Handler's contract
	current  time.Time
	ticks    int
	drain    context.Context
}

// enter notes a call and returns what ends it.
func (h *handler) enter(name string) func() {
	if h.inside.Add(1) != 1 {
		h.violated("%s called during another call", name)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.calls); n > 0 && h.calls[n-1] == "drain" {
		h.broken = name + " called after Drain"
	}
	if name != "apply" && name != "current" && name != "tick" {
		h.calls = append(h.calls, name)
	}
	return func() { h.inside.Add(-1) }
}

func (h *handler) violated(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken = fmt.Sprintf(format, args...)
}

func (h *handler) Restore(context.Context) (int64, error) {
	defer h.enter("restore")()
	h.mu.Lock()
	h.restores++
	n := h.restores
	h.mu.Unlock()
	if h.restore == nil {
		return 0, nil
	}
	at, err := h.restore(n)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next = at
	return at, err
}

func (h *handler) Apply(records []*kgo.Record, next int64, _ int32) {
	defer h.enter("apply")()
	if h.apply != nil {
		h.apply()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range records {
		if r.Offset < h.next || r.Partition != h.partition || r.Attrs.IsControl() {
			h.broken = fmt.Sprintf("record of partition %d at %d, control %v, at position %d of partition %d", r.Partition, r.Offset, r.Attrs.IsControl(), h.next, h.partition)
		}
		h.next = r.Offset + 1
		h.records = append(h.records, r)
	}
	if next < h.next {
		h.broken = fmt.Sprintf("position %d after a record at %d", next, h.next-1)
	}
	h.next = next
}

func (h *handler) Current(at time.Time) {
	defer h.enter("current")()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.current = at
}

func (h *handler) Tick(time.Time) error {
	defer h.enter("tick")()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ticks++
	return nil
}

func (h *handler) Drop(reason error) {
	defer h.enter("drop")()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.records, h.next = nil, 0
	h.reasons = append(h.reasons, reason)
}

func (h *handler) Drain(ctx context.Context) {
	defer h.enter("drain")()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drain = ctx
}

// values are those of the records kept.
func (h *handler) values() (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.records {
		out = append(out, string(r.Value))
	}
	return out
}

func (h *handler) seen() (calls []string, reasons []error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls), slices.Clone(h.reasons)
}

// logBook keeps what was logged.
type logBook struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// rig is a topic on a broker and a consumer of it.
type rig struct {
	*Consumer
	t      *testing.T
	broker *testcontainers.Kfake
	topic  string
	cl     *kgo.Client // writes to it, by partition
	log    logBook

	mu       sync.Mutex
	handlers []*handler
	client   *kgo.Client
	stop     context.CancelFunc
	done     chan error
}

func newRig(t *testing.T, partitions int) *rig {
	t.Helper()
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	r := &rig{t: t, broker: b, topic: testcontainers.NewTopic(t, b, "events", partitions, nil), done: make(chan error, 1)}
	r.connect()
	return r
}

// connect takes a new producing client, which knows nothing of the past.
func (r *rig) connect() {
	r.cl = testcontainers.Client(r.t, r.broker, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(r.topic))
}

// run starts the consumer; prepare alters each handler first, and change the
// settings.
func (r *rig) run(prepare func(*handler), change ...func(*Config)) {
	r.t.Helper()
	opts := append(ClientOptions(), kgo.SeedBrokers(r.broker.Brokers()...), kgo.MetadataMinAge(50*time.Millisecond), kgo.FetchMaxWait(100*time.Millisecond))
	var err error
	if r.client, err = kgo.NewClient(opts...); err != nil {
		r.t.Fatal(err)
	}
	cfg := Config{
		Client: r.client, Topic: r.topic, Logger: slog.New(slog.NewTextHandler(&r.log, nil)),
		Buffer: 4, Tick: 10 * time.Millisecond, Watch: 50 * time.Millisecond,
		Handler: func(p int32) Handler {
			h := &handler{partition: p}
			if prepare != nil {
				prepare(h)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.handlers = append(r.handlers, h)
			return h
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	r.Consumer = New(cfg)
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	go func() { r.done <- r.Run(ctx, context.WithValue(context.Background(), drainKey{}, "drain")) }()
	r.t.Cleanup(func() {
		r.end()
		if r.t.Failed() {
			r.t.Logf("log:\n%s", r.log.String())
		}
	})
}

type drainKey struct{}

// end stops the consumer and waits for it.
func (r *rig) end() {
	r.t.Helper()
	r.stop()
	select {
	case err := <-r.done:
		r.done <- err
		r.client.Close()
	case <-time.After(patience):
		r.t.Error("Run does not return")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.handlers {
		h.mu.Lock()
		if h.broken != "" {
			r.t.Errorf("partition %d: %s", h.partition, h.broken)
		}
		h.mu.Unlock()
	}
}

// handler returns a partition's, once there is one.
func (r *rig) handler(p int) (h *handler) {
	r.t.Helper()
	r.eventually(func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.handlers) <= p {
			return fmt.Errorf("%d handlers", len(r.handlers))
		}
		h = r.handlers[p]
		return nil
	})
	return h
}

func (r *rig) eventually(check func() error) {
	r.t.Helper()
	testcontainers.Eventually(r.t, patience, check)
}

// live waits until every partition is live and at its end.
func (r *rig) live() {
	r.t.Helper()
	ends := testcontainers.StableOffsets(r.t, r.broker, r.topic)
	r.eventually(func() error {
		parts := r.Partitions()
		if len(parts) != len(ends) {
			return fmt.Errorf("%d partitions, want %d", len(parts), len(ends))
		}
		for p, end := range ends {
			if parts[p].State() != Live || parts[p].Position() != end {
				return fmt.Errorf("partition %d: %s at %d, want live at %d; problem %q", p, parts[p].State(), parts[p].Position(), end, parts[p].Problem())
			}
		}
		return nil
	})
}

// send writes values to a partition.
func (r *rig) send(p int32, values ...string) {
	r.t.Helper()
	var recs []*kgo.Record
	for _, v := range values {
		recs = append(recs, &kgo.Record{Partition: p, Value: []byte(v)})
	}
	if err := r.cl.ProduceSync(r.t.Context(), recs...).FirstErr(); err != nil {
		r.t.Fatal(err)
	}
}

// sendUntilPaused writes numbers to both of two partitions until the first,
// whose handler hangs, is paused, and returns how many. How many batches they
// are fetched in is the broker's choice.
func (r *rig) sendUntilPaused() (n int) {
	r.t.Helper()
	r.eventually(func() error {
		for p := range int32(2) {
			r.send(p, numbers(n, 1)...)
		}
		n++
		if !r.Partitions()[0].Paused() {
			return fmt.Errorf("not paused after %d records", n)
		}
		return nil
	})
	return n
}

// hang returns what blocks a handler until release is called, at the test's end
// at the latest.
func hang(t *testing.T) (block, release func()) {
	c := make(chan struct{})
	release = sync.OnceFunc(func() { close(c) })
	t.Cleanup(release)
	return func() { <-c }, release
}

// transact writes values to a partition in a transaction that is committed or not.
func (r *rig) transact(p int32, commit kgo.TransactionEndTry, values ...string) {
	r.t.Helper()
	cl := testcontainers.Client(r.t, r.broker, kgo.TransactionalID(testcontainers.Name("tx")), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(r.topic))
	if err := cl.BeginTransaction(); err != nil {
		r.t.Fatal(err)
	}
	for _, v := range values {
		if err := cl.ProduceSync(r.t.Context(), &kgo.Record{Partition: p, Value: []byte(v)}).FirstErr(); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := cl.EndTransaction(r.t.Context(), commit); err != nil {
		r.t.Fatal(err)
	}
}

// numbers are n values that name their place.
func numbers(from, n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprint(from+i))
	}
	return out
}

// The position is the log's own: markers and aborted records count, and are
// not handed over.
func TestRecordsInOrderAndPositionsOverWhatIsNotHandedOver(t *testing.T) {
	for _, c := range []struct {
		name  string
		write func(r *rig)
		want  []string
		next  int64
	}{
		{"nothing", func(*rig) {}, nil, 0},
		{"records", func(r *rig) { r.send(0, "a", "b"); r.send(0, "c") }, []string{"a", "b", "c"}, 3},
		{"a commit marker at the end", func(r *rig) { r.send(0, "a"); r.transact(0, kgo.TryCommit, "b", "c") }, []string{"a", "b", "c"}, 4},
		{"an aborted transaction at the end", func(r *rig) { r.send(0, "a"); r.transact(0, kgo.TryAbort, "b", "c") }, []string{"a"}, 4},
		{"only an aborted transaction", func(r *rig) { r.transact(0, kgo.TryAbort, "a") }, nil, 2},
		{"transactions between records", func(r *rig) {
			r.transact(0, kgo.TryAbort, "a")
			r.send(0, "b")
			r.transact(0, kgo.TryCommit, "c")
			r.transact(0, kgo.TryAbort, "d", "e")
			r.send(0, "f")
		}, []string{"b", "c", "f"}, 9},
	} {
		t.Run(c.name, func(t *testing.T) {
			check := func(r *rig) {
				t.Helper()
				r.live()
				h := r.handler(0)
				if got := h.values(); !slices.Equal(got, c.want) {
					t.Errorf("records %v, want %v", got, c.want)
				}
				if got := r.Partitions()[0].Position(); got != c.next {
					t.Errorf("position %d, want %d", got, c.next)
				}
			}
			before := newRig(t, 1)
			c.write(before)
			before.run(nil)
			check(before)

			after := newRig(t, 1)
			after.run(nil)
			after.live()
			c.write(after)
			check(after)
		})
	}
}

func TestReadingBeginsWhereTheHandlerSays(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, numbers(0, 10)...)
	r.send(1, numbers(0, 10)...)
	r.run(func(h *handler) {
		h.restore = func(int) (int64, error) { return 4 * int64(h.partition+1), nil }
	})
	r.live()
	for p, from := range []int{4, 8} {
		if got, want := r.handler(p).values(), numbers(from, 10-from); !slices.Equal(got, want) {
			t.Errorf("partition %d: %v, want %v", p, got, want)
		}
		if got := r.Partitions()[p].Start(); got != int64(from) {
			t.Errorf("partition %d: start %d, want %d", p, got, from)
		}
	}
}

// A handler that is slow has its partition paused; whatever happens between
// pausing, resuming and fetching, no record is lost, doubled or out of order.
func TestPausingAndResumingLosesNothing(t *testing.T) {
	const partitions, total = 3, 3000
	r := newRig(t, partitions)
	var paused atomic.Int64
	r.run(func(h *handler) {
		rng := rand.New(rand.NewPCG(uint64(h.partition), 7))
		h.apply = func() {
			// Now and then behind the poll goroutine, now and then ahead of it.
			for range rng.IntN(200) * rng.IntN(2) * rng.IntN(2) {
				runtime.Gosched()
				if parts := r.Partitions(); parts[h.partition].Paused() {
					paused.Add(1)
				}
			}
		}
	})
	r.live()
	var wg sync.WaitGroup
	for p := range int32(partitions) {
		wg.Go(func() {
			for at := 0; at < total; at += 3 {
				for _, v := range numbers(at, 3) {
					r.cl.Produce(context.Background(), &kgo.Record{Partition: p, Value: []byte(v)}, nil)
				}
				if err := r.cl.Flush(context.Background()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	r.live()
	for p := range partitions {
		if got := r.handler(p).values(); !slices.Equal(got, numbers(0, total)) {
			t.Errorf("partition %d: %d records, want %d in order", p, len(got), total)
		}
		if calls, reasons := r.handler(p).seen(); len(reasons) > 0 {
			t.Errorf("partition %d: calls %v, dropped because of %v", p, calls, reasons)
		}
	}
	t.Logf("seen paused %d times", paused.Load())
}

// A partition whose handler hangs is paused with a bounded number of batches,
// and the others go on.
func TestAHandlerThatHangsIsPaused(t *testing.T) {
	r := newRig(t, 2)
	var release func()
	r.run(func(h *handler) {
		if h.partition == 0 {
			h.apply, release = hang(t)
		}
	})
	r.live()
	n := r.sendUntilPaused()
	for i := range 40 {
		r.send(0, numbers(n+i, 1)...)
		r.send(1, numbers(n+i, 1)...)
	}
	n += 40
	r.eventually(func() error {
		if got := r.handler(1).values(); !slices.Equal(got, numbers(0, n)) {
			return fmt.Errorf("the other partition has %d of %d records", len(got), n)
		}
		return nil
	})
	if got := len(r.Partitions()[0].batches); got > 4 || !r.Partitions()[0].Paused() {
		t.Errorf("%d batches held, paused %v; want it paused with at most the buffer's 4", got, r.Partitions()[0].Paused())
	}
	release()
	r.live()
	if got := r.handler(0).values(); !slices.Equal(got, numbers(0, n)) {
		t.Errorf("records %v, want %d in order", got, n)
	}
	r.eventually(func() error {
		if r.Partitions()[0].Paused() {
			return errors.New("still paused")
		}
		return nil
	})
}

// What should be read next is trimmed away while the partition is behind: it
// drops everything and restores, and never jumps over the hole in silence.
func TestOffsetOutOfRangeRestoresAgain(t *testing.T) {
	r := newRig(t, 2)
	var release func()
	var start atomic.Int64
	r.run(func(h *handler) {
		h.restore = func(int) (int64, error) { return start.Load() * int64(1-h.partition), nil }
		if h.partition == 0 {
			h.apply, release = hang(t)
		}
	})
	r.live()
	n := r.sendUntilPaused()
	for i := range 5 {
		r.send(0, numbers(n+i, 1)...)
	}
	start.Store(int64(n) + 2)
	testcontainers.DeleteRecords(t, r.broker, r.topic, 0, start.Load())
	release()
	r.live()
	h := r.handler(0)
	if got := h.values(); !slices.Equal(got, numbers(n+2, 3)) {
		t.Errorf("records after the restore %v, want those still in the log", got)
	}
	calls, reasons := h.seen()
	if want := []string{"restore", "drop", "restore"}; !slices.Equal(calls, want) || len(reasons) != 1 || !lost(reasons[0]) {
		t.Errorf("calls %v for %v, want %v for an offset out of range", calls, reasons, want)
	}
	if calls, _ := r.handler(1).seen(); !slices.Equal(calls, []string{"restore"}) {
		t.Errorf("the other partition's calls %v, want one restore", calls)
	}
	if got := r.Partitions()[0].Problem(); got != "" {
		t.Errorf("problem %q, want none any more", got)
	}
	r.send(0, "next")
	r.live()
}

func TestARestoreThatFailsIsTriedAgain(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, "a")
	broken := errors.New("nothing to be had from the snapshots")
	var failing atomic.Bool
	failing.Store(true)
	r.run(func(h *handler) {
		h.restore = func(int) (int64, error) {
			if h.partition == 0 && failing.Load() {
				return 0, broken
			}
			return 0, nil
		}
	})
	h := r.handler(0)
	r.eventually(func() error {
		p := r.Partitions()
		if calls, _ := h.seen(); len(calls) < 3 {
			return fmt.Errorf("%d attempts", len(calls))
		}
		if p[0].State() != Restoring || p[0].Problem() != broken.Error() {
			return fmt.Errorf("%s, problem %q; want restoring and the error", p[0].State(), p[0].Problem())
		}
		if p[1].State() != Live {
			return fmt.Errorf("the other partition is %s", p[1].State())
		}
		return nil
	})
	failing.Store(false)
	r.live()
	if got := r.Partitions()[0].Problem(); got != "" {
		t.Errorf("problem %q, want none any more", got)
	}
	if got := h.values(); !slices.Equal(got, []string{"a"}) {
		t.Errorf("records %v, want the one", got)
	}
	if !strings.Contains(r.log.String(), "restore failed") {
		t.Error("nothing is logged")
	}
}

// Back-off doubles: an outage costs some attempts, not thousands.
func TestRestoresBackOff(t *testing.T) {
	r := newRig(t, 1)
	began := time.Now()
	var took atomic.Int64
	r.run(func(h *handler) {
		h.restore = func(n int) (int64, error) {
			if n < 4 {
				return 0, errors.New("not yet")
			}
			took.Store(int64(time.Since(began)))
			return 0, nil
		}
	})
	r.live()
	if got := time.Duration(took.Load()); got < 700*time.Millisecond {
		t.Errorf("the fourth attempt came after %v, want 0.1 + 0.2 + 0.4 s", got)
	}
}

// A topic deleted and made anew under the same name has nothing of the old one.
func TestARecreatedTopicIsReadFromItsOwnStart(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("%d partitions instead of 2", n), func(t *testing.T) {
			r := newRig(t, 2)
			r.send(0, numbers(0, 5)...)
			r.run(nil)
			r.live()
			old := r.Topic()
			testcontainers.RecreateTopic(t, r.broker, r.topic, n, nil)
			r.connect()
			for p := range int32(n) {
				r.send(p, "new")
			}
			r.eventually(func() error {
				if r.Topic().ID == old.ID {
					return errors.New("not noticed")
				}
				for p := range n {
					if got := r.handler(p).values(); !slices.Equal(got, []string{"new"}) {
						return fmt.Errorf("partition %d: records %v", p, got)
					}
				}
				return nil
			})
			r.live()
			for p := range 2 {
				if _, reasons := r.handler(p).seen(); len(reasons) == 0 || !errors.Is(reasons[0], ErrRecreated) {
					t.Errorf("partition %d was dropped because of %v, want %v", p, reasons, ErrRecreated)
				}
			}
			if n == 1 { // the one that was gone comes back
				testcontainers.AddPartitions(t, r.broker, r.topic, 2)
				r.connect()
				r.send(1, "back")
				r.live()
				if got := r.handler(1).values(); !slices.Equal(got, []string{"back"}) {
					t.Errorf("records %v of the partition that came back", got)
				}
			}
		})
	}
}

func TestPartitionsThatAreAddedAreRead(t *testing.T) {
	r := newRig(t, 1)
	r.run(nil)
	r.live()
	testcontainers.AddPartitions(t, r.broker, r.topic, 3)
	r.connect()
	r.send(2, "a")
	r.live()
	if got := r.handler(2).values(); !slices.Equal(got, []string{"a"}) {
		t.Errorf("records %v, want the one", got)
	}
	if calls, _ := r.handler(0).seen(); !slices.Equal(calls, []string{"restore"}) {
		t.Errorf("calls of the partition that was there %v, want one restore", calls)
	}
}

// Current is only called when everything committed at that moment is applied.
func TestCurrentMeansApplied(t *testing.T) {
	r := newRig(t, 1)
	var block atomic.Pointer[chan struct{}]
	r.run(func(h *handler) {
		h.apply = func() {
			if c := block.Load(); c != nil {
				<-*c
			}
		}
	})
	r.live()
	h := r.handler(0)
	heard := func() time.Time {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.current
	}
	since := func(at time.Time) {
		t.Helper()
		r.eventually(func() error {
			if got := heard(); !got.After(at) {
				return fmt.Errorf("current as of %v, want after %v", got, at)
			}
			return nil
		})
	}
	since(time.Now())
	release := make(chan struct{})
	block.Store(&release)
	r.send(0, "a")
	sent := time.Now()
	// The watch goroutine has looked at the end again since.
	r.eventually(func() error {
		if r.Partitions()[0].End() < 1 || time.Since(sent) < 300*time.Millisecond {
			return errors.New("not looked at")
		}
		return nil
	})
	if got := heard(); got.After(sent) {
		t.Errorf("current as of %v although the record of %v is not applied", got, sent)
	}
	close(release)
	since(sent)
}

// A partition that is always a little behind still learns as of when it is whole.
func TestCurrentUnderSteadyLoad(t *testing.T) {
	h := &handler{}
	c := New(Config{Handler: func(int32) Handler { return h }})
	p := newPartition(c, 0)
	look := func(end int64) time.Time {
		at := time.Unix(end, 0)
		p.await(ending{end, at})
		return at
	}
	first := look(10)
	for offset := range int64(15) {
		p.apply(batch{records: []*kgo.Record{{Offset: offset}}})
		look(offset + 11) // what came meanwhile
		if want := offset >= 9; h.current.Equal(first) != want {
			t.Fatalf("position %d: current as of %v", offset+1, h.current)
		}
	}
}

// Drain is the last call, gets the drain context, and nothing is left running.
func TestDrain(t *testing.T) {
	r := newRig(t, 3)
	r.send(0, "a")
	r.cl.Close()
	before := runtime.NumGoroutine()
	r.run(nil)
	r.live()
	r.end()
	for p := range 3 {
		h := r.handler(p)
		calls, _ := h.seen()
		if want := []string{"restore", "drain"}; !slices.Equal(calls, want) {
			t.Errorf("partition %d: calls %v, want %v", p, calls, want)
		}
		if h.drain.Value(drainKey{}) != "drain" {
			t.Errorf("partition %d: Drain got another context", p)
		}
		if got := r.Partitions()[p].State(); got != Draining {
			t.Errorf("partition %d: %s, want draining", p, got)
		}
		if h.ticks == 0 {
			t.Errorf("partition %d: Tick was never called", p)
		}
	}
	r.eventually(func() error {
		if n := runtime.NumGoroutine(); n > before {
			return fmt.Errorf("%d goroutines, %d before", n, before)
		}
		return nil
	})
}

// Stopping does not wait for what cannot come: a topic that is not there, a
// restore that fails, a hand-over nobody takes.
func TestStoppingAtAnyMoment(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(*handler)
		change  func(*Config)
		want    []string // calls
	}{
		{"before the topic is there", nil, func(c *Config) { c.Topic = "nowhere" }, nil},
		{"while restores fail", func(h *handler) { h.restore = func(int) (int64, error) { return 0, errors.New("no") } }, nil, []string{"restore", "drain"}},
		{"while restores fail at an offset that is not there", func(h *handler) { h.restore = func(int) (int64, error) { return 1 << 40, nil } }, nil, []string{"restore", "drain"}},
		{"while it reads", nil, nil, []string{"restore", "drain"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, 1)
			r.send(0, "a")
			r.run(c.prepare, func(cfg *Config) {
				if c.change != nil {
					c.change(cfg)
				}
			})
			if c.want != nil {
				h := r.handler(0)
				r.eventually(func() error {
					if calls, _ := h.seen(); len(calls) == 0 {
						return errors.New("not restored")
					}
					return nil
				})
				r.end()
				calls, _ := h.seen()
				if calls[0] != c.want[0] || calls[len(calls)-1] != c.want[1] {
					t.Errorf("calls %v, want to begin and end with %v", calls, c.want)
				}
				return
			}
			r.eventually(func() error {
				if r.Problem() == "" {
					return errors.New("no problem is shown")
				}
				return nil
			})
			r.end()
			if err := <-r.done; !errors.Is(err, context.Canceled) {
				t.Errorf("Run returned %v, want that it was cancelled", err)
			}
			r.done <- nil
		})
	}
}

func TestStateNames(t *testing.T) {
	for s, want := range map[State]string{Restoring: "restoring", CatchingUp: "catching-up", Live: "live", Draining: "draining", 9: "unknown", -1: "unknown"} {
		if got := s.String(); got != want {
			t.Errorf("State(%d) is %q, want %q", s, got, want)
		}
	}
}
