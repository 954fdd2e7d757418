"""Schedules that services declare: Titanic asks their workers, and adds, changes and removes them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...clients import AsyncClient, RequestError
from ...mdp.errors import SettingError
from ...mdp.services import About
from ..api.schedules import SCHEDULE_OPTIONS, Schedule, parse_schedule
from ..api.submission import MalformedRequest, encode_options
from ..db import store
from ..db.engine import Database
from ..db.group_commit import StoreError
from .discovery import Discovery
from .dispatch import Dispatcher

INTERVAL_SECONDS: Final = 1.0
"""Interval at which new services are looked for."""
REPEAT_SECONDS: Final = 60.0
"""Interval at which each service is asked."""
ASKED_AT_ONCE: Final = 100
"""Maximum number of services that are asked in one step."""
FORGET_SECONDS: Final = 3600.0
"""How long a schedule that no worker declares is kept.  Until then, its requests wait for the workers."""
NAME_PREFIX: Final = "service:"

log = logging.getLogger("zmdp.titanic")


class ServiceSchedules:
    """Keeps the schedules in the database that workers declare of their own services.

    Args:
        client: Asks the broker for the workers' descriptions.
        database: Has the schedules.
        dispatcher: Knows which services have workers.
        discovery: Knows whether the broker answers.
        follows: Whether to keep them; otherwise they are looked for, and the log says that they are not followed.
    """

    def __init__(
        self, client: AsyncClient, database: Database, dispatcher: Dispatcher, discovery: Discovery, *, follows: bool
    ) -> None:
        self._client = client
        self._database = database
        self._dispatcher = dispatcher
        self._discovery = discovery
        self._follows = follows
        self._told: set[str] = set()
        """The services for which the log says that their schedules are not followed."""
        self._ask_at: dict[str, float] = {}
        """When to ask next of each service that has workers, on the monotonic clock."""
        self._since = time.monotonic()
        """Since when workers have been able to say something."""

    async def run(self) -> None:
        """Ask periodically until cancelled."""
        while True:
            with suppress(StoreError):  # the database's thread has logged it
                await self._step()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _step(self) -> None:
        now = time.monotonic()
        self._ask_at = {name: self._ask_at.get(name, 0.0) for name in self._dispatcher.offered}
        due = sorted((at, name) for name, at in self._ask_at.items() if at <= now)[:ASKED_AT_ONCE]
        found = {}
        for _, service in due:
            self._ask_at[service] = now + REPEAT_SECONDS
            try:
                found[service] = self._read(service, (await self._client.describe(service)).about)
            except (SettingError, MalformedRequest) as error:
                log.warning("ignored the schedule that workers of %s declare: %s", service, error)
            except RequestError:
                pass  # its workers have just left
        if not self._follows:
            self._tell(found)
            return
        if not self._discovery.answered:
            self._since = now
        # If no Titanic or no broker ran for long, workers first get the time to say it again.
        forget = self._database.clock.now() - FORGET_SECONDS if now - self._since > FORGET_SECONDS else None
        if found or forget is not None:
            declared = store.Declared(found, self._database.clock.now(), forget)
            for problem in await self._database.writer.submit(store.declare_service_schedules, declared):
                log.warning("%s", problem)

    def _tell(self, found: Mapping[str, Schedule | None]) -> None:
        self._told &= self._ask_at.keys()
        for service, schedule in found.items():
            if schedule is not None and service not in self._told:
                self._told.add(service)
                text = "workers of %s declare a schedule, which is not followed: `titanic serve --service-schedules`"
                log.warning(text, service)

    def _read(self, service: str, about: About) -> Schedule | None:
        """Return the schedule that workers declare, or None.  Raises `SettingError` or `MalformedRequest`."""
        options: dict[str, Any] = {name: about.schedule.get(name) for name in ("every", "cron", "timezone")}
        if options["every"] is None and options["cron"] is None:
            return None
        frames = [f"{NAME_PREFIX}{service}".encode(), service.encode(), b""]
        given = encode_options({**about.submission, **options}, SCHEDULE_OPTIONS, "a schedule")
        return parse_schedule(frames, given, self._database.clock.now())
