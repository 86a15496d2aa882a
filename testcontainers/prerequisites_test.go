// What a machine lacks is an error that says what to install, and the caches serve several test processes.

package testcontainers

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// deadline is the test's context with a limit.
func deadline(t *testing.T, within time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), within)
	t.Cleanup(cancel)
	return ctx
}

func TestMissingPrerequisites(t *testing.T) {
	native := func(ctx context.Context) error { _, err := StartNative(ctx, NativeConfig{}); return err }
	python := func(ctx context.Context) error { _, err := pythonWith(ctx, nil); return err }
	const java17 = "#!/bin/sh\necho 'openjdk version \"17.0.15\"' >&2\n"
	for _, c := range []struct {
		name     string
		programs map[string]string // the whole PATH
		do       func(context.Context) error
		want     []string
	}{
		{"no java", nil, native, []string{"no java", "openjdk-17-jre-headless"}},
		{"old java", map[string]string{"java": "#!/bin/sh\necho 'java version \"1.8.0_392\"' >&2\n"}, native, []string{"is Java 8", "needs 17 or later", "openjdk-17-jre-headless"}},
		{"no mvn", map[string]string{"java": java17}, native, []string{"no mvn", "apt-get install maven"}},
		{"no python3", nil, python, []string{"no python3", "python3-venv"}},
		{"no venv", map[string]string{"python3": "#!/bin/sh\n[ \"$1\" = -c ] && exit; echo 'ensurepip is not available'; exit 1\n"}, python, []string{"ensurepip is not available", "python3-venv"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bin := t.TempDir()
			for name, script := range c.programs {
				if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", bin)
			t.Setenv("JAVA_HOME", "")
			t.Setenv("XDG_CACHE_HOME", t.TempDir())
			err := c.do(t.Context())
			if !errors.Is(err, ErrPrerequisite) {
				t.Fatalf("got %v, want ErrPrerequisite", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the error %q does not say %q", err, w)
				}
			}
		})
	}
}

func TestJavaMajor(t *testing.T) {
	for out, want := range map[string]int{
		"openjdk version \"17.0.15\" 2025-04-15\nOpenJDK Runtime Environment": 17,
		"openjdk version \"25\" 2025-09-16":                                   25,
		"java version \"1.8.0_392\"":                                          8,
		"Picked up JAVA_TOOL_OPTIONS: -Xint\nopenjdk version \"21.0.1\"":      21,
		"no java here": 0,
	} {
		if got := javaMajor(out); got != want {
			t.Errorf("javaMajor(%q) = %d, want %d", out, got, want)
		}
	}
}

// One of several fills the cache; a failed filling leaves nothing that counts as filled.
func TestCached(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	failed := errors.New("failed")
	_, err := cached("thing", func(dir string) error {
		if err := os.WriteFile(filepath.Join(dir, "half"), nil, 0o644); err != nil {
			return err
		}
		return failed
	})
	if !errors.Is(err, failed) {
		t.Fatalf("got %v, want the filling's error", err)
	}
	fills := 0 // under the cache's lock
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			dir, err := cached("thing", func(string) error { fills++; return nil })
			if err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(dir, "half")); err == nil {
				t.Error("a failed filling's file is still there")
			}
		})
	}
	wg.Wait()
	if fills != 1 {
		t.Errorf("filled %d times", fills)
	}
}

func TestPython(t *testing.T) {
	python := Python(t, "fastavro", "xxhash")
	out, err := exec.CommandContext(t.Context(), python, "-c", "import fastavro, xxhash; print(xxhash.xxh3_64_intdigest(b'', 0))").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "3244421341483603138" {
		t.Errorf("got %s (%v), want the XXH3 hash of nothing", out, err)
	}
}
