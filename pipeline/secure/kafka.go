// This file is how every client of Kafka finds the brokers and proves itself to them.

package secure

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// KafkaPasswordEnv is the environment variable that has the password if no file
// does. It is no setting: nothing prints it.
const KafkaPasswordEnv = "KVINDEX_KAFKA_PASSWORD"

// Mechanisms are those of SASL that Kafka.Mechanism may name.
var Mechanisms = []string{"plain", "scram-sha-256", "scram-sha-512", "oauthbearer"}

// CheckBrokers says what is wrong with the addresses of brokers to start from.
func CheckBrokers(addrs []string) error {
	if len(addrs) == 0 {
		return errors.New("brokers: none given")
	}
	var errs []error
	for _, a := range addrs {
		if _, _, err := net.SplitHostPort(a); err != nil {
			errs = append(errs, fmt.Errorf("brokers: %q is not host:port", a))
		}
	}
	return errors.Join(errs...)
}

// Kafka is how a client reaches secured brokers. The zero value is plaintext.
type Kafka struct {
	TLS      bool
	CAFile   string // PEM; "": the system's authorities
	CertFile string // PEM, for brokers that want the client's; with KeyFile
	KeyFile  string

	Mechanism    string // one of Mechanisms; "": no SASL
	User         string // for all but oauthbearer
	PasswordFile string // its contents without the last line's end; "": KafkaPasswordEnv
	TokenFile    string // for oauthbearer
}

// Validate says all that is wrong, each with its name as a flag, and reads every
// file once.
func (k *Kafka) Validate() error {
	errs := []error{checkFiles("kafka-", k.TLS, k.CAFile, k.CertFile, k.KeyFile)}
	bad := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	switch k.Mechanism {
	case "":
		bad(k.User != "" || k.PasswordFile != "" || k.TokenFile != "",
			"kafka-user, kafka-password-file, kafka-token-file: given without kafka-sasl-mechanism")
	case "plain", "scram-sha-256", "scram-sha-512":
		bad(k.User == "", "kafka-user: %s needs one", k.Mechanism)
		bad(k.TokenFile != "", "kafka-token-file: goes with oauthbearer, not with %s", k.Mechanism)
		_, err := k.password()
		bad(err != nil, "kafka-password-file: %w", err)
	case "oauthbearer":
		bad(k.User != "" || k.PasswordFile != "", "kafka-user and kafka-password-file: do not go with oauthbearer")
		if k.TokenFile == "" {
			bad(true, "kafka-token-file: oauthbearer needs one")
			break
		}
		_, err := readSecret(k.TokenFile)
		bad(err != nil, "kafka-token-file: %w", err)
	default:
		bad(true, "kafka-sasl-mechanism: %q, want one of %s", k.Mechanism, strings.Join(Mechanisms, ", "))
	}
	return errors.Join(errs...)
}

// Exposed says what of the client's secrets crosses the network readable; "" if
// nothing does.
func (k *Kafka) Exposed() string {
	switch {
	case k.TLS:
	case k.Mechanism == "plain":
		return "the Kafka password is sent without TLS"
	case k.Mechanism == "oauthbearer":
		return "the Kafka token is sent without TLS"
	}
	return ""
}

// Options are what a client needs beside its brokers. The files are read again,
// if they have changed, for each connection: those that exist live on.
func (k *Kafka) Options() []kgo.Opt {
	var opts []kgo.Opt
	if k.TLS {
		d := &dialer{files: newClientFiles(k.CAFile, k.CertFile, k.KeyFile)}
		opts = append(opts, kgo.Dialer(d.dial))
	}
	if m := k.mechanism(); m != nil {
		opts = append(opts, kgo.SASL(m))
	}
	return opts
}

func (k *Kafka) mechanism() sasl.Mechanism {
	user := k.User
	scramAuth := func(context.Context) (scram.Auth, error) {
		pass, err := k.password()
		return scram.Auth{User: user, Pass: pass}, err
	}
	switch k.Mechanism {
	case "plain":
		return plain.Plain(func(context.Context) (plain.Auth, error) {
			pass, err := k.password()
			return plain.Auth{User: user, Pass: pass}, err
		})
	case "scram-sha-256":
		return scram.Sha256(scramAuth)
	case "scram-sha-512":
		return scram.Sha512(scramAuth)
	case "oauthbearer":
		return oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			token, err := readSecret(k.TokenFile)
			return oauth.Auth{Token: token}, err
		})
	}
	return nil
}

// password is the one to use now.
func (k *Kafka) password() (string, error) {
	if k.PasswordFile != "" {
		return readSecret(k.PasswordFile)
	}
	if p := os.Getenv(KafkaPasswordEnv); p != "" {
		return p, nil
	}
	return "", fmt.Errorf("none given, and %s is not set", KafkaPasswordEnv)
}

// readSecret returns a file's one line.
func readSecret(file string) (string, error) {
	data, err := readFile(file)
	if err != nil {
		return "", err
	}
	s := strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r")
	if s == "" {
		return "", fmt.Errorf("%s: is empty", file)
	}
	if strings.ContainsAny(s, "\r\n") {
		return "", fmt.Errorf("%s: has more than one line", file)
	}
	return s, nil
}

// dialTimeout bounds a connection's making, handshake included.
const dialTimeout = 10 * time.Second

// dialer connects by TLS with the files as they are now.
type dialer struct{ files clientFiles }

func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	cfg, err := d.files.config(host)
	if err != nil {
		return nil, fmt.Errorf("TLS to Kafka: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	secured := tls.Client(conn, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TLS handshake with the Kafka broker %s: %w", addr, err)
	}
	return secured, nil
}
