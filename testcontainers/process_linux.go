// This file is for Linux, where the kernel kills the broker when the test process dies.

package testcontainers

import "syscall"

func groupLeader() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
