// This file has the flags that several commands share.

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The defaults that several commands share.
const (
	defaultTopic         = "kv-events"
	defaultSnapshotTopic = "kv-snapshots"
	defaultGroup         = "kvindex"
	defaultQueryAddress  = "127.0.0.1:7400"
	defaultModel         = "demo"
	defaultBlockSize     = 64
)

func defaultBrokers() []string { return []string{"127.0.0.1:9092"} }

func brokersFlag(fs *pflag.FlagSet, p *[]string) {
	fs.StringSliceVar(p, "brokers", defaultBrokers(), "Kafka brokers to start from, `host:port,...`")
}

func topicFlag(fs *pflag.FlagSet, p *string) {
	fs.StringVar(p, "topic", defaultTopic, "`topic` of the KV events")
}

func snapshotTopicFlag(fs *pflag.FlagSet, p *string) {
	fs.StringVar(p, "snapshot-topic", defaultSnapshotTopic, "`topic` of the snapshots")
}

func groupFlag(fs *pflag.FlagSet, p *string) {
	fs.StringVar(p, "group", defaultGroup, "consumer `group` whose offsets show the floors, and whose name the stages that belong together share")
}

func queryAddressFlag(fs *pflag.FlagSet, p *string) {
	fs.StringVar(p, "query-address", defaultQueryAddress, "the stage's gRPC `host:port`")
}

// outputFlag is --output text|json.
func outputFlag(fs *pflag.FlagSet, p *string) {
	*p = "text"
	fs.Var(&choice{p, []string{"text", "json"}}, "output", "print as text or json `format`")
}

// choice is a flag that has one of a few values.
type choice struct {
	value *string
	of    []string
}

func (c *choice) String() string {
	if c.value == nil { // pflag asks a zero value, to see whether a default is one
		return ""
	}
	return *c.value
}
func (c *choice) Type() string { return "string" }
func (c *choice) Set(s string) error {
	if !slices.Contains(c.of, s) {
		return fmt.Errorf("%q is not one of %s", s, strings.Join(c.of, ", "))
	}
	*c.value = s
	return nil
}

// kafkaClient connects to the brokers as every command does.
func kafkaClient(brokers []string, opts ...kgo.Opt) (*kgo.Client, error) {
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(brokers...), kgo.ClientID("kvindex")}, opts...)...)
	if err != nil {
		return nil, usageError{fmt.Errorf("brokers %s: %w", strings.Join(brokers, ","), err)}
	}
	return cl, nil
}
