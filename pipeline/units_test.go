package pipeline

// This file tests what needs no broker: owners, the broker's clock, the log's
// limiter, models, settings, counters.

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvindex/index"
	"kvindex/pipeline/query"
)

func TestOwners(t *testing.T) {
	type state struct{ elsewhere, rivalled bool }
	beaten, rival, lost := state{elsewhere: true}, state{rivalled: true}, state{true, true}
	for _, c := range []struct {
		name   string
		claims []claim
		want   []state
	}{
		{"nobody else's", []claim{{partition: 0, epoch: 1}}, []state{{}}},
		{"ranks of one partition", []claim{{partition: 0, epoch: 1}, {partition: 0, epoch: 2}, {partition: 0, epoch: 2}}, []state{{}, {}, {}}},
		{"a newer epoch", []claim{{partition: 0, epoch: 1, since: 10}, {partition: 1, epoch: 2, since: 5}}, []state{beaten, {}}},
		{"of one epoch the older", []claim{{partition: 0, epoch: 1, since: 20}, {partition: 1, epoch: 1, since: 10}}, []state{lost, rival}},
		{"of one age the lower partition", []claim{{partition: 1, epoch: 1, since: 10}, {partition: 0, epoch: 1, since: 10}}, []state{lost, rival}},
		{"one rank's epoch beats all that are older", []claim{{partition: 0, epoch: 5}, {partition: 0, epoch: 7}, {partition: 1, epoch: 6}}, []state{beaten, {}, beaten}},
		{"three partitions", []claim{{partition: 0, epoch: 5}, {partition: 1, epoch: 6}, {partition: 2, epoch: 6}}, []state{beaten, rival, lost}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newOwners()
			check := func(when string, want func(i int) state) {
				t.Helper()
				for i, x := range c.claims {
					if got := (state{x.rank.elsewhere.Load(), x.rank.rivalled.Load()}); got != want(i) {
						t.Errorf("%s: claim %d: %+v, want %+v", when, i, got, want(i))
					}
				}
			}
			for i := range c.claims {
				c.claims[i].rank = new(rank)
				o.claims("w", claim{rank: c.claims[i].rank, partition: c.claims[i].partition, epoch: -1})
			}
			for _, x := range slices.Backward(c.claims) {
				o.claims("w", x)
			}
			check("all claimed", func(i int) state { return c.want[i] })
			for i, x := range c.claims {
				o.release("w", x.rank)
				if got := o.beaten("w", x); got != c.want[i].elsewhere {
					t.Errorf("claim %d would be beaten: %v", i, got)
				}
				o.claims("w", x)
			}
			check("claimed again", func(i int) state { return c.want[i] })
			for _, x := range c.claims {
				o.release("w", x.rank)
				o.release("w", x.rank)
			}
			if len(o.workers) != 0 {
				t.Errorf("left are %v", o.workers)
			}
		})
	}
}

// Only a transaction that outlives any of a stage's own is another's.
func TestHeld(t *testing.T) {
	began := time.UnixMilli(0)
	var h *held
	for i, c := range []struct {
		stable, end int64
		after       time.Duration
		since       time.Duration // -1: none is open
		foreign     bool
	}{
		{5, 5, 0, -1, false},
		{5, 9, time.Second, time.Second, false},
		{5, 12, heldLimit + time.Second, time.Second, false},
		{5, 12, heldLimit + 2*time.Second, time.Second, true},
		{7, 12, heldLimit + 3*time.Second, heldLimit + 3*time.Second, false},
		{7, 12, 2 * time.Hour, heldLimit + 3*time.Second, true},
		{12, 12, 3 * time.Hour, -1, false},
	} {
		now := began.Add(c.after)
		h = h.look(c.stable, c.end, now)
		if _, foreign := h.problem(now); foreign != c.foreign || (h == nil) != (c.since < 0) || h != nil && h.since.Sub(began) != c.since {
			t.Errorf("look %d: %+v, foreign %v, want %+v", i, h, foreign, c)
		}
	}
}

