// Ports that stay free while nobody listens on them.

package testcontainers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// The ports given out lie below the range from which Linux takes those of outgoing connections (32768 and up): what is killed
// finds its port free when it comes back.
const lowPort, highPort = 20000, 32000

// FreeAddress returns a host:port on loopback that nothing listens on, nor on the row-1 ports after it, and that no other test is
// given until this one ends. It is for what is started, killed and started again, which a port that the system chose is not:
// somebody's connection may have it meanwhile.
func FreeAddress(t testing.TB, row int) string {
	t.Helper()
	c, err := claimPorts(row)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.release)
	return loopback(c.first)
}

// claim is a row of ports that no other test process on the machine is given, also while what they are for is down: the UDP socket
// of each is held.
type claim struct {
	first int
	held  []net.PacketConn
}

// claimPorts claims a row of ports that nothing listens on.
func claimPorts(row int) (*claim, error) {
	for range 1000 {
		c := &claim{first: lowPort + rand.IntN(highPort-lowPort-row)}
		if c.take(row) {
			return c, nil
		}
		c.release()
	}
	return nil, fmt.Errorf("no %d free ports in a row on 127.0.0.1 between %d and %d", row, lowPort, highPort)
}

// take reports whether the row's ports were free.
func (c *claim) take(row int) bool {
	for port := c.first; port < c.first+row; port++ {
		udp, err := net.ListenPacket("udp", loopback(port))
		if err != nil {
			return false
		}
		c.held = append(c.held, udp)
		tcp, err := net.Listen("tcp", loopback(port))
		if err != nil {
			return false
		}
		tcp.Close()
	}
	return true
}

// release gives the ports to others.
func (c *claim) release() {
	for _, udp := range c.held {
		udp.Close()
	}
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
