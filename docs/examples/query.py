"""Asks kvindex which workers hold how much of a prompt. Tokens are read from standard input, a prompt a line."""
import argparse, json, pathlib, sys, time
import grpc
import kvindex_pb2 as pb, kvindex_pb2_grpc  # made from kvindex.proto

cli = argparse.ArgumentParser(description=__doc__)
cli.add_argument("--address", action="append", help="host:port of a replica; several are asked in turn (default 127.0.0.1:7400)")
cli.add_argument("--model", default="example")
cli.add_argument("--top-k", type=int, default=8)
cli.add_argument("--timeout", type=float, default=1.0, help="seconds for an answer")
cli.add_argument("--min-offset", action="append", default=[], help="partition=offset of a record that must be in the answer")
cli.add_argument("--stream", action="store_true", help="ask all prompts on one stream")
cli.add_argument("--ca-file", help="TLS, trusting these CA certificates (PEM)")
cli.add_argument("--token-file", help="bearer token to show")
args = cli.parse_args()

headers = [("authorization", "Bearer " + pathlib.Path(args.token_file).read_text().strip())] if args.token_file else []


def connect(address):
    # gRPC for Python waits up to two minutes between attempts, too long for a router whose index has just restarted
    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 1000)]
    if args.ca_file:
        trust = grpc.ssl_channel_credentials(pathlib.Path(args.ca_file).read_bytes())
        return kvindex_pb2_grpc.KVIndexStub(grpc.secure_channel(address, trust, options))
    return kvindex_pb2_grpc.KVIndexStub(grpc.insecure_channel(address, options))


replicas = [connect(address) for address in args.address or ["127.0.0.1:7400"]]
ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}


def match(request):
    """Asks one replica after the other. It fails open: without an answer there is an empty one, marked partial."""
    deadline, problem = time.monotonic() + args.timeout, None
    for left, replica in zip(range(len(replicas), 0, -1), replicas):
        try:  # each but the last has its part of the time only, so that one that hangs does not use up all of it
            return replica.Match(request, timeout=max(0, deadline - time.monotonic()) / left, metadata=headers)
        except grpc.RpcError as error:
            problem = error
            if error.code() not in ELSEWHERE:
                break
    replicas.append(replicas.pop(0))  # another one first, next time
    return pb.MatchResponse(partial=True, missing=[f"no answer: {problem.code().name}: {problem.details()}"])


def match_stream(requests):
    """Asks one replica on a stream, which costs both ends less. Answers come in the order of the requests."""
    sent = (pb.MatchStreamRequest(id=i, request=request) for i, request in enumerate(requests))
    for result in replicas[0].MatchStream(sent, timeout=args.timeout, metadata=headers):
        if result.HasField("error"):
            yield pb.MatchResponse(partial=True, missing=[f"no answer: {result.error.code}: {result.error.message}"])
        else:
            yield result.answer


requests = []
for line in sys.stdin:
    requests.append(pb.MatchRequest(
        model=args.model, tokens=[int(t) for t in line.replace(",", " ").split()], top_k=args.top_k, fail_open=True,
        min_offsets={int(p): int(o) for p, o in (pair.split("=") for pair in args.min_offset)}))
for answer in match_stream(requests) if args.stream else map(match, requests):
    print(json.dumps({
        "blocks": answer.blocks, "partial": answer.partial, "missing": list(answer.missing),
        "workers": {f"{m.worker}/{m.dp_rank}": {"tokens": m.depth_tokens, "loadable": m.depth_external_tokens} for m in answer.matches}}))
