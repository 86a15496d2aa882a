"""Asks kvindex as clients of Mooncake's Conductor and of Dynamo's standalone indexer do."""
import argparse, json, struct
import msgpack, requests, xxhash

cli = argparse.ArgumentParser(description=__doc__)
cli.add_argument("--url", default="http://127.0.0.1:7401")
cli.add_argument("--model", default="example")
args = cli.parse_args()

BLOCK, SEED = 16, 1337  # tokens a block; the seed of every hash
tokens = list(b"A prompt's tokens are numbers of 32 bits; here each is a byte of this very text.")
blocks = [tokens[i:i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
local = [xxhash.xxh3_64_intdigest(struct.pack(f"<{BLOCK}I", *b), SEED) for b in blocks]
seq = local[:1]
for h in local[1:]:
    seq.append(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seq[-1], h), SEED))
signed = [h - 2**64 if h >= 2**63 else h for h in local]

session = requests.Session()


def ask(path, body):
    answer = session.post(args.url + path, json=body, timeout=5)
    answer.raise_for_status()
    return answer.json()


def ask_packed(path, body):
    """As a client of the later Conductor does."""
    answer = session.post(args.url + path, data=msgpack.packb(body), headers={"Content-Type": "application/msgpack"}, timeout=5)
    answer.raise_for_status()
    return msgpack.unpackb(answer.content)


print(json.dumps({
    "/mooncake/query": ask("/mooncake/query", {"model": args.model, "block_size": BLOCK, "token_ids": tokens}),
    "/mooncake/query_by_hash": ask("/mooncake/query_by_hash", {"model": args.model, "block_size": BLOCK, "seq_hashes": seq}),
    "/mooncake/query in MessagePack": ask_packed("/mooncake/query", {"model": args.model, "block_size": BLOCK, "token_ids": struct.pack(f"<{len(tokens)}i", *tokens)}),
    "/dynamo/query": ask("/dynamo/query", {"model_name": args.model, "token_ids": tokens}),
    "/dynamo/query_by_hash": ask("/dynamo/query_by_hash", {"model_name": args.model, "block_hashes": signed}),
    "/dynamo/workers": session.get(args.url + "/dynamo/workers", params={"model_name": args.model}, timeout=5).json(),
}))
