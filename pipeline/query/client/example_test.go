package client_test

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"

	"kvindex/pipeline/query/client"
	pb "kvindex/pipeline/query/kvindexpb"
	"kvindex/pipeline/secure"
)

// instance stands for a kvindex that listens on gRPC.
type instance struct{ pb.UnimplementedKVIndexServer }

func (instance) Match(context.Context, *pb.MatchRequest) (*pb.MatchResponse, error) {
	return &pb.MatchResponse{Blocks: 3, BlockSize: 4, Matches: []*pb.WorkerMatch{
		{Worker: "gpu-01", DepthBlocks: 3, DepthTokens: 12, DepthExternalBlocks: 3, DepthExternalTokens: 12},
		{Worker: "gpu-02", DepthBlocks: 1, DepthTokens: 4, DepthExternalBlocks: 2, DepthExternalTokens: 8},
	}}, nil
}

// A router asks before it sends a request, and routes in any case.
func Example() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer()
	pb.RegisterKVIndexServer(server, instance{})
	go server.Serve(listener)
	defer server.Stop()

	// TLS and a token: secure.Client{TLS: true, CAFile: "ca.pem", TokenFile: "token"}.
	access := secure.Client{}
	c, err := client.New(client.Config{
		// The first is away: the other one answers.
		Replicas:    []string{"127.0.0.1:1", listener.Addr().String()},
		DialOptions: access.DialOptions(),
	})
	if err != nil {
		panic(err)
	}
	defer c.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	answer, err := c.Match(ctx, &pb.MatchRequest{
		Model:    "llama-3-8b",
		Tokens:   []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
		TopK:     8,
		FailOpen: true,
	})
	if err != nil {
		fmt.Println("routing without the index:", err) // answer is empty
	}
	for _, m := range answer.Matches {
		fmt.Printf("%s has %d tokens, %d with what it would load\n", m.Worker, m.DepthTokens, m.DepthExternalTokens)
	}
	// Output:
	// gpu-01 has 12 tokens, 12 with what it would load
	// gpu-02 has 4 tokens, 8 with what it would load
}