// The clock is the newest record's timestamp, plus the time since it arrived
// during which it is known that nothing newer was there.
func TestBrokerClock(t *testing.T) {
	at := func(ms int) time.Time { return epoch0.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct {
		name string
		do   func(c *brokerClock)
		now  int // milliseconds of this machine
		want int64
	}{
		{"nothing heard", func(*brokerClock) {}, 1000, 0},
		{"nothing heard, up to date", func(c *brokerClock) { c.upTo(at(900)) }, 1000, 0},
		{"stands still while it is not known to be up to date", func(c *brokerClock) { c.heard(5000, at(100)) }, 1000, 5000},
		{"stands still when that was known before the record", func(c *brokerClock) { c.upTo(at(50)); c.heard(5000, at(100)) }, 1000, 5000},
		{"goes on as far as that is known", func(c *brokerClock) { c.heard(5000, at(100)); c.upTo(at(300)) }, 1000, 5200},
		{"and no farther than now", func(c *brokerClock) { c.heard(5000, at(100)); c.upTo(at(2000)) }, 1000, 5900},
		{"is not turned back by an older record", func(c *brokerClock) { c.heard(5000, at(100)); c.heard(4000, at(200)); c.upTo(at(300)) }, 1000, 5200},
		{"takes the newer record", func(c *brokerClock) { c.heard(5000, at(100)); c.heard(5050, at(200)); c.upTo(at(300)) }, 1000, 5150},
		{"begins anew", func(c *brokerClock) { c.heard(5000, at(100)); c.upTo(at(300)); c.reset() }, 1000, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var clock brokerClock
			c.do(&clock)
			if got := clock.now(at(c.now)); got != c.want {
				t.Errorf("now %d, want %d", got, c.want)
			}
			if got, want := clock.age(4990, at(c.now)), max(0, c.want-4990); got != time.Duration(want)*time.Millisecond {
				t.Errorf("age of 4990 %v, want %d ms", got, want)
			}
		})
	}
}

func TestLogLimiter(t *testing.T) {
	var l logLimiter
	now := time.Now()
	for i := range logBurst {
		if ok, more := l.allow(gaps, now); !ok || more != 0 {
			t.Errorf("line %d: %v with %d held back, want it through", i, ok, more)
		}
	}
	for range 7 {
		if ok, _ := l.allow(gaps, now.Add(logWindow-1)); ok {
			t.Error("a line past the burst is let through")
		}
	}
	if ok, more := l.allow(recordsInvalid, now); !ok || more != 0 {
		t.Errorf("another kind: %v with %d held back, want it through", ok, more)
	}
	if ok, more := l.allow(gaps, now.Add(logWindow)); !ok || more != 7 {
		t.Errorf("in the next window: %v with %d held back, want it through with 7", ok, more)
	}
	if ok, more := l.allow(gaps, now.Add(logWindow)); !ok || more != 0 {
		t.Errorf("after it: %v with %d held back, want it through with none", ok, more)
	}
}

