// This file is the frame that every command stands in: flags with their
// environment and file equivalents, help, logging, exit codes.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// command is one command as its file describes it. To add one, write a function
// that returns it and list that in commands:
//
//	func serveCommand() command {
//		cfg := pipeline.DefaultConfig()
//		return command{
//			use:   "serve",
//			short: "Run the stage",
//			flags: func(fs *pflag.FlagSet) {
//				brokersFlag(fs, &cfg.Brokers)
//				fs.DurationVar(&cfg.WorkerTTL, "worker-ttl", cfg.WorkerTTL, "leave out workers silent for this `time`")
//			},
//			run: func(ctx context.Context, con *console, args []string) error {
//				if err := cfg.Validate(); err != nil {
//					return usageError{err} // exit code 2
//				}
//				return pipeline.Run(ctx, cfg)
//			},
//		}
//	}
//
// flags binds each flag to a field of the command's configuration, whose value
// then is the default. When run is called the fields have their values, whether
// from the flag, from KVINDEX_WORKER_TTL or from worker-ttl in the file, and
// slog's default logger writes as --log-level and --log-format say. ctx ends on
// SIGINT and SIGTERM.
type command struct {
	use     string // name and arguments
	short   string // one line, without a full stop
	long    string // what help says first; short if empty
	example string
	args    cobra.PositionalArgs // nil: none
	flags   func(*pflag.FlagSet)
	run     func(ctx context.Context, con *console, args []string) error
	sub     []command // instead of run
	hidden  bool      // from help
}

const envPrefix = "KVINDEX"

const rootLong = `kvindex reads from Kafka which worker of an LLM fleet holds which KV-cache blocks, and
answers how much of a prompt each worker already has.

Settings. Every flag FLAG-NAME can also be given as the environment variable
KVINDEX_FLAG_NAME and as the key flag-name in the YAML file that --config names.
Flags take precedence over the environment, the environment over the file, and the
file over the defaults. One file can serve several commands: each uses the keys that
it has flags for. A key that no command knows is an error. Lists are written a,b in
flags and in the environment, and as a YAML list in the file.

Exit codes.
  0    done
  1    failed while running
  2    wrong usage or settings; nothing was done
  3    the stage is not ready, or a check found something
  130  interrupted before it was done`

const rootExample = `  kvindex demo                           everything at once, nothing to set up
  kvindex topics create                  prepare the topics on 127.0.0.1:9092
  kvindex serve                          run the stage
  kvindex replay --synthetic 5000        send it the events of a simulated fleet
  kvindex status                         show its state
  KVINDEX_BROKERS=b1:9092,b2:9092 kvindex status --output json`

// usageTemplate is cobra's, less what does not apply here.
const usageTemplate = `Usage:
  {{if .HasAvailableSubCommands}}{{.CommandPath}} COMMAND{{else}}{{.UseLine}}{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsagesWrapped 100 | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableInheritedFlags}}

Flags of every command:
{{.InheritedFlags.FlagUsagesWrapped 100 | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableSubCommands}}

"{{.CommandPath}} COMMAND --help" says more about a command.{{end}}
`

// run executes the command line and returns the exit code.
func run(ctx context.Context, cmds []command, con *console, args []string) int {
	out := &checkedWriter{w: con.out}
	own := *con
	own.out = out
	f := &frame{con: &own}
	root := f.root(cmds)
	root.SetArgs(append([]string{}, args...)) // of nil cobra makes os.Args
	err := root.ExecuteContext(ctx)
	if failed := out.failed(); err == nil && failed != nil {
		f.started, err = true, failed
	}
	if err == nil {
		return 0
	}
	code := exitCode(err, f.started, ctx.Err() != nil)
	msg := joinLines(err.Error())
	switch {
	case code == codeInterrupted:
		msg = "interrupted"
	case code == codeUsage && f.at != nil:
		msg += fmt.Sprintf(" (see %q)", f.at.CommandPath()+" --help")
	}
	fmt.Fprintf(con.err, "%s %s\n", con.errStyle.red("kvindex:"), msg)
	return code
}

// joinLines puts the lines of an error, one for each thing that is wrong, into one.
func joinLines(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.Join(strings.Fields(line), " ")
		switch {
		case line == "":
			continue
		case strings.HasSuffix(b.String(), "?"), strings.HasSuffix(b.String(), ":"): // cobra's "Did you mean this?", a list's title
			b.WriteString(" ")
		case b.Len() > 0:
			b.WriteString("; ")
		}
		b.WriteString(line)
	}
	return b.String()
}

// frame is one execution of the command line.
type frame struct {
	con     *console
	at      *cobra.Command // the command that was asked for, if it exists
	started bool           // its run was called: errors are no longer about usage

	config, logLevel, logFormat string
}

func (f *frame) root(cmds []command) *cobra.Command {
	root := f.cobra(command{
		use:     "kvindex",
		short:   "Which worker holds which KV-cache blocks, from Kafka",
		long:    rootLong,
		example: rootExample,
		sub:     cmds,
	})
	root.SetIn(f.con.in)
	root.SetOut(f.con.out)
	root.SetErr(f.con.err)
	root.SetUsageTemplate(usageTemplate)
	root.SilenceErrors, root.SilenceUsage = true, true
	fs := root.PersistentFlags()
	fs.SortFlags = false
	fs.StringVar(&f.config, "config", "", "read settings from this YAML `file`")
	fs.StringVar(&f.logLevel, "log-level", "info", "log at this `level` and above: debug, info, warn or error")
	fs.StringVar(&f.logFormat, "log-format", "text", "log `format`: text or json; logs go to standard error")
	root.SetFlagErrorFunc(func(at *cobra.Command, err error) error {
		f.at = at
		return usageError{err}
	})
	return root
}

