"""Submits occurrences of schedules when they are due; `schedules.py` decides which are."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from ...mdp.errors import TitanicError
from ...mdp.program.logs import counted
from ...workers import Request
from ..api.schedules import parse_name, parse_schedule
from ..api.submission import OWNER_OPTION, UUID_OPTION, MalformedRequest, check_names, new_uuid
from ..db import store
from ..db.engine import Database
from ..db.group_commit import StoreError
from .accept import Full
from .counters import Quota
from .dispatch import Dispatcher
from .fetch import OK, refusal

SET_BACK_SECONDS: Final = 1.0
"""A clock that loses so much against the monotonic one within a step was set back."""
POLL_SECONDS: Final = 0.5
"""Interval at which schedules are looked for that other programs have added."""
CONTENTION_SECONDS: Final = 0.05
"""Pause after another Titanic has submitted the occurrences that were due."""
CHANGES: Final = ("pause", "resume", "rm", "run")
ACTIONS: Final = ("add", "ls", *CHANGES)
_TIMES: Final = ("created", "next", "last", "seen")

log = logging.getLogger("zmdp.titanic")


class Scheduler:
    """Submits occurrences that are due, and answers `titanic.schedule`.

    Args:
        database: Has the schedules.
        dispatcher: Executes the requests.
        quota: Says whether there is room for more; without, occurrences are late or missed.
    """

    def __init__(self, database: Database, dispatcher: Dispatcher, quota: Quota) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._quota = quota

    async def run(self) -> None:
        """Submit occurrences that are due, until cancelled."""
        ahead = math.inf
        """How much the clock was ahead of the monotonic one; at first, anything may have happened to it."""
        while True:
            pause = POLL_SECONDS
            with suppress(StoreError):  # the database's thread has logged it
                if (now_ahead := self._database.clock.now() - time.monotonic()) < ahead - SET_BACK_SECONDS:
                    await self._catch_up()
                ahead = now_ahead
                pause = min(pause, await self._step())
            await asyncio.sleep(pause)

    async def _catch_up(self) -> None:
        """Bring back schedules that wait for a time that lies too far ahead: the clock has been set back."""
        count = await self._database.writer.submit(store.catch_up, self._database.clock)
        if count:
            log.warning("the clock was ahead and has been set back: %s go on", counted(count, "schedule"))

    async def _step(self) -> float:
        """Submit some of the occurrences that are due, and return the pause until the next step."""
        full = self._quota.full()
        following = await self._database.reader.submit(store.next_occurrence, full)
        if following is None:
            return POLL_SECONDS
        if (early := following - self._database.clock.now()) > 0:
            return early
        if self._quota.why_full():
            return POLL_SECONDS
        fired = await self._database.keyed.submit(store.fire, store.Firing(self._database.clock, full))
        self._dispatcher.accepted(fired.submissions, fired.uuids)
        return 0.0 if fired.submissions else CONTENTION_SECONDS

    # ── the service ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(self, request: Request) -> list[bytes]:
        """`titanic.schedule`: add, list or change schedules.

        add name service body+   → 200
        ls                       → 200 JSON
        pause name               → 200       resume, rm likewise
        run name                 → 200 uuid
        """
        try:
            action = request[0].decode(errors="replace")
            if action == "add":
                return await self._add(request)
            if action == "ls":
                return await self._list(request)
            if action in CHANGES:
                return await self._change(action, request)
            raise MalformedRequest(f"the first frame must be one of {', '.join(ACTIONS)}")
        except TitanicError as error:
            return refusal(request, error)

    async def _add(self, request: Request) -> list[bytes]:
        now = self._database.clock.now()
        schedule = parse_schedule(request[1:], request.options, now, request.user)
        await self._edit(store.Edit("add", schedule.name, request.user, now, schedule))
        return [OK]

    async def _list(self, request: Request) -> list[bytes]:
        check_names("schedule", request.options, ())
        if len(request) != 1:
            raise MalformedRequest("ls has no other frames")
        owner = None if request.admin else request.user
        rows = await self._database.reader.submit(store.list_schedules, store.Listing(owner))
        return [OK, json.dumps([_shown(row) for row in rows], ensure_ascii=False).encode()]

    async def _change(self, action: str, request: Request) -> list[bytes]:
        check_names("schedule", request.options, ("owner", "uuid") if action == "run" else ("owner",))
        if len(request) != 2:
            raise MalformedRequest(f"{action} needs one more frame, the schedule's name")
        if action == "run" and (full := self._quota.why_full()):
            raise Full(full)
        full_services = self._quota.full() if action == "run" else frozenset()
        name, uuid = parse_name(request[1]), request.options.get("uuid")
        edit = store.Edit(
            action, name, _owner(request), self._database.clock.now(),
            uuid=new_uuid() if uuid is None else UUID_OPTION.from_wire("uuid", uuid), full=full_services,
        )  # fmt: skip
        edited = await self._edit(edit)
        if edited.full_service:
            raise Full(self._quota.service_full(edited.full_service))
        if edited.submission is None:
            return [OK]
        self._dispatcher.accepted([edited.submission], [edited.submission.uuid])
        return [OK, edited.submission.uuid.hex.encode()]

    async def _edit(self, edit: store.Edit) -> store.Edited:
        edited = await self._database.writer.submit(store.edit_schedules, edit)
        if edited.problem:
            raise MalformedRequest(edited.problem)
        return edited


def _owner(request: Request) -> str | None:
    """Return the owner of the schedule that a request is about; None if an admin names nobody."""
    given = request.options.get("owner")
    if given is None:
        return None if request.admin else request.user
    owner = OWNER_OPTION.from_wire("owner", given)
    if not request.admin and owner != request.user:
        raise MalformedRequest("only admins can change what belongs to others")
    return owner


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule as `ls` answers it."""
    found = dict(row)
    for name in _TIMES:
        if found[name] is not None:
            found[name] = datetime.fromtimestamp(found[name], UTC).isoformat(timespec="milliseconds")
    found["last_uuid"] = None if found["last_uuid"] is None else found["last_uuid"].hex
    found["headers"] = json.loads(found["headers"] or "{}")
    found["paused"] = found["next"] is None
    outcome = {name: found.pop(name) for name in ("state", "code", "error")}
    return {**found, "last_outcome": outcome if outcome["state"] else None}
