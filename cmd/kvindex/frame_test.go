package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// patience is how long anything that should happen may take.
const patience = 2 * time.Minute

// executed is what a command line did.
type executed struct {
	code     int
	out, err string
}

// execute runs a command line of the real commands in this process.
func execute(t *testing.T, args ...string) executed {
	t.Helper()
	return executeOf(t.Context(), commands(), strings.NewReader(""), args...)
}

func executeOf(ctx context.Context, cmds []command, in io.Reader, args ...string) executed {
	var out, err bytes.Buffer
	code := run(ctx, cmds, &console{in: in, out: &out, err: &err}, args)
	return executed{code, out.String(), err.String()}
}

// probe is a command with a flag of each kind; it keeps what it was run with.
type probe struct {
	name    string
	count   int
	list    []string
	wait    time.Duration
	on      bool
	ran     bool
	sources string
}

func (p *probe) commands(result error) []command {
	return []command{{
		use: "probe",
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&p.name, "the-name", "default", "")
			fs.IntVar(&p.count, "count", 1, "")
			fs.StringSliceVar(&p.list, "list", []string{"d"}, "")
			fs.DurationVar(&p.wait, "wait", time.Second, "")
			fs.BoolVar(&p.on, "on", false, "")
		},
		run: func(_ context.Context, con *console, _ []string) error {
			p.ran = true
			for _, s := range con.settings {
				p.sources += s.name + "=" + filepath.Base(s.from) + " "
			}
			return result
		},
	}, {
		use:   "other",
		flags: func(fs *pflag.FlagSet) { fs.String("of-other", "", "") },
		run:   func(context.Context, *console, []string) error { return nil },
	}}
}

