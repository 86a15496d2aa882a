package query

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"kvindex/index"
)

// large is a stage all of whose lists are longer than sockets hold.
type large struct{ *fakeSource }

func newLarge() large {
	f := newFake()
	for i := range 25_000 {
		f.workers = append(f.workers, WorkerStatus{Worker: fmt.Sprintf("worker-%06d", i), Model: "m"})
		f.status.Partitions = append(f.status.Partitions, PartitionStatus{Partition: int32(i)})
	}
	f.status.Models = []ModelStatus{{Model: "m", BlockSize: 4}}
	return large{f}
}

func (large) Dump(context.Context, DumpFilter) ([]Held, error) {
	return []Held{{Worker: "w", Chain: index.Stored{Position: index.NoPosition, Locals: make([]index.LocalHash, 120_000)}}}, nil
}

// stopped asks for something and reads nothing.
func stopped(t *testing.T, s *Server, path string) {
	t.Helper()
	conn, err := net.Dial("tcp", s.HTTPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path)
}

// Whatever is long is counted until it is taken, and has a time for that.
func TestListsForStoppedReaders(t *testing.T) {
	for _, path := range []string{pathMetrics, pathWorkers, pathStatus, "/dynamo/workers", "/dynamo/dump"} {
		t.Run(path, func(t *testing.T) {
			cfg := measured(t)
			small := cfg.Metrics
			cfg.Metrics = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("User-Agent") == "" { // one who stops
					w.Write(bytes.Repeat([]byte("# a comment\n"), 1<<19))
				} else {
					small.ServeHTTP(w, r)
				}
			})
			cfg.Limits = Limits{MaxUnreadBytes: 16 << 20, RequestTimeout: 5 * time.Second}
			s := serve(t, newLarge(), cfg)
			stopped(t, s, path)
			eventually(t, "it is counted", func() bool { return s.unread.held() > 4<<20 })
			if code, _ := get(t, s, pathMetrics); code != http.StatusOK {
				t.Errorf("metrics beside it: %d", code)
			}
			for range 3 {
				stopped(t, s, path)
			}
			eventually(t, "the time of all is over", func() bool {
				held := s.unread.held()
				if held > 20<<20 {
					t.Fatalf("%d bytes are held", held)
				}
				return held == 0 && s.httpAt.(*doorListener).open.Load() <= 2 // http.DefaultClient's
			})
		})
	}
}

// What is shown is what the handler made.
func TestMetricsAreWhole(t *testing.T) {
	s := serve(t, fleet(t), Config{Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/odd")
		w.WriteHeader(http.StatusTeapot)
		io.WriteString(w, "some\n")
	})})
	resp, err := http.Get("http://" + s.HTTPAddr().String() + pathMetrics)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || string(text) != "some\n" || resp.StatusCode != http.StatusTeapot || resp.Header.Get("Content-Type") != "text/odd" || resp.ContentLength != 5 {
		t.Errorf("got %s, %v, %q, %v", resp.Status, resp.Header, text, err)
	}
}
