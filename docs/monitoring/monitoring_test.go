// Package monitoring tests what the documentation says of metrics, the
// dashboard and the alerts against what a running process shows.
package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/twmb/franz-go/pkg/kgo"

	"kvindex/index"
	"kvindex/pipeline"
	"kvindex/pipeline/relay"
	"kvindex/schemas"
	"kvindex/testcontainers"
)

func TestMain(m *testing.M) { testcontainers.Main(m) }

const patience = 2 * time.Minute

// scrape reads a /metrics as Prometheus asks for it without OpenMetrics.
func scrape(t *testing.T, addr string) (text string, families map[string]*dto.MetricFamily) {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status, err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err = parser.TextToMetricFamilies(strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	return string(body), families
}

// addressLog is a log that takes note of where HTTP is served.
type addressLog struct {
	slog.Handler
	http chan<- string // has room for one
}

func (l addressLog) Handle(ctx context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "http" {
			l.http <- a.Value.String()
		}
		return true
	})
	return l.Handler.Handle(ctx, r)
}

func (l addressLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return addressLog{l.Handler.WithAttrs(attrs), l.http}
}

func (l addressLog) WithGroup(name string) slog.Handler {
	return addressLog{l.Handler.WithGroup(name), l.http}
}

// start runs something that serves HTTP until the test ends, and returns where.
func start(t *testing.T, run func(context.Context, *slog.Logger) error) (addr string) {
	t.Helper()
	at := make(chan string, 1)
	logger := slog.New(addressLog{slog.NewTextHandler(t.Output(), nil), at})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, logger) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case addr = <-at:
	case err := <-done:
		t.Fatal(err)
	}
	return addr
}

// runRelay runs a relay of an engine that is away, and scrapes it.
func runRelay(t *testing.T) (text string, families map[string]*dto.MetricFamily) {
	t.Helper()
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	cfg := relay.DefaultConfig()
	cfg.Brokers, cfg.Topic = b.Brokers(), testcontainers.NewTopic(t, b, "events", 1, nil)
	cfg.HTTPListen = "127.0.0.1:0"
	cfg.Engines = []relay.Engine{{Worker: "w", Kind: relay.VLLM, Events: "tcp://127.0.0.1:1", Model: "m", BlockSize: 16, Ranks: 1}}
	return scrape(t, start(t, func(ctx context.Context, log *slog.Logger) error {
		cfg.Logger = log
		r, err := relay.New(cfg)
		if err != nil {
			return err
		}
		return r.Run(ctx)
	}))
}

