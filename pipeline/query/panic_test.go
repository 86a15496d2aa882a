package query

import (
	"testing"

	pb "kvindex/pipeline/query/kvindexpb"
)

// What a query that panicked has worked in is not given to another.
func TestMemoryOfAPanicIsNotUsedAgain(t *testing.T) {
	f := fleet(t)
	panics := true
	f.onModel = func() {
		if panics {
			panic("BUG: a test's")
		}
	}
	req := &pb.MatchRequest{Model: "m", Tokens: prompt}
	for name, ask := range map[string]func(*Service) error{
		"Match": func(svc *Service) error { _, err := svc.Match(t.Context(), req); return err },
		"MatchMany": func(svc *Service) error {
			_, err := svc.MatchMany(t.Context(), &pb.MatchManyRequest{Requests: []*pb.MatchRequest{req}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			svc := NewService(f, Limits{})
			made, fresh := 0, svc.scratch.New
			svc.scratch.New = func() any { made++; return fresh() }
			panics = true
			for range 20 {
				func() {
					defer func() {
						if recover() == nil {
							t.Error("no panic")
						}
					}()
					ask(svc)
				}()
			}
			if made != 20 {
				t.Errorf("20 queries that panicked worked in the memory of %d", made)
			}
			panics = false
			if err := ask(svc); err != nil {
				t.Error(err)
			}
		})
	}
}
