"""Remember the services that do not answer, so that following rows fail immediately."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from ...mdp.codes import Code
from ...mdp.errors import BrokerUnreachable, RequestError, RequestTimeout, ServiceNotFound, ZmdpError

PROBE_TIMEOUT_SECONDS: Final = 5.0
"""How long the broker may take to answer when it is probed again.  Rows fail if it does not."""
RECHECK_SECONDS: Final = 1.0
"""Interval between such probes; rows fail immediately in between."""


class Asker(Protocol):
    """A client that can ask whether a service has workers."""

    async def available(self, service: str, *, timeout: float) -> bool:
        """Return whether at least one worker offers `service` now."""


class Availability:
    """The services that did not answer, and the probes that find out whether they answer again."""

    def __init__(self, client: Asker, timeout: float, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._timeout = timeout
        self._loop = loop
        self._missing: dict[str, _Unavailable] = {}

    def __bool__(self) -> bool:
        """Return whether any service is unavailable."""
        return bool(self._missing)

    @property
    def probes(self) -> list["asyncio.Task[None]"]:
        """The probes that are running."""
        return [missing.probe for missing in self._missing.values() if missing.probe is not None]

    def not_found(self, service: str, error: RequestError) -> None:
        """Remember that nobody offers `service`."""
        self._missing.setdefault(service, _Unavailable(error))

    async def timed_out(self, needed: Sequence[str], error: RequestTimeout) -> RequestError:
        """Return the error to report, and remember an unavailable service so that following rows fail immediately."""
        if isinstance(error, BrokerUnreachable):
            self._missing.setdefault(needed[0], _Unavailable(error))
            return error
        for service in needed:
            if service in self._missing or not await self._available(service, default=True):
                text = f"no worker offered service {service!r} within {self._timeout:g} s"
                missing = ServiceNotFound(text, service=service, code=Code.NO_WORKER, text=text)
                self._missing.setdefault(service, _Unavailable(missing))
                return missing
        return error

    async def check(self, needed: Sequence[str]) -> RequestError | None:
        """Return an error if a required service is known to be unavailable; probe it every `RECHECK_SECONDS`.

        Without this, each window of rows would wait for the whole `timeout`.
        """
        for service in needed:
            missing = self._missing.get(service)
            if missing is None:
                continue
            if missing.probe is None and time.monotonic() >= missing.until:
                missing.probe = self._loop.create_task(self._probe(service, missing))
            if missing.probe is not None:
                await asyncio.shield(missing.probe)
            if self._missing.get(service) is missing:
                return missing.error
        return None

    async def _probe(self, service: str, missing: "_Unavailable") -> None:
        if await self._available(service, default=False):
            self._missing.pop(service, None)
        missing.until = time.monotonic() + RECHECK_SECONDS
        missing.probe = None

    async def _available(self, service: str, *, default: bool) -> bool:
        """Return whether a worker offers `service`; `default` if the broker does not answer."""
        try:
            return await self._client.available(service, timeout=min(self._timeout, PROBE_TIMEOUT_SECONDS))
        except ZmdpError:
            return default


class _Unavailable:
    """A broker or service that did not answer."""

    def __init__(self, error: RequestError) -> None:
        self.error = error
        self.until = time.monotonic() + RECHECK_SECONDS
        """When to probe again."""
        self.probe: asyncio.Task[None] | None = None
        """The probe that is running."""
