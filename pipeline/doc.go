// Package pipeline puts the stage together: Kafka partitions to goroutines, to
// an index per model, to answers, and the state back to Kafka.
//
// The path of one record: the poll goroutine fetches it and hands its batch to
// the partition's goroutine (package consumer), which decodes it (schemas),
// applies the rules of epoch, sequence and ownership (apply.go, owners.go) and
// stores or removes its blocks (index). Queries read the index on their own
// goroutines (pipeline/query). Between two batches the partition's goroutine
// copies worker-ranks that are due, each at its W, and the partition's saver
// writes them in a fenced transaction (package snapshot).
//
// # Goroutines
//
//	name                 how many            owner              ends when
//	poll                 1                   consumer.Consumer  reading context ends
//	watch                1                   consumer.Consumer  reading context ends
//	partition            1 a partition       consumer.Consumer  reading context ends, after its Drain
//	saver                1 a partition       Stage              saving context ends
//	duty                 3 (and its client)  Stage              saving context ends
//	query servers        gRPC and HTTP       query.Server       Shutdown
//	Kafka clients        events, aux, duty   Stage              Run returns
//	                     1 a partition written  saver           its turn ends
//
// What each owns: a partition's goroutine owns its workers and ranks, the slots
// of the index that are theirs, and its reusable decode buffer. A saver owns
// its transactional client and what it knows of the snapshot topic. What others
// may read of them is atomic and marked "shared". Locks: Stage.mu (the list of
// partitions; taken under the consumer's own lock when a partition is made),
// models.mu, owners.mu; each is held for a few map operations and takes no other.
//
// # Stop order
//
// On SIGTERM: readiness goes first, then queries under way finish, then reading
// stops; each partition hands its last changes to its saver and waits for them;
// then savers end, and the clients close. Everything within Config.DrainTimeout.
// kill -9 at any moment is as good for what is answered afterwards: it only
// leaves more to replay.
package pipeline
