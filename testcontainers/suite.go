// This file is the integration suite: each test runs against each kind of broker; the real one is started once for all tests of a package.

package testcontainers

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// native is the real Kafka that a package's tests share: a start costs 3 s, so it happens once a test binary, on first use.
var native struct {
	main  atomic.Bool // Main runs, so it will be stopped
	start sync.Once
	n     *Native
	err   error
}

// Main is the body of TestMain in a package that uses [Each]. It runs the tests, stops the shared broker and exits. When tests
// have failed, it keeps the broker's log and says where.
//
//	func TestMain(m *testing.M) { testcontainers.Main(m) }
func Main(m *testing.M) {
	native.main.Store(true)
	code := m.Run()
	if native.n != nil {
		if code != 0 {
			fmt.Fprintf(os.Stderr, "the log of the Kafka node is kept in %s\n", native.n.keepLogs())
		}
		if err := native.n.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Each runs f as one subtest a broker: "kfake" (its own, in memory) and "kafka" (one real node, shared by the package's tests, so
// topics and groups need names of their own and nobody may kill it); or only "external" when KAFKA_BROKERS is set. Tests
// that break brokers start their own with [NewNative] or [NewKfake].
func Each(t *testing.T, f func(t *testing.T, b Broker)) {
	t.Helper()
	if e := externalFromEnv(); e != nil {
		t.Run(e.Name(), func(t *testing.T) { f(t, e) })
		return
	}
	t.Run("kfake", func(t *testing.T) { f(t, NewKfake(t, KfakeConfig{})) })
	t.Run("kafka", func(t *testing.T) { f(t, sharedNative(t)) })
}

// sharedNative returns the package's real broker.
func sharedNative(t *testing.T) *Native {
	t.Helper()
	if !native.main.Load() {
		t.Fatal("BUG: the package has no func TestMain(m *testing.M) { testcontainers.Main(m) }, so nothing would stop the broker")
	}
	native.start.Do(func() { native.n, native.err = StartNative(context.Background(), NativeConfig{}) })
	if native.err != nil {
		t.Fatal(native.err)
	}
	return native.n
}
