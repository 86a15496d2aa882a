// Command kvindex runs and tries out a kvindex stage: it serves the index, and
// replays traces to it, asks it, checks it and shows it.
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
