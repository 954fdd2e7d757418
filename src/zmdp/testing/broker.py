"""A broker for tests: in this process, for a `with` block."""

import random
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import zmq

from ..mdp.broker.io.dialer import LinkTo
from ..mdp.broker.io.loop import Server, ServerSettings
from ..mdp.limits import Limits
from ..mdp.security.access import Access

FREE_PORT = "tcp://127.0.0.1:*"
FIXED_PORTS = range(20_000, 32_000)
"""Ports that systems do not give to connections: those of Linux begin at 32768."""
_untried: list[int] = []
"""The ports that `free_endpoint` has not tried yet, in random order."""


def free_endpoint() -> str:
    """Return an endpoint on loopback at which nothing listens, for a broker that is stopped and started again.

        endpoint = free_endpoint()
        for _ in range(2):
            with running_broker(endpoint): ...

    Each call returns another one, until all have been tried.  The port of `tcp://127.0.0.1:*` may meanwhile be given to
    any connection of any program.

    Returns:
        The endpoint.
    """
    while True:
        if not _untried:
            _untried.extend(random.sample(FIXED_PORTS, len(FIXED_PORTS)))
        port = _untried.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"tcp://127.0.0.1:{port}"


@contextmanager
def running_broker(
    *binds: str,
    limits: Limits | None = None,
    drain_timeout: float = 5.0,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    access: Access | None = None,
    pirates: Sequence[tuple[str, str | bytes]] = (),
    pirate_workers: Sequence[tuple[str, str | bytes]] = (),
    name: str = "",
    links: Sequence[LinkTo] = (),
) -> Generator[Server]:
    """Run a broker in a thread, by default on a free loopback port; its endpoint is `server.endpoints[0]`.

        with running_broker() as server, Client(server.endpoints[0]) as client:
            client.request("mmi.service", b"echo")

    The broker drains when the block ends.

    Args:
        binds: Where it listens.
        limits: Its settings (`zmdp.mdp.limits.Limits`).
        drain_timeout: Seconds for requests in progress when the block ends.
        context: The ZeroMQ context, for `inproc://` endpoints.
        access: Admit only these keys (`zmdp.mdp.security.access.load`).
        pirates: Endpoints for pirate clients, each with the service that they call.
        pirate_workers: Endpoints for pirate workers, each with the service that they offer.
        name: The broker's name.
        links: Other brokers to which it is linked.

    Yields:
        The server.

    Raises:
        BindError: It cannot listen.
    """
    endpoints: Sequence[str] = binds or (FREE_PORT,)
    settings = ServerSettings(
        limits=limits or Limits(), pirates=pirates, pirate_workers=pirate_workers, name=name, links=links,
        drain_timeout=drain_timeout,
    )  # fmt: skip
    with Server(endpoints, settings, access=access, context=context) as server:
        thread = threading.Thread(target=server.run, name="zmdp-broker", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()
