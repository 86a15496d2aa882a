// This file builds a Go program of another module, for tests that run other clients than ours.

package testcontainers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// GoTool returns the path of the program of a package at a version ("example.com/tool/cmd/tool@v1.2.3"). It is built on the first
// call on this machine, by the Go command, which takes as long as its dependencies do. Whatever is missing fails the test.
func GoTool(t testing.TB, versioned string) string {
	t.Helper()
	pkg, _, _ := strings.Cut(versioned, "@")
	dir, err := cached("go-"+strings.NewReplacer("/", "-", "@", "-").Replace(versioned), func(dir string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*fetchTimeout)
		defer cancel()
		install := exec.CommandContext(ctx, "go", "install", versioned)
		install.Dir = dir
		install.Env = append(os.Environ(), "GOBIN="+dir, "GOFLAGS=")
		if out, err := install.CombinedOutput(); err != nil {
			return fmt.Errorf("go install %s (is the Go module proxy reachable?): %w\n%s", versioned, err, lastLines(out, 15))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, path.Base(pkg))
}
