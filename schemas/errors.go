package schemas

// This file names what can be wrong with a record.

import (
	"errors"
	"fmt"
)

// What decoding a record can fail with; match with errors.Is. The error itself
// also says where in the record.
var (
	// ErrMagic: the value does not begin with C3 01, so it is no single-object
	// encoding.
	ErrMagic = errors.New("not an Avro single-object encoding")
	// ErrUnknownSchema: no schema of that fingerprint is known. The error is
	// an *UnknownSchemaError.
	ErrUnknownSchema = errors.New("unknown schema")
	// ErrTruncated: the record ends before its schema does.
	ErrTruncated = errors.New("record is truncated")
	// ErrLeftover: bytes follow the record.
	ErrLeftover = errors.New("bytes left over after the record")
	// ErrTooLarge: the record, or a count in it, is beyond the Limits.
	ErrTooLarge = errors.New("too large")
	// ErrChecksum: a manifest or floor is not as it was written.
	ErrChecksum = errors.New("checksum is wrong")
	// ErrInvalid: a value that its type does not allow.
	ErrInvalid = errors.New("invalid value")
)

// Where this package is stricter than goavro, which takes all of these.
var (
	errVarint    = fmt.Errorf("%w: integer of more than 64 bits", ErrInvalid)
	errInt       = fmt.Errorf("%w: int of more than 32 bits", ErrInvalid)
	errBlockSize = errors.New("block size in bytes is not the block's")
	errUTF8      = fmt.Errorf("%w: string is not UTF-8", ErrInvalid)
	errBool      = fmt.Errorf("%w: boolean is neither 0 nor 1", ErrInvalid)
	errCRC       = fmt.Errorf("%w: CRC-32C negative or of more than 32 bits", ErrInvalid)
)

// UnknownSchemaError tells which schema is missing.
type UnknownSchemaError struct {
	Fingerprint uint64 // CRC-64-AVRO
}

// Error returns the message.
func (e *UnknownSchemaError) Error() string {
	return fmt.Sprintf("%v %016x", ErrUnknownSchema, e.Fingerprint)
}

// Unwrap returns ErrUnknownSchema.
func (e *UnknownSchemaError) Unwrap() error { return ErrUnknownSchema }
