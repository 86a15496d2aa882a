// This file is the gRPC health service, which says serving only as long as
// queries are answered whole.

package query

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "kvindex/pipeline/query/kvindexpb"
)

// healthPoll is how far behind readiness a watcher may be.
const healthPoll = 100 * time.Millisecond

// health answers from the source at the moment of asking. grpc-go's own server
// keeps a status to be set, and never ends its Watch streams, for which a
// graceful stop would wait in vain.
type health struct {
	healthpb.UnimplementedHealthServer
	ready    func() Readiness
	draining <-chan struct{}
}

func (h *health) status(service string) healthpb.HealthCheckResponse_ServingStatus {
	switch {
	case service != "" && service != pb.KVIndex_ServiceDesc.ServiceName:
		return healthpb.HealthCheckResponse_SERVICE_UNKNOWN
	case h.ready().Ready:
		return healthpb.HealthCheckResponse_SERVING
	}
	return healthpb.HealthCheckResponse_NOT_SERVING
}

// Check says whether queries are answered now.
func (h *health) Check(_ context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	st := h.status(req.Service)
	if st == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, status.Errorf(codes.NotFound, "unknown service %q", req.Service)
	}
	return &healthpb.HealthCheckResponse{Status: st}, nil
}

// List says the same of both names there are.
func (h *health) List(context.Context, *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	st := &healthpb.HealthCheckResponse{Status: h.status("")}
	return &healthpb.HealthListResponse{Statuses: map[string]*healthpb.HealthCheckResponse{
		"":                                 st,
		pb.KVIndex_ServiceDesc.ServiceName: st,
	}}, nil
}

// Watch tells every change until the caller leaves or the server drains.
func (h *health) Watch(req *healthpb.HealthCheckRequest, stream healthpb.Health_WatchServer) error {
	tick := time.NewTicker(healthPoll)
	defer tick.Stop()
	last := healthpb.HealthCheckResponse_ServingStatus(-1)
	for draining := false; ; {
		if st := h.status(req.Service); st != last {
			if err := stream.Send(&healthpb.HealthCheckResponse{Status: st}); err != nil {
				return err
			}
			last = st
		}
		if draining {
			return status.Error(codes.Unavailable, "the server is draining")
		}
		select {
		case <-tick.C:
		case <-h.draining: // tell that first
			draining = true
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}
