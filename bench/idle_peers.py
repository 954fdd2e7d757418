"""Any number of idle workers in one process, without libzmq, so that they take little CPU from the broker that is
measured.

    python bench/idle_peers.py ENDPOINT 0.1|0.2 one|each HEARTBEAT

Each line on stdin sets the number of workers, and is answered with the same number.  They all offer one service
(`one`), or each its own service (`each`).  HEARTBEAT is the seconds between a worker's heartbeats, 0 for none.  A
worker here is a TCP connection that sends what ZMTP 3.0 requires, and reads nothing after the handshake.
"""

import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
METADATA = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HELLO = GREETING + bytes([4, len(METADATA)]) + METADATA
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close without TIME_WAIT, because too many connections would soon be in that state."""
BATCH = 100


def message(frames: Sequence[bytes]) -> bytes:
    """Return short frames in ZMTP's encoding."""
    last = len(frames) - 1
    return b"".join(bytes([at < last, len(frame)]) + frame for at, frame in enumerate(frames))


def connected(host: str, port: int) -> socket.socket:
    peer = socket.create_connection((host, port))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.sendall(HELLO)
    return peer


def shake_hands(peer: socket.socket) -> None:
    """Read to the end of the other side's READY, which must be complete before anything else is sent."""
    came = b""
    while len(came) < len(GREETING) + 2 or len(came) < len(GREETING) + 2 + came[len(GREETING) + 1]:
        more = peer.recv(4096)
        if not more:
            raise ConnectionError("the broker ended the connection")
        came += more


def main(endpoint: str, dialect: str, kind: str, heartbeat: float) -> None:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    front = [b"", b"MDPW01"] if dialect == "0.1" else [b"MDPW02"]
    beat = message([*front, b"\x04" if dialect == "0.1" else b"\x05"])
    peers: list[socket.socket] = []
    turn = 0
    due = time.monotonic()
    while True:
        wait = None
        if heartbeat and peers:
            # A few at a time, so that the load is even.
            wait = max(0.0, due - time.monotonic())
        ready, _, _ = select.select([sys.stdin], [], [], wait)
        if ready:
            line = sys.stdin.readline()
            if not line:
                return
            while (missing := int(line) - len(peers)) > 0:
                batch = [connected(host, int(port)) for _ in range(min(BATCH, missing))]
                for peer in batch:
                    shake_hands(peer)
                    name = b"idle" if kind == "one" else b"idle-%d" % len(peers)
                    peer.sendall(message([*front, b"\x01", name]))
                    peers.append(peer)
            print(len(peers), flush=True)
            due = time.monotonic()
        elif peers:
            parts = max(1, len(peers) // BATCH)
            for peer in peers[turn % parts :: parts]:
                peer.send(beat)
            turn += 1
            due += heartbeat / parts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