func TestModels(t *testing.T) {
	flash, dynamo, wide := modelKey{"m", 16, index.Flash}, modelKey{"m", 16, index.Dynamo}, modelKey{"m", 32, index.Flash}
	start := func(limit int, allowed ...ModelConfig) *models {
		return newModels(&Config{MaxModels: limit, JumpSize: 32, Structure: "positional", Models: allowed})
	}
	make := func(t *testing.T, m *models, keys ...modelKey) {
		t.Helper()
		for _, k := range keys {
			if _, err := m.get(k); err != nil {
				t.Fatal(err)
			}
		}
	}

	t.Run("one index a key, whoever asks first", func(t *testing.T) {
		m := start(9)
		got := [8]*query.Model{}
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() { got[i], _ = m.get(flash) })
		}
		wg.Wait()
		for _, x := range got {
			if x == nil || x != got[0] {
				t.Fatalf("%v, want one", got)
			}
		}
	})
	t.Run("opaque hashes have a tree, others what is configured", func(t *testing.T) {
		m := start(9)
		for _, h := range []index.Hasher{index.Flash, index.Dynamo, index.Opaque} {
			x, err := m.get(modelKey{"m", 16, h})
			if err != nil {
				t.Fatal(err)
			}
			_, err = x.Index.AddWorker("w", 0, nil).Store(index.Device, index.Stored{Locals: locals(1, 1), Hashes: []index.SeqHash{7}})
			if refused := errors.Is(err, index.ErrOpaqueHash); refused != (h != index.Opaque) {
				t.Errorf("hasher %s: storing an opaque hash gave %v", h, err)
			}
		}
	})
	t.Run("to allow is not to make", func(t *testing.T) {
		m := start(9)
		if err := m.allow(flash); err != nil || len(m.all()) != 0 {
			t.Errorf("%v and %d models, want neither", err, len(m.all()))
		}
	})
	t.Run("the limit", func(t *testing.T) {
		m := start(2)
		make(t, m, flash, dynamo)
		if _, err := m.get(wide); err == nil || m.allow(wide) == nil {
			t.Error("a third model is made, the limit is 2")
		}
		make(t, m, dynamo) // is there
	})
	t.Run("an index goes with its last worker-rank, and leaves room", func(t *testing.T) {
		m := start(2)
		make(t, m, flash, flash, dynamo)
		first := m.find(flash)
		m.release(first)
		if m.find(flash) != first {
			t.Error("gone while one is of it")
		}
		m.release(first)
		if m.find(flash) != nil || m.find(dynamo) == nil {
			t.Error("there, or gone with another")
		}
		make(t, m, wide)
	})
	t.Run("only those configured, which are there from the start and stay", func(t *testing.T) {
		m := start(9, ModelConfig{"m", 16, index.Flash})
		make(t, m, flash)
		m.release(m.find(flash))
		if x, err := m.resolve("m", 0, ""); err != nil || x.BlockSize != 16 {
			t.Errorf("%+v, %v; want the one configured", x, err)
		}
		for _, k := range []modelKey{dynamo, wide, {"n", 16, index.Flash}} {
			if _, err := m.get(k); err == nil || m.allow(k) == nil {
				t.Errorf("%+v is made although it is not configured", k)
			}
		}
	})
	for _, c := range []struct {
		name      string
		have      []modelKey
		ask       string
		blockSize int
		hasher    string
		want      error
		says      string
	}{
		{"none", nil, "m", 0, "", query.ErrUnknownModel, `"m"`},
		{"another name", []modelKey{flash}, "n", 0, "", query.ErrUnknownModel, `"n"`},
		{"the only one", []modelKey{flash}, "m", 0, "", nil, ""},
		{"the only one, by its block size", []modelKey{flash}, "m", 16, "", nil, ""},
		{"another block size", []modelKey{flash}, "m", 32, "", query.ErrUnknownModel, ""},
		{"one of two block sizes", []modelKey{flash, wide}, "m", 32, "", nil, ""},
		{"either of two block sizes", []modelKey{flash, wide}, "m", 0, "", query.ErrAmbiguousModel, "block size 32"},
		{"two hashers of one block size", []modelKey{flash, dynamo}, "m", 16, "", query.ErrAmbiguousModel, "dynamo"},
		{"one of two hashers", []modelKey{flash, dynamo}, "m", 16, "dynamo", nil, ""},
		{"another hasher", []modelKey{flash}, "m", 0, "opaque", query.ErrUnknownModel, ""},
	} {
		t.Run("asking for: "+c.name, func(t *testing.T) {
			m := start(9)
			make(t, m, c.have...)
			x, err := m.resolve(c.ask, c.blockSize, c.hasher)
			if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Fatalf("error %v, want %v with %q", err, c.want, c.says)
			}
			if err == nil && (x.Name != c.ask || c.blockSize != 0 && x.BlockSize != c.blockSize || c.hasher != "" && x.Hasher.String() != c.hasher) {
				t.Errorf("model %+v, want %s with blocks of %d", x, c.ask, c.blockSize)
			}
		})
	}
}

// A fleet that changes its block size is ambiguous only as long as workers of the old
// one are known.
func TestModelOfForgottenWorkers(t *testing.T) {
	f := newFeed(t)
	f.apply(stored(nil, locals(1, 3)...))
	grace := f.p.stage.cfg.WorkerGrace
	now := f.record.Timestamp
	speak := func(after time.Duration) {
		f.record.Timestamp = now.Add(after)
		f.apply(stored(nil, locals(1, 3)...))
	}
	f.batch.Worker, f.batch.BlockSize, f.batch.Seq = []byte("worker-2"), 32, -1
	f.record.Key = f.batch.Worker
	speak(0)
	if _, err := f.p.stage.models.resolve("m", 0, ""); !errors.Is(err, query.ErrAmbiguousModel) {
		t.Errorf("two block sizes: %v", err)
	}
	speak(grace) // retired
	if _, err := f.p.stage.models.resolve("m", 64, ""); err != nil {
		t.Errorf("retired: %v", err)
	}
	speak(2 * grace) // and forgotten
	if x, err := f.p.stage.models.resolve("m", 0, ""); err != nil || x.BlockSize != 32 {
		t.Errorf("%+v, %v, want blocks of 32", x, err)
	}
}

