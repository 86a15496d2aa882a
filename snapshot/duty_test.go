package snapshot

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/testcontainers"
)

// holder follows one instance's events.
type holder struct {
	d    *Duty
	done chan struct{}

	mu    sync.Mutex
	holds map[int32]bool
}

func newHolder(t *testing.T, w *world, change ...func(*DutyConfig)) *holder {
	t.Helper()
	cfg := DutyConfig{Group: w.group, Topic: w.topic, Opts: []kgo.Opt{kgo.SeedBrokers(w.b.Brokers()...)}}
	for _, f := range change {
		f(&cfg)
	}
	d, err := NewDuty(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h := &holder{d: d, done: make(chan struct{}), holds: make(map[int32]bool)}
	go func() {
		defer close(h.done)
		for e := range d.Events() {
			h.mu.Lock()
			for _, p := range e.Partitions {
				if h.holds[p] == e.Assigned {
					t.Errorf("event %+v, but it holds %v", e, h.holds)
				}
				h.holds[p] = e.Assigned
			}
			h.mu.Unlock()
		}
	}()
	return h
}

func (h *holder) partitions() []int32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var p []int32
	for n := range maps.Keys(h.holds) {
		if h.holds[n] {
			p = append(p, n)
		}
	}
	slices.Sort(p)
	return p
}

// All partitions are dealt, to all instances, and given back.
func TestDuty(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 4)
		one := newHolder(t, w)
		hasAll := func() error {
			if got := one.partitions(); len(got) != 4 {
				return fmt.Errorf("one instance holds %v, want all 4", got)
			}
			return nil
		}
		testcontainers.Eventually(t, longWait, hasAll)
		two := newHolder(t, w)
		testcontainers.Eventually(t, longWait, func() error {
			all := append(one.partitions(), two.partitions()...)
			slices.Sort(all)
			if len(two.partitions()) != 2 || !slices.Equal(all, []int32{0, 1, 2, 3}) {
				return fmt.Errorf("dealt %v and %v", one.partitions(), two.partitions())
			}
			return nil
		})
		two.d.Close()
		<-two.done // the channel is closed
		testcontainers.Eventually(t, longWait, hasAll)
		one.d.Close()
		<-one.done
	})
}

// Close waits for nobody to take the events.
func TestDutyCloseUnread(t *testing.T) {
	w := newWorld(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	d, err := NewDuty(DutyConfig{Group: w.group, Topic: w.topic, Opts: []kgo.Opt{kgo.SeedBrokers(w.b.Brokers()...)}})
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	for e := range d.Events() {
		t.Logf("left: %+v", e)
	}
}

// A named instance that died has its partitions back when it is started again,
// long before its session would have ended; one that is stopped gives them up.
func TestDutyNamed(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		w := newWorld(t, b, 4)
		named := func(instance string) *holder {
			return newHolder(t, w, func(cfg *DutyConfig) { cfg.Instance, cfg.SessionTimeout = instance, 3*time.Minute })
		}
		one, two := named("one"), named("two")
		shared := func() error {
			if a, b := one.partitions(), two.partitions(); len(a) != 2 || len(b) != 2 {
				return fmt.Errorf("dealt %v and %v", a, b)
			}
			return nil
		}
		testcontainers.Eventually(t, longWait, shared)
		one.d.cl.Close() // dies: a named member does not leave by this
		had := one.partitions()
		one = named("one")
		testcontainers.Eventually(t, longWait, func() error { // its session ends after 3 minutes
			if got := one.partitions(); !slices.Equal(got, had) {
				return fmt.Errorf("it holds %v, and held %v", got, had)
			}
			return nil
		})
		two.d.leaving = longWait
		two.d.Close()
		groups, err := kadm.NewClient(w.cl).DescribeGroups(deadline(t), two.d.group)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range groups[two.d.group].Members {
			if m.InstanceID == nil || *m.InstanceID != "one" {
				t.Errorf("still in the group: %+v", m)
			}
		}
		testcontainers.Eventually(t, longWait, func() error {
			if got := one.partitions(); len(got) != 4 {
				return fmt.Errorf("it holds %v, want all 4", got)
			}
			return nil
		})
		one.d.Close()
	})
}

// An instance that may not join says so, again and again but not more often than
// it tries, and joins once it may.
func TestDutyOutsideTheGroup(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	topic := testcontainers.NewTopic(t, b, "snapshots", 2, map[string]string{"cleanup.policy": "compact"})
	var refuse atomic.Bool
	refuse.Store(true)
	b.Cluster().ControlKey(int16(kmsg.JoinGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		b.Cluster().KeepControl()
		if !refuse.Load() {
			return nil, nil, false
		}
		resp := req.ResponseKind().(*kmsg.JoinGroupResponse)
		resp.ErrorCode = kerr.GroupAuthorizationFailed.Code
		return resp, nil, true
	})
	d, err := NewDuty(DutyConfig{Group: "g", Topic: topic, Opts: []kgo.Opt{kgo.SeedBrokers(b.Brokers()...)}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	next := func() DutyEvent {
		select {
		case e := <-d.Events():
			return e
		case <-t.Context().Done():
			t.Fatal("no event")
			return DutyEvent{}
		}
	}
	for range 2 {
		if e := next(); !errors.Is(e.Err, kerr.GroupAuthorizationFailed) || !strings.Contains(e.Err.Error(), "group g-snapshot") {
			t.Errorf("event %+v, want the group and why it refuses", e)
		}
	}
	refuse.Store(false)
	for {
		if e := next(); e.Err == nil {
			if !e.Assigned || len(e.Partitions) != 2 {
				t.Errorf("event %+v, want both partitions", e)
			}
			return
		}
	}
}

// A join that the broker does not answer, as while it waits for other members,
// does not keep a Duty from closing.
func TestDutyClosesWhileJoining(t *testing.T) {
	for _, instance := range []string{"", "instance-1"} {
		t.Run(instance, func(t *testing.T) {
			b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
			topic := testcontainers.NewTopic(t, b, "snapshots", 1, map[string]string{"cleanup.policy": "compact"})
			var once sync.Once
			joining, goOn := make(chan struct{}), make(chan struct{})
			defer close(goOn)
			b.Cluster().ControlKey(int16(kmsg.JoinGroup), func(kmsg.Request) (kmsg.Response, error, bool) {
				b.Cluster().KeepControl()
				b.Cluster().SleepControl(func() {
					once.Do(func() { close(joining) })
					<-goOn
				})
				return nil, nil, false
			})
			d, err := NewDuty(DutyConfig{Group: "g", Topic: topic, Instance: instance, Opts: []kgo.Opt{kgo.SeedBrokers(b.Brokers()...)}})
			if err != nil {
				t.Fatal(err)
			}
			<-joining
			began := time.Now()
			d.Close()
			if took := time.Since(began); took > 5*leaveTimeout {
				t.Errorf("closing took %v", took)
			}
		})
	}
}
