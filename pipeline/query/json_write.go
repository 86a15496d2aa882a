// This file writes messages as JSON.

package query

import (
	"encoding/json"
	"math"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "kvindex/pipeline/query/kvindexpb"
)

// exactInt is the first whole number whose neighbour a float64 cannot tell from
// it: from there on integers are written as strings, lest JavaScript and jq
// round them.
const exactInt = 1 << 53

// AppendJSON appends an answer as GET and POST give it, for other programs that
// print one.
func AppendJSON(dst []byte, m proto.Message) []byte { return appendJSON(dst, m.ProtoReflect()) }

// appendJSON appends a message as a JSON object with every field there is,
// named as in the .proto file. Unlike protojson it writes 64-bit integers as
// numbers where that is exact. It knows the kinds of fields that answers have.
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

// appendMatches is appendJSON of a MatchResponse, several times as quick:
// routers wait for this one.
func appendMatches(dst []byte, resp *pb.MatchResponse) []byte {
	dst = strconv.AppendUint(append(dst, `{"blocks":`...), uint64(resp.Blocks), 10)
	dst = strconv.AppendUint(append(dst, `,"block_size":`...), uint64(resp.BlockSize), 10)
	dst = append(dst, `,"matches":[`...)
	for i, m := range resp.Matches {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(append(dst, `{"worker":`...), m.Worker)
		dst = strconv.AppendInt(append(dst, `,"dp_rank":`...), int64(m.DpRank), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_blocks":`...), uint64(m.DepthBlocks), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_tokens":`...), uint64(m.DepthTokens), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_host_blocks":`...), uint64(m.DepthHostBlocks), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_host_tokens":`...), uint64(m.DepthHostTokens), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_disk_blocks":`...), uint64(m.DepthDiskBlocks), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_disk_tokens":`...), uint64(m.DepthDiskTokens), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_external_blocks":`...), uint64(m.DepthExternalBlocks), 10)
		dst = strconv.AppendUint(append(dst, `,"depth_external_tokens":`...), uint64(m.DepthExternalTokens), 10)
		dst = appendInt(append(dst, `,"age_ms":`...), m.AgeMs)
		dst = strconv.AppendBool(append(dst, `,"incomplete":`...), m.Incomplete)
		dst = strconv.AppendInt(append(dst, `,"partition":`...), int64(m.Partition), 10)
		dst = appendInt(append(dst, `,"offset":`...), m.Offset)
		dst = append(dst, '}')
	}
	dst = strconv.AppendBool(append(dst, `],"lower_bounds":`...), resp.LowerBounds)
	dst = strconv.AppendBool(append(dst, `,"partial":`...), resp.Partial)
	dst = appendStrings(append(dst, `,"missing":`...), resp.Missing)
	dst = append(dst, `,"behind":[`...)
	for i, b := range resp.Behind {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(append(dst, `{"partition":`...), int64(b.Partition), 10)
		dst = appendInt(append(dst, `,"offsets":`...), b.Offsets)
		dst = append(dst, '}')
	}
	return append(dst, "]}"...)
}

// appendResults writes a batch's answers: each an object with either answer or error.
func appendResults(dst []byte, resp *pb.MatchManyResponse) []byte {
	dst = append(dst, `{"results":[`...)
	for i, r := range resp.Results {
		if i > 0 {
			dst = append(dst, ',')
		}
		if r.Error != nil {
			dst = appendJSON(append(dst, `{"error":`...), r.Error.ProtoReflect())
		} else {
			dst = appendMatches(append(dst, `{"answer":`...), r.Answer)
		}
		dst = append(dst, '}')
	}
	return append(dst, "]}"...)
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
	switch f.Kind() {
	case protoreflect.BoolKind:
		return strconv.AppendBool(dst, v.Bool())
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		return appendInt(dst, v.Int())
	case protoreflect.Uint32Kind:
		return strconv.AppendUint(dst, v.Uint(), 10)
	case protoreflect.DoubleKind:
		x := v.Float()
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return append(dst, "null"...)
		}
		return strconv.AppendFloat(dst, x, 'g', -1, 64)
	case protoreflect.StringKind:
		return appendString(dst, v.String())
	case protoreflect.MessageKind:
		return appendJSON(dst, v.Message())
	}
	panic("BUG: JSON of a " + f.Kind().String() + " field: " + string(f.FullName()))
}

// appendInt appends a number, or a string if it is not exact as a float64.
func appendInt(dst []byte, x int64) []byte {
	if x >= exactInt || x <= -exactInt {
		return append(strconv.AppendInt(append(dst, '"'), x, 10), '"')
	}
	return strconv.AppendInt(dst, x, 10)
}

func appendStrings(dst []byte, list []string) []byte {
	dst = append(dst, '[')
	for i, s := range list {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(dst, s)
	}
	return append(dst, ']')
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
