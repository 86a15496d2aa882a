package secure_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

// patience bounds what a broker needs a moment for.
const patience = 2 * time.Minute

// file writes a secret.
func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	securetest.WriteFile(t, path, text)
	return path
}

// ask connects once and asks the brokers something.
func ask(t *testing.T, k secure.Kafka, brokers []string) error {
	t.Helper()
	if err := k.Validate(); err != nil {
		return err
	}
	cl, err := kgo.NewClient(append(k.Options(), kgo.SeedBrokers(brokers...), kgo.RequestRetries(0))...)
	if err != nil {
		return err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = kadm.NewClient(cl).BrokerMetadata(ctx)
	return err
}

const refusedCertificate = "one of securetest.RefusedCertificate"

// check fails unless the error has the text; "": there must be none.
func check(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == refusedCertificate:
		if err == nil || !slices.ContainsFunc(securetest.RefusedCertificate, func(s string) bool { return strings.Contains(err.Error(), s) }) {
			t.Errorf("got %v, want %s", err, want)
		}
	case want == "" && err != nil:
		t.Errorf("got %v, want no error", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("got %v, want %q", err, want)
	}
}

func cluster(t *testing.T, opts ...kfake.Opt) []string {
	t.Helper()
	c, err := kfake.NewCluster(append(opts, kfake.NumBrokers(1))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c.ListenAddrs()
}

func serverTLS(t *testing.T, p securetest.Pair, clientCA *securetest.CA) *tls.Config {
	t.Helper()
	s := secure.Server{CertFile: p.Cert, KeyFile: p.Key}
	if clientCA != nil {
		s.ClientCAFile = clientCA.File
	}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	return s.Config(true, nil)
}

func TestKafkaSecurity(t *testing.T) {
	ca, other := securetest.NewCA(t), securetest.NewCA(t)
	broker, own, stranger := ca.Issue(t, "broker"), ca.Issue(t, "client"), other.Issue(t, "client")
	sasl := []kfake.Opt{
		kfake.EnableSASL(),
		kfake.Superuser("PLAIN", "ann", "right"),
		kfake.Superuser("SCRAM-SHA-256", "ann", "right"),
		kfake.Superuser("SCRAM-SHA-512", "ann", "right"),
	}
	open := cluster(t)
	overTLS := cluster(t, kfake.TLS(serverTLS(t, broker, nil)))
	mutual := cluster(t, kfake.TLS(serverTLS(t, broker, ca)))
	clear := cluster(t, sasl...)
	both := cluster(t, append(sasl, kfake.TLS(serverTLS(t, broker, nil)))...)
	right := file(t, "right\r\n")

	for name, c := range map[string]struct {
		k       secure.Kafka
		brokers []string
		err     string
	}{
		"nothing":                  {secure.Kafka{}, open, ""},
		"TLS":                      {secure.Kafka{TLS: true, CAFile: ca.File}, overTLS, ""},
		"an unknown authority":     {secure.Kafka{TLS: true, CAFile: other.File}, overTLS, "certificate signed by unknown authority"},
		"not in the system's list": {secure.Kafka{TLS: true}, overTLS, "certificate signed by unknown authority"},
		"plaintext to TLS":         {secure.Kafka{}, overTLS, "is TLS missing?"},
		"own certificate":          {secure.Kafka{TLS: true, CAFile: ca.File, CertFile: own.Cert, KeyFile: own.Key}, mutual, ""},
		"no certificate":           {secure.Kafka{TLS: true, CAFile: ca.File}, mutual, refusedCertificate},
		"a stranger's certificate": {secure.Kafka{TLS: true, CAFile: ca.File, CertFile: stranger.Cert, KeyFile: stranger.Key}, mutual, refusedCertificate},
		"plain":                    {secure.Kafka{Mechanism: "plain", User: "ann", PasswordFile: right}, clear, ""},
		"plain over TLS":           {secure.Kafka{TLS: true, CAFile: ca.File, Mechanism: "plain", User: "ann", PasswordFile: right}, both, ""},
		"scram-sha-256":            {secure.Kafka{Mechanism: "scram-sha-256", User: "ann", PasswordFile: right}, clear, ""},
		"scram-sha-512 over TLS":   {secure.Kafka{TLS: true, CAFile: ca.File, Mechanism: "scram-sha-512", User: "ann", PasswordFile: right}, both, ""},
		"mechanism not there":      {secure.Kafka{Mechanism: "oauthbearer", TokenFile: right}, clear, "UNSUPPORTED_SASL_MECHANISM"},

		"unknown mechanism":  {secure.Kafka{Mechanism: "gssapi"}, nil, `kafka-sasl-mechanism: "gssapi", want one of plain, scram-sha-256`},
		"no user":            {secure.Kafka{Mechanism: "plain", PasswordFile: right}, nil, "kafka-user: plain needs one"},
		"no password":        {secure.Kafka{Mechanism: "plain", User: "ann"}, nil, "kafka-password-file: none given, and KVINDEX_KAFKA_PASSWORD is not set"},
		"no password's file": {secure.Kafka{Mechanism: "plain", User: "ann", PasswordFile: "/no/such"}, nil, "kafka-password-file: open /no/such: no such file"},
		"an empty password":  {secure.Kafka{Mechanism: "plain", User: "ann", PasswordFile: file(t, "\n")}, nil, "is empty"},
		"two passwords":      {secure.Kafka{Mechanism: "plain", User: "ann", PasswordFile: file(t, "a\nb\n")}, nil, "more than one line"},
		"no token":           {secure.Kafka{Mechanism: "oauthbearer"}, nil, "kafka-token-file: oauthbearer needs one"},
		"no mechanism":       {secure.Kafka{User: "ann"}, nil, "given without kafka-sasl-mechanism"},
		"no TLS":             {secure.Kafka{CAFile: ca.File}, nil, "kafka-ca-file: given without kafka-tls"},
		"half a pair":        {secure.Kafka{TLS: true, CertFile: own.Cert}, nil, "kafka-cert-file and kafka-key-file: give both or none"},
		"another's key":      {secure.Kafka{TLS: true, CertFile: own.Cert, KeyFile: stranger.Key}, nil, "private key does not match public key"},
		"no certificates":    {secure.Kafka{TLS: true, CAFile: right}, nil, "no CA certificate in PEM form"},
	} {
		t.Run(name, func(t *testing.T) { check(t, ask(t, c.k, c.brokers), c.err) })
	}
	t.Run("the environment's password", func(t *testing.T) {
		t.Setenv(secure.KafkaPasswordEnv, "right")
		check(t, ask(t, secure.Kafka{Mechanism: "plain", User: "ann"}, clear), "")
	})
}

// What the files say at each connection counts; what was good stays if they are
// broken.
func TestKafkaFilesAreReadAgain(t *testing.T) {
	old, next := securetest.NewCA(t), securetest.NewCA(t)
	brokers := cluster(t, kfake.TLS(serverTLS(t, next.Issue(t, "broker"), nil)),
		kfake.EnableSASL(), kfake.Superuser("PLAIN", "ann", "right"))
	caFile, password := file(t, read(t, old.File)), file(t, "wrong")
	k := secure.Kafka{TLS: true, CAFile: caFile, Mechanism: "plain", User: "ann", PasswordFile: password}
	opts := append(k.Options(), kgo.SeedBrokers(brokers...), kgo.RequestRetries(0))
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ping := func(want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		check(t, cl.Ping(ctx), want)
	}
	ping("unknown authority")
	securetest.WriteFile(t, caFile, "broken")
	ping("unknown authority")
	securetest.WriteFile(t, caFile, read(t, next.File))
	ping("EOF") // kfake has no words for a wrong password
	securetest.WriteFile(t, password, "right")
	ping("")
}

// A real Kafka with every mechanism over TLS.
func TestKafkaSecurityNative(t *testing.T) {
	ca := securetest.NewCA(t)
	broker := ca.Issue(t, "broker")
	const module = "org.apache.kafka.common.security."
	n := testcontainers.NewNative(t, testcontainers.NativeConfig{
		Listeners: []string{"SASL_SSL"},
		Properties: map[string]string{
			"listener.security.protocol.map":                        "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL",
			"ssl.keystore.type":                                     "PEM",
			"ssl.keystore.location":                                 broker.Both,
			"listener.name.sasl_ssl.sasl.enabled.mechanisms":        "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
			"listener.name.sasl_ssl.plain.sasl.jaas.config":         module + `plain.PlainLoginModule required user_ann="right";`,
			"listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": module + `scram.ScramLoginModule required;`,
			"listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": module + `scram.ScramLoginModule required;`,
			"listener.name.sasl_ssl.oauthbearer.sasl.jaas.config":   module + `oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="ann";`,
		},
	})
	adm := testcontainers.Admin(t, n)
	for _, m := range []kadm.ScramMechanism{kadm.ScramSha256, kadm.ScramSha512} {
		res, err := adm.AlterUserSCRAMs(t.Context(), nil, []kadm.UpsertSCRAM{{User: "ann", Mechanism: m, Iterations: 4096, Password: "right"}})
		if err == nil {
			err = res.Error()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	brokers := n.Listener("SASL_SSL")
	right, wrong := file(t, "right"), file(t, "wrong")
	for _, m := range []string{"plain", "scram-sha-256", "scram-sha-512"} {
		k := secure.Kafka{TLS: true, CAFile: ca.File, Mechanism: m, User: "ann", PasswordFile: right}
		testcontainers.Eventually(t, patience, func() error { return ask(t, k, brokers) }) // the user has to reach the broker
		k.PasswordFile = wrong
		check(t, ask(t, k, brokers), "SASL_AUTHENTICATION_FAILED")
	}
	k := secure.Kafka{TLS: true, CAFile: ca.File, Mechanism: "oauthbearer", TokenFile: file(t, token(time.Now(), time.Now().Add(time.Hour)))}
	check(t, ask(t, k, brokers), "")
	k.TokenFile = file(t, token(time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)))
	check(t, ask(t, k, brokers), "invalid_token")
	for name, c := range map[string]struct {
		k       secure.Kafka
		brokers []string
		err     string
	}{
		"no login":         {secure.Kafka{TLS: true, CAFile: ca.File}, brokers, "is SASL missing?"},
		"plaintext to TLS": {secure.Kafka{}, brokers, "is this a plaintext connection speaking to a tls endpoint?"},
		"TLS to plaintext": {secure.Kafka{TLS: true, CAFile: ca.File}, n.Brokers(), "often happens if the client is using TLS when the broker is not expecting it"},
	} {
		t.Run(name, func(t *testing.T) { check(t, ask(t, c.k, c.brokers), c.err) })
	}
}

// token is a JSON Web Token without signature, as Kafka's default validator takes it.
func token(issued, expires time.Time) string {
	enc := base64.RawURLEncoding.EncodeToString
	return enc([]byte(`{"alg":"none"}`)) + "." + enc(fmt.Appendf(nil, `{"sub":"ann","iat":%d,"exp":%d}`, issued.Unix(), expires.Unix())) + "."
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
