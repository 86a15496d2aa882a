// Command kvindex runs a kvindex stage or a relay, and has commands to query, inspect,
// verify, measure and demonstrate them.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// commands are those of the command line, in the order that help lists them.
func commands() []command {
	return []command{
		demoCommand(),
		stageCommand(),
		relayChildCommand(),
		publisherCommand(),
		serveCommand(),
		relayCommand(),
		replayCommand(),
		fakeEngineCommand(),
		queryCommand(),
		statusCommand(),
		snapshotCommand(),
		topicsCommand(),
		verifyCommand(),
		benchCommand(),
		benchServerCommand(),
		versionCommand(),
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process at once, whatever it is waiting for.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, commands(), newConsole(os.Stdin, os.Stdout, os.Stderr), os.Args[1:]))
}
