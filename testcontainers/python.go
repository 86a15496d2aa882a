// This file makes a Python with packages from PyPI, for tests that run other clients than ours.

package testcontainers

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Python returns the path of a Python 3 interpreter that has the packages (as pip names them: "fastavro", "xxhash==3.5.0").
// It lives in a virtual environment of its own, made on the first call on this machine. Whatever is missing fails the test.
func Python(t testing.TB, packages ...string) string {
	t.Helper()
	python, err := pythonWith(t.Context(), packages)
	if err != nil {
		t.Fatal(err)
	}
	return python
}

func pythonWith(ctx context.Context, packages []string) (string, error) {
	const install = "install Python 3 with its venv module (Debian, Ubuntu: apt-get install python3 python3-venv)"
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	python, err := exec.LookPath("python3")
	if err != nil {
		return "", fmt.Errorf("%w: no python3 (%v): %s", ErrPrerequisite, err, install)
	}
	version, err := exec.CommandContext(ctx, python, "-c", "import sys; print(sys.version, sys.prefix)").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s does not run: %v: %s: %s", ErrPrerequisite, python, err, lastLines(version, 3), install)
	}
	packages = slices.Sorted(slices.Values(packages))
	sum := sha256.Sum256([]byte(strings.Join(append(packages, string(version)), "\n")))
	dir, err := cached(fmt.Sprintf("python-%x", sum[:6]), func(dir string) error {
		if out, err := exec.CommandContext(ctx, python, "-m", "venv", dir).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s -m venv: %v\n%s\n%s", ErrPrerequisite, python, err, lastLines(out, 5), install)
		}
		pip := append([]string{"-m", "pip", "install", "--quiet", "--disable-pip-version-check"}, packages...)
		if out, err := exec.CommandContext(ctx, filepath.Join(dir, "bin", "python"), pip...).CombinedOutput(); err != nil {
			return fmt.Errorf("pip install %s (is PyPI or its mirror in pip's configuration reachable?): %w\n%s", strings.Join(packages, " "), err, lastLines(out, 15))
		}
		return nil
	})
	return filepath.Join(dir, "bin", "python"), err
}
