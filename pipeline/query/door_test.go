package query

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
	"kvindex/pipeline/secure/securetest"
)

const (
	goodToken  = "good-token-0123456789"
	laterToken = "later-token-0123456789"
	oldToken   = "old-token-0123456789"
)

// tokenFile writes one with a good and an expired token.
func tokenFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	securetest.WriteFile(t, path, "# who may ask\n\n"+goodToken+"\n"+oldToken+" 2020-01-31T00:00:00Z\n"+
		laterToken+" "+time.Now().Add(time.Hour).Format(time.RFC3339)+"\n")
	return path
}

// shown asks for the status with an Authorization header, "" for none, over
// either transport, and returns the code and the message.
func shown(t *testing.T, s *Server, authorization string) map[string]error {
	t.Helper()
	ctx := t.Context()
	if authorization != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", authorization)
	}
	_, grpcErr := dial(t, s).Status(ctx)
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+s.HTTPAddr().String()+"/v1/status", nil)
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var httpErr error
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		httpErr = httpToStatus(t, resp.StatusCode, string(body))
		if got := resp.Header.Get("WWW-Authenticate"); got != `Bearer realm="kvindex"` {
			t.Errorf("WWW-Authenticate is %q", got)
		}
	}
	return map[string]error{"grpc": grpcErr, "http": httpErr}
}

func TestTokens(t *testing.T) {
	cfg := measured(t)
	cfg.TokenFile, cfg.OpenMetrics = tokenFile(t), true
	s := serve(t, fleet(t), cfg)
	for name, c := range map[string]struct{ header, want string }{
		"good":             {"Bearer " + goodToken, ""},
		"not expired":      {"Bearer " + laterToken, ""},
		"lower case":       {"bearer " + goodToken, ""},
		"none":             {"", "no bearer token: this instance wants the header Authorization: Bearer TOKEN"},
		"another scheme":   {"Basic " + goodToken, "no bearer token"},
		"without a scheme": {goodToken, "no bearer token"},
		"unknown":          {"Bearer x" + goodToken, "the bearer token is not known"},
		"a beginning":      {"Bearer " + goodToken[:20], "the bearer token is not known"},
		"a very long one":  {"Bearer " + strings.Repeat("x", 5000), "the bearer token is not known"},
		"expired":          {"Bearer " + oldToken, "the bearer token expired at 2020-01-31T00:00:00Z"},
	} {
		t.Run(name, func(t *testing.T) {
			for transport, err := range shown(t, s, c.header) {
				if c.want == "" && err != nil || c.want != "" && (status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), c.want)) {
					t.Errorf("%s: got %v, want %q", transport, err, c.want)
				}
			}
		})
	}
	for _, transport := range []string{"grpc", "http"} {
		for reason, want := range map[string]string{"unauthenticated": "6", "token_expired": "1"} {
			if n := metricOf(t, s, refusedMetric(transport, reason)); n != want {
				t.Errorf("%s %s over %s, want %s", n, reason, transport, want)
			}
		}
	}
	// What is open and what is not.
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/v1/match": 401, "/v1/workers": 401, "/": 401, "/other": 401, "//healthz": 401} {
		if code, _ := get(t, s, path); code != want {
			t.Errorf("%s: %d, want %d", path, code, want)
		}
	}
	if _, err := healthpb.NewHealthClient(connect(t, s)).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
	stream, err := reflectpb.NewServerReflectionClient(connect(t, s)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("reflection: %v", err)
	}
	if code, _ := get(t, serve(t, fleet(t), Config{TokenFile: cfg.TokenFile, Metrics: cfg.Metrics}), "/metrics"); code != 401 {
		t.Errorf("closed metrics: %d", code)
	}
}

// A changed file counts within a second or so, a broken one changes nothing.
func TestTokensAreReadAgain(t *testing.T) {
	cfg := measured(t)
	cfg.TokenFile, cfg.OpenMetrics = tokenFile(t), true
	s := serve(t, fleet(t), cfg)
	may := func(token string) bool { return shown(t, s, "Bearer "+token)["http"] == nil }
	securetest.WriteFile(t, cfg.TokenFile, "tiny\n")
	eventually(t, "the broken file is found", func() bool { may(goodToken); return metricOf(t, s, "kvindex_query_reload_failures_total") == "1" })
	if !may(goodToken) {
		t.Error("a broken file takes the old tokens away")
	}
	const next = "the-next-token-0123456789"
	securetest.WriteFile(t, cfg.TokenFile, next+"\n")
	eventually(t, "the new token is known", func() bool { return may(next) })
	if may(goodToken) {
		t.Error("a token that was taken out is still good")
	}
}

