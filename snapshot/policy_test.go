package snapshot

import (
	"slices"
	"testing"
	"time"
)

var epoch = time.Unix(1_700_000_000, 0)

func TestDue(t *testing.T) {
	p := Policy{MaxAge: 5 * time.Minute, MinBytes: 10_000}
	for _, tc := range []struct {
		name string
		c    Counters
		age  time.Duration
		want Action
	}{
		{"just written", Counters{HasManifest: true}, 0, Wait},
		{"events of less than a dump", Counters{HasManifest: true, Changed: true, Blocks: 100_000, EventBytes: 900_000}, time.Minute, Wait},
		{"events of a dump", Counters{HasManifest: true, Changed: true, Blocks: 100_000, EventBytes: EstimateBytes(100_000)}, time.Minute, DumpNow},
		{"a small one's events below the minimum", Counters{HasManifest: true, Changed: true, Blocks: 10, EventBytes: 9_999}, time.Minute, Wait},
		{"a small one's events at the minimum", Counters{HasManifest: true, Changed: true, Blocks: 10, EventBytes: 10_000}, time.Minute, DumpNow},
		{"heartbeats that weigh as much", Counters{HasManifest: true, Blocks: 10, EventBytes: 10_000}, time.Minute, RefreshNow},
		{"old and changed", Counters{HasManifest: true, Changed: true, Blocks: 100_000, EventBytes: 100}, 5 * time.Minute, DumpNow},
		{"old and unchanged", Counters{HasManifest: true, Blocks: 100_000}, 5 * time.Minute, RefreshNow},
		{"nearly old", Counters{HasManifest: true, Blocks: 100_000}, 5*time.Minute - 1, Wait},
		{"new and small", Counters{Changed: true, Blocks: 1, EventBytes: 100}, time.Second, Wait},
		{"old, without blocks or manifest", Counters{EventBytes: 100}, 5 * time.Minute, DumpNow},
		{"forced", Counters{HasManifest: true, Force: true}, 0, DumpNow},
	} {
		tc.c.Saved = epoch
		if got := p.Due(tc.c, epoch.Add(tc.age)); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
	if got := (Policy{}).Due(Counters{HasManifest: true, Changed: true, Saved: epoch, Blocks: 10}, epoch.Add(1000*time.Hour)); got != Wait {
		t.Errorf("without a maximum age: %v, want %v", got, Wait)
	}
}

// The stated reason for the rule: under any load, what snapshots write stays
// below what the events weigh, and what a replay would read below the state.
func TestDueBounds(t *testing.T) {
	p := Policy{}
	var written, events, worst int64
	c := Counters{Changed: true, HasManifest: true, Blocks: 5000, Saved: epoch}
	for i := range 100_000 {
		c.EventBytes += 200
		events += 200
		c.Blocks += int64(i%7) - 3
		worst = max(worst, c.EventBytes)
		if p.Due(c, epoch) == DumpNow {
			written += EstimateBytes(c.Blocks)
			c.EventBytes = 0
		}
	}
	if written > events {
		t.Errorf("snapshots wrote %d bytes, events only %d", written, events)
	}
	if most := EstimateBytes(c.Blocks) + 1000; worst > most {
		t.Errorf("a replay would have read %d bytes, the state is %d", worst, most)
	}
}

func TestPlan(t *testing.T) {
	now := epoch.Add(time.Hour)
	urgent := func(worker string, times int64) Candidate {
		return Candidate{ID{worker, 0}, Counters{Changed: true, HasManifest: true, Blocks: 1000, EventBytes: times * EstimateBytes(1000), Saved: now}}
	}
	size := EstimateBytes(1000)
	old := Candidate{ID{"old", 0}, Counters{HasManifest: true, Blocks: 1000, Saved: epoch}}
	forced := Candidate{ID{"forced", 0}, Counters{Force: true}}
	huge := Candidate{ID{"huge", 0}, Counters{Force: true, Blocks: 1 << 30}}
	for _, tc := range []struct {
		name   string
		policy Policy
		budget *Budget
		from   []Candidate
		want   []string
	}{
		{"nobody", Policy{}, nil, nil, nil},
		{"nobody is due", Policy{}, nil, []Candidate{urgent("a", 0)}, nil},
		{"most urgent first", Policy{}, nil, []Candidate{urgent("a", 1), urgent("b", 3), urgent("c", 2), forced}, []string{"forced", "b", "c", "a"}},
		{"ties by worker", Policy{}, nil, []Candidate{urgent("b", 2), urgent("a", 2)}, []string{"a", "b"}},
		{"by age too", Policy{MaxAge: 20 * time.Minute}, nil, []Candidate{urgent("a", 2), old, urgent("b", 4)}, []string{"b", "old", "a"}},
		{"so many a round", Policy{RoundCount: 2}, nil, []Candidate{urgent("a", 1), urgent("b", 3), urgent("c", 2)}, []string{"b", "c"}},
		{"so many bytes a round", Policy{RoundBytes: 2*size + 1}, nil, []Candidate{urgent("a", 1), urgent("b", 3), urgent("c", 2)}, []string{"b", "c"}},
		{"a single one too large", Policy{RoundBytes: size}, nil, []Candidate{huge, urgent("a", 1)}, []string{"huge"}},
		{"an empty budget", Policy{}, NewBudget(1, size), []Candidate{urgent("a", 1), urgent("b", 3)}, []string{"b"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for range 2 { // the order of the candidates does not matter
				b := tc.budget
				if b != nil {
					fresh := NewBudget(int64(b.rate), int64(b.burst))
					b = fresh
				}
				var got []string
				for _, p := range tc.policy.Plan(nil, slices.Clone(tc.from), b, now) {
					got = append(got, p.ID.Worker)
					if p.Action == Wait || p.Bytes <= 0 {
						t.Errorf("pick %+v", p)
					}
				}
				if !slices.Equal(got, tc.want) {
					t.Errorf("picked %v, want %v", got, tc.want)
				}
				slices.Reverse(tc.from)
			}
		})
	}
}

func TestBudget(t *testing.T) {
	b := NewBudget(100, 250)
	for i, step := range []struct {
		at   time.Duration
		n    int64
		want bool
	}{
		{0, 250, true},
		{0, 1, false},
		{500 * time.Millisecond, 200, true}, // 50 were there: 150 are owed
		{time.Second, 1, false},
		{2 * time.Second, 1, false}, // just paid off
		{2010 * time.Millisecond, 1, true},
		{time.Second, 1, false}, // an earlier time gives nothing
		{time.Hour, 250, true},  // and an hour no more than the bucket holds
		{time.Hour, 1, false},
	} {
		if got := b.Spend(epoch.Add(step.at), step.n); got != step.want {
			t.Errorf("step %d, %d bytes at %v: %v, want %v", i, step.n, step.at, got, step.want)
		}
	}
	for _, b := range []*Budget{nil, NewBudget(0, 0)} {
		for range 2 {
			if !b.Spend(epoch, 1<<40) {
				t.Error("no limit was set, and it was reached")
			}
		}
	}
}
