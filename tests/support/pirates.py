"""Hand-written pirates: clients and workers without a header, as the ZeroMQ Guide describes them."""

from typing import Any

import zmq

from .peers import Bench, Peer
from .processes import TIMEOUT_SECONDS

READY, HEARTBEAT = b"\x01", b"\x02"


class LazyPirate(Peer):
    """A client on a REQ socket, which adds the empty frame."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, **settings: Any) -> None:
        super().__init__(context, endpoint, **{**settings, "kind": zmq.REQ})

    def call(self, *body: bytes) -> None:
        self.send(*body)

    def answered(self, *body: bytes) -> None:
        """Expect a reply with this body."""
        assert self.recv() == [*body]


class ParanoidPirate(Peer):
    """A worker on a DEALER, which sends only what the test tells it to, HEARTBEATs included."""

    def ready(self) -> None:
        self.send(READY)

    def heartbeat(self) -> None:
        self.send(HEARTBEAT)

    def work(self, *body: bytes) -> bytes:
        """Expect a request with this body; return its address."""
        while (message := self.recv(TIMEOUT_SECONDS)) == [HEARTBEAT]:
            pass
        assert message[1:] == [b"", *body]
        return message[0]

    def final(self, address: bytes, *body: bytes) -> None:
        self.send(address, b"", *body)


class SimplePirate(Peer):
    """A worker on a REQ socket: the Guide's `spworker`."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, **settings: Any) -> None:
        super().__init__(context, endpoint, **{**settings, "kind": zmq.REQ})

    def work(self, *body: bytes) -> bytes:
        """Expect a request with this body; return its address."""
        address, *rest = self.recv()
        assert rest == [b"", *body]
        return address

    def final(self, address: bytes, *body: bytes) -> None:
        self.send(address, b"", *body)


def simple(bench: Bench, ready: bytes = READY) -> SimplePirate:
    """Return a Simple Pirate that the broker has registered."""
    made: SimplePirate = bench.connect(SimplePirate, endpoint=bench.server.pirate_worker_endpoints[0])
    before = bench.stats()["workers"]
    made.send(ready)
    bench.until(lambda: bench.stats()["workers"] == before + 1)
    return made


def lazy(bench: Bench, number: int = 0, **settings: Any) -> LazyPirate:
    """Return a client at the broker's pirate endpoint of that number."""
    made: LazyPirate = bench.connect(LazyPirate, endpoint=bench.server.pirate_endpoints[number], **settings)
    return made


def paranoid(bench: Bench, number: int = 0, *, ready: bool = True, **settings: Any) -> ParanoidPirate:
    """The same for a worker; if `ready`, the broker has registered it."""
    made: ParanoidPirate = bench.connect(ParanoidPirate, endpoint=bench.server.pirate_endpoints[number], **settings)
    if ready:
        before = bench.stats()["workers"]
        made.ready()
        bench.until(lambda: bench.stats()["workers"] == before + 1)
    return made
