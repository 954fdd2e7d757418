"""Replies as they arrive: server-sent events, one for each PARTIAL, then one for the FINAL or the error, or values as
lines of JSON, or in another format of `rows.py`.

    event: partial            a part that is one frame of text; each line of it is a line `data: …`
    event: partial-base64     any other part: `data` is a JSON list with each frame in Base64
    event: final              the last part; final-base64 as above
    event: error              a problem document, instead of the last part
    :                         a comment, after a while without events

An error that arrives first is an ordinary response with its status.  After a line of JSON, the response breaks off: a
line with the problem would be taken for a value.
"""

import asyncio
import base64
import json
import logging
from collections import deque
from time import monotonic
from typing import Any, Final

from ....clients.calls.call import Call, Outcome
from ....clients.calls.reply import Reply
from ....clients.values import is_text, json_of
from ....mdp.http.problems import Problem, problem_of
from ....mdp.services import About
from ...gateway import Gateway
from .translation import AS_DATA, EVENT_STREAM

KEEP_ALIVE_SECONDS: Final = 15.0
"""How long a stream is silent before a comment is sent, so that proxies do not take the connection for dead."""
CHUNK_BYTES: Final = 256 << 10
"""Size up to which events are written together."""
OVERHEAD_BYTES: Final = 100
"""Memory charged for each event, in addition to its content."""
_AT_ONCE: Final = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
"""x-accel-buffering tells nginx to pass on everything immediately."""
HEADERS: Final = [(b"content-type", EVENT_STREAM), *_AT_ONCE]
COMMENT: Final = b":\n\n"

log = logging.getLogger("zmdp.gateway")


def event(name: str, frames: list[bytes]) -> bytes:
    """Return the event with the frames of a part of a reply."""
    if len(frames) == 1:
        data = bytes(frames[0])
        if b"\r" not in data and is_text(data):
            return b"event: %s\ndata: %s\n\n" % (name.encode(), data.replace(b"\n", b"\ndata: "))
    listed = json.dumps([base64.b64encode(frame).decode() for frame in frames])
    return f"event: {name}-base64\ndata: {listed}\n\n".encode()


def error_event(problem: Problem) -> bytes:
    """Return the event with a problem document."""
    return b"event: error\ndata: %s\n\n" % problem.body()


class BrokenOff(Exception):
    """A response cannot be completed."""


