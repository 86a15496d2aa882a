package schemas

// This file appends Avro's binary encoding, byte for byte as goavro writes it.

import "encoding/binary"

func appendLong(dst []byte, v int64) []byte {
	return binary.AppendUvarint(dst, uint64(v)<<1^uint64(v>>63))
}

func appendText[T string | []byte](dst []byte, s T) []byte {
	dst = appendLong(dst, int64(len(s)))
	return append(dst, s...)
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

func appendHashes[H ~uint64](dst []byte, hs []H) []byte {
	if len(hs) > 0 {
		dst = appendLong(dst, int64(len(hs)))
		for _, h := range hs {
			dst = binary.LittleEndian.AppendUint64(dst, uint64(h))
		}
	}
	return append(dst, 0)
}
