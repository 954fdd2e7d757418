"""Events: published by one gateway, at the root, and passed on by all.

The gateway at rank 0 offers the service `flux.events`:

    body {"topic", "flags", "payload"}   publish an event; the reply is {"seq": its number}
    empty body                           subscribe: an empty PARTIAL, then one with the parts of each event's message

Each gateway subscribes with one request while its connections have subscriptions, and filters the events for them.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Protocol

from ....clients.aio import AsyncClient
from ....clients.calls.call import Call, Outcome
from ....clients.calls.reply import Reply
from ....mdp.errors import ServiceError
from ....workers.handling import Last
from ....workers.session.request import Request
from ..wire.errnos import reported
from ..wire.framing import BIG, LITTLE, encode
from ..wire.messages import EPROTO, ROLE_OWNER, USERID_UNKNOWN, Event, decode, valid_topic
from ..wire.messages import encode as parts_of
from ..wire.payloads import json_payload, parse_json

EVENTS: Final = "flux.events"
PRIVATE: Final = 0x20
MAX_BACKLOG: Final = 10_000
"""Maximum number of waiting events of a gateway; beyond, it has to subscribe again."""
RETRY_SECONDS: Final = 0.5
"""The pause before the gateway subscribes again, after its subscription has been interrupted."""
CONFIRM_SECONDS: Final = 5.0
"""How long a connection waits for events to flow before its subscription is confirmed anyway: the gateway at rank 0 is
missing, and events will arrive once it has started."""
CONCURRENCY: Final = 10_000
"""Maximum number of subscriptions, and of events that are being published."""

log = logging.getLogger("zmdp.gateway")


class Subscriber(Protocol):
    """A connection that can subscribe to events."""

    def subscribed(self) -> None:
        """Take in that events arrive from now on, or that for the time being none will."""

    def event(self, event: Event, message: dict[str, bytes]) -> None:
        """Take in an event, and its message in both byte orders."""


class Subscribers:
    """The connections of a gateway that have subscriptions."""

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called when the first connection subscribes, and when none is left."""
        self.waits: Callable[[Subscriber], None] = lambda _: None
        """Called with each connection that waits for events to flow; it must be told after a while that none do."""
        self.ready = False
        """Whether events arrive."""
        self._all: dict[Subscriber, None] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, subscriber: Subscriber) -> bool:
        return subscriber in self._all

    def add(self, subscriber: Subscriber) -> bool:
        """Add a connection.  Return whether events arrive; if not, `subscribed` will be called."""
        first = not self._all
        self._all[subscriber] = None
        if first:
            self.changed()
        if not self.ready:
            self.waits(subscriber)
        return self.ready

    def remove(self, subscriber: Subscriber) -> None:
        """Remove a connection.  Idempotent."""
        if self._all.pop(subscriber, subscriber) is None and not self._all:
            self.changed()

    def subscribed(self) -> None:
        """Tell all connections that events arrive."""
        for each in list(self._all):
            each.subscribed()

    def deliver(self, event: Event) -> None:
        """Pass an event on."""
        parts = parts_of(event)
        message: dict[str, bytes] = {LITTLE: encode(parts, LITTLE), BIG: encode(parts, BIG)}
        for each in list(self._all):
            each.event(event, message)


