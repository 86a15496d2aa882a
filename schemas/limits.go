package schemas

// This file bounds what a record may ask for.

// Limits bound what a record may ask for. The zero value of a field means its
// default.
type Limits struct {
	MaxRecordBytes int // of a value, framing included; default and most 4 MiB
	MaxEvents      int // of a batch; default 65,536. An Event takes some 100 bytes of memory, but may take only one byte of a record.
}

// DefaultLimits are the defaults of each field.
var DefaultLimits = Limits{MaxRecordBytes: maxBlockCount * 8, MaxEvents: 1 << 16}

func (l Limits) withDefaults() Limits {
	if l.MaxRecordBytes <= 0 || l.MaxRecordBytes > DefaultLimits.MaxRecordBytes {
		l.MaxRecordBytes = DefaultLimits.MaxRecordBytes
	}
	if l.MaxEvents <= 0 {
		l.MaxEvents = DefaultLimits.MaxEvents
	}
	return l
}
