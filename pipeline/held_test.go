package pipeline

// This file has a transaction of another's hold what the stage writes to the snapshot topic.

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/testcontainers"
)

// A stage says that a restart would not see its snapshots, and one that restarts reads what is
// below the transaction, says so too, and answers as before.
func TestTransactionOfAnother(t *testing.T) {
	r := newRig(t, testcontainers.NewKfake(t, testcontainers.KfakeConfig{}), 1)
	p := r.produce("w", 0)
	p.send(stored(nil, locals(1, 4)...))
	one := r.start()
	one.saved()
	foreign := testcontainers.Client(t, r.broker, kgo.TransactionalID(testcontainers.Name("foreign")), kgo.DefaultProduceTopic(r.cfg.SnapshotTopic))
	if err := foreign.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := foreign.ProduceSync(t.Context(), &kgo.Record{Key: []byte("foreign")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	p.send(stored(nil, locals(1, 8)...))
	one.saved()
	warns := func() bool {
		return slices.ContainsFunc(one.Status().Warnings, func(w string) bool {
			return strings.Contains(w, r.cfg.SnapshotTopic+"/0: a transaction that no stage has begun")
		})
	}
	one.eventually(func() error {
		one.parts[0].held.Store(nil) // of a look by the stage itself
		now := time.Now()
		one.lookForHeld(t.Context(), now.Add(-2*heldLimit))
		one.lookForHeld(t.Context(), now)
		if !warns() || one.parts[0].heldFor(now) < heldLimit {
			return errors.New("the status does not warn of the transaction")
		}
		return nil
	})
	r.mustSay("level=WARN", "a transaction that no stage has begun", "topic="+r.cfg.SnapshotTopic, "partition=0", "last_stable_offset=", "end=")
	one.abandon()
	two := r.start()
	two.same(1, 50)
	r.mustSay("level=INFO", "a transaction is open", "topic="+r.cfg.SnapshotTopic, "partition=0", "last_stable_offset=", "end=")
	if n := two.counted(recordsRead); n != 1 {
		t.Errorf("%d records were read again, want the one past the older snapshot", n)
	}
	if err := foreign.EndTransaction(t.Context(), kgo.TryAbort); err != nil {
		t.Fatal(err)
	}
	two.lookForHeld(t.Context(), time.Now())
	if h := two.parts[0].held.Load(); h != nil && h.end > h.stable+10 {
		t.Errorf("held by %+v, want it let go", h)
	}
}
