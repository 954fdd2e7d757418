"""The side of a gateway that faces the broker: one client, and one worker for each service that peers offer."""

import asyncio
import logging
import resource
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import zmq

from ..clients.aio import AsyncClient
from ..mdp.errors import SettingError
from ..mdp.security.keys import ClientKeys
from ..mdp.transport.sockets import end, own_context
from ..workers.aio import AsyncWorker

Handler = Callable[[Any], AsyncGenerator[Any, None]]

CONCURRENCY: Final = 1000
"""Maximum number of concurrent requests to a service of a peer: some may be endless streams."""
NOTHING_IN_PROGRESS: Final = "waiting for the broker, which does not answer; no request was in progress"
"""Logged when a gateway gives up at its drain limit without requests in progress."""
MAX_SOCKETS: Final = 60_000
"""Maximum number of sockets of all workers, each of which has several."""
OTHER_DESCRIPTORS: Final = 200
"""Descriptors that a gateway needs in addition to those of connections and services."""

log = logging.getLogger("zmdp.gateway")


class Upstream:
    """The client and the workers of a gateway.

    Args:
        broker: An endpoint, or several in order of preference.
        keys: The gateway's key and the broker's, for brokers that require them.
        timeout: Default limit for a request, in seconds.
    """

    def __init__(
        self, broker: str | Sequence[str], *, keys: ClientKeys | None = None, timeout: float | None = None
    ) -> None:
        self._broker = broker
        self.endpoints = broker if isinstance(broker, str) else ", ".join(broker)
        """The brokers, for people."""
        self._keys = keys
        self.client = AsyncClient(broker, timeout=timeout, key=keys)
        self._context = own_context()  # for all workers: each context has a thread
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._workers: dict[str, AsyncWorker] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def offer(self, service: str, handler: Handler, *, concurrency: int = CONCURRENCY) -> None:
        """Offer `service` at the broker.  Raises `SettingError` for an invalid name, or if it is offered already.

        `concurrency` is the maximum number of concurrent requests.
        """
        if service in self._workers:
            raise SettingError(f"service {service!r} is offered already")
        worker = AsyncWorker(
            service, handler, broker=self._broker, name="gateway", key=self._keys, context=self._context,
            concurrency=concurrency,
        )  # fmt: skip
        worker.start()
        self._workers[service] = worker

    def withdraw(self, service: str) -> None:
        """Stop offering a service, once its requests in progress are finished.  Idempotent."""
        worker = self._workers.pop(service, None)
        if worker is not None:
            worker.stop()
            task = asyncio.ensure_future(worker.wait())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Withdraw every service, and cancel every outstanding request."""
        for service in list(self._workers):
            self.withdraw(service)
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self.client.close()
        await asyncio.to_thread(end, self._context)  # waits until the last messages have been sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have `wanted` descriptors and `OTHER_DESCRIPTORS`, or as many as the system allows."""
    wanted += OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):  # the system's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        log.warning("the system allows %d descriptors, of which %d may be needed (ulimit -n)", allowed, wanted)