// cobra makes a command what the library wants.
func (f *frame) cobra(c command) *cobra.Command {
	cc := &cobra.Command{Use: c.use, Short: c.short, Long: c.long, Example: c.example, Args: c.args, Hidden: c.hidden}
	if c.flags != nil {
		cc.Flags().SortFlags = false
		c.flags(cc.Flags())
		cc.Flags().VisitAll(func(fl *pflag.Flag) {
			if v, ok := fl.Value.(interface{ values() []string }); ok {
				if err := cc.RegisterFlagCompletionFunc(fl.Name, cobra.FixedCompletions(v.values(), cobra.ShellCompDirectiveNoFileComp)); err != nil {
					panic("BUG: " + err.Error())
				}
			}
		})
	}
	for _, s := range c.sub {
		cc.AddCommand(f.cobra(s))
	}
	if c.run == nil {
		// Without this a group prints its help and succeeds, whatever follows it.
		cc.RunE = func(cc *cobra.Command, args []string) error {
			f.at = cc
			if len(args) > 0 {
				return usagef("unknown command %q for %q", args[0], cc.CommandPath())
			}
			return cc.Help()
		}
		return cc
	}
	if c.args == nil {
		cc.Args = func(cc *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			f.at = cc
			return usagef("unexpected argument %q: %q takes none", args[0], cc.CommandPath())
		}
	}
	cc.RunE = func(cc *cobra.Command, args []string) error {
		f.at = cc
		if err := f.settle(cc); err != nil {
			return err
		}
		f.started = true
		return c.run(cc.Context(), f.con, args)
	}
	return cc
}

// settle gives every flag that was not given its value from the environment or
// the file, and sets up logging.
func (f *frame) settle(cc *cobra.Command) error {
	v := viper.New()
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer("-", "_"))
	v.AutomaticEnv()
	if f.config == "" {
		f.config = v.GetString("config")
	}
	if f.config != "" {
		v.SetConfigFile(f.config)
		v.SetConfigType("yaml")
		if err := v.ReadInConfig(); err != nil {
			return usageError{fmt.Errorf("settings file %s: %w", f.config, err)}
		}
		known := flagNames(cc.Root(), map[string]bool{})
		for _, key := range slices.Sorted(slices.Values(v.AllKeys())) {
			if v.InConfig(strings.SplitN(key, ".", 2)[0]) && !known[key] {
				return usagef("settings file %s: unknown key %q", f.config, key)
			}
		}
	}
	var first error
	sources := map[string]string{}
	cc.Flags().VisitAll(func(fl *pflag.Flag) {
		env := envName(fl.Name)
		switch {
		case fl.Name == "help" || fl.Name == "config":
			return
		case fl.Changed:
			sources[fl.Name] = "flag"
			return
		case !v.IsSet(fl.Name):
			sources[fl.Name] = "default"
			return
		case os.Getenv(env) != "":
			sources[fl.Name] = env
		default:
			sources[fl.Name] = f.config
		}
		value, err := settingText(v.Get(fl.Name))
		if err == nil {
			err = cc.Flags().Set(fl.Name, value)
		}
		if err != nil && first == nil {
			first = fmt.Errorf("%s in %s: %w", fl.Name, sources[fl.Name], err)
			if sources[fl.Name] == env {
				first = fmt.Errorf("%s: %w", env, err)
			}
		}
	})
	cc.Flags().VisitAll(func(fl *pflag.Flag) {
		if fl.Value.Type() == "duration" && strings.HasPrefix(fl.Value.String(), "-") && first == nil {
			first = fmt.Errorf("%s: %s is negative", fl.Name, fl.Value)
		}
	})
	if first != nil {
		return usageError{first}
	}
	f.con.settings = nil
	cc.LocalFlags().VisitAll(func(fl *pflag.Flag) {
		if from, ok := sources[fl.Name]; ok {
			f.con.settings = append(f.con.settings, setting{fl.Name, fl.Value.String(), from})
		}
	})
	return f.logging()
}

// setting is one setting of the command that runs, and where it is from.
type setting struct {
	name, value, from string
}

func envName(flag string) string {
	return envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// settingText writes a value of the file as its flag would be given.
func settingText(v any) (string, error) {
	switch v := v.(type) {
	case []any:
		parts := make([]string, len(v))
		for i, p := range v {
			var err error
			if parts[i], err = settingText(p); err != nil {
				return "", err
			}
		}
		return strings.Join(parts, ","), nil
	case map[string]any, nil:
		return "", errors.New("want one value or a list")
	}
	return fmt.Sprint(v), nil
}

// flagNames adds the names of all flags of a command and those below it.
func flagNames(cc *cobra.Command, names map[string]bool) map[string]bool {
	add := func(fl *pflag.Flag) { names[fl.Name] = fl.Name != "config" && fl.Name != "help" }
	cc.Flags().VisitAll(add)
	cc.PersistentFlags().VisitAll(add)
	for _, s := range cc.Commands() {
		flagNames(s, names)
	}
	return names
}

func (f *frame) logging() error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return usagef("log level %q: want debug, info, warn or error", f.logLevel)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch f.logFormat {
	case "text":
		slog.SetDefault(slog.New(slog.NewTextHandler(f.con.err, opts)))
	case "json":
		slog.SetDefault(slog.New(slog.NewJSONHandler(f.con.err, opts)))
	default:
		return usagef("log format %q: want text or json", f.logFormat)
	}
	return nil
}
