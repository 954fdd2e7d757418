"""native/forward.c in Python, using only pyzmq: a lower bound for the cost of a pure Python broker.

A ROUTER that forwards the frames of MDP/0.1 and MDP/0.2 between clients and workers, without services, heartbeats or
detection of dead workers.  A worker gets a request when it has none; the others wait in one queue.  It calls pyzmq's
`recv` and `send` once for each frame, because its `recv_multipart` and `send_multipart` cost more.  It prints its
endpoint.
"""

from collections import deque

import zmq

SERVICE = b"bench"
CLIENTS = {b"MDPC01", b"MDPC02"}


def receive(router: zmq.Socket[bytes]) -> list[bytes]:
    message = []
    recv = router.recv
    while True:
        frame = recv(0, False)
        message.append(frame.bytes)
        if not frame.more:
            return message


def send(router: zmq.Socket[bytes], message: list[bytes]) -> None:
    last = len(message) - 1
    put = router.send
    for at, frame in enumerate(message):
        put(frame, zmq.SNDMORE if at < last else 0, len(frame) < 65536)


def header_of(message: list[bytes]) -> int:
    """Return the index of the header, which follows the sender's identity and the envelope if there is one."""
    at = 1
    while not message[at].startswith(b"MDP"):
        at += 1
    return at


def to_worker(worker: bytes, message: list[bytes]) -> list[bytes]:
    at = header_of(message)
    header, client = message[at], message[0]
    if header == b"MDPC02":
        return [worker, b"MDPW02", b"\x02", client, b"", *message[at + 3 :]]
    return [worker, b"", b"MDPW01", b"\x02", client, b"", *message[at + 2 :]]


def to_client(message: list[bytes], at: int) -> list[bytes]:
    header, client = message[at], message[at + 2]
    if header == b"MDPW02":
        return [client, b"MDPC02", b"\x03", SERVICE, *message[at + 4 :]]
    return [client, b"", b"MDPC01", SERVICE, *message[at + 4 :]]


def serve(router: zmq.Socket[bytes]) -> None:
    workers: deque[bytes] = deque()
    requests: deque[list[bytes]] = deque()
    while True:
        message = receive(router)
        at = header_of(message)
        if message[at] in CLIENTS:
            if requests or not workers:
                requests.append(message)
            else:
                send(router, to_worker(workers.popleft(), message))
            continue
        command, final = message[at + 1][0], 3 if message[at] == b"MDPW01" else 4
        if command == final:
            send(router, to_client(message, at))
        elif command == final + 2 and message[0] in workers:
            workers.remove(message[0])
        if command == final or (command == 1 and message[at + 2] == SERVICE):
            if requests:
                send(router, to_worker(message[0], requests.popleft()))
            else:
                workers.append(message[0])


if __name__ == "__main__":
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"), flush=True)
    serve(socket)