class Subscription:
    """The gateway's request for events, which exists while it has subscribers."""

    def __init__(self, subscribers: Subscribers, client: AsyncClient) -> None:
        self._subscribers = subscribers
        self._client = client
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Calls `_begin` again."""
        self._waiting: dict[Subscriber, asyncio.TimerHandle] = {}
        """Ends the time for which each connection waits."""
        self._closed = False
        subscribers.changed = self._changed
        subscribers.waits = self._waits

    def _changed(self) -> None:
        if self._closed:
            return
        if not self._subscribers:
            self._end()
        elif self._call is None and self._timer is None:
            self._begin()

    def _waits(self, subscriber: Subscriber) -> None:
        if not self._closed and subscriber not in self._waiting:
            self._waiting[subscriber] = asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._waited, subscriber)

    def _waited(self, subscriber: Subscriber) -> None:
        del self._waiting[subscriber]
        if subscriber in self._subscribers:
            subscriber.subscribed()

    def _stop_waiting(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def _begin(self) -> None:
        self._timer = None
        self._call = self._client.begin(self, EVENTS, timeout=None)

    def _end(self) -> None:
        self._subscribers.ready = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._call is not None:
            self._client.cancel(self._call)
            self._call = None

    def put(self, outcome: Outcome) -> None:
        """Take in an event, or that the subscription has ended."""
        if isinstance(outcome, Reply) and not outcome.final:
            if outcome == [b""]:
                self._subscribers.ready = True
                self._stop_waiting()
                self._subscribers.subscribed()
            elif isinstance(event := decode(list(outcome)), Event):
                self._subscribers.deliver(event)
            return
        why = "the gateway at rank 0 has stopped" if isinstance(outcome, Reply) else outcome
        log.warning("events are interrupted: %s", why)
        self._call = None
        self._end()
        self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._begin)

    def close(self) -> None:
        """End the subscription."""
        self._closed = True
        self._stop_waiting()
        self._end()


class Publisher:
    """The service `flux.events`."""

    def __init__(self) -> None:
        self.sequence = 0
        """The number of the latest event."""
        self._streams: set[_Stream] = set()

    async def handle(self, request: Request) -> AsyncGenerator[Any, None]:
        """Publish an event, or subscribe."""
        if list(request) == [b""]:
            stream = _Stream()
            self._streams.add(stream)
            try:
                yield None
                while (parts := await stream.take()) is not None:
                    yield parts
                yield Last()
            finally:
                self._streams.discard(stream)
            return
        event = published(request, self.sequence + 1)
        self.sequence = event.sequence
        parts = parts_of(event)
        for stream in self._streams:
            stream.put(parts)
        yield Last(json_payload({"seq": event.sequence})[:-1])

    def close(self) -> None:
        """End all subscriptions: the gateways subscribe again, perhaps at another one."""
        for stream in self._streams:
            stream.put(None)


def published(request: Request, sequence: int) -> Event:
    """Return the event that `request` asks for.  Raises `ServiceError`."""
    asked = parse_json(b"".join(request) + b"\0") or {}
    topic, flags, payload = asked.get("topic"), asked.get("flags", 0), asked.get("payload")
    if not (isinstance(topic, str) and valid_topic(topic) and flags in (0, PRIVATE) and type(flags) is int):
        raise ServiceError(*reported(EPROTO, "expected topic, flags (0 or 32) and perhaps payload"))
    try:
        content = None if payload is None else base64.b64decode(payload, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ServiceError(*reported(EPROTO, "payload is not base64")) from None
    flux = request.options.get("flux")
    userid, rolemask = credentials(flux if isinstance(flux, dict) else {})
    return Event(topic, content, sequence, userid=userid, rolemask=rolemask, private=flags == PRIVATE)


def credentials(flux: dict[str, Any]) -> tuple[int, int]:
    """Return userid and rolemask of a request; a client of the broker itself counts as the owner."""
    userid, rolemask = flux.get("userid"), flux.get("rolemask")
    return (
        userid if type(userid) is int and 0 <= userid <= USERID_UNKNOWN else USERID_UNKNOWN,
        rolemask if type(rolemask) is int and 0 <= rolemask <= USERID_UNKNOWN else ROLE_OWNER,
    )


class _Stream:
    """The events that wait for one gateway."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._overflowed = False

    def put(self, event: list[bytes] | None) -> None:
        """Add an event, or None for the end."""
        self._overflowed = self._overflowed or self._events.qsize() >= MAX_BACKLOG
        if not self._overflowed:
            self._events.put_nowait(event)

    async def take(self) -> list[bytes] | None:
        """Return the next event, or None at the end.  Raises `ServiceError` if there were too many."""
        if self._overflowed:
            raise ServiceError(429, "too many events wait: subscribe again")
        return await self._events.get()
