package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
	"kvindex/testcontainers"
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
		"no TLS":            {[]string{"topics", "check", "--brokers", cluster.ListenAddrs()[0]}, codeFailed, "is TLS missing?"},
		"no login":          {[]string{"topics", "check", "--brokers", cluster.ListenAddrs()[0], "--kafka-tls", "--kafka-ca-file", ca.File}, codeFailed, "is SASL missing?"},
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

// TestAStageWithEveryLock runs a stage whose brokers want TLS and a login and
// give it no more rights than operations.md asks for, and whose own ports want
// TLS, a certificate and a token.
func TestAStageWithEveryLock(t *testing.T) {
	const topic, prefixed = kmsg.ACLResourceTypeTopic, kmsg.ACLResourcePatternTypePrefixed
	may := func(on kmsg.ACLResourceType, name string, pattern kmsg.ACLResourcePatternType, operations ...kmsg.ACLOperation) (acls []kfake.ACL) {
		for _, op := range operations {
			acls = append(acls, kfake.ACL{Resource: on, Name: name, Pattern: pattern, Operation: op, Allow: true})
		}
		return acls
	}
	rights := may(topic, defaultTopic, kmsg.ACLResourcePatternTypeLiteral, kmsg.ACLOperationRead, kmsg.ACLOperationDescribe)
	rights = append(rights, may(topic, defaultSnapshotTopic, kmsg.ACLResourcePatternTypeLiteral, kmsg.ACLOperationRead, kmsg.ACLOperationDescribe, kmsg.ACLOperationWrite)...)
	rights = append(rights, may(kmsg.ACLResourceTypeGroup, defaultGroup, prefixed, kmsg.ACLOperationRead, kmsg.ACLOperationDescribe)...)
	rights = append(rights, may(kmsg.ACLResourceTypeTransactionalId, defaultGroup, prefixed, kmsg.ACLOperationWrite, kmsg.ACLOperationDescribe)...)

	ca := securetest.NewCA(t)
	server, client := ca.Issue(t, "server"), ca.Issue(t, "client")
	tls := secure.Server{CertFile: server.Cert, KeyFile: server.Key}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.TLS(tls.Config(true, nil)), kfake.EnableSASL(), kfake.EnableACLs(),
		kfake.Superuser("SCRAM-SHA-512", "admin", "the admin's"), kfake.User("SCRAM-SHA-256", "stage", "the stage's", rights...))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	address := testcontainers.FreeAddress(t, 1)
	const token = "a-token-that-is-long-enough"
	t.Setenv("KVINDEX_BROKERS", cluster.ListenAddrs()[0])
	t.Setenv("KVINDEX_KAFKA_TLS", "true")
	t.Setenv("KVINDEX_KAFKA_CA_FILE", ca.File)
	asking := []string{"--query-address", address, "--tls", "--ca-file", ca.File, "--cert-file", client.Cert, "--key-file", client.Key, "--token-file", secret(t, token)}
	admin := []string{"--kafka-sasl-mechanism", "scram-sha-512", "--kafka-user", "admin", "--kafka-password-file", secret(t, "the admin's")}
	with := func(args string, more ...[]string) []string {
		all := strings.Fields(args)
		for _, m := range more {
			all = append(all, m...)
		}
		return all
	}
	must := func(args []string) executed {
		t.Helper()
		got := execute(t, args...)
		if got.code != 0 {
			t.Fatalf("%v: exit code %d\n%s%s", args, got.code, got.out, got.err)
		}
		return got
	}
	must(with("topics create --partitions 2 --replication-factor 1", admin))
	stage, err := startChild(filepath.Join(t.TempDir(), "log"), stageCommandName,
		"--brokers", cluster.ListenAddrs()[0], "--kafka-tls", "--kafka-ca-file", ca.File, "--log-level", "warn",
		"--grpc-listen", address, "--http-listen", "127.0.0.1:0", "--snapshot-max-age", "200ms", "--drain-timeout", "5s", "--max-runnable", childRunnable,
		"--kafka-sasl-mechanism", "scram-sha-256", "--kafka-user", "stage", "--kafka-password-file", secret(t, "the stage's\n"),
		"--tls-cert-file", server.Cert, "--tls-key-file", server.Key, "--tls-client-ca-file", ca.File, "--auth-token-file", secret(t, token+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stage.kill)
	testcontainers.Eventually(t, patience, func() error {
		if got := execute(t, with("status", asking)...); got.code != 0 {
			return errors.New(got.out + got.err + stage.lastWords())
		}
		return nil
	})
	must(with("replay --synthetic 50 --workers 3", asking, admin))
	must(with("verify --queries 20", asking, admin))
	must(with("query --local-hashes 1", asking))
	testcontainers.Eventually(t, patience, func() error {
		var parts []inspected
		got := must(with("snapshot inspect --output json", admin))
		if err := json.Unmarshal([]byte(got.out), &parts); err != nil {
			return err
		}
		workers := 0
		for _, p := range parts {
			workers += len(p.Workers)
		}
		if workers != 3 {
			return fmt.Errorf("%d worker-ranks have snapshots", workers)
		}
		return nil
	})
	for without, want := range map[string]string{"--token-file": "no bearer token", "--cert-file": "Unavailable", "--ca-file": "unknown authority"} {
		var some []string
		for i := 0; i < len(asking); i++ {
			if asking[i] == without || without == "--cert-file" && asking[i] == "--key-file" {
				i++
				continue
			}
			some = append(some, asking[i])
		}
		if got := execute(t, with("status", some)...); got.code != codeFailed || !strings.Contains(got.err, want) {
			t.Errorf("without %s: exit code %d: %s, want %q", without, got.code, got.err, want)
		}
	}
	stage.stop()
}