func TestBadTokenFiles(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "no token in it",
		"# nothing\n":                        "no token in it",
		"tiny\n":                             "line 1: the token has 4 bytes, want 16 to 4096",
		"\n" + goodToken + " tomorrow\n":     "line 2: after the token: want a time such as",
		goodToken + " a b\n":                 "line 1: want a token and",
		strings.Repeat(goodToken+"\n", 1001): "more than 1000 tokens",
	} {
		path := filepath.Join(t.TempDir(), "tokens")
		securetest.WriteFile(t, path, text)
		if _, err := NewServer(fleet(t), Config{TokenFile: path}); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), goodToken) {
			t.Errorf("%.30q: %v, want %q", text, err, want)
		}
	}
	if _, err := NewServer(fleet(t), Config{TokenFile: "/no/such"}); err == nil || !strings.Contains(err.Error(), "auth-token-file: ") {
		t.Errorf("no file: %v", err)
	}
}

// httpsClient trusts an authority and shows a certificate, if it is given one.
func httpsClient(t *testing.T, ca *securetest.CA, own *securetest.Pair) *http.Client {
	t.Helper()
	pem, err := os.ReadFile(ca.File)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{RootCAs: x509.NewCertPool()}
	cfg.RootCAs.AppendCertsFromPEM(pem)
	if own != nil {
		pair, err := tls.LoadX509KeyPair(own.Cert, own.Key)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
}

func TestTLS(t *testing.T) {
	ca, other := securetest.NewCA(t), securetest.NewCA(t)
	pair, own, stranger := ca.Issue(t, "server"), ca.Issue(t, "client"), other.Issue(t, "client")
	open := serve(t, fleet(t), Config{TLS: secure.Server{CertFile: pair.Cert, KeyFile: pair.Key}})
	cfg := measured(t)
	cfg.TLS, cfg.OpenMetrics = secure.Server{CertFile: pair.Cert, KeyFile: pair.Key, ClientCAFile: ca.File}, true
	mutual := serve(t, fleet(t), cfg)
	tokened := serve(t, fleet(t), Config{TLS: secure.Server{CertFile: pair.Cert, KeyFile: pair.Key}, TokenFile: tokenFile(t)})
	token := filepath.Join(t.TempDir(), "token")
	securetest.WriteFile(t, token, goodToken+"\n")

	for name, c := range map[string]struct {
		s    *Server
		as   secure.Client
		want string
	}{
		"TLS":                      {open, secure.Client{TLS: true, CAFile: ca.File}, ""},
		"another authority":        {open, secure.Client{TLS: true, CAFile: other.File}, "certificate signed by unknown authority"},
		"plaintext":                {open, secure.Client{}, "error reading server preface"},
		"TLS to plaintext":         {serve(t, fleet(t), Config{}), secure.Client{TLS: true, CAFile: ca.File}, "first record does not look like a TLS handshake"},
		"own certificate":          {mutual, secure.Client{TLS: true, CAFile: ca.File, CertFile: own.Cert, KeyFile: own.Key}, ""},
		"no certificate":           {mutual, secure.Client{TLS: true, CAFile: ca.File}, "code = Unavailable"},
		"a stranger's certificate": {mutual, secure.Client{TLS: true, CAFile: ca.File, CertFile: stranger.Cert, KeyFile: stranger.Key}, "code = Unavailable"},
		"token":                    {tokened, secure.Client{TLS: true, CAFile: ca.File, TokenFile: token}, ""},
		"no token":                 {tokened, secure.Client{TLS: true, CAFile: ca.File}, "no bearer token"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.as.Validate(); err != nil {
				t.Fatal(err)
			}
			cl, err := client.Dial(c.s.GRPCAddr().String(), patience, c.as.DialOptions()...)
			if err != nil {
				t.Fatal(err)
			}
			defer cl.Close()
			_, err = cl.Status(t.Context())
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	for name, c := range map[string]struct {
		s      *Server
		client *http.Client
		path   string
		want   string
	}{
		"HTTPS":                           {open, httpsClient(t, ca, nil), "/v1/status", "200"},
		"another authority, HTTPS":        {open, httpsClient(t, other, nil), "/v1/status", "unknown authority"},
		"own certificate, HTTPS":          {mutual, httpsClient(t, ca, &own), "/v1/status", "200"},
		"no certificate, HTTPS":           {mutual, httpsClient(t, ca, nil), "/v1/status", "403"},
		"a stranger's certificate, HTTPS": {mutual, httpsClient(t, ca, &stranger), "/v1/status", `Get "https://`},
		"no certificate for the probe":    {mutual, httpsClient(t, ca, nil), "/readyz", "200"},
		"no certificate for open metrics": {mutual, httpsClient(t, ca, nil), "/metrics", "200"},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := c.client.Get("https://" + c.s.HTTPAddr().String() + c.path)
			got := fmt.Sprint(err)
			if err == nil {
				resp.Body.Close()
				got = resp.Status
			}
			if !strings.Contains(got, c.want) {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
	// Over gRPC one without and one with a stranger's certificate, over HTTP the
	// stranger, and one without who was let in to no more than the probes.
	eventually(t, "each is counted", func() bool {
		resp, err := httpsClient(t, ca, nil).Get("https://" + mutual.HTTPAddr().String() + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return counted(string(text), refusedMetric("grpc", "tls_handshake")) >= 2 &&
			counted(string(text), refusedMetric("http", "tls_handshake")) == 1 &&
			counted(string(text), refusedMetric("http", "no_certificate")) == 1
	})
	if code, text := get(t, open, "/readyz"); code != http.StatusBadRequest || !strings.Contains(text, "HTTP request to an HTTPS server") {
		t.Errorf("plaintext to HTTPS: %d %s", code, text)
	}
}

// A certificate that was renewed is used from the next handshake on, one that
// cannot be used is not taken.
func TestCertificatesAreReadAgain(t *testing.T) {
	ca := securetest.NewCA(t)
	pair := ca.Issue(t, "server")
	cfg := measured(t)
	cfg.TLS = secure.Server{CertFile: pair.Cert, KeyFile: pair.Key}
	s := serve(t, fleet(t), cfg)
	web := httpsClient(t, ca, nil)
	serial := func() string {
		t.Helper()
		resp, err := web.Get("https://" + s.HTTPAddr().String() + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.TLS.PeerCertificates[0].SerialNumber.String()
	}
	first := serial()
	securetest.WriteFile(t, pair.Key, "half written")
	if serial() != first {
		t.Error("a key that cannot be used was taken")
	}
	ca.Issue(t, "server")
	if serial() == first {
		t.Error("the old certificate is still shown")
	}
	cl, err := client.Dial(s.GRPCAddr().String(), patience, (&secure.Client{TLS: true, CAFile: ca.File}).DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if _, err := cl.Status(t.Context()); err != nil {
		t.Error(err)
	}
}

// Beyond the limit a connection is closed at once, and below it the next is served.
func TestConnectionsAreLimited(t *testing.T) {
	s := serve(t, fleet(t), Config{Limits: Limits{MaxConnections: 2}})
	for transport, addr := range map[string]net.Addr{"grpc": s.GRPCAddr(), "http": s.HTTPAddr()} {
		open := func() net.Conn {
			conn, err := net.Dial("tcp", addr.String())
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			return conn
		}
		held := []net.Conn{open(), open()}
		beyond := open()
		if _, err := beyond.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Errorf("%s: beyond the limit: %v", transport, err)
		}
		beyond.Close()
		for _, c := range held {
			c.Close()
		}
		eventually(t, "there is room again", func() bool {
			if transport == "grpc" {
				_, err := dial(t, s).Status(t.Context())
				return err == nil
			}
			resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + addr.String() + "/healthz")
			if err == nil {
				resp.Body.Close()
			}
			return err == nil
		})
	}
}

// lines is a log that a test reads.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Listening to the world without TLS is told of, once for each port, and a flood
// of refusals makes one line.
func TestWhatIsLogged(t *testing.T) {
	log := new(lines)
	s, err := NewServer(fleet(t), Config{GRPCAddr: "0.0.0.0:0", HTTPAddr: "127.0.0.1:0", TokenFile: tokenFile(t), Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer s.Shutdown(context.Background())
	conn, err := grpc.NewClient(s.GRPCAddr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 10 {
		if _, err := pb.NewKVIndexClient(conn).Status(t.Context(), &pb.StatusRequest{}); status.Code(err) != codes.Unauthenticated {
			t.Error(err)
		}
	}
	for text, want := range map[string]int{"listening beyond the loopback without TLS": 1, "reason=unauthenticated": 1} {
		if n := strings.Count(log.String(), text); n != want {
			t.Errorf("%q is there %d times, want %d, in\n%s", text, n, want, log)
		}
	}
}

// counted is the value of a metric in the text of /metrics; 0 if it is not there.
func counted(text, name string) (n int) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			fmt.Sscan(value, &n)
		}
	}
	return n
}
