// This file reads requests of the APIs of other indexers: a newer client's field is
// passed over, but one that may be a known one misspelt is refused, as is each number
// that is not exact.

package query

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// dropinRequest is what a request of any of those APIs can say.
type dropinRequest struct {
	model     string
	blockSize uint32
	lora      string
	salt      string
	tokens    []uint32
	hashes    []uint64 // local or sequence hashes, as the path says
	tenant    string
	group     string
	instance  string
	rank      int32
}

// dropinFields are the fields of a kind of request, by name. Each function reads the
// value at the front of value and returns what follows it.
type dropinFields map[string]func(in *dropinRequest, name string, value []byte) (rest []byte, err error)

// maxUnknown bounds how many fields of a request are passed over.
const maxUnknown = 64

// read reads the object that is body, of which nothing is kept, and returns the names
// of the fields that it does not know.
func (in *dropinRequest) read(body []byte, fields dropinFields) (unknown []string, err error) {
	if !exactText(body) {
		return nil, errNotUTF8
	}
	at := skipSpace(body)
	if len(at) == 0 {
		return nil, invalid("the body ends before its JSON object does")
	}
	if at[0] != '{' {
		return nil, invalid("the body is not a JSON object")
	}
	var seen []string
	for at = skipSpace(at[1:]); ; at = skipSpace(at[1:]) {
		if len(seen)+len(unknown) == 0 && len(at) > 0 && at[0] == '}' {
			break
		}
		name, value, err := fieldName(at)
		if err != nil {
			return nil, err
		}
		if read, ok := fields[name]; ok {
			if slices.Contains(seen, name) {
				return nil, invalid("%s is there twice", name)
			}
			seen = append(seen, name)
			at, err = read(in, name, value)
		} else if meant := fields.like(name); meant != "" {
			return nil, invalid("unknown field %q: %q is meant, it seems", name, meant)
		} else if changesHashes(name) {
			at, err = refuseField("unknown, and it may change which blocks are meant")(in, name, value)
		} else {
			if len(unknown) == maxUnknown {
				return nil, invalid("more than %d unknown fields", maxUnknown)
			}
			unknown = append(unknown, name)
			_, at, err = cutValue(name, value)
		}
		if err != nil {
			return nil, invalid("%v", err)
		}
		if at = skipSpace(at); len(at) == 0 {
			return nil, invalid("the body ends before its JSON object does")
		}
		if at[0] == '}' {
			break
		}
		if at[0] != ',' {
			return nil, invalid("not JSON: %s follows the value of %q", clip(at), name)
		}
	}
	if len(skipSpace(at[1:])) > 0 {
		return nil, invalid("the body goes on after its JSON object")
	}
	return unknown, nil
}

// fieldName reads a name and the colon after it, and returns what follows.
func fieldName(at []byte) (name string, value []byte, err error) {
	if len(at) == 0 {
		return "", nil, invalid("the body ends before its JSON object does")
	}
	if at[0] != '"' {
		return "", nil, invalid("not JSON: %s is no field's name", clip(at))
	}
	end := 1
	for end < len(at) && at[end] != '"' {
		if at[end] == '\\' {
			end++
		}
		end++
	}
	if end >= len(at) {
		return "", nil, invalid("the body ends before its JSON object does")
	}
	if err := json.Unmarshal(at[:end+1], &name); err != nil {
		return "", nil, invalid("not JSON: %s is no field's name", clip(at))
	}
	at = skipSpace(at[end+1:])
	if len(at) == 0 {
		return "", nil, invalid("the body ends before its JSON object does")
	}
	if at[0] != ':' {
		return "", nil, invalid("not JSON: no colon follows the name %q", name)
	}
	return name, skipSpace(at[1:]), nil
}

// like returns the field that differs from name in nothing but case and underscores,
// "" if there is none.
func (fields dropinFields) like(name string) string {
	for field := range fields {
		if foldName(field) == foldName(name) {
			return field
		}
	}
	return ""
}

