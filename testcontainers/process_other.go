//go:build !linux

// Elsewhere no kernel does it: a killed test process leaves its broker running.

package testcontainers

import "syscall"

func groupLeader() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
