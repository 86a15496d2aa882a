// A port is one test's, in whichever process.

package ports

import (
	"net"
	"testing"
)

func TestClaim(t *testing.T) {
	c, err := Claim(3)
	if err != nil {
		t.Fatal(err)
	}
	// takes is what another process would find, as a claim is not known by memory.
	takes := func(port int) bool {
		other := &Row{first: port}
		defer other.Release()
		return other.take(1)
	}
	for port := c.first; port < c.first+3; port++ {
		l, err := net.Listen("tcp", loopback(port)) // what it is for
		if err != nil {
			t.Fatal(err)
		}
		if takes(port) {
			t.Errorf("port %d is given twice", port)
		}
		l.Close()
		if takes(port) {
			t.Errorf("port %d is given twice, while what it is for is down", port)
		}
	}
	c.Release()
	if !takes(c.first) {
		t.Error("a claim outlives its release")
	}
}
