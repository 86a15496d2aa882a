"""An engine on libzmq, for the tests: vllm.py EVENTS REPLAY KEEP BEFORE binds a PUB and a ROUTER socket as vLLM's publisher does, with
one thread for both, and keeps KEEP batches for replays. REPLAY may be "-". BEFORE
batches, as of store, are published before the sockets are bound.

It prints "bound". Commands, one a line, each answered by "at NEXT", the number of the next batch:

    store N    publish N batches, each of one block that continues the chain: block n has the tokens 4n to 4n+3
    remove     publish a batch that removes the chain's last block
    lose N     as store, but the batches are not sent: as if lost on the way
"""

import collections
import select
import sys
import time

import msgpack
import zmq

END = b"\xff" * 8


class Engine:
    def __init__(self, events, replay, keep, before):
        context = zmq.Context()
        self.pub = context.socket(zmq.PUB)
        self.pub.set_hwm(100000)
        self.router = None
        if replay != "-":
            self.router = context.socket(zmq.ROUTER)
        self.kept = collections.deque(maxlen=keep)
        self.seq = 0
        self.blocks = 0
        self.salt = time.time_ns() % 1000000 * 1000  # hashes of another process are others
        for _ in range(before):
            self.store()
        if self.router is not None:
            self.router.bind(replay)
        self.pub.bind(events)

    def publish(self, event, send=True):
        payload = msgpack.packb([time.time(), [event], 0])
        number = self.seq.to_bytes(8, "big")
        if send:
            self.pub.send_multipart((b"", number, payload))
        self.kept.append((number, payload))
        self.seq += 1

    def store(self, send=True):
        n = self.blocks
        self.blocks += 1
        self.publish(
            {
                "type": "BlockStored",
                "block_hashes": [self.salt + n],
                "parent_block_hash": self.salt + n - 1 if n else None,
                "token_ids": list(range(4 * n, 4 * n + 4)),
                "block_size": 4,
                "medium": "GPU",
            },
            send,
        )

    def remove(self):
        self.blocks -= 1
        self.publish({"type": "BlockRemoved", "block_hashes": [self.salt + self.blocks], "medium": "GPU"})

    def replay(self):
        identity, _, start = self.router.recv_multipart()
        for number, payload in self.kept:
            if number >= start:
                self.router.send_multipart((identity, b"", b"", number, payload))
        self.router.send_multipart((identity, b"", b"", END, b""))

    def run(self):
        print("bound", flush=True)
        while True:
            if self.router is not None and self.router.poll(0):
                self.replay()
            if not select.select([sys.stdin], [], [], 0.02)[0]:
                continue
            line = sys.stdin.readline().split()
            if not line:
                return
            if line[0] == "remove":
                self.remove()
            else:
                for _ in range(int(line[1])):
                    self.store(line[0] == "store")
            print("at", self.seq, flush=True)


Engine(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).run()
