// Package kvw is KVW1, the file format of workloads for index structures: the
// events that a fleet published and the queries that were asked between them, in
// order. It reads and writes the format and makes such files from traces of
// requests.
//
// All numbers are little-endian:
//
//	header    "KVW1", u32 workers, u32 tokens a block, u64 operations
//	store     u8 1, u32 worker, u8 has parent, u64 parent, u32 n, n x (u64 local hash, u64 sequence hash)
//	remove    u8 2, u32 worker, u32 n, n x u64 sequence hash
//	query     u8 3, u32 n, n x u64 local hash
//
// A store's sequence hashes are those that index.Next makes of its parent and
// local hashes, the parent is 0 if there is none, and no worker is at or above
// the header's number of them. A file that says otherwise is refused, as is one with
// bytes after the last operation.
package kvw
