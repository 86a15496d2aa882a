// This file reads a relay's file of engines. Its keys are the flags of one engine.

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kvindex/pipeline/relay"
)

// engineKey is one setting of an engine: a flag, and a key in the file.
type engineKey struct {
	name string
	flag func(*pflag.FlagSet, *relay.Engine)
}

// engineKeys are all of them, in the order that help has.
var engineKeys = []engineKey{
	{"worker", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.StringVar(&e.Worker, "worker", e.Worker, "the engine's `name`, as routers know it")
	}},
	{"kind", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.Var((*kindFlag)(&e.Kind), "kind", "the engine's `kind`: vllm, sglang, trtllm (HTTP) or trtllm-stream (ZeroMQ)")
	}},
	{"events", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.StringVar(&e.Events, "events", e.Events, "where rank 0 publishes, `tcp://host:port` (rank n has port+n) or ipc:///path; for trtllm http://host:port/path (default: the kind's own, on this host)")
	}},
	{"replay", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.StringVar(&e.Replay, "replay", e.Replay, "where rank 0 replays what was missed, likewise `tcp://host:port`; empty: nowhere")
	}},
	{"topic-prefix", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.StringVar(&e.Topic, "topic-prefix", e.Topic, "take messages whose ZeroMQ topic begins with this `prefix`; empty: all")
	}},
	{"model", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.StringVar(&e.Model, "model", e.Model, "the model's `name`, as queries have it")
	}},
	{"block-size", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.IntVar(&e.BlockSize, "block-size", e.BlockSize, "the engine's block (or page) size in `tokens`")
	}},
	{"hasher", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.Var((*hasherFlag)(&e.Hasher), "hasher", "the model's `hasher`: flash or dynamo")
	}},
	{"eagle", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.BoolVar(&e.Eagle, "eagle", e.Eagle, "the engine hashes a block together with the token after it, as with EAGLE drafting")
	}},
	{"ranks", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.IntVar(&e.Ranks, "ranks", e.Ranks, "`number` of data parallel ranks")
	}},
	{"first-rank", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.IntVar(&e.FirstRank, "first-rank", e.FirstRank, "`number` of the first of them")
	}},
	{"media", func(fs *pflag.FlagSet, e *relay.Engine) {
		fs.Var((*mediaFlag)(&e.Media), "media", "tiers of a connector's own kinds of memory, `word=tier,...`")
	}},
}

// maxEnginesFile bounds the file, in bytes.
const maxEnginesFile = 16 << 20

// errEngines says that a file is no list of engines.
var errEngines = errors.New("want a list under the one key engines")

// enginesFile is what is in the file; an unknown key's error names it.
type enginesFile struct {
	Engines []yaml.Node `yaml:"engines"`
}

// readEngines reads the file of engines. Errors name file, line and engine.
func readEngines(file string) ([]relay.Engine, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("engines: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxEnginesFile+1))
	if err == nil && len(text) > maxEnginesFile {
		err = fmt.Errorf("more than %d bytes", maxEnginesFile)
	}
	if err != nil {
		return nil, fmt.Errorf("engines file %s: %w", file, err)
	}
	var doc enginesFile
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&doc); err != nil {
		return nil, fmt.Errorf("engines file %s: %w: %w", file, errEngines, err)
	}
	if err := d.Decode(new(yaml.Node)); err != io.EOF {
		return nil, fmt.Errorf("engines file %s: more than one document", file)
	}
	if len(doc.Engines) == 0 {
		return nil, fmt.Errorf("engines file %s: no engines: %w", file, errEngines)
	}
	all := make([]relay.Engine, len(doc.Engines))
	var errs []error
	for i := range doc.Engines {
		node := &doc.Engines[i]
		e, err := readEngine(node)
		if err == nil {
			err = e.Validate()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("engines file %s, line %d, engine %d (%q): %w", file, node.Line, i+1, e.Worker, err))
		}
		all[i] = e
	}
	return all, errors.Join(errs...)
}

// readEngine reads one entry.
func readEngine(node *yaml.Node) (relay.Engine, error) {
	e := relay.Engine{Kind: relay.VLLM, Ranks: 1}
	if node.Kind != yaml.MappingNode {
		return e, errors.New("want keys and values")
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	var known []string
	for _, k := range engineKeys {
		k.flag(fs, &e)
		known = append(known, k.name)
	}
	var errs []error
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		var v any
		err := value.Decode(&v)
		text := ""
		if err == nil {
			text, err = settingText(v)
		}
		fl := fs.Lookup(key.Value)
		switch {
		case !slices.Contains(known, key.Value):
			err = fmt.Errorf("unknown key %q: want one of %s", key.Value, strings.Join(known, ", "))
		case err != nil:
			err = fmt.Errorf("%s: %w", key.Value, err)
		case fl.Changed:
			err = fmt.Errorf("%s: given twice", key.Value)
		default:
			if value.Kind == yaml.ScalarNode {
				text = value.Value // as written: a name may look like a number
			}
			if err = fs.Set(key.Value, text); err != nil {
				err = fmt.Errorf("%s: %w", key.Value, err)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", key.Line, err))
		}
	}
	if e.Events == "" {
		e.Events = defaultEvents[e.Kind]
	}
	return e, errors.Join(errs...)
}
