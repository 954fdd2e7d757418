"""Which services do not answer, so that following rows fail immediately."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from ...clients import AsyncClient, BrokerUnreachable, RequestTimeout, ZmdpError
from ...mdp.codes import Code
from .replies import RowFailed

PROBE_TIMEOUT_SECONDS: Final = 0.5
"""How long an unreachable broker may take to answer when it is probed again."""
RECHECK_SECONDS: Final = 1.0
"""Interval between such probes; rows fail immediately in between."""


class Availability:
    """The services that did not answer, and the probes that find out whether they do again."""

    def __init__(self, client: AsyncClient, timeout: float, loop: asyncio.AbstractEventLoop) -> None:
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

    def not_found(self, service: str, failed: RowFailed) -> None:
        """Remember that nobody offers `service`."""
        self._missing.setdefault(service, _Unavailable(failed))

    async def timed_out(self, needed: Sequence[str], error: RequestTimeout) -> RowFailed:
        """Return the failure to report, and remember an unavailable service so that following rows fail immediately."""
        failed = RowFailed(Code.TIME_PASSED, error.text or str(error))
        if isinstance(error, BrokerUnreachable):
            self._missing.setdefault(needed[0], _Unavailable(failed))
            return failed
        for service in needed:
            if service in self._missing or not await self._available(service, default=True):
                failed = RowFailed(Code.NO_WORKER, f"no worker offered service {service!r} within {self._timeout:g} s")
                self._missing.setdefault(service, _Unavailable(failed))
                break
        return failed

    async def check(self, needed: Sequence[str]) -> None:
        """Fail immediately if a required service is known to be unavailable; probe it again every `RECHECK_SECONDS`.

        Without this, each window of rows would wait for the whole `timeout`.  Raises `RowFailed`.
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
                raise RowFailed(missing.failed.code, missing.failed.text)

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

    def __init__(self, failed: RowFailed) -> None:
        self.failed = failed
        self.until = time.monotonic() + RECHECK_SECONDS
        """When to probe again."""
        self.probe: asyncio.Task[None] | None = None
        """The probe that is running."""