func TestConfig(t *testing.T) {
	valid := DefaultConfig()
	if err := valid.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	if valid.Logger == nil || !strings.HasSuffix(valid.Instance, "-7400") {
		t.Errorf("logger %v, instance %q; want both filled in, the instance with its port", valid.Logger, valid.Instance)
	}
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   string // in the error, "" if there is none
	}{
		{"no brokers", func(c *Config) { c.Brokers = nil }, "brokers:"},
		{"broker without a port", func(c *Config) { c.Brokers = []string{"a:1", "b"} }, `brokers: "b"`},
		{"no topic", func(c *Config) { c.Topic = "" }, "topic:"},
		{"no snapshots", func(c *Config) { c.SnapshotTopic = "" }, ""},
		{"snapshots among the events", func(c *Config) { c.SnapshotTopic = c.Topic }, "snapshot-topic:"},
		{"no group", func(c *Config) { c.Group = "" }, "group:"},
		{"instance with a space", func(c *Config) { c.Instance = "a b" }, "instance:"},
		{"instance of 201 letters", func(c *Config) { c.Instance = strings.Repeat("x", 201) }, "instance:"},
		{"no models at all", func(c *Config) { c.MaxModels = 0 }, "max-models:"},
		{"structure that there is not", func(c *Config) { c.Structure = "trees" }, "structure:"},
		{"more models than the limit", func(c *Config) { c.MaxModels, c.Models = 1, []ModelConfig{{"a", 1, 0}, {"b", 1, 0}} }, "models: 2"},
		{"model without a name", func(c *Config) { c.Models = []ModelConfig{{"", 16, 0}} }, "models:"},
		{"model without a block size", func(c *Config) { c.Models = []ModelConfig{{"a", 0, 0}} }, "models:"},
		{"block size beyond what records can say", func(c *Config) { c.Models = []ModelConfig{{"a", math.MaxInt32 + 1, 0}} }, "models:"},
		{"jumps of nothing", func(c *Config) { c.JumpSize = 0 }, "jump-size:"},
		{"snapshots of no age", func(c *Config) { c.SnapshotMaxAge = 0 }, "snapshot-max-age:"},
		{"negative budget", func(c *Config) { c.SnapshotBudget = -1 }, "snapshot-budget:"},
		{"no budget", func(c *Config) { c.SnapshotBudget = 0 }, ""},
		{"workers of no time", func(c *Config) { c.WorkerTTL = 0 }, "worker-ttl:"},
		{"grace below silence", func(c *Config) { c.WorkerGrace = c.WorkerTTL - 1 }, "worker-grace:"},
		{"negative lag", func(c *Config) { c.ReadyLag = -1 }, "ready-lag:"},
		{"no lag", func(c *Config) { c.ReadyLag = 0 }, ""},
		{"small buffer", func(c *Config) { c.Buffer = 3 }, "buffer:"},
		{"large buffer", func(c *Config) { c.Buffer = 1025 }, "buffer:"},
		{"no time to drain", func(c *Config) { c.DrainTimeout = 0 }, "drain-timeout:"},
		{"gRPC without a port", func(c *Config) { c.GRPCListen = "localhost" }, "grpc-listen:"},
		{"HTTP without a port", func(c *Config) { c.HTTPListen = "localhost" }, "http-listen:"},
		{"no ticks", func(c *Config) { c.Tick = 0 }, "tick:"},
		{"no watch", func(c *Config) { c.Watch = 0 }, "watch:"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := DefaultConfig()
			c.change(&cfg)
			err := cfg.Validate()
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
			if _, made := New(cfg); (made == nil) != (err == nil) {
				t.Errorf("New says %v, Validate %v", made, err)
			}
		})
	}
	t.Run("everything that is wrong is said at once", func(t *testing.T) {
		err := (&Config{Instance: "?"}).Validate()
		for _, name := range []string{"brokers", "topic", "group", "instance", "max-models", "jump-size", "snapshot-max-age", "worker-ttl", "buffer", "drain-timeout", "grpc-listen", "http-listen"} {
			if !strings.Contains(fmt.Sprint(err), name+":") {
				t.Errorf("%v: nothing of %s", err, name)
			}
		}
	})
}

func TestCountersAreNamed(t *testing.T) {
	seen := map[string]bool{}
	for k, c := range counterNames {
		if !strings.HasSuffix(c.name, "_total") || !strings.HasSuffix(c.help, ".") || seen[c.name] {
			t.Errorf("counter %d is named %q and helped by %q", k, c.name, c.help)
		}
		seen[c.name] = true
	}
	var c counters
	c.add(gaps, 3)
	c.add(gaps, 0)
	if got := c[gaps].Load(); got != 3 {
		t.Errorf("%d counted, want 3", got)
	}
}

// The text about a model or a hasher that a caller made up fits into the trailers that
// clients take, 8 KiB.
func TestErrorsAboutLongNames(t *testing.T) {
	long := strings.Repeat("\x01", 1<<20)
	_, unknown := newModels(&Config{MaxModels: 1}).resolve(long, 0, "")
	_, hasher := index.ParseHasher(long)
	for _, err := range []error{unknown, hasher} {
		if n := len(err.Error()); n > 4096 {
			t.Errorf("%d bytes: %.60s", n, err)
		}
	}
	if !errors.Is(unknown, query.ErrUnknownModel) {
		t.Error(unknown)
	}
}
