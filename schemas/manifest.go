package schemas

// This file encodes and decodes snapshot manifests.

import (
	"fmt"
	"math"
	"unicode/utf8"

	"kvindex/index"
)

// AppendManifest appends m as a framed record to dst and returns the extended
// slice; it allocates only to grow dst. On an error it returns dst as it was.
// Errors: ErrInvalid, ErrTooLarge, as AppendBatch's.
func AppendManifest(dst []byte, m *Manifest) ([]byte, error) {
	if !utf8.ValidString(m.Worker) || !utf8.ValidString(m.Model) || !utf8.ValidString(m.Producer) {
		return dst, fmt.Errorf("snapshot manifest: %w", errUTF8)
	}
	if m.Hasher > index.Opaque {
		return dst, fmt.Errorf("snapshot manifest: %w: %v", ErrInvalid, m.Hasher)
	}
	out := append(dst, manifestSchema.header[:]...)
	out = appendLong(out, int64(m.Format))
	out = appendText(out, m.Worker)
	out = appendLong(out, int64(m.Rank))
	out = appendLong(out, m.Generation)
	out = appendLong(out, m.W)
	out = appendLong(out, int64(m.LeaderEpoch))
	out = append(out, m.TopicID[:]...)
	out = appendLong(out, int64(m.Partitions))
	out = appendText(out, m.Model)
	out = appendLong(out, int64(m.BlockSize))
	out = appendLong(out, int64(m.Hasher))
	out = appendLong(out, m.Epoch)
	out = appendLong(out, m.EpochStarted)
	out = appendLong(out, m.Seq)
	out = appendText(out, m.Producer)
	out = appendLong(out, m.LastHeard)
	out = appendLong(out, m.LastOffset)
	out = appendBool(out, m.Incomplete)
	out = appendLong(out, m.PastLostAt)
	out = appendBool(out, m.Disputed)
	out = appendBool(out, m.Retired)
	out = appendLong(out, m.RetiredAt)
	out = appendLong(out, int64(m.Chunks))
	out = appendLong(out, m.Bytes)
	if len(m.CRC32C) > 0 {
		out = appendLong(out, int64(len(m.CRC32C)))
		for _, crc := range m.CRC32C {
			out = appendLong(out, int64(crc))
		}
	}
	return sized(dst, appendCheck(append(out, 0), len(dst)), "snapshot manifest")
}

// DecodeManifest decodes a framed record into m, which does not alias value
// and reuses only the storage of m.CRC32C. After an error m is undefined.
// Errors: as Batch.Decode's, and ErrChecksum.
func DecodeManifest(m *Manifest, value []byte) error {
	r := manifestSchema.open(value, DefaultLimits)
	*m = Manifest{
		Format:       r.int(),
		Worker:       string(r.text()),
		Rank:         r.int(),
		Generation:   r.long(),
		W:            r.long(),
		LeaderEpoch:  r.int(),
		TopicID:      r.topicID(),
		Partitions:   r.int(),
		Model:        string(r.text()),
		BlockSize:    r.int(),
		Hasher:       r.hasher(),
		Epoch:        r.long(),
		EpochStarted: r.long(),
		Seq:          r.long(),
		Producer:     string(r.text()),
		LastHeard:    r.long(),
		LastOffset:   r.long(),
		Incomplete:   r.boolean(),
		PastLostAt:   r.long(),
		Disputed:     r.boolean(),
		Retired:      r.boolean(),
		RetiredAt:    r.long(),
		Chunks:       r.int(),
		Bytes:        r.long(),
		CRC32C:       m.CRC32C[:0],
	}
	var a array
	for n := r.block(&a, crcBytes, maxBlockCount); n > 0; n = r.block(&a, crcBytes, maxBlockCount) {
		for range n {
			crc := r.long()
			if crc < 0 || crc > math.MaxUint32 {
				r.fail(errCRC)
			}
			m.CRC32C = append(m.CRC32C, uint32(crc))
		}
	}
	if err := r.endChecked(); err != nil {
		return fmt.Errorf("snapshot manifest: %w", err)
	}
	return nil
}

func (r *reader) topicID() (id [16]byte) {
	copy(id[:], r.take(len(id)))
	return id
}
