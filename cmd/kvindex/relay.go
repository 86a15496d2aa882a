// This file runs a relay.

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvindex/index"
	"kvindex/pipeline/relay"
	"kvindex/pipeline/secure"
)

const relayLong = `Forward the KV events of unmodified engines to the events topic: vLLM and SGLang over
ZeroMQ, TensorRT-LLM over HTTP or, in its streaming form, ZeroMQ.

For one engine, as in a sidecar, use flags; --worker is the name by which routers know it,
in Kubernetes best the pod's, given as KVINDEX_WORKER. List several engines in a YAML file,
--engines FILE, with the flags from --worker to --media as keys:

  engines:
    - worker: llama-0
      kind: vllm
      events: tcp://10.0.0.1:5557
      replay: tcp://10.0.0.1:5657
      model: meta-llama/Llama-3.3-70B
      block-size: 16
      ranks: 2

Give --replay if the engine has a replay endpoint: without it each lost message or
connection discards what is known of the rank. With --state-dir a restarted relay continues
where it stopped. The relay never overstates what an engine holds: whenever something is
lost, it has the index forget the rank and show it as incomplete.

The relay is ready, on /readyz, once it has caught up with every engine and Kafka accepts
its records; /v1/status says what is missing, by worker and rank.`

const relayExample = `  kvindex relay --worker w0 --model qwen3 --block-size 16 --replay tcp://127.0.0.1:5657
  kvindex relay --kind sglang --worker w1 --model qwen3 --block-size 64 --events tcp://10.0.0.7:5557
  kvindex relay --kind trtllm --worker w2 --model qwen3 --block-size 32 --events http://127.0.0.1:8000/kv_cache_events
  KVINDEX_WORKER=$POD_NAME kvindex relay --config relay.yaml --state-dir /var/lib/kvindex
  kvindex relay --engines engines.yaml --check-config`

func relayCommand() command {
	cfg := relay.DefaultConfig()
	one := relay.Engine{Kind: relay.VLLM, Ranks: 1}
	var kafka secure.Kafka
	var file string
	var check bool
	return command{
		use:     "relay",
		short:   "Forward engines' KV events to the topic",
		long:    relayLong,
		example: relayExample,
		flags: func(fs *pflag.FlagSet) {
			brokersFlag(fs, &cfg.Brokers)
			kafkaSecurityFlags(fs, &kafka)
			topicFlag(fs, &cfg.Topic)
			for _, k := range engineKeys {
				k.flag(fs, &one)
			}
			fs.StringVar(&file, "engines", file, "read engines from this YAML `file` instead of the flags above")
			fs.StringVar(&cfg.StateDir, "state-dir", cfg.StateDir, "keep checkpoints in this `directory`; empty: none")
			fs.DurationVar(&cfg.CheckpointEvery, "checkpoint-every", cfg.CheckpointEvery, "write a rank's checkpoint after this `time`")
			fs.Int64Var(&cfg.BufferBytes, "buffer-bytes", cfg.BufferBytes, "records on their way to Kafka may take this many `bytes`; beyond that they are dropped, and everything held is sent again later")
			fs.DurationVar(&cfg.HeartbeatEvery, "heartbeat-every", cfg.HeartbeatEvery, "send a heartbeat for a quiet engine after this `time`")
			fs.DurationVar(&cfg.WorkerGrace, "worker-grace", cfg.WorkerGrace, "the stage's --worker-grace: it retires a worker silent for this `time`")
			fs.StringVar(&cfg.Instance, "instance", cfg.Instance, "this relay's `name` (default: host name)")
			fs.StringVar(&cfg.HTTPListen, "http-listen", cfg.HTTPListen, "serve health, metrics and status on `host:port`")
			fs.DurationVar(&cfg.DrainTimeout, "drain-timeout", cfg.DrainTimeout, "after SIGTERM, write what is left within this `time`")
			fs.BoolVar(&check, "check-config", false, "print the settings and where each comes from, and exit, with 2 if they are wrong")
		},
		run: func(ctx context.Context, con *console, _ []string) error {
			if check {
				con.printSettings()
			}
			if err := engines(con, file, one, &cfg); err != nil {
				return usageError{err}
			}
			if err := errors.Join(cfg.Validate(), kafka.Validate()); err != nil {
				return usageError{err}
			}
			if check {
				for i, e := range cfg.Engines {
					fmt.Fprintf(con.out, "engine %d: %s of worker %s, ranks %d to %d, model %s, blocks of %d tokens, hasher %s, events %s, replay %s\n",
						i+1, e.Kind, e.Worker, e.FirstRank, e.FirstRank+e.Ranks-1, e.Model, e.BlockSize, e.Hasher, e.Events, cmp.Or(e.Replay, "none"))
				}
				return nil
			}
			cfg.Version = buildVersion()
			cfg.Logger = slog.Default()
			if what := kafka.Exposed(); what != "" {
				slog.Warn(what)
			}
			cfg.KafkaOptions = kafka.Options()
			r, err := relay.New(cfg)
			if err != nil {
				return usageError{err}
			}
			if err = r.Run(ctx); errors.Is(err, relay.ErrStateDir) {
				return usageError{err}
			}
			return err
		},
	}
}

