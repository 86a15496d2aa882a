package snapshot

// This file makes and parses the keys of the snapshot topic's records.

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ID names a worker-rank.
type ID struct {
	Worker string
	Rank   int32
}

// String returns the worker and its rank, as in log lines.
func (id ID) String() string { return fmt.Sprintf("%s rank %d", id.Worker, id.Rank) }

// Compare orders ids by worker, then rank.
func (id ID) Compare(o ID) int {
	if c := strings.Compare(id.Worker, o.Worker); c != 0 {
		return c
	}
	return int(id.Rank) - int(o.Rank)
}

type keyKind uint8

const (
	manifestKey keyKind = iota
	chunkKey
	floorKey
)

// key is a parsed record key. Compaction keeps the last record of each, so a
// key holds no generation: a new chunk takes the place of the old one.
type key struct {
	kind  keyKind
	id    ID    // but of floorKey
	chunk int32 // of chunkKey
}

var errKey = errors.New(`key is none of "manifest/<rank>/<worker>", "chunk/<rank>/<n>/<worker>", "floor"`)

// bytes returns the key as text. The worker comes last because its name may
// contain a slash.
func (k key) bytes() []byte {
	switch k.kind {
	case manifestKey:
		return fmt.Appendf(nil, "manifest/%d/%s", k.id.Rank, k.id.Worker)
	case chunkKey:
		return fmt.Appendf(nil, "chunk/%d/%d/%s", k.id.Rank, k.chunk, k.id.Worker)
	default:
		return []byte("floor")
	}
}

// parseKey parses what bytes makes and nothing else, so that no two keys mean
// the same record.
func parseKey(b []byte) (key, error) {
	s := string(b)
	if s == "floor" {
		return key{kind: floorKey}, nil
	}
	kind, rest, _ := strings.Cut(s, "/")
	var k key
	switch kind {
	case "manifest":
		k.kind = manifestKey
	case "chunk":
		k.kind = chunkKey
	default:
		return key{}, errKey
	}
	var ok bool
	if k.id.Rank, rest, ok = cutNumber(rest); !ok {
		return key{}, errKey
	}
	if k.kind == chunkKey {
		if k.chunk, rest, ok = cutNumber(rest); !ok {
			return key{}, errKey
		}
	}
	if rest == "" {
		return key{}, errKey
	}
	k.id.Worker = rest
	return k, nil
}

// cutNumber cuts a canonical decimal number, not negative, off s up to a slash.
func cutNumber(s string) (int32, string, bool) {
	field, rest, ok := strings.Cut(s, "/")
	n, err := strconv.ParseInt(field, 10, 32)
	if !ok || err != nil || n < 0 || strconv.FormatInt(n, 10) != field {
		return 0, "", false
	}
	return int32(n), rest, true
}
