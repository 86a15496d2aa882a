package schemas

// This file encodes and decodes snapshot floors.

import "fmt"

// AppendFloor appends f as a framed record to dst and returns the extended
// slice.
func AppendFloor(dst []byte, f *Floor) []byte {
	dst = append(dst, floorSchema.header[:]...)
	dst = appendLong(dst, int64(f.Format))
	dst = appendLong(dst, f.Offset)
	dst = append(dst, f.TopicID[:]...)
	dst = appendLong(dst, int64(f.Partitions))
	return appendLong(dst, f.Written)
}

// DecodeFloor decodes a framed record into f, which is undefined after an
// error. Errors: as Batch.Decode's.
func DecodeFloor(f *Floor, value []byte) error {
	r := floorSchema.open(value, DefaultLimits)
	*f = Floor{
		Format:     r.int(),
		Offset:     r.long(),
		TopicID:    r.topicID(),
		Partitions: r.int(),
		Written:    r.long(),
	}
	if err := r.end(); err != nil {
		return fmt.Errorf("snapshot floor: %w", err)
	}
	return nil
}
