package main

import (
	"slices"
	"strings"
	"testing"

	"kvindex/testcontainers"
)

// TestTopicsCheckSaysWhatIsWrong creates topics that are wrong in one way each.
func TestTopicsCheckSaysWhatIsWrong(t *testing.T) {
	broker := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	adm := testcontainers.Admin(t, broker)
	var right topicsConfig
	events := func(change ...string) map[string]string { return changed(right.eventsSettings(), change) }
	snapshots := func(change ...string) map[string]string { return changed(right.snapshotSettings(), change) }
	for name, c := range map[string]struct {
		events         map[string]string // nil: the topic is not there
		snapshots      map[string]string
		morePartitions int32 // of snapshots
		want           []string
	}{
		"as they should be":     {events(), snapshots(), 0, nil},
		"nothing there":         {nil, nil, 0, []string{"topic E: does not exist", "topic S: does not exist"}},
		"no snapshots":          {events(), nil, 0, []string{"topic S: does not exist"}},
		"compacted events":      {events("cleanup.policy", "compact"), snapshots(), 0, []string{"topic E: cleanup.policy is compact, must be delete"}},
		"producers' timestamps": {events("message.timestamp.type", "CreateTime"), snapshots(), 0, []string{"topic E: message.timestamp.type is CreateTime"}},
		"snapshots age":         {events(), snapshots("cleanup.policy", "delete,compact"), 0, []string{"topic S: cleanup.policy is compact,delete, must be compact"}},
		"compacted at once":     {events(), snapshots("min.compaction.lag.ms", "0"), 0, []string{"topic S: min.compaction.lag.ms is 0, must be at least 3600000"}},
		"tombstones go early":   {events(), snapshots("delete.retention.ms", "1000"), 0, []string{"topic S: delete.retention.ms is 1000, must be at least 86400000"}},
		"partitions differ":     {events(), snapshots(), 1, []string{"topic S: has 4 partitions and E has 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			e, s := testcontainers.Name("e"), testcontainers.Name("s")
			for topic, settings := range map[string]map[string]string{e: c.events, s: c.snapshots} {
				if settings == nil {
					continue
				}
				partitions, configs := int32(3), map[string]*string{}
				if topic == s {
					partitions += c.morePartitions
				}
				for k, v := range settings {
					configs[k] = &v
				}
				if _, err := adm.CreateTopic(t.Context(), partitions, 1, configs, topic); err != nil {
					t.Fatal(err)
				}
			}
			got := execute(t, "topics", "check", "--brokers", strings.Join(broker.Brokers(), ","), "--topic", e, "--snapshot-topic", s)
			if want := map[bool]int{true: 0, false: codeCheck}[c.want == nil]; got.code != want {
				t.Errorf("exit code %d, want %d; %s", got.code, want, got.err)
			}
			named := strings.NewReplacer(e, "E", s, "S").Replace(got.out)
			found := strings.Count(named, "wrong: ")
			if found != len(c.want) {
				t.Errorf("%d problems, want %d:\n%s", found, len(c.want), named)
			}
			for _, w := range c.want {
				if !strings.Contains(named, "wrong: "+w) {
					t.Errorf("no word of %q in:\n%s", w, named)
				}
			}
		})
	}
}

func changed(settings map[string]string, change []string) map[string]string {
	for kv := range slices.Chunk(change, 2) {
		settings[kv[0]] = kv[1]
	}
	return settings
}

// TestTopicsCreate creates, leaves what is there alone, and finds it right.
func TestTopicsCreate(t *testing.T) {
	broker := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	args := []string{"topics", "create", "--brokers", broker.Brokers()[0], "--partitions", "5", "--retention", "1h"}
	for range 2 {
		if got := execute(t, args...); got.code != 0 {
			t.Fatalf("exit code %d: %s%s", got.code, got.out, got.err)
		}
	}
	topics, err := testcontainers.Admin(t, broker).ListTopics(t.Context(), defaultTopic, defaultSnapshotTopic)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range topics {
		if d.Err != nil || len(d.Partitions) != 5 {
			t.Errorf("%s: %d partitions, %v", d.Topic, len(d.Partitions), d.Err)
		}
	}
}

// TestTopicsCreateWantsWhatItWasAsked: a script that asks for something that is not
// so must not go on as if it were; one that leaves it to the defaults may.
func TestTopicsCreateWantsWhatItWasAsked(t *testing.T) {
	broker := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	create := func(args string) executed {
		return execute(t, append([]string{"topics", "create", "--brokers", broker.Brokers()[0]}, strings.Fields(args)...)...)
	}
	const made = "--partitions 4 --replication-factor 1 --retention 2h --retention-bytes 1000000"
	if got := create(made); got.code != 0 {
		t.Fatalf("exit code %d: %s%s", got.code, got.out, got.err)
	}
	for args, wrong := range map[string][]string{
		"":                        nil,
		made:                      nil,
		"--retention 0":           nil,
		"--replication-factor -1": nil,
		"--partitions 8":          {"topic kv-events: has 4 partitions, not the 8 asked for", "topic kv-snapshots: has 4 partitions, not the 8 asked for"},
		"--partitions 16":         {"topic kv-events: has 4 partitions, not the 16 asked for", "topic kv-snapshots: has 4 partitions, not the 16 asked for"},
		"--replication-factor 3":  {"topic kv-events: partition 0 has 1 copies, not the 3 asked for", "topic kv-snapshots: partition 0 has 1 copies, not the 3 asked for"},
		"--retention 24h":         {"topic kv-events: retention.ms is 7200000, not the 86400000 asked for"},
		"--retention-bytes 5":     {"topic kv-events: retention.bytes is 1000000, not the 5 asked for"},
	} {
		got := create(args)
		if want := map[bool]int{true: 0, false: codeCheck}[wrong == nil]; got.code != want {
			t.Errorf("%q: exit code %d, want %d; %s%s", args, got.code, want, got.out, got.err)
		}
		if n := strings.Count(got.out, "wrong: "); n != len(wrong) {
			t.Errorf("%q: %d problems, want %d:\n%s", args, n, len(wrong), got.out)
		}
		for _, w := range wrong {
			if !strings.Contains(got.out, "wrong: "+w+"\n") {
				t.Errorf("%q: no word of %q in:\n%s", args, w, got.out)
			}
		}
	}
}

// TestTwoTopics: whatever needs two topics says so when it is given one, or none.
func TestTwoTopics(t *testing.T) {
	for _, line := range []string{"topics create", "topics check", "snapshot inspect"} {
		for args, want := range map[string]string{
			"--topic same --snapshot-topic same": `events and snapshots need two topics, not "same" twice`,
			"--topic=":                           "--topic and --snapshot-topic must not be empty",
		} {
			got := execute(t, strings.Fields(line+" --brokers 127.0.0.1:1 "+args)...)
			if got.code != codeUsage || got.out != "" || !strings.HasPrefix(got.err, "kvindex: "+want) {
				t.Errorf("%s %s: exit code %d, want %d; %q, want %q", line, args, got.code, codeUsage, got.err, want)
			}
		}
	}
}