// runStage runs a stage that has applied an event, written a snapshot and
// answered a query, so that its metrics have values, and scrapes it.
func runStage(t *testing.T) (text string, families map[string]*dto.MetricFamily) {
	t.Helper()
	b := testcontainers.NewKfake(t, testcontainers.KfakeConfig{})
	cfg := pipeline.DefaultConfig()
	cfg.Brokers = b.Brokers()
	cfg.Topic = testcontainers.NewTopic(t, b, "events", 2, nil)
	cfg.SnapshotTopic = testcontainers.NewTopic(t, b, "snapshots", 2, map[string]string{"cleanup.policy": "compact"})
	cfg.Instance, cfg.Version = "i", "v1"
	cfg.GRPCListen, cfg.HTTPListen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.SnapshotMaxAge = 100 * time.Millisecond
	addr := start(t, func(ctx context.Context, log *slog.Logger) error {
		cfg.Logger = log
		s, err := pipeline.New(cfg)
		if err != nil {
			return err
		}
		return s.Run(ctx)
	})

	value, err := schemas.AppendBatch(nil, &schemas.Batch{
		Producer: []byte("p"), Worker: []byte("w"), Epoch: 1, Model: []byte("m"), BlockSize: 16,
		Events: []schemas.Event{{Kind: schemas.KindStored, Stored: index.Stored{Position: index.NoPosition, Locals: []index.LocalHash{1, 2}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	record := &kgo.Record{Topic: cfg.Topic, Key: []byte("w"), Value: value}
	if err := testcontainers.Client(t, b).ProduceSync(t.Context(), record).FirstErr(); err != nil {
		t.Fatal(err)
	}
	testcontainers.Eventually(t, patience, func() error {
		resp, err := http.Post("http://"+addr+"/v1/match", "application/json", strings.NewReader(`{"model": "m", "local_hashes": [1, 2]}`))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if text, families = scrape(t, addr); resp.StatusCode != http.StatusOK || total(families["kvindex_snapshot_rounds_total"]) == 0 {
			return fmt.Errorf("%s, %v rounds of snapshots", resp.Status, total(families["kvindex_snapshot_rounds_total"]))
		}
		return nil
	})
	return text, families
}

// total is a counter's sum over its labels.
func total(f *dto.MetricFamily) (n float64) {
	for _, m := range f.GetMetric() {
		n += m.GetCounter().GetValue()
	}
	return n
}

// promtool runs Prometheus's own checker, built without the service discovery
// that it would pull in.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	const version = "v0.316.0" // of the module; Prometheus 3.16
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"run", "-tags", "remove_all_sd", "github.com/prometheus/prometheus/cmd/promtool@" + version}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, out)
	}
}

func TestRules(t *testing.T) {
	promtool(t, "", "check", "rules", "--lint-fatal", "rules.yaml")
	promtool(t, "", "test", "rules", "rules_test.yaml")
}

// documented is a row of docs/metrics.md.
type documented struct{ kind, labels string }

var (
	row  = regexp.MustCompile("(?m)^\\| `(kvindex_[a-z0-9_]+)` \\| (\\w+) \\|([^|]*)\\|")
	name = regexp.MustCompile(`\b(?:kvindex|go|process)_[a-z0-9_]+`)
	rule = regexp.MustCompile(`(?m)^ +- record: (\S+)$`)
	used = regexp.MustCompile(`\b[a-z_]*:kvindex_[a-z0-9_]+:[a-z0-9_]+`)
)

// seldom are metrics that are shown only once there is something to count.
var seldom = map[string]documented{
	"kvindex_relay_left_out_total": {"counter", "rank, reason, worker"},
}

// Every metric that a stage or a relay shows is in the documentation as it is,
// the documentation has no other, and neither have the dashboard and the rules.
func TestMetricsAreDocumented(t *testing.T) {
	text, families := runStage(t)
	promtool(t, text, "check", "metrics")
	text, ofRelay := runRelay(t)
	promtool(t, text, "check", "metrics")
	maps.Copy(families, ofRelay)

	docs := map[string]documented{}
	for _, m := range row.FindAllStringSubmatch(read(t, "../metrics.md"), -1) {
		if _, twice := docs[m[1]]; twice {
			t.Errorf("%s is documented twice", m[1])
		}
		docs[m[1]] = documented{m[2], strings.Trim(m[3], " `")}
	}
	shown := maps.Clone(seldom)
	for name, f := range families {
		if !strings.HasPrefix(name, "kvindex_") {
			continue
		}
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		shown[name] = documented{strings.ToLower(f.GetType().String()), strings.Join(labels, ", ")}
	}
	for _, name := range slices.Sorted(maps.Keys(shown)) {
		if docs[name] != shown[name] {
			t.Errorf("docs/metrics.md has of %s %q, it is %q", name, docs[name], shown[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(docs)) {
		if _, ok := shown[name]; !ok {
			t.Errorf("docs/metrics.md has %s, which nothing shows", name)
		}
	}

	exists := func(name string) bool {
		for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
			base, ok := strings.CutSuffix(name, suffix)
			if f := families[base]; ok && f != nil && (suffix == "" || f.GetType() == dto.MetricType_HISTOGRAM) {
				return true
			}
		}
		_, ok := seldom[name]
		return ok
	}
	rules := read(t, "rules.yaml")
	recorded := map[string]bool{}
	for _, m := range rule.FindAllStringSubmatch(rules, -1) {
		recorded[m[1]] = true
	}
	var exprs strings.Builder
	dashboardExprs(t, &exprs)
	for file, text := range map[string]string{"rules.yaml": rules, "rules_test.yaml": read(t, "rules_test.yaml"), "dashboard.json": exprs.String()} {
		for _, r := range used.FindAllString(text, -1) {
			if !recorded[r] {
				t.Errorf("%s uses %s, which no rule records", file, r)
			}
		}
		for _, name := range name.FindAllString(used.ReplaceAllString(text, ""), -1) {
			if !exists(name) {
				t.Errorf("%s uses %s, which does not exist", file, name)
			}
		}
	}
}

// dashboardExprs writes the dashboard's queries to out, one a line. Each is also parsed, by
// way of a rule.
func dashboardExprs(t *testing.T, out *strings.Builder) {
	t.Helper()
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, RefID string }
		}
		Templating struct {
			List []struct{ Query any }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "dashboard.json")), &board); err != nil {
		t.Fatal(err)
	}
	asRules := "groups: [{name: dashboard, rules: [\n"
	ids := map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.Title == "" || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %d %q: the id is another's too, or it has no title or shows nothing", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			fmt.Fprintln(out, target.Expr)
			expr := strings.NewReplacer("$__rate_interval", "5m").Replace(target.Expr)
			asRules += fmt.Sprintf("{record: 'panel_%d_%s', expr: %q},\n", p.ID, target.RefID, expr)
		}
	}
	for _, v := range board.Templating.List {
		fmt.Fprintln(out, v.Query)
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, []byte(asRules+"]}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "", "check", "rules", file)
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
