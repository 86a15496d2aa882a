// This file gives tests ports that stay free while nobody listens on them.

package testcontainers

import (
	"testing"

	"kvindex/pipeline/ports"
)

// FreeAddress returns a host:port on loopback that nothing listens on, nor on the row-1 ports after it, and that no other test is
// given until this one ends. It is for what is started, killed and started again, which a port that the system chose is not:
// somebody's connection may have it meanwhile.
func FreeAddress(t testing.TB, row int) string {
	t.Helper()
	r, err := ports.Claim(row)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r.Address()
}
