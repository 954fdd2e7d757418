"""The events to which one connection has subscribed."""

from typing import Final

from ..instance.pubsub import Subscribers
from ..wire.messages import EAGAIN, ENOENT, EPROTO, ROLE_OWNER, Event, FluxRequest
from ..wire.payloads import text_in
from .output import Output

MAX_SUBSCRIPTIONS: Final = 1000
"""Maximum number of subscriptions of one connection."""


class Subscriptions:
    """Answers the connection's subscriptions, and filters events for it.  A `Subscriber`."""

    def __init__(self, subscribers: Subscribers, userid: int, rolemask: int, output: Output) -> None:
        self._subscribers = subscribers
        self._userid = userid
        self._is_owner = rolemask & ROLE_OWNER != 0
        self._output = output
        self._prefixes: dict[str, int] = {}
        """How many times the connection has subscribed to each prefix."""
        self._unconfirmed: list[FluxRequest] = []
        """Subscriptions that are answered when events arrive."""

    def subscribe(self, request: FluxRequest) -> None:
        """Subscribe to the topics with a prefix."""
        prefix = text_in(request.payload, "topic")
        if prefix is None:
            self._output.fail(request, EPROTO)
            return
        if max(sum(self._prefixes.values()), len(self._unconfirmed)) >= MAX_SUBSCRIPTIONS:
            self._output.fail(request, EAGAIN)
            return
        self._prefixes[prefix] = self._prefixes.get(prefix, 0) + 1
        if self._subscribers.add(self):
            self._output.respond(request)
        else:
            self._unconfirmed.append(request)

    def unsubscribe(self, request: FluxRequest) -> None:
        """End a subscription; one that was made twice, only once."""
        prefix = text_in(request.payload, "topic")
        if prefix is None or prefix not in self._prefixes:
            self._output.fail(request, EPROTO if prefix is None else ENOENT)
            return
        self._prefixes[prefix] -= 1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
        if not self._prefixes:
            self._subscribers.remove(self)
            self._confirm()
        self._output.respond(request)

    def subscribed(self) -> None:
        """Take in that events arrive from now on, or that for the time being none will."""
        if self._unconfirmed:
            self._confirm()
            self._output.wake()

    def event(self, event: Event, message: dict[str, bytes]) -> None:
        """Take in an event, and its message in both byte orders."""
        if event.private and event.userid != self._userid and not self._is_owner:
            return
        if any(event.topic.startswith(prefix) for prefix in self._prefixes):
            self._output.choose(message)
            self._output.wake()

    def ended(self) -> None:
        """Take in that the connection is closed."""
        self._subscribers.remove(self)

    def _confirm(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for request in unconfirmed:
            self._output.respond(request)
