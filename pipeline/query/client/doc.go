// Package client is what a router uses to ask kvindex which workers hold how much of a
// prompt: connections to several replicas, deadlines, another replica when one is away
// or busy, streams for high rates, and an answer in any case.
//
//	c, err := client.New(client.Config{Replicas: []string{"10.0.0.1:7400", "10.0.0.2:7400"}})
//	...
//	answer, err := c.Match(ctx, &kvindexpb.MatchRequest{Model: "llama-3-8b", Tokens: prompt, TopK: 8})
//
// It fails open: the answer is never nil. When no replica has answered it is empty and
// marked partial, so that a router that looks at nothing else routes as it would
// without an index; the error says why.
//
// The package depends on gRPC, the generated messages and OpenTelemetry's API alone.
package client
