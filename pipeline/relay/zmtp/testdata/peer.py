"""A peer on libzmq, for the tests: peer.py TYPE ENDPOINT [OPTION=VALUE...] binds a socket and does what its input says.

TYPE is pub, xpub or router, or any other of pyzmq's. The first line it prints is "bound ENDPOINT"; an xpub prints
"subscribed TOPIC" for each subscription. Commands, one a line:

    send N SIZE    publish N messages: topic "", sequence number (8 bytes, big-endian), SIZE bytes of it; prints "sent NEXT"

A router answers (identity, "", start) as engines do: (identity, "", "", sequence number, payload) from start to
REPLIES, then the end marker.
"""

import select
import sys

import zmq

END = b"\xff" * 8


def number(n):
    return n.to_bytes(8, "big")


def say(*words):
    print(*words, flush=True)


def main(kind, endpoint, *options):
    context = zmq.Context()
    socket = context.socket(getattr(zmq, kind.upper()))
    replies, size, sent = 0, 100, 0
    for option in options:
        name, value = option.split("=")
        if name == "REPLIES":
            replies = int(value)
        elif name == "PLAIN":
            socket.plain_server = True
        else:
            socket.setsockopt(getattr(zmq, name), int(value))
    socket.bind(endpoint)
    say("bound", socket.getsockopt_string(zmq.LAST_ENDPOINT))
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    if kind in ("xpub", "router"):
        poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            frames = socket.recv_multipart()
            if kind == "xpub":
                say("subscribed" if frames[0][0] else "cancelled", frames[0][1:].decode())
                continue
            identity, empty, start = frames
            for n in range(int.from_bytes(start, "big"), replies):
                socket.send_multipart((identity, empty, b"", number(n), number(n) * (size // 8)))
            socket.send_multipart((identity, empty, b"", END, b""))
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline().split()
            if not line:
                return
            count, size = int(line[1]), int(line[2])
            for _ in range(count):
                socket.send_multipart((b"", number(sent), number(sent) * (size // 8)))
                sent += 1
            say("sent", sent)


main(*sys.argv[1:])
