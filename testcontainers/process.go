// This file is one broker process: its own process group, its end observed, killed with the test process.

package testcontainers

import (
	"os/exec"
	"runtime"
	"syscall"
)

// process is a started command.
type process struct {
	pid  int
	done chan struct{} // closed once the process has ended and is reaped
	err  error         // how it ended; read after done
}

// startProcess starts cmd as the leader of a new process group.
func startProcess(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = groupLeader()
	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Linux sends the parent-death signal when the *thread* that forked ends, so that thread must live as long as the process:
		// this goroutine keeps it until Wait returns.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// signal sends sig to the whole group. The pid is known to be ours as long as the process has not been reaped.
func (p *process) signal(sig syscall.Signal) error { return syscall.Kill(-p.pid, sig) }

// running reports whether the process has not ended.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// kill ends the group at once and waits for that; a stopped (SIGSTOP) process too.
func (p *process) kill() {
	if p.running() {
		p.signal(syscall.SIGKILL)
	}
	<-p.done
}