// changesHashes reports whether a field is about what goes into hashes, by its name:
// passing it over would answer for other blocks.
func changesHashes(name string) bool {
	name = strings.ToLower(name)
	return strings.Contains(name, "salt") || strings.Contains(name, "lora") || strings.Contains(name, "multimodal") ||
		slices.Contains(strings.Split(name, "_"), "mm")
}

func foldName(s string) string {
	return strings.NewReplacer("_", "", "-", "", " ", "").Replace(strings.ToLower(s))
}

// cutValue returns the JSON value at the front of value, and what follows it.
func cutValue(name string, value []byte) (raw, rest []byte, err error) {
	rest = skipValue(value)
	raw = bytes.TrimRight(value[:len(value)-len(rest)], " \n\t\r")
	if !json.Valid(raw) {
		return nil, nil, fmt.Errorf("not JSON: %s: %s is no value", name, clip(value))
	}
	return raw, rest, nil
}

// textField is a string.
func textField(to func(*dropinRequest) *string) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		raw, rest, err := cutValue(name, value)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(raw, to(in)); err != nil {
			return nil, fmt.Errorf("%s: %s is not a string", name, clip(raw))
		}
		return rest, nil
	}
}

// nameField is a string or a whole number, which is the name that it writes.
func nameField(to func(*dropinRequest) *string) func(*dropinRequest, string, []byte) ([]byte, error) {
	text := textField(to)
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		if len(value) > 0 && '0' <= value[0] && value[0] <= '9' {
			_, rest, ok := parseUint(value, math.MaxUint64)
			if !ok || len(rest) > 0 && strings.IndexByte(".eE", rest[0]) >= 0 {
				return nil, fmt.Errorf("%s: %s is neither a string nor a whole number of 64 bits", name, clip(value))
			}
			*to(in) = string(value[:len(value)-len(rest)])
			return rest, nil
		}
		return text(in, name, value)
	}
}

// sizeField is a whole number of 31 bits.
func sizeField(to func(*dropinRequest) *uint32) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		raw, rest, err := cutValue(name, value)
		if err != nil || string(raw) == "null" {
			return rest, err
		}
		v, more, ok := parseUint(raw, math.MaxInt32)
		if !ok || len(more) > 0 {
			return nil, fmt.Errorf("%s: %s is not a whole number from 0 to %d", name, clip(raw), math.MaxInt32)
		}
		*to(in) = uint32(v)
		return rest, nil
	}
}

// tokensField is a list of tokens.
func tokensField(in *dropinRequest, name string, value []byte) (rest []byte, err error) {
	if rest, ok := skipNull(value); ok {
		return rest, nil
	}
	if len(value) == 0 {
		return nil, fmt.Errorf("%s has no value", name)
	}
	in.tokens, rest, err = parseUints(in.tokens, name, value, math.MaxUint32, false)
	return rest, err
}

// hashesField is a list of 64-bit hashes, each signed or not.
func hashesField(in *dropinRequest, name string, value []byte) (rest []byte, err error) {
	if rest, ok := skipNull(value); ok {
		return rest, nil
	}
	if len(value) == 0 {
		return nil, fmt.Errorf("%s has no value", name)
	}
	in.hashes, rest, err = parseUints(in.hashes, name, value, math.MaxUint64, true)
	return rest, err
}

func skipNull(value []byte) (rest []byte, ok bool) {
	return bytes.CutPrefix(value, []byte("null"))
}

// passedOver is a field that means nothing here.
func passedOver(_ *dropinRequest, name string, value []byte) ([]byte, error) {
	_, rest, err := cutValue(name, value)
	return rest, err
}

// refuseField is a field whose value, if it is none of these, would change the answer in a way that is
// not supported.
func refuseField(why string, harmless ...string) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(_ *dropinRequest, name string, value []byte) ([]byte, error) {
		raw, rest, err := cutValue(name, value)
		if err == nil && string(raw) != "null" && !slices.Contains(harmless, string(raw)) {
			err = fmt.Errorf("%s: %s", name, why)
		}
		return rest, err
	}
}
