"""Asks the broker at a bounded rate, and keeps the answers for all visitors."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...clients import AsyncClient
from ...mdp.errors import RetryLater, ZmdpError
from ..shell.timeline import Timeline
from .snapshot import Snapshot, levels_of, point_between

INTERVAL_SECONDS: Final = 1.0
"""Time between two snapshots, if the broker answers quickly."""
SHARE: Final = 0.02
"""The largest share of its time that the broker may spend on answers."""
MAX_INTERVAL_SECONDS: Final = 20.0
TIMEOUT_SECONDS: Final = 5.0
"""How long an answer may take: on a busy machine, every program on its way waits for the processor."""
RECENT_SECONDS: Final = 10.0
"""The time over which current rates and latencies are computed."""
MAX_QUESTIONS: Final = 20
"""Maximum number of questions about single services per second."""
MAX_SERVICES_IN_RECENT: Final = 20_000
"""Maximum number of service rows kept for current rates."""

log = logging.getLogger("zmdp.web")


class Unavailable(Exception):
    """The broker did not answer; the text says why."""


class Observer:
    """The one client of a broker, shared by all visitors of its pages."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._recent: deque[Snapshot] = deque()
        self._answers: dict[tuple[str, bytes], tuple[float, asyncio.Future[Any]]] = {}
        self._asked: deque[float] = deque(maxlen=MAX_QUESTIONS)
        """When the last questions about single services were asked."""
        self.history = Timeline(point_between, levels_of)
        self.trouble = "the broker has not answered yet"
        """Why there is no current snapshot; empty if there is one."""
        self.last_answer: float | None = None
        """When the broker last answered anything."""
        self.changed = asyncio.Event()
        """Set at the next snapshot, or when the broker stops answering; then there is a new one."""
        self.generation = 0
        """A number that changes with every snapshot, and when answers are known to be out of date."""

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; None before the first."""
        return self._recent[-1] if self._recent else None

    @property
    def earlier(self) -> Snapshot | None:
        """The snapshot to compare the last one with."""
        return self._recent[0] if self._recent else None

    async def run(self) -> None:
        """Take snapshots until it is cancelled."""
        while True:
            began = time.monotonic()
            try:
                snapshot, spent = await self._look()
            except Unavailable as error:
                self.trouble = str(error)
                spent = 0.0
            else:
                self.trouble = ""
                self._keep(snapshot)
            self.generation += 1
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()
            pause = min(max(INTERVAL_SECONDS, spent / SHARE), MAX_INTERVAL_SECONDS)
            await asyncio.sleep(max(began + pause - time.monotonic(), INTERVAL_SECONDS / 10))

    async def ask(self, service: str, body: bytes = b"") -> Any:
        """Return the broker's answer, which may be a second old: visitors share it.

        Raises `Unavailable`.
        """
        key, now = (service, body), time.monotonic()
        known = self._answers.get(key)
        if known is None or known[0] < now:
            if body:
                self.count_question()
            for old in [each for each, (until, _) in self._answers.items() if until < now]:
                del self._answers[old]
            answer = asyncio.ensure_future(self.now(service, body))
            known = self._answers[key] = now + INTERVAL_SECONDS * 0.9, answer
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(known[1])

    def count_question(self) -> None:
        """Count a question about a single service.  Raises `Unavailable` if there were too many lately."""
        now = time.monotonic()
        if len(self._asked) == MAX_QUESTIONS and self._asked[0] > now - 1.0:
            raise Unavailable("too many different pages are looked at: try again in a second")
        self._asked.append(now)

    async def now(self, service: str, *body: bytes) -> Any:
        """Return the broker's answer.  Raises `Unavailable`."""
        try:
            (frame,) = await self._client.request(service, *body, timeout=TIMEOUT_SECONDS)
        except RetryLater as error:
            raise Unavailable(f"the broker is draining: {error}") from None
        except ZmdpError as error:
            raise Unavailable(str(error)) from None
        self.last_answer = time.monotonic()
        try:
            return json.loads(frame)
        except ValueError:
            raise Unavailable(f"the broker does not answer {service}") from None

    async def until_changed(self, timeout: float) -> None:
        """Wait for the next snapshot, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.changed.wait()

    def refresh(self) -> None:
        """Make the next `ask` fetch a new answer."""
        self._answers.clear()
        self.generation += 1

    async def _look(self) -> tuple[Snapshot, float]:
        """Return a snapshot, and an upper bound of the seconds that the broker spent on its metrics."""
        broker, stats = await self.now("mmi.broker"), await self.now("mmi.stats")
        brokers = await self.now("mmi.brokers")
        services: dict[str, Mapping[str, Any]] = {}
        after, spent = b"", 0.0
        while True:
            began = time.monotonic()
            page = await self.now("mmi.metrics", after)
            took = time.monotonic() - began
            spent += took
            services.update((row["name"], row) for row in page["services"])
            if page["next"] is None:
                break
            after = bytes.fromhex(page["next"])
            await asyncio.sleep(min(took, 0.05))  # others come first
        snapshot = Snapshot(
            at=time.monotonic(), broker=broker, stats=stats, brokers=brokers, bounds=page["bounds"], services=services,
            others=page["others"], roles=page["roles"],
        )  # fmt: skip
        return snapshot, spent

    def _keep(self, snapshot: Snapshot) -> None:
        latest = self.latest
        if latest is not None and latest.stats["up_seconds"] > snapshot.stats["up_seconds"]:
            log.warning("the broker was restarted")
            self._recent.clear()
            self.history.forget()
        recent = self._recent
        recent.append(snapshot)
        self.history.add(snapshot)
        while len(recent) > 2 and (
            recent[1].at <= snapshot.at - RECENT_SECONDS
            or sum(len(each.services) for each in recent) > MAX_SERVICES_IN_RECENT
        ):
            recent.popleft()
