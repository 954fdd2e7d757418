"""FLP by hand: a caller that writes its own frames, and programs like those of the Guide's third Freelance model."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import zmq

from .processes import TIMEOUT_SECONDS, eventually


class Caller:
    """A ROUTER without a routing id of its own, connected to servers, which sends only what the test tells it to."""

    def __init__(self, *endpoints: str, receive_limit: int | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        if receive_limit is not None:
            self.socket.set(zmq.RCVHWM, receive_limit)
            self.socket.set(zmq.RCVBUF, 4096)
        for endpoint in endpoints:
            self.socket.connect(endpoint)

    def send(self, endpoint: str, *frames: bytes) -> None:
        """Send a message, once there is a connection to the server of this name."""
        eventually(lambda: self.try_send(endpoint, *frames))

    def try_send(self, endpoint: str, *frames: bytes) -> bool:
        """Send a message if there is a connection to the server of this name."""
        try:
            self.socket.send_multipart([endpoint.encode(), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            time.sleep(0.001)  # the pause between attempts
            return False
        return True

    def recv(self, timeout: float = TIMEOUT_SECONDS) -> list[bytes]:
        """Return the next message, which begins with the server's routing id."""
        assert self.socket.poll(int(timeout * 1000)), f"no message arrived within {timeout} s"
        return self.socket.recv_multipart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


Answer = Callable[[list[bytes]], Sequence[bytes] | None]


@contextmanager
def plain_server(endpoint: str, answer: Answer | None = None) -> Iterator[list[list[bytes]]]:
    """Run a server that answers PING with PONG, and everything else as the Guide's `flserver3` does: the control frame,
    then OK.

    `answer` may return other frames for a message without its routing id, or None for no answer.  Yields the messages
    received, without routing ids.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTING_ID, endpoint.encode())
    socket.set(zmq.LINGER, 0)
    socket.bind(endpoint)
    received: list[list[bytes]] = []
    ended = threading.Event()

    def default(frames: list[bytes]) -> Sequence[bytes]:
        return [b"PONG"] if frames[0] == b"PING" else [frames[0], b"OK"]

    def run() -> None:
        while not ended.is_set():
            if socket.poll(20):
                client, *frames = socket.recv_multipart()
                received.append(frames)
                reply = (answer or default)(frames)
                if reply is not None:
                    socket.send_multipart([client, *reply])
        socket.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield received
    finally:
        ended.set()
        thread.join()
        context.term()


def agent(endpoints: Sequence[str], body: Sequence[bytes], number: int) -> list[bytes] | None:
    """Make one request in the manner of the Guide's `flcliapi`.

    It assumes that servers are there 0.1 s after it has connected, drops what it cannot send, takes every message for a
    sign of life, and sends the request again, with the same number, to the first living server whenever something
    arrives or is due.
    """
    with Caller() as caller:
        caller.socket.set(zmq.ROUTER_MANDATORY, 0)
        for endpoint in endpoints:
            caller.socket.connect(endpoint)
        time.sleep(0.1)
        now = time.monotonic()
        until, ping_at = now + TIMEOUT_SECONDS, dict.fromkeys(endpoints, now)
        living, expires = list(endpoints), dict.fromkeys(endpoints, now + 6.0)
        while (now := time.monotonic()) < until:
            living = [each for each in living if now < expires[each]]
            if living:
                caller.socket.send_multipart([living[0].encode(), b"%d" % number, *body])
            for each, at in ping_at.items():
                if now >= at:
                    caller.socket.send_multipart([each.encode(), b"PING"])
                    ping_at[each] = now + 2.0
            if caller.socket.poll(int(1000 * (min(until, *ping_at.values(), until) - now))):
                server, first, *rest = caller.socket.recv_multipart()
                name = server.decode()
                assert name in ping_at, f"{name!r} is not one of the endpoints"
                ping_at[name], expires[name] = now + 2.0, now + 6.0
                if name not in living:
                    living.append(name)
                if first.isdigit() and int(first) == number:
                    return rest
    return None