// TestARelayReachesASecuredKafka: with no more rights than operations.md asks for.
func TestARelayReachesASecuredKafka(t *testing.T) {
	var rights []kfake.ACL
	for _, op := range []kmsg.ACLOperation{kmsg.ACLOperationWrite, kmsg.ACLOperationDescribe} {
		rights = append(rights, kfake.ACL{Resource: kmsg.ACLResourceTypeTopic, Name: defaultTopic,
			Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: op, Allow: true})
	}
	ca := securetest.NewCA(t)
	broker := ca.Issue(t, "broker")
	server := secure.Server{CertFile: broker.Cert, KeyFile: broker.Key}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.TLS(server.Config(true, nil)), kfake.EnableSASL(), kfake.EnableACLs(),
		kfake.SeedTopics(1, defaultTopic), kfake.Superuser("SCRAM-SHA-512", "admin", "the admin's"), kfake.User("SCRAM-SHA-256", "relay", "the relay's", rights...))
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	cfg := fakeengine.DefaultConfig()
	cfg.Listen, cfg.ReplayListen = "127.0.0.1:0", "127.0.0.1:0"
	engine, err := fakeengine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	at, address := engine.State().Ranks[0], testcontainers.FreeAddress(t, 1)
	relay, err := startChild(filepath.Join(t.TempDir(), "log"), relayCommandName, "--http-listen", address,
		"--brokers", cluster.ListenAddrs()[0], "--kafka-tls", "--kafka-ca-file", ca.File,
		"--kafka-sasl-mechanism", "scram-sha-256", "--kafka-user", "relay", "--kafka-password-file", secret(t, "the relay's"),
		"--worker", "w0", "--model", "m", "--block-size", "64", "--events", at.Events, "--replay", at.Replay)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(relay.kill)
	testcontainers.Eventually(t, patience, func() error {
		resp, err := http.Get("http://" + address + "/readyz")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, relay.lastWords())
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s\n%s", resp.Status, relay.lastWords())
		}
		return nil
	})
	relay.stop()
}
