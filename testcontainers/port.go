// Ports that stay free while nobody listens on them.

package testcontainers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// The ports given out lie below the range from which Linux takes those of outgoing connections (32768 and up): what is killed
// finds its port free when it comes back.
const lowPort, highPort = 20000, 32000

// given has the ports given out by this process, which nobody else of it gets.
var given = struct {
	sync.Mutex
	ports map[int]bool
}{ports: map[int]bool{}}

// FreeAddress returns a host:port on loopback that nothing listens on, nor on the row-1 ports after it. It is for what is
// started, killed and started again, which a port that the system chose is not: somebody's connection may have it meanwhile.
func FreeAddress(t testing.TB, row int) string {
	t.Helper()
	port, err := freePort(row)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// freePorts returns n ports that nothing on 127.0.0.1 listens on.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		var err error
		if ports[i], err = freePort(1); err != nil {
			return nil, err
		}
	}
	return ports, nil
}

// freePort returns the first of row ports.
func freePort(row int) (int, error) {
	given.Lock()
	defer given.Unlock()
	for range 1000 {
		first := lowPort + rand.IntN(highPort-lowPort-row)
		free := 0
		for ; free < row && !given.ports[first+free] && nobodyListens(first+free); free++ {
		}
		if free < row {
			continue
		}
		for i := range row {
			given.ports[first+i] = true
		}
		return first, nil
	}
	return 0, fmt.Errorf("no %d free ports in a row on 127.0.0.1 between %d and %d", row, lowPort, highPort)
}

func nobodyListens(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	l.Close()
	return true
}
