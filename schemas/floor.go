package schemas

// This file encodes and decodes snapshot floors, and the checksum that ends
// them as it ends manifests.

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// AppendFloor appends f as a framed record to dst and returns the extended
// slice.
func AppendFloor(dst []byte, f *Floor) []byte {
	start := len(dst)
	dst = append(dst, floorSchema.header[:]...)
	dst = appendLong(dst, int64(f.Format))
	dst = appendLong(dst, f.Offset)
	dst = append(dst, f.TopicID[:]...)
	dst = appendLong(dst, int64(f.Partitions))
	dst = appendLong(dst, f.PastLostAt)
	return appendCheck(appendLong(dst, f.Written), start)
}

// DecodeFloor decodes a framed record into f, which is undefined after an
// error. Errors: as Batch.Decode's, and ErrChecksum.
func DecodeFloor(f *Floor, value []byte) error {
	r := floorSchema.open(value, DefaultLimits)
	*f = Floor{
		Format:     r.int(),
		Offset:     r.long(),
		TopicID:    r.topicID(),
		Partitions: r.int(),
		PastLostAt: r.long(),
		Written:    r.long(),
	}
	if err := r.endChecked(); err != nil {
		return fmt.Errorf("snapshot floor: %w", err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendCheck ends the record that begins at start with its checksum. Kafka's
// own covers a record on its way to and from a broker's disk; this one also
// what happens to it in between, since a manifest or floor that reads well but
// is wrong would have events passed over.
func appendCheck(dst []byte, start int) []byte {
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// endChecked is end for a record that ends with its checksum.
func (r *reader) endChecked() error {
	at := r.pos
	sum := r.take(4)
	if err := r.end(); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(sum) != crc32.Checksum(r.buf[:at], castagnoli) {
		r.fail(ErrChecksum)
	}
	return r.err
}
