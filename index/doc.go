// Package index keeps in memory which worker-rank holds which KV-cache blocks,
// and answers how many leading blocks of a prompt each of them has.
package index
