// This file reads requests in MessagePack. Each field is known, each value of one kind
// and nowhere nested, and no length is trusted before there are bytes for it.

package query

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// packedRefusal refuses a request as the Conductor does.
type packedRefusal struct {
	text   string
	reason string
	field  string // "": it is of none
	index  int    // of the element; -1: it is of none
}

func (e *packedRefusal) Error() string { return e.text }

// GRPCStatus makes it InvalidArgument.
func (e *packedRefusal) GRPCStatus() *status.Status {
	return status.New(codes.InvalidArgument, e.text)
}

// notPacked refuses a body that is not what it says it is.
func notPacked(text string) error { return &packedRefusal{text, "invalid_msgpack", "", -1} }

var errPackedShort = notPacked("the body ends before its map does")

// refusePacked refuses a field, for a reason of the Conductor's.
func refusePacked(reason, field, text string) error {
	return &packedRefusal{field + " " + text, reason, field, -1}
}

// packedError is what an error of msgp says of a field that should be want.
func packedError(field, want string, err error) error {
	switch {
	case err == msgp.ErrShortBytes:
		return errPackedShort
	case msgp.Resumable(err):
		return refusePacked("invalid_type", field, "must be "+want)
	}
	return notPacked("the body is not MessagePack: " + err.Error())
}

// packedFields are the fields of a kind of request.
type packedFields []packedField

type packedField struct {
	name     string
	required bool
	// read reads the value at the front of value and returns what follows it.
	read func(in *dropinRequest, name string, value []byte) (rest []byte, err error)
}

// readPacked reads the map that is body, of which nothing is kept. A field that is not
// known, or is there twice, is refused.
func (in *dropinRequest) readPacked(body []byte, fields packedFields) error {
	n, at, err := msgp.ReadMapHeaderBytes(body)
	if err == msgp.ErrShortBytes {
		return errPackedShort
	} else if err != nil {
		return notPacked("the body is not a map in MessagePack")
	}
	var seen uint64 // a bit for each of fields
	for range n {
		key, value, err := msgp.ReadStringZC(at)
		if err == msgp.ErrShortBytes {
			return errPackedShort
		} else if err != nil {
			return notPacked("the body's map has a key that is not a string")
		}
		i := slices.IndexFunc(fields, func(f packedField) bool { return f.name == string(key) })
		if i < 0 {
			return unknownPacked(key)
		}
		if seen&(1<<i) != 0 {
			return refusePacked("invalid_value", fields[i].name, "is there twice")
		}
		seen |= 1 << i
		if at, err = fields[i].read(in, fields[i].name, value); err != nil {
			return err
		}
	}
	if len(at) > 0 {
		return notPacked("the body goes on after its map")
	}
	for i, f := range fields {
		if f.required && seen&(1<<i) == 0 {
			return refusePacked("missing", f.name, "is required")
		}
	}
	return nil
}

func unknownPacked(key []byte) error {
	name := clip(key)
	why := &packedRefusal{"unknown field " + strconv.Quote(name), "unknown_field", name, -1}
	if !utf8.ValidString(name) {
		why.field = "" // it could not be sent as text
	}
	return why
}

// packedText is a string, and not an empty one unless it may be.
func packedText(to func(*dropinRequest) *string, mayBeEmpty bool) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		text, rest, err := msgp.ReadStringZC(value)
		switch {
		case err != nil:
			return nil, packedError(name, "a string", err)
		case !utf8.Valid(text):
			return nil, refusePacked("invalid_value", name, "is not UTF-8")
		case len(text) == 0 && !mayBeEmpty:
			return nil, refusePacked("invalid_value", name, "must not be empty")
		}
		*to(in) = string(text)
		return rest, nil
	}
}

// packedOr is a nil or what read reads.
func packedOr(read func(*dropinRequest, string, []byte) ([]byte, error)) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		if msgp.IsNil(value) {
			return value[1:], nil
		}
		return read(in, name, value)
	}
}

// packedNumber is a whole number from least to most.
func packedNumber(least, most int64, to func(in *dropinRequest, v int64)) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		v, rest, err := msgp.ReadInt64Bytes(value)
		if overflows(err) || err == nil && (v < least || v > most) {
			return nil, refusePacked("out_of_range", name, "must be from "+strconv.FormatInt(least, 10)+" to "+strconv.FormatInt(most, 10))
		} else if err != nil {
			return nil, packedError(name, "an integer", err)
		}
		to(in, v)
		return rest, nil
	}
}

// overflows reports whether an integer is one, but not of 64 bits with a sign.
func overflows(err error) bool {
	_, ok := errors.AsType[msgp.UintOverflow](err)
	return ok
}

