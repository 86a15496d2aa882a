"""A client on libzmq, for the tests: client.py TYPE ENDPOINT [OPTION=VALUE...] connects a socket and does what its input says.

TYPE is sub, dealer or req. It prints "ready", and then each message that comes as "got FRAME ..." with the frames in
hexadecimal, "-" for an empty one. Commands, one a line:

    send FRAME ...      send a message of such frames
    subscribe TEXT      or unsubscribe; prints "done"
"""

import select
import sys

import zmq


def say(*words):
    print(*words, flush=True)


def main(kind, endpoint, *options):
    socket = zmq.Context().socket(getattr(zmq, kind.upper()))
    for option in options:
        name, value = option.split("=")
        socket.setsockopt(getattr(zmq, name), int(value))
    socket.connect(endpoint)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    poller.register(socket, zmq.POLLIN)
    say("ready")
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            say("got", *(f.hex() or "-" for f in socket.recv_multipart()))
        if sys.stdin.fileno() in ready:
            command, *rest = sys.stdin.readline().split() or [""]
            if command == "send":
                socket.send_multipart([bytes.fromhex(f.strip("-")) for f in rest])
            elif command in ("subscribe", "unsubscribe"):
                getattr(socket, command)("".join(rest))
                say("done")
            else:
                return


main(*sys.argv[1:])
