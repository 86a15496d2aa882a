// This file tests a rank's endpoints, and a relay that does not run yet;
// cmd/kvindex tests the rest of the settings.

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

func TestStatusBeforeRun(t *testing.T) {
	c := DefaultConfig()
	c.Engines = []Engine{{Worker: "w", Kind: VLLM, Events: "tcp://127.0.0.1:5557", Model: "m", BlockSize: 16, Ranks: 1}}
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if st := r.Status(); st.Ready || len(st.Missing) != 1 || len(st.Ranks) != 0 {
		t.Errorf("%+v", st)
	}
}