class Events:
    """The unwritten events of one reply: the receiver of a request's outcomes.

    Up to `max_unread` bytes wait for the reader, and no more than the memory that the gateway has left.  If there are
    more, the request is cancelled, and the stream ends with an error after the events that wait.
    """

    headers = HEADERS

    def __init__(self, gateway: Gateway, service: str, timeout: float, about: About | None = None) -> None:
        self.call: Call | None = None
        self.ended = False
        """No more events arrive."""
        self.problem: Problem | None = None
        """Why the request failed, if it failed before its first event."""
        self.broken_off = False
        """The response ends without the last events."""
        self._gateway = gateway
        self._client = gateway.upstream.client
        self._service = service
        self.about = about or About()
        """The description of the service, if values are to be JSON."""
        self.begun = False
        """An event has been added."""
        self._deadline = monotonic() + timeout
        self._waiting: deque[bytes] = deque()
        self._unread = 0
        self._arrived = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, outcome: Outcome) -> None:
        """Add an event for a part, the FINAL or the error."""
        if self.ended:
            return
        if isinstance(outcome, Reply):
            self.ended = outcome.final
            self._take_in(outcome)
            if not self.ended:
                self._check_unread()
        else:
            self._end(problem_of(outcome, self._service, overdue=monotonic() >= self._deadline))

    def _take_in(self, part: Reply) -> None:
        """Add the event for a part."""
        value = json_of(self.about, part)
        self._add(event("final" if part.final else "partial", part if value is None else [value]))

    def _check_unread(self) -> None:
        settings = self._gateway.settings
        if self._unread > settings.max_unread:
            self.fail(Problem("slow-reader", f"more than {settings.max_unread} bytes (--max-unread) were not read"))
        elif self._gateway.memory > settings.max_memory:
            self.fail(
                Problem("overloaded", f"replies that were not read take {settings.max_memory} bytes (--max-memory)")
            )

    def fail(self, problem: Problem) -> None:
        """Cancel the request and end the stream with an error."""
        if self.call is not None:
            self._client.cancel(self.call)
        self._end(problem)

    def disconnected(self) -> None:
        """The client has disconnected: cancel the request, and forget unwritten events."""
        if self.call is not None and not self.ended:
            self._client.cancel(self.call)
        self._waiting.clear()
        self._count(-self._unread)
        self.ended = True
        self._arrived.set()

    def remind(self) -> None:
        """Add a comment, if nothing else waits."""
        if not self._waiting and not self.ended:
            self._add(COMMENT)

    def keep_alive(self) -> None:
        """Remind at intervals until `let_end` is called."""
        # Not by a nested function: its reference to itself would keep this object alive.
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._remind_again)

    def _remind_again(self) -> None:
        self.remind()
        self.keep_alive()

    def let_end(self) -> None:
        """Remind no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, problem: Problem) -> None:
        self.ended = True
        if self.begun:
            self._break_off(problem)
        else:
            self.problem = problem
            self._arrived.set()

    def _break_off(self, problem: Problem) -> None:
        self._add(error_event(problem))

    def _add(self, data: bytes) -> None:
        self.begun = True
        self._waiting.append(data)
        self._count(len(data) + OVERHEAD_BYTES)
        self._arrived.set()

    def _count(self, change: int) -> None:
        self._unread += change
        self._gateway.memory += change

    async def take(self) -> bytes:
        """Wait for events, and return some of them; nothing if the stream has ended."""
        while not self._waiting and not self.ended:
            self._arrived.clear()
            await self._arrived.wait()
        taken: list[bytes] = []
        size = 0
        while self._waiting and size < CHUNK_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1])
        self._count(-size - OVERHEAD_BYTES * len(taken))
        return b"".join(taken)


class Lines(Events):
    """The unwritten values of one reply, each a line of JSON.

    Subclasses write them in other ways.
    """

    def __init__(self, gateway: Gateway, service: str, timeout: float, about: About, kind: bytes) -> None:
        super().__init__(gateway, service, timeout, about)
        self.headers = [(b"content-type", kind), *_AT_ONCE, *AS_DATA]

    def _take_in(self, part: Reply) -> None:
        value = json_of(self.about, part)
        if not (part.final and (value == b"null" or part == [b""])):  # an empty FINAL only ends the stream
            try:
                if value is None:
                    raise ValueError("it is not a value of the service's codec")
                self._add(self._written(value))
            except ValueError as error:
                text = f"a value cannot be written as {self.headers[0][1].decode()}: {error}"
                self.fail(Problem("interrupted", text, service=self._service))
                return
        if part.final and (closing := self._closing()):
            self._add(closing)
        self._arrived.set()

    def _written(self, value: bytes) -> bytes:
        """Return the bytes for a value.  Raises `ValueError` if it cannot be written."""
        return value.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"  # never within texts, where they are escaped

    def _closing(self) -> bytes:
        """Return the bytes after the last value."""
        return b""

    def _break_off(self, problem: Problem) -> None:
        log.info("service %r: the stream broke off: %s", self._service, problem.detail)
        self.broken_off = True
        self._arrived.set()

    def remind(self) -> None:
        """Do nothing: only values can be written."""


async def write(events: Events, send: Any) -> None:
    """Write a response with all events, as fast as the client reads.

    Raises `Problem` if it failed from the outset, and `BrokenOff` if it cannot be completed.
    """
    events.keep_alive()
    try:
        data = await events.take()
        if events.problem is not None:
            raise events.problem
        await send({"type": "http.response.start", "status": 200, "headers": events.headers})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await events.take()
        if events.broken_off:
            raise BrokenOff
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        events.let_end()
