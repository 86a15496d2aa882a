// This file is what several commands ask of a running stage and its topic.

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"google.golang.org/grpc/status"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
)

// askError says what a stage answered instead, without gRPC's own words.
func askError(address string, err error) error {
	st := status.Convert(err)
	return askedError{fmt.Sprintf("stage at %s: %s (%s)", address, st.Message(), st.Code()), err}
}

// askedError is an error in other words.
type askedError struct {
	text string
	error
}

func (e askedError) Error() string { return e.text }
func (e askedError) Unwrap() error { return e.error }

// topicEnds are the last stable offsets of a topic's partitions.
func topicEnds(ctx context.Context, adm *kadm.Client, topic string) (map[int32]int64, error) {
	listed, err := adm.ListCommittedOffsets(ctx, topic)
	if err == nil {
		err = listed.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("topic %s: %w", topic, err)
	}
	ends := map[int32]int64{}
	listed.Each(func(o kadm.ListedOffset) { ends[o.Partition] = o.Offset })
	return ends, nil
}

// stageAtEnd waits until the stage is ready and has applied everything in its topic, and
// returns the offsets. It tells what it is waiting for.
func stageAtEnd(ctx context.Context, address string, stage *client.Client, adm *kadm.Client, tell func(why string)) (*pb.StatusResponse, map[int32]int64, error) {
	for last := "waiting for the stage"; ; {
		st, ends, problem, err := stageAt(ctx, address, stage, adm)
		switch {
		case ctx.Err() != nil:
			return nil, nil, fmt.Errorf("%s: %w", last, ctx.Err())
		case err != nil || problem == "":
			return st, ends, err
		}
		last = problem
		tell(problem)
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stageAt is one look; problem says why the stage is not there yet.
func stageAt(ctx context.Context, address string, stage *client.Client, adm *kadm.Client) (_ *pb.StatusResponse, ends map[int32]int64, problem string, _ error) {
	st, err := stage.Status(ctx)
	if err != nil {
		return nil, nil, askError(address, err).Error(), nil // it may be starting
	}
	if !st.Ready {
		return nil, nil, "the stage is not ready: " + strings.Join(st.Missing, "; "), nil
	}
	topic := st.Events.GetName()
	if ends, err = topicEnds(ctx, adm, topic); err != nil {
		return nil, nil, "", err
	}
	if len(st.Partitions) != len(ends) {
		return nil, nil, fmt.Sprintf("topic %s has %d partitions, the stage reads %d", topic, len(ends), len(st.Partitions)), nil
	}
	for _, p := range st.Partitions {
		if p.Position != ends[p.Partition] {
			return nil, nil, fmt.Sprintf("topic %s partition %d: the stage is at %d, the end is %d", topic, p.Partition, p.Position, ends[p.Partition]), nil
		}
	}
	return st, ends, "", nil
}
