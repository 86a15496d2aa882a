// This file says which exit code an error stands for.

package main

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The exit codes; rootLong tells users.
const (
	codeFailed      = 1
	codeUsage       = 2
	codeCheck       = 3
	codeInterrupted = 130 // as shells have it for SIGINT
)

// usageError is a mistake in how the command was called or set up.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// checkError says that what was looked at is not as it should be.
type checkError struct{ error }

func (e checkError) Unwrap() error { return e.error }

func checkf(format string, args ...any) error { return checkError{fmt.Errorf(format, args...)} }

// exitCode returns the exit code of an error. started is whether the command
// had begun: what fails before is the command line.
func exitCode(err error, started, interrupted bool) int {
	var usage usageError
	var check checkError
	switch {
	case errors.As(err, &usage) || !started:
		return codeUsage
	case errors.As(err, &check):
		return codeCheck
	case interrupted && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled):
		return codeInterrupted
	}
	return codeFailed
}
