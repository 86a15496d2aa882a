// A test process that is killed takes its broker along.

package testcontainers

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

// childEnv makes this test binary the process that is killed.
const childEnv = "KVINDEX_TEST_CHILD"

func TestProcessDiesWithItsParent(t *testing.T) {
	if os.Getenv(childEnv) != "" {
		// The broker's stand-in holds the pipe to the test open as long as it lives.
		cmd := exec.Command("sleep", "600")
		cmd.Stdout = os.Stdout
		if _, err := startProcess(cmd); err != nil {
			t.Fatal(err)
		}
		fmt.Println("started")
		select {}
	}
	child := exec.Command(os.Args[0], "-test.run=^TestProcessDiesWithItsParent$")
	child.Env = append(os.Environ(), childEnv+"=1")
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, len("started\n"))
	if _, err := io.ReadFull(out, buf); err != nil || string(buf) != "started\n" {
		t.Fatalf("the child said %q: %v", buf, err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, out) // ends when nobody holds the pipe
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the process outlives its parent")
	}
	child.Wait() // killed, as meant
}
