// Package ports gives out ports that stay free while nobody listens on them, for what
// tests and commands start, kill and start again at the same address. A port chosen by
// the system is not reliable for that: another connection may get it meanwhile.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// The ports given out lie below the range from which Linux takes the ports of outgoing
// connections (32768 and up).
const low, high = 20000, 32000

// Row is a row of ports on loopback that nobody else, in any process, is given before
// Release, even while what uses them is down: the UDP socket of each is held.
type Row struct {
	first int
	held  []net.PacketConn
}

// Claim claims n ports in a row that nothing listens on.
func Claim(n int) (*Row, error) {
	for range 1000 {
		r := &Row{first: low + rand.IntN(high-low-n)}
		if r.take(n) {
			return r, nil
		}
		r.Release()
	}
	return nil, fmt.Errorf("no %d free ports in a row on 127.0.0.1 between %d and %d", n, low, high)
}

// take reports whether the ports were free.
func (r *Row) take(n int) bool {
	for port := r.first; port < r.first+n; port++ {
		udp, err := net.ListenPacket("udp", loopback(port))
		if err != nil {
			return false
		}
		r.held = append(r.held, udp)
		tcp, err := net.Listen("tcp", loopback(port))
		if err != nil {
			return false
		}
		tcp.Close()
	}
	return true
}

// First returns the first port; the others follow it.
func (r *Row) First() int { return r.first }

// Address returns the first port's host:port.
func (r *Row) Address() string { return loopback(r.first) }

// Release gives the ports to others.
func (r *Row) Release() {
	for _, udp := range r.held {
		udp.Close()
	}
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
