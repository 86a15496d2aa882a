// This file runs the stage.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"kvindex/index"
	"kvindex/pipeline"
	"kvindex/pipeline/secure"
)

const serveLong = `Run the stage: read the events topic, keep the index, answer queries, write snapshots.

Every instance reads all partitions and is a full replica; start several with the
same --group and they share the duty of writing snapshots. An instance is ready,
on /readyz and in gRPC health, once every partition has been restored and has
caught up. SIGTERM drains: readiness goes first, queries finish, last snapshots
are written.`

const serveExample = `  kvindex serve
  kvindex serve --brokers b1:9092,b2:9092 --group prod --http-listen 0.0.0.0:9501
  kvindex serve --models meta-llama/Llama-3.3-70B:64,qwen3:16:dynamo
  kvindex serve --config kvindex.yaml --check-config`

func serveCommand() command {
	cfg := pipeline.DefaultConfig()
	var check bool
	var kafka secure.Kafka
	return command{
		use:     "serve",
		short:   "Run the stage",
		long:    serveLong,
		example: serveExample,
		flags: func(fs *pflag.FlagSet) {
			brokersFlag(fs, &cfg.Brokers)
			kafkaSecurityFlags(fs, &kafka)
			topicFlag(fs, &cfg.Topic)
			fs.StringVar(&cfg.SnapshotTopic, "snapshot-topic", cfg.SnapshotTopic, "`topic` of the snapshots; empty: none, so that a restart replays all events")
			groupFlag(fs, &cfg.Group)
			fs.StringVar(&cfg.Instance, "instance", cfg.Instance, "this instance's `name`, unique and the same after a restart (default: host name and gRPC port)")
			fs.StringVar(&cfg.GRPCListen, "grpc-listen", cfg.GRPCListen, "serve gRPC on `host:port`")
			fs.StringVar(&cfg.HTTPListen, "http-listen", cfg.HTTPListen, "serve HTTP (JSON API, health, metrics) on `host:port`")
			fs.StringVar(&cfg.TLS.CertFile, "tls-cert-file", "", "serve TLS on both ports, with the certificate in this `file`")
			fs.StringVar(&cfg.TLS.KeyFile, "tls-key-file", "", "private key of the certificate, in this `file`")
			fs.StringVar(&cfg.TLS.ClientCAFile, "tls-client-ca-file", "", "require callers to have a certificate from a CA in this `file`")
			fs.StringVar(&cfg.AuthTokenFile, "auth-token-file", "", "require callers to send a bearer token from this `file`: one a line, and if it expires, after a blank, when")
			fs.BoolVar(&cfg.OpenMetrics, "open-metrics", false, "serve /metrics to everybody, like /healthz and /readyz")
			fs.Var((*modelsFlag)(&cfg.Models), "models", "serve only these, `name:block-size[:hasher],...` (default: all that appear)")
			fs.IntVar(&cfg.MaxModels, "max-models", cfg.MaxModels, "refuse models beyond this `number`")
			fs.DurationVar(&cfg.SnapshotMaxAge, "snapshot-max-age", cfg.SnapshotMaxAge, "write a worker's snapshot again after this `time` at the latest")
			fs.Int64Var(&cfg.SnapshotBudget, "snapshot-budget", cfg.SnapshotBudget, "write at most this many `bytes` of snapshots a second; 0: no limit")
			fs.DurationVar(&cfg.WorkerTTL, "worker-ttl", cfg.WorkerTTL, "leave a worker out of answers once it has been silent for this `time`")
			fs.DurationVar(&cfg.WorkerGrace, "worker-grace", cfg.WorkerGrace, "retire a worker once it has been silent for this `time`")
			fs.Int64Var(&cfg.ReadyLag, "ready-lag", cfg.ReadyLag, "count a partition as live once it is within this many `offsets` of its end")
			fs.IntVar(&cfg.Buffer, "buffer", cfg.Buffer, "fetched `batches` that a partition may hold before it is paused")
			fs.StringVar(&cfg.Structure, "structure", cfg.Structure, "`structure` of the index: runs, or positional (larger and slower, same answers)")
			fs.IntVar(&cfg.JumpSize, "jump-size", cfg.JumpSize, "`blocks` that a search jumps over at a time; only with --structure positional")
			fs.IntVar(&cfg.Limits.MaxBlocks, "max-blocks", cfg.Limits.MaxBlocks, "refuse queries of more `blocks`")
			fs.IntVar(&cfg.Limits.MaxRequestBytes, "max-request-bytes", cfg.Limits.MaxRequestBytes, "refuse requests of more `bytes`")
			fs.DurationVar(&cfg.Limits.Deadline, "query-deadline", cfg.Limits.Deadline, "give up a query after this `time`")
			fs.IntVar(&cfg.Limits.MaxConcurrent, "max-concurrent", 0, "work on at most this `number` of queries at once; 0: twice the processors")
			fs.IntVar(&cfg.Limits.MaxQueue, "max-queue", 0, "let at most this `number` of queries wait behind those, and refuse the rest; 0: 16 times max-concurrent")
			fs.DurationVar(&cfg.Limits.QueueTimeout, "queue-timeout", cfg.Limits.QueueTimeout, "refuse a query that has waited for this `time`")
			fs.IntVar(&cfg.Limits.MaxRunnable, "max-runnable", cfg.Limits.MaxRunnable, "refuse queries while more than this `number` of goroutines wait for each processor")
			fs.IntVar(&cfg.Limits.MaxConnections, "max-connections", cfg.Limits.MaxConnections, "accept at most this `number` of connections on each port")
			fs.IntVar(&cfg.Limits.MaxUnreadBytes, "max-unread-bytes", cfg.Limits.MaxUnreadBytes, "keep at most this many `bytes` of answers that callers have not read yet; beyond that refuse queries")
			fs.DurationVar(&cfg.Limits.RequestTimeout, "request-timeout", cfg.Limits.RequestTimeout, "give up a request if it takes longer than this `time` to arrive, or its answer to be read")
			fs.DurationVar(&cfg.Limits.IdleTimeout, "idle-timeout", cfg.Limits.IdleTimeout, "close a connection without requests for this `time`; a proxy in front should close its own earlier")
			fs.DurationVar(&cfg.DrainTimeout, "drain-timeout", cfg.DrainTimeout, "after SIGTERM, finish within this `time`")
			fs.BoolVar(&check, "check-config", false, "print the settings and where each comes from, and exit, with 2 if they are wrong")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			if check {
				con.printSettings()
			}
			if err := errors.Join(cfg.Validate(), kafka.Validate()); err != nil {
				return usageError{err}
			}
			if check {
				return nil
			}
			if what := kafka.Exposed(); what != "" {
				slog.Warn(what)
			}
			cfg.KafkaOptions = kafka.Options()
			cfg.Version = buildVersion()
			cfg.Logger = slog.Default()
			stage, err := pipeline.New(cfg)
			if err != nil {
				return usageError{err}
			}
			return stage.Run(ctx)
		},
	}
}

// modelsFlag parses name:block-size[:hasher]; the name may hold colons.
type modelsFlag []pipeline.ModelConfig

func (f *modelsFlag) Type() string { return "model" }

func (f *modelsFlag) String() string {
	parts := make([]string, len(*f))
	for i, m := range *f {
		parts[i] = fmt.Sprintf("%s:%d:%s", m.Name, m.BlockSize, m.Hasher)
	}
	return strings.Join(parts, ",")
}

func (f *modelsFlag) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		m := pipeline.ModelConfig{}
		rest := part
		if i := strings.LastIndexByte(part, ':'); i >= 0 {
			if h, err := index.ParseHasher(part[i+1:]); err == nil {
				m.Hasher, rest = h, part[:i]
			}
		}
		i := strings.LastIndexByte(rest, ':')
		if i < 0 {
			return fmt.Errorf("%q: want name:block-size[:hasher]", part)
		}
		n, err := strconv.Atoi(rest[i+1:])
		if err != nil {
			return fmt.Errorf("%q: block size %q is not a number", part, rest[i+1:])
		}
		m.Name, m.BlockSize = rest[:i], n
		*f = append(*f, m)
	}
	return nil
}
