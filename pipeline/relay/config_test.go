// This file tests a rank's endpoints; cmd/kvindex tests the rest of the settings.

package relay

import "testing"

func TestEndpointOf(t *testing.T) {
	for _, c := range []struct {
		endpoint string
		rank     int
		want     string // empty: an error
	}{
		{"tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"},
		{"tcp://10.0.0.1:5557", 3, "tcp://10.0.0.1:5560"},
		{"tcp://[::1]:5557", 1, "tcp://[::1]:5558"},
		{"tcp://host:65535", 1, ""},
		{"tcp://host", 1, ""},
		{"tcp://5557", 1, ""},
		{"tcp://host:", 1, ""},
		{"tcp://host:99999999999999999999", 1, ""},
		{"ipc:///run/engine:5", 0, "ipc:///run/engine:5"},
		{"ipc:///run/engine:5", 1, ""},
		{"", 1, ""},
	} {
		got, err := endpointOf(c.endpoint, c.rank)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q, rank %d: %q, %v; want %q", c.endpoint, c.rank, got, err, c.want)
		}
	}
}
