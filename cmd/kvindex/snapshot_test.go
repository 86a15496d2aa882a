package main

// This file tests what snapshot inspect says of a log that its snapshots have seen more of.

import (
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/consumer"
	"kvindex/schemas"
	"kvindex/snapshot"
	"kvindex/testcontainers"
)

func TestInspectOfATruncatedLog(t *testing.T) {
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	cl := testcontainers.Client(t, b)
	events := testcontainers.NewTopic(t, b, "events", 1, nil)
	topic := testcontainers.NewTopic(t, b, "snapshots", 2, map[string]string{"cleanup.policy": "compact"})
	source, err := consumer.DescribeTopic(t.Context(), cl, events)
	if err != nil {
		t.Fatal(err)
	}
	w, err := snapshot.NewWriter(snapshot.WriterConfig{
		Group: "g", Source: source, Topic: topic, Client: cl, Opts: []kgo.Opt{kgo.SeedBrokers(b.Brokers()...)},
		Reader: snapshot.NewReader(snapshot.ReaderConfig{Client: cl, Topic: topic}),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	inspect := func() executed {
		return executeOf(t.Context(), commands(), strings.NewReader(""), "snapshot", "inspect", "--brokers", strings.Join(b.Brokers(), ","), "--topic", events, "--snapshot-topic", topic)
	}
	for range 50 {
		cl.Produce(t.Context(), &kgo.Record{Topic: events}, nil)
	}
	if err := cl.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "unusable: floor is 51, but " + events + " partition 0 ends at 50: the log was truncated"} {
		at := int64(50 + i)
		m := schemas.Manifest{Worker: "w", W: at, LeaderEpoch: -1, Model: "m", BlockSize: 16, Producer: "p"}
		res, err := w.Write(t.Context(), snapshot.Round{Position: at, Dumps: []snapshot.Dump{{Manifest: m}}})
		if err != nil || len(res.Refused) > 0 {
			t.Fatal(res, err)
		}
		code := 0
		if want != "" {
			code = codeCheck
		}
		if got := inspect(); got.code != code || !strings.Contains(got.out, want) {
			t.Errorf("floor %d: exit code %d, want %d\n%s%s", at, got.code, code, got.out, got.err)
		}
	}
}