// packedTokens is the tokens: the bytes of 32-bit numbers, little-endian, or an array of
// numbers, of which there are no more than most. They have a sign there, but no token
// is below 0.
func packedTokens(most int) func(*dropinRequest, string, []byte) ([]byte, error) {
	return func(in *dropinRequest, name string, value []byte) ([]byte, error) {
		const size = 4
		outOfRange := func(i int) error {
			return &packedRefusal{name + "[" + strconv.Itoa(i) + "] is not from 0 to " + strconv.Itoa(math.MaxInt32), "out_of_range", name, i}
		}
		if msgp.NextType(value) == msgp.ArrayType {
			n, rest, err := msgp.ReadArrayHeaderBytes(value)
			switch {
			case err != nil:
				return nil, packedError(name, "an array", err)
			case int64(n) > int64(most):
				return nil, tooMany(name, int(n), "tokens", most)
			case int64(n) > int64(len(rest)):
				return nil, errPackedShort
			}
			in.tokens = make([]uint32, n)
			for i := range in.tokens {
				v, after, err := msgp.ReadInt64Bytes(rest)
				if overflows(err) || err == nil && (v < 0 || v > math.MaxInt32) {
					return nil, outOfRange(i)
				} else if err != nil {
					err = packedError(name, "a list of integers", err)
					if why, ok := errors.AsType[*packedRefusal](err); ok && why.field != "" {
						why.index = i
					}
					return nil, err
				}
				in.tokens[i], rest = uint32(v), after
			}
			return rest, nil
		}
		bin, rest, err := msgp.ReadBytesZC(value)
		switch {
		case err != nil:
			return nil, packedError(name, "a bin or an array", err)
		case len(bin)%size != 0:
			return nil, refusePacked("invalid_value", name, "must be a bin of a multiple of 4 bytes")
		case len(bin)/size > most:
			return nil, tooMany(name, len(bin)/size, "tokens", most)
		}
		in.tokens = make([]uint32, len(bin)/size)
		for i := range in.tokens {
			if in.tokens[i] = binary.LittleEndian.Uint32(bin[i*size:]); in.tokens[i] > math.MaxInt32 {
				return nil, outOfRange(i)
			}
		}
		return rest, nil
	}
}

// packedProfile is how an engine makes its hashes: strings by these names. What they
// say matters to nobody here.
func packedProfile(_ *dropinRequest, name string, value []byte) ([]byte, error) {
	n, rest, err := msgp.ReadMapHeaderBytes(value)
	if err != nil {
		return nil, packedError(name, "a map", err)
	}
	for range n {
		var key []byte
		if key, rest, err = msgp.ReadStringZC(rest); err != nil {
			return nil, packedError(name, "a map of strings", err)
		}
		if !slices.Contains(profileFields, string(key)) {
			return nil, unknownPacked(key)
		}
		if _, rest, err = msgp.ReadStringZC(rest); err != nil {
			return nil, packedError(name, "a map of strings", err)
		}
	}
	return rest, nil
}

var profileFields = []string{"strategy", "algorithm", "python_hash_seed", "index_projection"}

// conductorQueryFields are a query's.
func conductorQueryFields(l Limits) packedFields {
	return packedFields{
		{"model", true, packedText(intoModel, false)},
		{"block_size", true, packedNumber(1, math.MaxInt32, intoPackedSize)},
		{"token_ids", true, packedTokens(l.MaxTokens)},
		{"tenant_id", false, packedText(intoTenant, true)},
		{"lora_name", false, packedText(intoLoRA, true)},
		{"cache_salt", false, packedOr(packedText(intoSalt, true))},
		{"instance_id", false, packedText(intoInstance, false)},
	}
}

var (
	conductorRegisterFields = packedFields{
		{"instance_id", true, packedText(intoInstance, false)},
		{"modelname", true, packedText(intoModel, false)},
		{"tenant_id", false, packedText(intoTenant, true)},
		{"dp_rank", true, packedNumber(0, math.MaxInt32, intoRank)},
		{"endpoint", true, packedText(intoNothing, false)},
		{"replay_endpoint", false, packedText(intoNothing, true)},
		{"type", true, packedText(intoNothing, false)},
		{"lora_name", false, packedText(intoNothing, true)},
		{"block_size", true, packedNumber(1, math.MaxInt32, intoPackedSize)},
		{"cache_group", false, packedOr(packedNumber(0, 0, func(*dropinRequest, int64) {}))},
		{"hash_profile", true, packedProfile},
	}
	conductorUnregisterFields = packedFields{
		{"instance_id", true, packedText(intoInstance, false)},
		{"tenant_id", false, packedText(intoTenant, true)},
		{"dp_rank", true, packedNumber(0, math.MaxInt32, intoRank)},
	}
)

func intoPackedSize(in *dropinRequest, v int64) { in.blockSize = uint32(v) }
func intoRank(in *dropinRequest, v int64)       { in.rank = int32(v) }
func intoNothing(*dropinRequest) *string        { return new(string) }
