"""Tells kvindex of one worker: it holds the blocks of a prompt, and it lives."""
import argparse, io, json, pathlib, struct, time
import confluent_kafka, fastavro, xxhash

cli = argparse.ArgumentParser(description=__doc__)
cli.add_argument("--brokers", default="127.0.0.1:9092")
cli.add_argument("--topic", default="kv-events")
cli.add_argument("--worker", default="python-0")
cli.add_argument("--model", default="example")
cli.add_argument("--epoch", type=int, default=time.time_ns() // 1_000_000)
cli.add_argument("--partitioner", default="murmur2_random")
cli.add_argument("--schema", default=pathlib.Path(__file__).parents[2] / "schemas/kv_event_batch.avsc")
args = cli.parse_args()

BLOCK, SEED = 16, 1337  # tokens a block; the seed of every hash
tokens = list(b"A prompt's tokens are numbers of 32 bits; here each is a byte of this very text.")
schema = fastavro.parse_schema(json.loads(pathlib.Path(args.schema).read_text()))
canonical = fastavro.schema.to_parsing_canonical_form(schema)
frame = b"\xc3\x01" + bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))

blocks = [tokens[i:i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]  # a last block that is not full is dropped
local = [xxhash.xxh3_64_intdigest(struct.pack(f"<{BLOCK}I", *b), SEED) for b in blocks]
seq = local[:1]
for h in local[1:]:
    seq.append(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seq[-1], h), SEED))

fixed8 = [struct.pack("<Q", h) for h in local]
half = len(local) // 2
root = ("kvindex.Stored", {"tier": "device", "parent": None, "position": 0, "locals": fixed8[:half]})
rest = ("kvindex.Stored", {"tier": "device", "parent": struct.pack("<Q", seq[half - 1]), "position": half, "locals": fixed8[half:]})

producer = confluent_kafka.Producer({"bootstrap.servers": args.brokers, "partitioner": args.partitioner, "enable.idempotence": True})
failed = []
for number, events in [(0, [root]), (1, [rest]), (1, [])]:  # a heartbeat has no events and carries the last seq
    value = io.BytesIO(frame)
    value.seek(len(frame))
    fastavro.schemaless_writer(value, schema, {
        "producer": f"producer.py-{args.epoch}", "worker": args.worker, "dp_rank": 0, "epoch": args.epoch, "seq": number,
        "timestamp": time.time_ns() // 1_000_000, "model": args.model, "block_size": BLOCK, "hasher": "flash", "events": events})
    producer.produce(args.topic, key=args.worker, value=value.getvalue(),
                     on_delivery=lambda error, m: failed.append(error) if error else print(f"partition {m.partition()} offset {m.offset()}"))
if producer.flush(30) or failed:
    raise SystemExit(f"not delivered: {failed or 'time out'}")
print(json.dumps({"worker": args.worker, "model": args.model, "epoch": args.epoch, "tokens": tokens, "local_hashes": local, "sequence_hashes": seq}))
