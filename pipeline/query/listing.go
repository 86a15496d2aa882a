// This file puts what the source reports into messages.

package query

import (
	"context"

	"kvindex/index"
	pb "kvindex/pipeline/query/kvindexpb"
)

// Workers lists the worker-ranks known, ready or not.
func (s *Service) Workers(_ context.Context, req *pb.WorkersRequest) (*pb.WorkersResponse, error) {
	workers := s.src.Workers(req.Model)
	resp := &pb.WorkersResponse{Workers: make([]*pb.WorkerStatus, len(workers))}
	for i, w := range workers {
		resp.Workers[i] = &pb.WorkerStatus{
			Worker:    w.Worker,
			DpRank:    w.Rank,
			Model:     w.Model,
			BlockSize: uint32(w.BlockSize),
			Hasher:    w.Hasher.String(),
			Partition: w.Partition,
			Epoch:     w.Epoch,
			Seq:       w.Seq,
			Blocks: &pb.TierBlocks{
				Device:   int64(w.Blocks[index.Device]),
				Host:     int64(w.Blocks[index.Host]),
				Disk:     int64(w.Blocks[index.Disk]),
				External: int64(w.Blocks[index.External]),
			},
			AgeMs:      w.Age.Milliseconds(),
			Silent:     w.Silent,
			Incomplete: w.Incomplete,
			Retired:    w.Retired,
		}
	}
	return resp, nil
}

// Status describes the instance, ready or not.
func (s *Service) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	ready, st := s.src.Readiness(), s.src.Status()
	resp := &pb.StatusResponse{
		Ready:     ready.Ready,
		Missing:   ready.Missing,
		Group:     st.Group,
		Instance:  st.Instance,
		Version:   st.Version,
		StartedMs: st.Started.UnixMilli(),
		Events:    &pb.Topic{Name: st.Events.Name, Id: st.Events.ID},
		Snapshots: &pb.Topic{Name: st.Snapshots.Name, Id: st.Snapshots.ID},
		Counters:  st.Counters,
		Warnings:  st.Warnings,
	}
	for _, p := range st.Partitions {
		resp.Partitions = append(resp.Partitions, &pb.PartitionStatus{
			Partition:      p.Partition,
			State:          p.State,
			Position:       p.Position,
			End:            p.End,
			Lag:            p.Lag,
			StartedAt:      p.StartedAt,
			Reread:         p.Reread,
			Floor:          p.Floor,
			SnapshotDuty:   p.SnapshotDuty,
			SnapshotAgeMs:  p.SnapshotAge.Milliseconds(),
			Workers:        uint32(p.Workers),
			Paused:         p.Paused,
			RestoreSeconds: p.RestoreSeconds,
			Problem:        p.Problem,
		})
	}
	for _, m := range st.Models {
		resp.Models = append(resp.Models, &pb.ModelStatus{
			Model:     m.Model,
			BlockSize: uint32(m.BlockSize),
			Hasher:    m.Hasher.String(),
			Workers:   uint32(m.Workers),
			Blocks:    m.Blocks,
		})
	}
	return resp, nil
}
