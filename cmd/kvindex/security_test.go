package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"

	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
)

// secret writes one to a file.
func secret(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	securetest.WriteFile(t, path, text)
	return path
}

// TestCommandsReachASecuredKafka: what all commands share lets one in and says
// why it does not.
func TestCommandsReachASecuredKafka(t *testing.T) {
	ca := securetest.NewCA(t)
	broker := ca.Issue(t, "broker")
	server := secure.Server{CertFile: broker.Cert, KeyFile: broker.Key}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.TLS(server.Config(true, nil)),
		kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-512", "ann", "the password"))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	with := func(more ...string) []string {
		return append([]string{"topics", "create", "--brokers", cluster.ListenAddrs()[0], "--partitions", "1", "--replication-factor", "1",
			"--kafka-tls", "--kafka-sasl-mechanism", "scram-sha-512", "--kafka-user", "ann"}, more...)
	}
	password := secret(t, "the password")
	if got := execute(t, with("--kafka-ca-file", ca.File, "--kafka-password-file", password)...); got.code != 0 {
		t.Errorf("exit code %d: %s", got.code, got.err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		err  string
	}{
		"unknown authority": {with("--kafka-ca-file", securetest.NewCA(t).File, "--kafka-password-file", password), codeFailed, "unknown authority"},
		"no password":       {with("--kafka-ca-file", ca.File), codeUsage, "kafka-password-file: none given"},
		"no such flag":      {with("--kafka-password", "the password"), codeUsage, "unknown flag: --kafka-password"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := execute(t, c.args...); got.code != c.code || !strings.Contains(got.err, c.err) {
				t.Errorf("exit code %d, want %d; %s, want %q", got.code, c.code, got.err, c.err)
			}
		})
	}
}

// TestNoSecretIsPrinted: neither what a file holds nor what the environment does.
func TestNoSecretIsPrinted(t *testing.T) {
	t.Setenv(secure.KafkaPasswordEnv, "from the environment")
	got := execute(t, "serve", "--check-config", "--kafka-sasl-mechanism", "plain", "--kafka-user", "ann")
	if got.code != 0 || !strings.Contains(got.out, "kafka-user") || strings.Contains(got.out+got.err, "from the environment") {
		t.Errorf("exit code %d:\n%s%s", got.code, got.out, got.err)
	}
}
