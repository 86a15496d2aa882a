// This file tests the command fake-engine.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"kvindex/cmd/kvindex/fakeengine"
	"kvindex/pipeline/relay/zmtp"
	"kvindex/testcontainers"
)

// TestFakeEngine runs it as a user would: it says where it listens, serves when
// told to, stays after the trace, and ends well when it is told to end.
func TestFakeEngine(t *testing.T) {
	out, in := io.Pipe()
	defer out.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan executed)
	go func() {
		var errs strings.Builder
		con := &console{out: in, err: &errs}
		code := run(ctx, commands(), con, []string{
			"fake-engine", "--kind", "sglang", "--synthetic", "50", "--rate", "0", "--ranks", "2", "--salt", "0.5", "--paused",
			"--listen", "127.0.0.1:0", "--replay-listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0", "--output", "json",
		})
		ended <- executed{code: code, err: errs.String()}
	}()
	var said struct {
		Control string
		fakeengine.Held
	}
	if err := json.NewDecoder(out).Decode(&said); err != nil {
		t.Fatal(err)
	}
	if !said.Paused || len(said.Ranks) != 2 {
		t.Fatalf("%+v", said)
	}
	s, err := zmtp.NewSub(zmtp.DefaultConfig(said.Ranks[1].Events))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if ev, err := s.Next(t.Context()); err != nil || ev.Kind != zmtp.Connected {
		t.Fatal(ev, err)
	}
	ask := func(method, path string) (h fakeengine.Held) {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), method, said.Control+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := http.DefaultClient.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		if err := json.NewDecoder(a.Body).Decode(&h); err != nil {
			t.Fatal(err)
		}
		return h
	}
	testcontainers.Eventually(t, patience, func() error {
		if ask("GET", "/held").Ranks[1].Subscribers == 0 {
			return errors.New("no subscriber")
		}
		return nil
	})
	ask("POST", "/resume")
	if ev, err := s.Next(t.Context()); err != nil || ev.Kind != zmtp.Message || len(ev.Frames) != 3 {
		t.Errorf("%v, %v", ev.Kind, err)
	}
	testcontainers.Eventually(t, patience, func() error {
		if ask("GET", "/held").Requests < 50 {
			return errors.New("not all requests are served")
		}
		return nil
	})
	interrupt()
	if got := <-ended; got.code != 0 || !strings.Contains(got.err, `msg="requests are over" requests=50`) {
		t.Errorf("exit code %d: %s", got.code, got.err)
	}
}

func TestFakeEngineUsage(t *testing.T) {
	for want, args := range map[string]string{
		"either --trace or --synthetic":      "",
		"does not divide":                    "--synthetic 1 --block-size 100",
		"kind":                               "--synthetic 1 --kind tgi",
		"in maps":                            "--synthetic 1 --kind sglang --shape array --lora 0.5",
		"loopback":                           "--synthetic 1 --control-listen 0.0.0.0:0",
		"--paused needs":                     "--synthetic 1 --paused",
		"no such file":                       "--trace /nonexistent",
		"share of salt":                      "--synthetic 1 --salt 2",
		"missing port in address":            "--synthetic 1 --listen localhost",
		"no port for rank 3":                 "--synthetic 1 --listen 127.0.0.1:65533 --ranks 4",
		"gap every is -1, must be 0 or more": "--synthetic 1 --gap-every -1",
	} {
		got := execute(t, append([]string{"fake-engine"}, strings.Fields(args)...)...)
		if got.code != codeUsage || !strings.Contains(got.err, want) {
			t.Errorf("%s: exit code %d, %s", args, got.code, got.err)
		}
	}
}
