// This file runs a stage or a relay as a child process of the demo.

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const (
	stageCommandName = "demo-stage"
	relayCommandName = "demo-relay"

	// childRunnable is a stage's --max-runnable: it answers however busy the machine
	// is, which has all the others to run too.
	childRunnable = "1000000"
)

func stageCommand() command { return childCommand(serveCommand(), stageCommandName) }

func relayChildCommand() command { return childCommand(relayCommand(), relayCommandName) }

// childCommand is a command, except that it stops when its standard input ends:
// even if the demo is killed, what it started does not stay behind.
func childCommand(c command, name string) command {
	run := c.run
	c.use, c.hidden = name, true
	c.example = "  kvindex " + name
	c.run = func(ctx context.Context, con *console, args []string) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			_, _ = io.Copy(io.Discard, con.in) // an error is an end too
			cancel()
		}()
		return run(ctx, con, args)
	}
	return c
}

// child is a process of this program.
type child struct {
	name  string // what it is
	cmd   *exec.Cmd
	stdin io.Closer
	log   string        // file that it writes to
	ended chan struct{} // closed once it has ended
}

// startChild runs this program with other arguments; what it writes is added to
// the file log.
func startChild(log string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the child has its own
	c := &child{name: strings.TrimPrefix(args[0], "demo-"), cmd: exec.Command(self, args...), log: log, ended: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = out, out
	// Its settings are the arguments alone, whatever the user has set for stages
	// of their own.
	c.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, envPrefix+"_") })
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = c.cmd.Wait() // how it ended is in its log
		close(c.ended)
	}()
	return c, nil
}

// kill ends the process as kill -9 does.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // fails only if it has ended already
	<-c.ended
}

// stop lets the process finish, but not for long.
func (c *child) stop() {
	c.stdin.Close()
	select {
	case <-c.ended:
	case <-time.After(15 * time.Second):
		c.kill()
	}
}

// during returns a context that also ends when the process does, with an error
// that says so.
func (c *child) during(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-ctx.Done():
		case <-c.ended:
			cancel(c.gone())
		}
	}()
	return ctx, func() { cancel(nil) }
}

// gone is the error of a process that has ended.
func (c *child) gone() error { return fmt.Errorf("the %s ended by itself: %s", c.name, c.lastWords()) }

// lastWords is the last line of the log.
func (c *child) lastWords() string {
	text, err := os.ReadFile(c.log)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return string(lines[len(lines)-1])
}
