//go:build !linux

// This file is for other systems, where a killed test process leaves its broker running.

package testcontainers

import "syscall"

func groupLeader() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
