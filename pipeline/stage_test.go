package pipeline

import (
	"testing"

	"kvindex/index"
	"kvindex/testcontainers"
)

// The whole path on each broker: events in, exact answers out, and the same
// answers from a second process that has only Kafka.
func TestEventsInAnswersOutRestartIncluded(t *testing.T) {
	testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
		r := newRig(t, b, 4)
		one := r.start()
		var seqs []index.SeqHash
		for i, worker := range []string{"a", "b", "c", "d", "e", "f", "g"} {
			for rank := range int32(2) {
				p := r.produce(worker, rank)
				chain := locals(7, 20)
				seqs = index.Chain(seqs[:0], chain)
				p.send(stored(nil, chain[:10+i]...))
				p.send(stored(&seqs[9+i], locals(uint64(100+i), 5)...), removed(seqs[i+2]))
				p.send()
				if i%2 == 0 {
					p.send(stored(&seqs[i+1], chain[i+2]))
				}
				if i == 3 {
					p.renew()
					p.send(stored(nil, chain[:3]...))
				}
				if i == 5 {
					p.send(retired())
				}
			}
		}
		one.same(1, 200)
		one.saved()
		one.abandon()

		two := r.start()
		two.same(2, 200)
		if n := two.counted(recordsRead); n != 0 {
			t.Errorf("%d records were read again, want none: everything is in the snapshots", n)
		}
		late := r.produce("b", 0)
		late.batch.Seq = 2
		late.send(stored(nil, locals(9, 4)...))
		two.same(3, 200)
	})
}
