package snapshot

import "testing"

func TestKeyRoundTrip(t *testing.T) {
	for text, k := range map[string]key{
		"floor":                    {kind: floorKey},
		"manifest/0/w":             {kind: manifestKey, id: ID{"w", 0}},
		"manifest/7/http://h:1/x/": {kind: manifestKey, id: ID{"http://h:1/x/", 7}},
		"chunk/0/0/w":              {kind: chunkKey, id: ID{"w", 0}},
		"chunk/2/2147483647/a/b":   {kind: chunkKey, id: ID{"a/b", 2}, chunk: 2147483647},
		"chunk/1/2/3/4":            {kind: chunkKey, id: ID{"3/4", 1}, chunk: 2},
		"manifest/0//":             {kind: manifestKey, id: ID{"/", 0}},
	} {
		if got := string(k.bytes()); got != text {
			t.Errorf("key %+v is %q, want %q", k, got, text)
		}
		if got, err := parseKey([]byte(text)); err != nil || got != k {
			t.Errorf("parse %q: %+v, %v, want %+v", text, got, err, k)
		}
	}
}

func TestKeyRefused(t *testing.T) {
	for _, text := range []string{
		"", "floor/", "Floor", "manifest", "manifest/", "manifest/0", "manifest/0/", "manifest//w", "manifest/w/0",
		"manifest/00/w", "manifest/+1/w", "manifest/-1/w", "manifest/01/w", "manifest/2147483648/w", "manifest/ 1/w",
		"chunk/0/w", "chunk/0/0", "chunk/0/0/", "chunk/0/-1/w", "chunk/0/1e3/w", "chunk//0/w", "chunks/0/0/w",
	} {
		if k, err := parseKey([]byte(text)); err == nil {
			t.Errorf("parse %q: %+v, want an error", text, k)
		}
	}
}

func FuzzKey(f *testing.F) {
	for _, s := range []string{"floor", "manifest/0/w", "chunk/1/2/a/b", "chunk/01/2/w"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if k, err := parseKey(b); err == nil && string(k.bytes()) != string(b) {
			t.Errorf("%q parses as %+v, which is %q", b, k, k.bytes())
		}
	})
}