// engines sets the configuration's engines from the file, or else from the flags.
func engines(con *console, file string, one relay.Engine, cfg *relay.Config) (err error) {
	if file == "" {
		if one.Events == "" {
			one.Events = defaultEvents[one.Kind]
		}
		cfg.Engines = []relay.Engine{one}
		return nil
	}
	for _, s := range con.settings {
		if s.from != "default" && slices.ContainsFunc(engineKeys, func(k engineKey) bool { return k.name == s.name }) {
			return fmt.Errorf("%s (from %s) is of one engine, but engines are listed in %s", s.name, s.from, file)
		}
	}
	cfg.Engines, err = readEngines(file)
	return err
}

// defaultEvents is where an engine on this machine publishes if it is not told otherwise.
var defaultEvents = map[relay.Kind]string{
	relay.VLLM:                 "tcp://127.0.0.1:5557",
	relay.SGLang:               "tcp://127.0.0.1:5557",
	relay.TensorRTLLMStreaming: "tcp://127.0.0.1:5557",
	relay.TensorRTLLM:          "http://127.0.0.1:8000/kv_cache_events",
}

// kindFlag is a relay.Kind.
type kindFlag relay.Kind

func (f *kindFlag) values() (all []string) {
	for _, k := range relay.Kinds {
		all = append(all, string(k))
	}
	return all
}
func (f *kindFlag) Type() string   { return "kind" }
func (f *kindFlag) String() string { return string(*f) }
func (f *kindFlag) Set(s string) error {
	if !slices.Contains(relay.Kinds, relay.Kind(s)) {
		return fmt.Errorf("%q is not one of %q", s, relay.Kinds)
	}
	*f = kindFlag(s)
	return nil
}

// hasherFlag is a model's hasher.
type hasherFlag index.Hasher

func (f *hasherFlag) Type() string   { return "hasher" }
func (f *hasherFlag) String() string { return index.Hasher(*f).String() }
func (f *hasherFlag) Set(s string) error {
	h, err := index.ParseHasher(s)
	if err != nil || h == index.Opaque {
		return fmt.Errorf("%q is not flash or dynamo", s)
	}
	*f = hasherFlag(h)
	return nil
}

// mediaFlag parses word=tier,...
type mediaFlag map[string]index.Tier

func (f *mediaFlag) Type() string { return "media" }

func (f *mediaFlag) String() string {
	parts := []string{}
	for word, t := range *f {
		parts = append(parts, word+"="+t.String())
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

func (f *mediaFlag) Set(s string) error {
	out := mediaFlag{}
	for part := range strings.SplitSeq(s, ",") {
		word, name, ok := strings.Cut(part, "=")
		tier, known := tierOf(name)
		if !ok || word == "" || !known {
			return fmt.Errorf("%q: want word=tier, the tier being device, host, disk or external", part)
		}
		out[word] = tier
	}
	*f = out
	return nil
}

func tierOf(name string) (index.Tier, bool) {
	for t := range index.Tier(index.Tiers) {
		if t.String() == name {
			return t, true
		}
	}
	return 0, false
}
