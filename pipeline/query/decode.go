// This file reads gRPC messages: of a list that is longer than it may be only the
// length is kept, for an element of it is two bytes on the way and hundreds in memory.

package query

import (
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "kvindex/pipeline/query/kvindexpb"
)

// The fields whose elements are messages.
var (
	fieldMM            = numberOf(&pb.MatchRequest{}, "mm")
	fieldRequests      = numberOf(&pb.MatchManyRequest{}, "requests")
	fieldStreamRequest = numberOf(&pb.MatchStreamRequest{}, "request")
)

func numberOf(m proto.Message, name string) protowire.Number {
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); string(f.Name()) == name {
			return f.Number()
		}
	}
	panic("BUG: no field " + name)
}

// codec is gRPC's own, for a server with these limits.
type codec struct {
	encoding.CodecV2
	limits Limits
}

func newCodec(l Limits) codec { return codec{encoding.GetCodecV2(grpcproto.Name), l} }

// Marshal passes on what is encoded already.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if e, ok := v.(*encoded); ok {
		return mem.BufferSlice{e.buf}, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal makes the whole message, but for lists that are too long: those have
// their length and no elements, which is enough for the service to refuse them.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	var decode func([]byte) error
	switch in := v.(type) {
	case *pb.MatchRequest:
		decode = func(b []byte) error { return c.request(in, b) }
	case *pb.MatchManyRequest:
		decode = func(b []byte) error { return c.batch(in, b) }
	case *pb.MatchStreamRequest:
		decode = func(b []byte) error { return c.streamed(in, b) }
	default:
		return c.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	return decode(buf.ReadOnlyData())
}

// request adds an encoded request to in.
func (c codec) request(in *pb.MatchRequest, b []byte) error {
	n := c.crowd(b)
	if n > 0 {
		b = without(b, fieldMM)
	}
	if err := (proto.UnmarshalOptions{Merge: true}).Unmarshal(b, in); err != nil {
		return err
	}
	if n > 0 {
		in.Mm = make([]*pb.Multimodal, n)
	}
	return nil
}

// crowd returns how many multimodal inputs an encoded request has, 0 if it may.
func (c codec) crowd(request []byte) (n int) {
	each(request, fieldMM, func([]byte) { n++ })
	if n <= c.limits.MaxMultimodal {
		return 0
	}
	return n
}

func (c codec) batch(in *pb.MatchManyRequest, b []byte) error {
	n, crowded := 0, false
	each(b, fieldRequests, func(request []byte) {
		n++
		crowded = crowded || c.crowd(request) > 0
	})
	most := c.limits.MaxBatch
	if n <= most && !crowded {
		return proto.Unmarshal(b, in)
	}
	if err := proto.Unmarshal(without(b, fieldRequests), in); err != nil {
		return err
	}
	in.Requests = make([]*pb.MatchRequest, n)
	if n > most {
		return nil
	}
	var err error
	i := 0
	each(b, fieldRequests, func(request []byte) {
		in.Requests[i] = new(pb.MatchRequest)
		if e := c.request(in.Requests[i], request); e != nil {
			err = e
		}
		i++
	})
	return err
}

func (c codec) streamed(in *pb.MatchStreamRequest, b []byte) error {
	crowded := false
	each(b, fieldStreamRequest, func(request []byte) { crowded = crowded || c.crowd(request) > 0 })
	if !crowded {
		return proto.Unmarshal(b, in)
	}
	if err := proto.Unmarshal(without(b, fieldStreamRequest), in); err != nil {
		return err
	}
	in.Request = new(pb.MatchRequest)
	var err error
	each(b, fieldStreamRequest, func(request []byte) { // several are one, as protobuf has it
		if e := c.request(in.Request, request); e != nil {
			err = e
		}
	})
	return err
}

// each calls f with each value of a field of an encoded message, as far as it is one.
func each(b []byte, field protowire.Number, f func(value []byte)) {
	walk(b, func(num protowire.Number, whole, value []byte) {
		if num == field && value != nil {
			f(value)
		}
	})
}

// without returns an encoded message without the values of a field.
func without(b []byte, field protowire.Number) (rest []byte) {
	end := walk(b, func(num protowire.Number, whole, value []byte) {
		if num != field || value == nil {
			rest = append(rest, whole...)
		}
	})
	return append(rest, b[end:]...) // what is none fails later
}

// walk calls f with the fields of an encoded message, tags included, and returns where
// it ends to be one. value is not nil if it is bytes, as messages are.
func walk(b []byte, f func(num protowire.Number, whole, value []byte)) (end int) {
	for end < len(b) {
		num, typ, n := protowire.ConsumeTag(b[end:])
		if n < 0 {
			break
		}
		size := protowire.ConsumeFieldValue(num, typ, b[end+n:])
		if size < 0 {
			break
		}
		var value []byte
		if typ == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(b[end+n:])
		}
		f(num, b[end:end+n+size], value)
		end += n + size
	}
	return end
}
