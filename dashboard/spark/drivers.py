"""Spark's drivers, as they report themselves through their control services, `spark.control.NAME`.

A control service takes a JSON object whose `op` names the operation, and replies with one.  A worker that may offer
such a service may answer anything, so answers are bounded in size and time, and checked before they are shown.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from ...clients import AsyncClient
from ...mdp.errors import ZmdpError
from ...mdp.program.control_services import names_in
from ..broker.observer import Observer, Unavailable

TIMEOUT_SECONDS: Final = 5.0
"""How long an answer may take."""
MAX_PROGRAMS: Final = 100
"""Maximum number of programs that are asked; the page shows how many more there are."""
MAX_CONCURRENT: Final = 10
"""Maximum number of programs that are asked at the same time."""
MAX_ANSWER_BYTES: Final = 1 << 20
INTERVAL_SECONDS: Final = 0.9
"""Minimum age of an answer before its program is asked again."""
RETRY_SECONDS: Final = 5.0
"""Pause before a program that did not answer is asked again."""
WAIT_SECONDS: Final = 0.5
"""How long a page waits for answers; those that come later are shown at its next update."""
MAX_TEXT: Final = 300
MAX_URL: Final = 2000
MAX_ROWS: Final = 1000
"""Rows of a list in an answer."""


@dataclass
class Program:
    """A program with a control service."""

    name: str
    status: Mapping[str, Any] = field(default_factory=dict)
    """The last answer; empty if there is none."""
    trouble: str = "it has not answered yet"
    """Why the program has not answered recently; empty if it has."""
    due: float = 0.0
    asking: asyncio.Task[None] | None = None


class ControlServices:
    """The control services whose names begin with `prefix`, at one broker and those linked to it."""

    def __init__(self, client: AsyncClient, observer: Observer, prefix: str) -> None:
        self._client = client
        self._observer = observer
        self._prefix = prefix
        self._programs: dict[str, Program] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def look(self) -> tuple[list[Program], int]:
        """Return the programs, by name, and how many more there are.  An answer may be a second old, or older if the
        program is slow.

        Raises `Unavailable`.
        """
        names = await self._names()
        shown = names[:MAX_PROGRAMS]
        for name in self._programs.keys() - set(shown):
            gone = self._programs.pop(name)
            if gone.asking is not None:
                gone.asking.cancel()
        found = [self._programs.setdefault(name, Program(name)) for name in shown]
        now = time.monotonic()
        for each in found:
            if each.asking is None and each.due <= now:
                each.asking = asyncio.create_task(self._look_at(each))
        asked = [each.asking for each in found if each.asking is not None]
        if asked:
            await asyncio.wait(asked, timeout=WAIT_SECONDS)
        return found, len(names) - len(shown)

    async def try_to_look(self) -> tuple[list[Program], int, str]:
        """Return the same, and as third value the reason if the broker does not answer; otherwise empty."""
        try:
            programs, more = await self.look()
        except Unavailable as error:
            return [], 0, str(error)
        return programs, more, ""

    async def ask(self, name: str, op: str, **arguments: Any) -> Mapping[str, Any]:
        """Return a program's answer.  Raises `Unavailable`."""
        question = json.dumps({"op": op, **arguments}).encode()
        try:
            async with aclosing(
                self._client.stream(self._prefix + name, question, deadline=TIMEOUT_SECONDS, wait=False)
            ) as parts:
                # Not `request`, which collects whatever a stream sends.
                reply = await anext(parts)
        except ZmdpError as error:
            raise Unavailable(text(str(error))) from None
        if not reply.final or len(reply) != 1 or len(reply[0]) > MAX_ANSWER_BYTES:
            raise Unavailable("its answer is not one frame of JSON")
        try:
            found = json.loads(reply[0])
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Unavailable("its answer is not a JSON object")
        return found

    def refresh(self) -> None:
        """Ask each program again when its answer is next needed."""
        for each in self._programs.values():
            each.due = 0.0

    async def _names(self) -> list[str]:
        latest = self._observer.latest
        if latest is None:
            return []
        found = {name for name, row in latest.services.items() if row["workers"]}
        if latest.brokers["links"]:
            answer = await self._observer.ask("mmi.services")
            found |= {row["name"] for row in answer["services"] if row["hops"]}
        return names_in(found, self._prefix)

    async def _look_at(self, program: Program) -> None:
        due = time.monotonic() + RETRY_SECONDS
        try:
            async with self._slots:
                due = time.monotonic() + INTERVAL_SECONDS
                program.status, program.trouble = await self.ask(program.name, "status"), ""
        except Unavailable as error:
            program.trouble, due = str(error), time.monotonic() + RETRY_SECONDS
        finally:
            program.due, program.asking = due, None


# ── reading an answer ────────────────────────────────────────────────────────────────────────────────────────────────


def text(value: object) -> str:
    """Return a text on one line, cut if it is long; empty for anything else."""
    if not isinstance(value, str):
        return ""
    # Other characters could end a line, turn the direction of what follows, or not exist in UTF-8 at all.
    found = "".join(each if each.isprintable() else "?" for each in value[:MAX_TEXT])
    return found if len(value) <= MAX_TEXT else f"{found}…"


def texts(value: object) -> list[str]:
    """Return the texts in a list."""
    return [found for each in value[:MAX_ROWS] if (found := text(each))] if isinstance(value, list) else []


def count(value: object) -> int:
    """Return a number of things; 0 for anything else."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def amount(value: object) -> float:
    """Return a positive number, such as a time; 0 for anything else."""
    if not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        return 0.0
    return float(value) if math.isfinite(value) else 0.0


def rows(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a list."""
    for each in value[:MAX_ROWS] if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield each


def url(value: object) -> str:
    """Return a URL that a page may link to: of http or https, without a password; empty for anything else."""
    if not isinstance(value, str) or len(value) > MAX_URL or not value.isascii() or not value.isprintable():
        return ""
    try:
        parts = urlsplit(value)
    except ValueError:
        return ""
    known = parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc and " " not in value
    return value if known else ""
