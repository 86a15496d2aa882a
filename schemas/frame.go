package schemas

// This file reads the single-object framing in front of every record.

import (
	"encoding/binary"
	"fmt"
)

// headerBytes is the length of the framing: C3 01, then the writer schema's
// CRC-64-AVRO fingerprint, little-endian.
const headerBytes = 10

// fingerprint returns the fingerprint of the schema that value was written
// with: ErrMagic if it is no single-object encoding, ErrTruncated if it is
// shorter than the framing.
func fingerprint(value []byte) (uint64, error) {
	if len(value) >= 2 && (value[0] != 0xC3 || value[1] != 0x01) {
		return 0, fmt.Errorf("%w: begins with % x", ErrMagic, value[:2])
	}
	if len(value) < headerBytes {
		return 0, fmt.Errorf("%w: %d bytes, less than its framing", ErrTruncated, len(value))
	}
	return binary.LittleEndian.Uint64(value[2:]), nil
}

// open checks size and framing of a value that must be of schema s, and
// returns a reader behind the framing.
func (s *compiled) open(value []byte, l Limits) reader {
	if len(value) > l.MaxRecordBytes {
		return reader{err: fmt.Errorf("%w: record of %d bytes, limit %d", ErrTooLarge, len(value), l.MaxRecordBytes)}
	}
	if len(value) < headerBytes || [headerBytes]byte(value) != s.header {
		fp, err := fingerprint(value)
		if err == nil {
			err = &UnknownSchemaError{Fingerprint: fp}
		}
		return reader{err: err}
	}
	return reader{buf: value, pos: headerBytes}
}
