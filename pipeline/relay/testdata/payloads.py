"""Engines on libzmq, for the tests: payloads.py EVENTS REPLAY FORM ... binds for each three arguments a PUB and a ROUTER socket as an
engine's publisher does. FORM is "old" if answers to replay requests have no topic, as those of older versions, or else "new".

It prints "bound". Commands, one a line in JSON, each answered by "sent":

    {"to": N, "file": F}                        engine N publishes the payload
    {"to": N, "file": F, "from": A, "until": B}   the same, but only events A to B-1 of it
    {"to": N, "batch": B}                       engine N publishes the batch; {"hex": H} stands for bytes
"""

import json
import sys
import threading

import msgpack
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class Engine:
    def __init__(self, context, events, replay, form):
        self.between = (b"",) if form == "old" else (b"", b"")
        self.kept = []
        self.pub = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(replay)
        self.pub.bind(events)

    def publish(self, payload):
        number = len(self.kept).to_bytes(8, "big")
        self.pub.send_multipart((b"", number, payload))
        self.kept.append((number, payload))

    def replay(self):
        identity, _, start = self.router.recv_multipart()
        for number, payload in self.kept:
            if number >= start:
                self.router.send_multipart((identity, *self.between, number, payload))
        self.router.send_multipart((identity, *self.between, END, b""))


def payload(command):
    if "batch" in command:
        return msgpack.packb(command["batch"])
    with open(command["file"], "rb") as f:
        whole = f.read()
    if "until" not in command:
        return whole
    batch = msgpack.unpackb(whole, strict_map_key=False)
    key = "events" if isinstance(batch, dict) else 1
    batch[key] = batch[key][command["from"] : command["until"]]
    return msgpack.packb(batch)


def as_bytes(found):
    return bytes.fromhex(found["hex"]) if list(found) == ["hex"] else found


def main():
    context = zmq.Context()
    arguments = sys.argv[1:]
    engines = [Engine(context, *arguments[i : i + 3]) for i in range(0, len(arguments), 3)]
    lines = context.socket(zmq.PULL)
    lines.bind("inproc://lines")

    def read():
        pushing = context.socket(zmq.PUSH)
        pushing.connect("inproc://lines")
        for line in sys.stdin:
            pushing.send(line.encode())
        pushing.send(b"")

    threading.Thread(target=read, daemon=True).start()
    poller = zmq.Poller()
    poller.register(lines, zmq.POLLIN)
    for engine in engines:
        poller.register(engine.router, zmq.POLLIN)
    print("bound", flush=True)
    while True:
        ready = dict(poller.poll())
        for engine in engines:
            if engine.router in ready:
                engine.replay()
        if lines in ready:
            line = lines.recv()
            if not line:
                break
            command = json.loads(line, object_hook=as_bytes)
            engines[command["to"]].publish(payload(command))
            print("sent", flush=True)
    context.destroy(linger=0)


main()
