package snapshot

// This file deals the writing duty among instances that all read everything.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// DutyConfig is what a Duty needs. Logger may be nil.
type DutyConfig struct {
	Group string // of the stage; the duty's own is "<group>-snapshot"
	Topic string // of the snapshots, whose partitions are dealt
	Opts  []kgo.Opt
	// Instance, if not empty, is this instance's name in the group (static
	// membership), of letters, digits, '.', '_' and '-'. Started again under
	// the same name after a crash, it has its partitions back at once instead
	// of after SessionTimeout.
	Instance string
	// SessionTimeout is how long a dead instance keeps its partitions: 0 means
	// 10 s. Brokers refuse less than their group.min.session.timeout.ms.
	SessionTimeout time.Duration
	Logger         *slog.Logger
}

// DutyEvent is a change of the partitions that this instance writes. The
// group's word is only a hint of who should write: that nobody else does is
// Kafka's, by fencing.
type DutyEvent struct {
	Assigned   bool    // else revoked
	Lost       bool    // revoked because this instance dropped out of the group
	Partitions []int32 // none if the group has no more for this instance
	Err        error   // nothing else is set: the instance is not in the group, and tries again until it is assigned something or nothing
}

// Duty is an instance's membership in the group that deals the partitions of
// the snapshot topic. No records flow: the topic is paused.
type Duty struct {
	cl       *kgo.Client
	cancel   context.CancelFunc // ends what the client waits for
	group    string
	instance string
	events   chan DutyEvent
	wake     chan struct{}
	stop     chan struct{}
	done     chan struct{} // forward has returned
	polled   chan struct{} // poll has

	leaving time.Duration // leaveTimeout, but in tests

	mu    sync.Mutex
	queue []DutyEvent // filled by the client's callbacks, which must not block
}

// NewDuty joins the group, in the background.
func NewDuty(cfg DutyConfig) (*Duty, error) {
	if cfg.SessionTimeout <= 0 {
		cfg.SessionTimeout = 10 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	d := &Duty{
		group:    cfg.Group + "-snapshot",
		instance: cfg.Instance,
		events:   make(chan DutyEvent),
		wake:     make(chan struct{}, 1),
		stop:     make(chan struct{}),
		done:     make(chan struct{}),
		polled:   make(chan struct{}),
		leaving:  leaveTimeout,
	}
	on := func(assigned, lost bool) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, parts map[string][]int32) {
			p := parts[cfg.Topic]
			if len(p) > 0 {
				cfg.Logger.Info("snapshot duty", "assigned", assigned, "lost", lost, "topic", cfg.Topic, "partitions", p)
			}
			if len(p) > 0 || assigned {
				d.push(DutyEvent{Assigned: assigned, Lost: lost, Partitions: append([]int32(nil), p...)})
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	d.cancel = cancel
	opts := append(append([]kgo.Opt(nil), cfg.Opts...),
		kgo.WithContext(ctx),
		kgo.ConsumerGroup(d.group),
		kgo.ConsumeTopics(cfg.Topic),
		kgo.Balancers(kgo.CooperativeStickyBalancer()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtEnd()),
		kgo.DisableAutoCommit(),
		kgo.SessionTimeout(cfg.SessionTimeout),
		kgo.HeartbeatInterval(cfg.SessionTimeout/4),
		kgo.OnPartitionsAssigned(on(true, false)),
		kgo.OnPartitionsRevoked(on(false, false)),
		kgo.OnPartitionsLost(on(false, true)),
	)
	if cfg.Instance != "" {
		opts = append(opts, kgo.InstanceID(cfg.Instance))
	}
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("snapshot duty: group %s: %w", d.group, err)
	}
	cl.PauseFetchTopics(cfg.Topic)
	d.cl = cl
	go d.forward()
	go d.poll()
	return d, nil
}

// Events returns what happens, in order. It is closed by Close.
func (d *Duty) Events() <-chan DutyEvent { return d.events }

// leaveTimeout bounds the wait for a broker that is away when a Duty closes, or
// that holds back the answer to a join until the others have joined too.
const leaveTimeout = 2 * time.Second

// Close leaves the group and returns when no event comes any more. It waits
// for nobody to take the last ones.
func (d *Duty) Close() {
	if d.instance != "" {
		// A named member that closes is only gone after its session: it might
		// come back. This one gives its partitions to the others now.
		ctx, cancel := context.WithTimeout(context.Background(), d.leaving)
		_, _ = kadm.NewClient(d.cl).LeaveGroup(ctx, kadm.LeaveGroup(d.group).Reason("stopping").InstanceIDs(d.instance))
		cancel()
		d.cancel()
	}
	timer := time.AfterFunc(d.leaving, d.cancel)
	d.cl.Close() // a nameless member leaves by this
	timer.Stop()
	d.cancel()
	close(d.stop)
	<-d.done
	<-d.polled
}

// poll takes what the client has for whoever consumes: no records, but why it
// is not in the group.
func (d *Duty) poll() {
	defer close(d.polled)
	for {
		fetches := d.cl.PollFetches(context.Background())
		if fetches.IsClientClosed() {
			return
		}
		fetches.EachError(func(_ string, _ int32, err error) {
			// Other trouble passes without a word that it has.
			if outside := (*kgo.ErrGroupSession)(nil); errors.As(err, &outside) {
				d.push(DutyEvent{Err: fmt.Errorf("group %s: %w", d.group, outside.Err)})
			}
		})
	}
}

func (d *Duty) push(e DutyEvent) {
	d.mu.Lock()
	d.queue = append(d.queue, e)
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// forward is a goroutine: it moves events from the queue, which
// takes any number, to the channel.
func (d *Duty) forward() {
	defer close(d.done)
	defer close(d.events)
	for {
		select {
		case <-d.wake:
		case <-d.stop:
			return
		}
		d.mu.Lock()
		queue := d.queue
		d.queue = nil
		d.mu.Unlock()
		for _, e := range queue {
			select {
			case d.events <- e:
			case <-d.stop:
				return
			}
		}
	}
}