func TestSettings(t *testing.T) {
	for name, c := range map[string]struct {
		args string
		env  map[string]string
		file string
		want probe  // ran and sources apart
		from string // of each flag
		err  string // instead
	}{
		"defaults": {
			want: probe{name: "default", count: 1, list: []string{"d"}, wait: time.Second},
			from: "the-name=default count=default list=default wait=default on=default ",
		},
		"flag wins over all": {
			args: "--the-name flag", env: map[string]string{"KVINDEX_THE_NAME": "env"}, file: "the-name: file",
			want: probe{name: "flag", count: 1, list: []string{"d"}, wait: time.Second},
			from: "the-name=flag count=default list=default wait=default on=default ",
		},
		"environment wins over file": {
			env: map[string]string{"KVINDEX_THE_NAME": "env"}, file: "the-name: file",
			want: probe{name: "env", count: 1, list: []string{"d"}, wait: time.Second},
			from: "the-name=KVINDEX_THE_NAME count=default list=default wait=default on=default ",
		},
		"every kind in the file": {
			file: "the-name: file\ncount: 7\nlist: [a, b]\nwait: 2m\non: true",
			want: probe{name: "file", count: 7, list: []string{"a", "b"}, wait: 2 * time.Minute, on: true},
			from: "the-name=f.yaml count=f.yaml list=f.yaml wait=f.yaml on=f.yaml ",
		},
		"every kind in the environment": {
			env:  map[string]string{"KVINDEX_COUNT": "7", "KVINDEX_LIST": "a,b", "KVINDEX_WAIT": "2m", "KVINDEX_ON": "true"},
			want: probe{name: "default", count: 7, list: []string{"a", "b"}, wait: 2 * time.Minute, on: true},
			from: "the-name=default count=KVINDEX_COUNT list=KVINDEX_LIST wait=KVINDEX_WAIT on=KVINDEX_ON ",
		},
		"an empty variable is none": {
			env: map[string]string{"KVINDEX_COUNT": ""}, file: "count: 3",
			want: probe{name: "default", count: 3, list: []string{"d"}, wait: time.Second},
			from: "the-name=default count=f.yaml list=default wait=default on=default ",
		},
		"another command's key": {
			file: "of-other: x\nlog-level: warn",
			want: probe{name: "default", count: 1, list: []string{"d"}, wait: time.Second},
			from: "the-name=default count=default list=default wait=default on=default ",
		},
		"the file's name is a setting too": {
			env:  map[string]string{"KVINDEX_CONFIG": "testdata/count.yaml"},
			want: probe{name: "default", count: 9, list: []string{"d"}, wait: time.Second},
			from: "the-name=default count=count.yaml list=default wait=default on=default ",
		},
		"unknown key":         {file: "count: 1\nworker-tll: 2m", err: `f.yaml: unknown key "worker-tll"`},
		"nested key":          {file: "list:\n  a: b", err: `f.yaml: unknown key "list.a"`},
		"bad value in file":   {file: "count: many", err: `count in `},
		"bad value in env":    {env: map[string]string{"KVINDEX_COUNT": "many"}, err: "KVINDEX_COUNT: "},
		"bad flag":            {args: "--count many", err: `invalid argument "many" for "--count"`},
		"unknown flag":        {args: "--cuont 1", err: "unknown flag: --cuont"},
		"no such file":        {args: "--config /nowhere/f.yaml", err: "settings file /nowhere/f.yaml: "},
		"not YAML":            {file: "count: [", err: "f.yaml: "},
		"bad log level":       {args: "--log-level loud", err: `log level "loud"`},
		"bad log format":      {env: map[string]string{"KVINDEX_LOG_FORMAT": "xml"}, err: `log format "xml"`},
		"unexpected argument": {args: "more", err: `unexpected argument "more": "kvindex probe" takes none`},
		"negative time":       {args: "--wait -1s", err: "wait: -1s is negative"},
		"negative in file":    {file: "wait: -1m", err: "wait: -1m0s is negative"},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			args := append([]string{"probe"}, strings.Fields(c.args)...)
			if c.file != "" {
				file := filepath.Join(t.TempDir(), "f.yaml")
				if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--config", file)
			}
			var got probe
			res := executeOf(t.Context(), got.commands(nil), nil, args...)
			if c.err != "" {
				if res.code != codeUsage || got.ran || !strings.Contains(res.err, c.err) {
					t.Errorf("code %d, ran %v, %q; want code %d and %q", res.code, got.ran, res.err, codeUsage, c.err)
				}
				if strings.Count(res.err, "\n") != 1 {
					t.Errorf("the error is not one line: %q", res.err)
				}
				return
			}
			if res.code != 0 || !got.ran {
				t.Fatalf("code %d: %s", res.code, res.err)
			}
			if got.sources != c.from {
				t.Errorf("settings come from %q, want %q", got.sources, c.from)
			}
			got.ran, got.sources = false, ""
			if got.name != c.want.name || got.count != c.want.count || strings.Join(got.list, ",") != strings.Join(c.want.list, ",") || got.wait != c.want.wait || got.on != c.want.on {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestAnErrorIsOneLine(t *testing.T) {
	for err, want := range map[string]string{
		"one thing":                       "one thing",
		"one thing\n  another\tthing\n":   "one thing; another thing",
		"errors:\n  one thing\n  another": "errors: one thing; another",
		"unknown command \"srve\"\n\nDid you mean this?\n\tserve\n": "unknown command \"srve\"; Did you mean this? serve",
	} {
		if got := joinLines(err); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		code int
		says string
	}{
		"done":               {t.Context(), nil, 0, ""},
		"failed":             {t.Context(), errors.New("broken\tpipe\n"), codeFailed, "kvindex: broken pipe\n"},
		"usage":              {t.Context(), usagef("no"), codeUsage, "kvindex: no (see \"kvindex probe --help\")\n"},
		"check":              {t.Context(), checkf("not ready"), codeCheck, "kvindex: not ready\n"},
		"interrupted":        {ended, context.Canceled, codeInterrupted, "kvindex: interrupted\n"},
		"its question ended": {ended, askError("a", status.Error(codes.Canceled, "context canceled")), codeInterrupted, "kvindex: interrupted\n"},
		"a stage that ends":  {t.Context(), askError("a", status.Error(codes.Canceled, "no")), codeFailed, "kvindex: stage at a: no (Canceled)\n"},
		"failed when ending": {ended, errors.New("broken"), codeFailed, "kvindex: broken\n"},
		"cancelled inside":   {t.Context(), context.Canceled, codeFailed, "kvindex: context canceled\n"},
	} {
		var p probe
		got := executeOf(c.ctx, p.commands(c.err), nil, "probe")
		if got.code != c.code || got.err != c.says {
			t.Errorf("%s: code %d, %q; want %d, %q", name, got.code, got.err, c.code, c.says)
		}
	}
	for _, line := range []string{"nothing", "topics nothing", "topics create --nothing"} {
		if got := execute(t, strings.Fields(line)...); got.code != codeUsage {
			t.Errorf("%s: code %d, want %d", line, got.code, codeUsage)
		}
	}
}

// TestInterruptedFiles: what writes a file stops when told, and leaves no half of it.
func TestInterruptedFiles(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, line := range []string{"bench workload --synthetic 1000 -o", "replay --synthetic 1000 --write-trace"} {
		file := filepath.Join(t.TempDir(), "f")
		got := executeOf(ended, commands(), nil, append(strings.Fields(line), file)...)
		if got.code != codeInterrupted || got.out != "" {
			t.Errorf("%s: code %d, want %d; %q %q", line, got.code, codeInterrupted, got.out, got.err)
		}
		if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the file stays: %v", line, err)
		}
	}
}

// noSpace is a full disk.
type noSpace struct{}

func (noSpace) Write([]byte) (int, error) { return 0, errors.New("no space left") }

// TestLostOutput: what cannot be printed is a failure, whatever printed it.
func TestLostOutput(t *testing.T) {
	for line, want := range map[string]executed{
		"version":              {code: codeFailed, err: "kvindex: no space left\n"},
		"--help":               {code: codeFailed, err: "kvindex: no space left\n"},
		"topics":               {code: codeFailed, err: "kvindex: no space left\n"},
		"serve --check-config": {code: codeFailed, err: "kvindex: no space left\n"},
	} {
		var said bytes.Buffer
		code := run(t.Context(), commands(), &console{in: strings.NewReader(""), out: noSpace{}, err: &said}, strings.Fields(line))
		if code != want.code || said.String() != want.err {
			t.Errorf("%s: code %d, %q; want %d, %q", line, code, said.String(), want.code, want.err)
		}
	}
}

// TestTimeoutsAreAboveZero: a command that may take no time can do nothing.
func TestTimeoutsAreAboveZero(t *testing.T) {
	for _, line := range []string{"status", "query --tokens 1", "verify", "snapshot inspect"} {
		for _, d := range []string{"0", "0s", "-1s"} {
			got := execute(t, append(strings.Fields(line), "--timeout", d)...)
			if got.code != codeUsage || !strings.Contains(got.err, "must be above 0") {
				t.Errorf("%s --timeout %s: code %d, %q", line, d, got.code, got.err)
			}
		}
	}
}

// TestNoBrokerThatAnswers: whatever asks brokers says in one line, and soon, that
// none answers, be it that nobody listens or that who does says nothing.
func TestNoBrokerThatAnswers(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close() // connections are taken by the system, and nobody reads them
	defer func(d time.Duration) { brokersPatience = d }(brokersPatience)
	brokersPatience = 200 * time.Millisecond
	for _, line := range []string{"topics create", "topics check", "snapshot inspect", "verify", "replay --synthetic 10"} {
		for broker, want := range map[string]struct {
			code int
			err  string
		}{
			"127.0.0.1:1":         {codeFailed, "kvindex: no broker answers at 127.0.0.1:1: "},
			lis.Addr().String():   {codeFailed, "kvindex: no broker answers at " + lis.Addr().String() + ": nothing within 200ms\n"},
			"":                    {codeUsage, "kvindex: brokers: none given"},
			"nowhere":             {codeUsage, `kvindex: brokers: "nowhere" is not host:port`},
			"127.0.0.1:1,a:b:c:d": {codeUsage, `kvindex: brokers: "a:b:c:d" is not host:port`},
		} {
			t.Run(line+" "+broker, func(t *testing.T) {
				got := execute(t, append(strings.Fields(line), "--brokers", broker)...)
				if got.code != want.code || !strings.HasPrefix(got.err, want.err) || strings.Count(got.err, "\n") != 1 || got.out != "" {
					t.Errorf("code %d, %q %q; want %d, %q", got.code, got.out, got.err, want.code, want.err)
				}
			})
		}
	}
}

// TestHelp: every command can be asked for help and says what it does, with an
// example, and what each of its flags means.
func TestHelp(t *testing.T) {
	var walk func(path []string, cmds []command)
	walk = func(path []string, cmds []command) {
		for _, c := range cmds {
			path := append(path[:len(path):len(path)], strings.Fields(c.use)[0])
			got := execute(t, append(path, "--help")...)
			if got.code != 0 || !strings.Contains(got.out, "kvindex "+strings.Join(path, " ")) {
				t.Errorf("%v --help: code %d, %q", path, got.code, got.out)
			}
			if c.short == "" || strings.HasSuffix(c.short, ".") {
				t.Errorf("%v: short is %q", path, c.short)
			}
			if c.run != nil && c.flags != nil {
				if c.long == "" || !strings.Contains(c.example, "kvindex "+strings.Join(path, " ")) {
					t.Errorf("%v: long or example is missing", path)
				}
				fs := pflag.NewFlagSet("", pflag.ContinueOnError)
				c.flags(fs)
				fs.VisitAll(func(f *pflag.Flag) {
					if f.Usage == "" {
						t.Errorf("%v --%s: no word about it", path, f.Name)
					}
				})
			}
			walk(path, c.sub)
		}
	}
	walk(nil, commands())
	if got := execute(t); got.code != 0 || !strings.Contains(got.out, "Exit codes") {
		t.Errorf("without arguments: code %d, %q", got.code, got.out)
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := execute(t, "completion", shell); got.code != 0 || !strings.Contains(got.out, "kvindex") {
			t.Errorf("%s: code %d, %d bytes", shell, got.code, len(got.out))
		}
	}
	for args, want := range map[string]string{
		"topics ":          "check\t",
		"relay --state":    "--state-dir\t",
		"relay --kind ":    "vllm\nsglang\ntrtllm\ntrtllm-stream\n",
		"status --output ": "text\njson\n",
	} {
		if got := execute(t, append([]string{"__complete"}, strings.Split(args, " ")...)...); !strings.Contains(got.out, want) {
			t.Errorf("%q completes to %q, want %q", args, got.out, want)
		}
	}
}
