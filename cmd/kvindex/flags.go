// This file has the flags that several commands share.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/pipeline/query/client"
	"kvindex/pipeline/secure"
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
	fs.StringVar(p, "group", defaultGroup, "consumer `group` whose offsets show the floors; the same for all instances that belong together")
}

// outputFlag is --output text|json.
func outputFlag(fs *pflag.FlagSet, p *string) {
	*p = "text"
	fs.Var(&choice{p, []string{"text", "json"}}, "output", "output `format`: text or json")
}

// timeoutFlag is --timeout, above 0.
func timeoutFlag(fs *pflag.FlagSet, p *time.Duration, value time.Duration, usage string) {
	*p = value
	fs.Var((*positive)(p), "timeout", usage)
}

// positive is a flag that is a time above 0.
type positive time.Duration

func (p *positive) String() string { return time.Duration(*p).String() }
func (p *positive) Type() string   { return "duration" }
func (p *positive) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err == nil && d <= 0 {
		err = errors.New("must be above 0")
	}
	*p = positive(d)
	return err
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
func (c *choice) values() []string { return c.of }
func (c *choice) Type() string     { return "string" }
func (c *choice) Set(s string) error {
	if !slices.Contains(c.of, s) {
		return fmt.Errorf("%q is not one of %s", s, strings.Join(c.of, ", "))
	}
	*c.value = s
	return nil
}

// stageAccess is how a command reaches a stage.
type stageAccess struct {
	address  string
	security secure.Client
}

func (a *stageAccess) flags(fs *pflag.FlagSet) {
	fs.StringVar(&a.address, "query-address", defaultQueryAddress, "the stage's gRPC `host:port`")
	fs.BoolVar(&a.security.TLS, "tls", false, "use TLS to reach the stage")
	fs.StringVar(&a.security.CAFile, "ca-file", "", "trust the CA certificates in this `file` (default: the system's)")
	fs.StringVar(&a.security.CertFile, "cert-file", "", "client certificate for the stage, in this `file`")
	fs.StringVar(&a.security.KeyFile, "key-file", "", "private key of the certificate, in this `file`")
	fs.StringVar(&a.security.TokenFile, "token-file", "", "bearer token for the stage, in this `file`")
}

// dial returns a client of the stage; it is not connected yet.
func (a *stageAccess) dial(timeout time.Duration) (*client.Client, error) {
	if a.address == "" {
		return nil, usagef("--query-address must not be empty")
	}
	if err := a.security.Validate(); err != nil {
		return nil, usageError{err}
	}
	cl, err := client.Dial(a.address, timeout, a.security.DialOptions()...)
	if err != nil {
		return nil, usageError{err}
	}
	return cl, nil
}

// kafkaAccess is how a command reaches Kafka.
type kafkaAccess struct {
	brokers  []string
	security secure.Kafka
}

func (a *kafkaAccess) flags(fs *pflag.FlagSet) {
	brokersFlag(fs, &a.brokers)
	kafkaSecurityFlags(fs, &a.security)
}

// kafkaSecurityFlags are those of secured brokers.
func kafkaSecurityFlags(fs *pflag.FlagSet, k *secure.Kafka) {
	fs.BoolVar(&k.TLS, "kafka-tls", false, "use TLS to reach Kafka")
	fs.StringVar(&k.CAFile, "kafka-ca-file", "", "trust the CA certificates in this `file` (default: the system's)")
	fs.StringVar(&k.CertFile, "kafka-cert-file", "", "client certificate for the brokers, in this `file`")
	fs.StringVar(&k.KeyFile, "kafka-key-file", "", "private key of the certificate, in this `file`")
	fs.StringVar(&k.Mechanism, "kafka-sasl-mechanism", "", "log in to Kafka with this SASL `mechanism`: "+strings.Join(secure.Mechanisms, ", "))
	fs.StringVar(&k.User, "kafka-user", "", "user `name` to log in to Kafka with")
	fs.StringVar(&k.PasswordFile, "kafka-password-file", "", "password of the user, in this `file` (default: "+secure.KafkaPasswordEnv+")")
	fs.StringVar(&k.TokenFile, "kafka-token-file", "", "token for oauthbearer, in this `file`, which is read for each login")
}

// options are the brokers and how to be let in.
func (a *kafkaAccess) options() ([]kgo.Opt, error) {
	if err := errors.Join(secure.CheckBrokers(a.brokers), a.security.Validate()); err != nil {
		return nil, usageError{err}
	}
	if what := a.security.Exposed(); what != "" {
		slog.Warn(what)
	}
	return append(a.security.Options(), kgo.SeedBrokers(a.brokers...)), nil
}

// client connects to the brokers, and fails if none answers.
func (a *kafkaAccess) client(ctx context.Context, opts ...kgo.Opt) (*kgo.Client, error) {
	own, err := a.options()
	if err != nil {
		return nil, err
	}
	cl, err := kafkaClient(a.brokers, append(own, opts...)...)
	if err != nil {
		return nil, err
	}
	if err := ping(ctx, cl, a.brokers); err != nil {
		cl.Close()
		return nil, err
	}
	return cl, nil
}

// brokersPatience is how long brokers may take to say anything at all: one that
// hangs, or a port that is something else's, would be waited for without end.
var brokersPatience = 5 * time.Second

// ping sees whether a broker answers.
func ping(ctx context.Context, cl *kgo.Client, brokers []string) error {
	bounded, cancel := context.WithTimeout(ctx, brokersPatience)
	defer cancel()
	err := cl.Ping(bounded)
	if err == nil {
		return nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("nothing within %v", brokersPatience)
	}
	return fmt.Errorf("no broker answers at %s: %w", strings.Join(brokers, ","), err)
}

// kafkaClient connects to the brokers as every command does.
func kafkaClient(brokers []string, opts ...kgo.Opt) (*kgo.Client, error) {
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(brokers...), kgo.ClientID("kvindex")}, opts...)...)
	if err != nil {
		return nil, usageError{fmt.Errorf("brokers %s: %w", strings.Join(brokers, ","), err)}
	}
	return cl, nil
}
