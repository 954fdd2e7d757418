"""The events to which one connection has subscribed."""

from collections.abc import Callable

from ..effects import Effect
from .events import Subscribers
from .messages import ENOENT, EPROTO, ROLE_OWNER, Event, Request
from .payloads import text_in
from .writer import Writer


class Subscriptions:
    """Answers the connection's subscriptions, and filters events for it.  A `Subscriber`.

    `deliver` carries out what follows from something else than a message.
    """

    def __init__(
        self,
        subscribers: Subscribers,
        userid: int,
        rolemask: int,
        writer: Writer,
        deliver: Callable[[list[Effect]], None],
    ) -> None:
        self._subscribers = subscribers
        self._userid = userid
        self._is_owner = rolemask & ROLE_OWNER != 0
        self._writer = writer
        self._deliver = deliver
        self._prefixes: dict[str, int] = {}
        """How often the connection has subscribed to each."""
        self._unconfirmed: list[Request] = []
        """Subscriptions that are answered when events arrive."""

    def subscribe(self, request: Request) -> list[Effect]:
        """Subscribe to the topics with a prefix."""
        prefix = text_in(request.payload, "topic")
        if prefix is None:
            return self._writer.fail(request, EPROTO)
        self._prefixes[prefix] = self._prefixes.get(prefix, 0) + 1
        if self._subscribers.add(self):
            return self._writer.respond(request)
        self._unconfirmed.append(request)
        return []

    def unsubscribe(self, request: Request) -> list[Effect]:
        """End a subscription; one that was made twice, only once."""
        prefix = text_in(request.payload, "topic")
        if prefix is None or prefix not in self._prefixes:
            return self._writer.fail(request, EPROTO if prefix is None else ENOENT)
        self._prefixes[prefix] -= 1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
        confirmations: list[Effect] = []
        if not self._prefixes:
            self._subscribers.remove(self)
            confirmations = self._confirm()
        return [*confirmations, *self._writer.respond(request)]

    def subscribed(self) -> None:
        """Take in that events arrive from now on, or that for the time being none will."""
        if self._unconfirmed:
            self._deliver(self._confirm())

    def event(self, event: Event, message: dict[str, bytes]) -> None:
        """Take in an event, and its message in both byte orders."""
        if event.private and event.userid != self._userid and not self._is_owner:
            return
        if any(event.topic.startswith(prefix) for prefix in self._prefixes):
            self._deliver([self._writer.choose(message)])

    def ended(self) -> None:
        """Take in that the connection is closed."""
        self._subscribers.remove(self)

    def _confirm(self) -> list[Effect]:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        return [effect for request in unconfirmed for effect in self._writer.respond(request)]
