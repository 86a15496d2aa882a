// This file writes messages as JSON.

package query

import (
	"encoding/json"
	"math"
	"slices"
	"strconv"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// exactInt is the first whole number whose neighbour a float64 cannot tell from
// it: from there on integers are written as strings, lest JavaScript and jq
// round them.
const exactInt = 1 << 53

// appendJSON appends a message as a JSON object with every field there is,
// named as in the .proto file. Unlike protojson it writes 64-bit integers as
// numbers where that is exact. Bytes, enums and groups are not used by this API.
func appendJSON(dst []byte, m protoreflect.Message) []byte {
	dst = append(dst, '{')
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		dst = append(dst, f.Name()...)
		dst = append(dst, '"', ':')
		switch v := m.Get(f); {
		case f.IsList():
			list := v.List()
			dst = append(dst, '[')
			for j := range list.Len() {
				if j > 0 {
					dst = append(dst, ',')
				}
				dst = appendValue(dst, f, list.Get(j))
			}
			dst = append(dst, ']')
		case f.IsMap():
			dst = appendMap(dst, f, v.Map())
		default:
			dst = appendValue(dst, f, v)
		}
	}
	return append(dst, '}')
}

func appendMap(dst []byte, f protoreflect.FieldDescriptor, m protoreflect.Map) []byte {
	keys := make([]string, 0, m.Len())
	for k := range m.Range {
		keys = append(keys, k.String())
	}
	slices.Sort(keys)
	dst = append(dst, '{')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendString(dst, k), ':')
		dst = appendValue(dst, f.MapValue(), m.Get(protoreflect.ValueOfString(k).MapKey()))
	}
	return append(dst, '}')
}

func appendValue(dst []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch x := v.Interface().(type) {
	case bool:
		return strconv.AppendBool(dst, x)
	case int32:
		return strconv.AppendInt(dst, int64(x), 10)
	case uint32:
		return strconv.AppendUint(dst, uint64(x), 10)
	case int64:
		if x >= exactInt || x <= -exactInt {
			return append(strconv.AppendInt(append(dst, '"'), x, 10), '"')
		}
		return strconv.AppendInt(dst, x, 10)
	case uint64:
		if x >= exactInt {
			return append(strconv.AppendUint(append(dst, '"'), x, 10), '"')
		}
		return strconv.AppendUint(dst, x, 10)
	case float64:
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return append(dst, "null"...)
		}
		return strconv.AppendFloat(dst, x, 'g', -1, 64)
	case string:
		return appendString(dst, x)
	case protoreflect.Message:
		return appendJSON(dst, x)
	}
	panic("BUG: JSON of a " + f.Kind().String() + " field: " + string(f.FullName()))
}

// appendString appends a JSON string.
func appendString(dst []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			quoted, err := json.Marshal(s)
			if err != nil {
				panic("BUG: JSON of a string: " + err.Error())
			}
			return append(dst, quoted...)
		}
	}
	dst = append(dst, '"')
	dst = append(dst, s...)
	return append(dst, '"')
}
