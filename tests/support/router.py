"""A hand-written broker (a raw ROUTER) that tests zmdp's clients and workers from outside, and a real proxy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import zmq

from zmdp.mdp.security.keys import ClientKeys

from .processes import TIMEOUT_SECONDS


class Router:
    """A ROUTER on a free loopback port, which sends only what the test tells it to."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(bind)
        self.endpoint = self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def recv(self, timeout: float = TIMEOUT_SECONDS) -> list[bytes]:
        """Return the next message, which begins with the sender's routing id."""
        assert self._socket.poll(int(timeout * 1000)), f"no message arrived within {timeout} s"
        return self._socket.recv_multipart()

    def command(self, timeout: float = TIMEOUT_SECONDS) -> list[bytes]:
        """Return the next message that is not a worker's HEARTBEAT."""
        while (message := self.recv(timeout))[1:] == [b"MDPW02", b"\x05"]:
            pass
        return message

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


@contextmanager
def proxied(endpoint: str, keys: ClientKeys | None = None) -> Iterator[str]:
    """Run a ROUTER–DEALER proxy in front of a broker for the block, with keys of its own; yield its endpoint."""
    context: zmq.Context[Any] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.linger = back.linger = 0
    front.bind("tcp://127.0.0.1:*")
    if keys is not None:
        keys.apply(back)
    back.connect(endpoint)

    def run() -> None:
        with front, back:
            try:
                zmq.proxy(front, back)
            except zmq.ContextTerminated:
                return

    proxy = front.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    thread = threading.Thread(target=run, name="proxy")
    thread.start()
    try:
        yield proxy
    finally:
        context.term()
        thread.join()
