"""A server's side of FLP (C46) as a state machine: requests from any number of clients, without a broker.

It uses no socket and no clock.  The shell calls `receive` and `tick`, starts the requests that `begin` returns, and
reports what came of them with `partial` and `finish`.  It sends what `take_messages` returns, and reports with `gone`
and `not_read` what cannot be sent.  It logs what `take_events` returns: which messages were dropped.

The machine answers a PING immediately, whatever the handlers do.  It holds a limited number of requests, and of bytes,
and ignores those beyond the limit: clients then try another server.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.limits import Limits
from ...mdp.wire import Invalid, Message, flp
from ..collected import CollectedPartials
from ..handling import Failed
from ..request import Request

MAX_WAITING: Final = 10_000
"""Maximum number of requests that wait for a handler."""
MAX_WAITING_BYTES: Final = 1 << 28
"""Maximum memory of these requests."""
FRAME_COST_BYTES: Final = 100
"""Memory charged for each frame, in addition to its content."""
REPORT_SECONDS: Final = 10.0
"""Interval in which dropped messages are reported, at most once."""

MALFORMED: Final = "malformed"
TOO_LARGE: Final = "too-large"
QUEUE_FULL: Final = "queue-full"
STOPPING: Final = "stopping"
CLIENT_GONE: Final = "client-gone"
SLOW_READER: Final = "slow-reader"
UNKNOWN_KEY: Final = "unknown-key"


class _Held:
    """A request, and where its reply goes."""

    __slots__ = ("control", "cost", "partials", "peer", "request")

    def __init__(self, peer: bytes, control: bytes, request: Request, cost: int) -> None:
        self.peer = peer
        self.control = control
        self.request = request
        self.cost = cost
        self.partials = CollectedPartials()


class FreelanceServerSession:
    """One server's exchange with its clients; `service` is the name that its requests show to the handler."""

    def __init__(
        self,
        service: bytes,
        *,
        concurrency: int = 1,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_message: int = Limits().max_message,
        max_frames: int = Limits().max_frames,
    ) -> None:
        self.service = service
        self.served = 0
        """Requests that have ended with a reply."""
        self.leaving = False
        self.dropped: Counter[str] = Counter()
        """Number of requests, replies and other messages that were dropped, by reason."""
        self._name = service.decode()
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._max_message = max_message
        self._max_frames = max_frames
        self._last_address = 0
        self._waiting: deque[_Held] = deque()
        self._waiting_bytes = 0
        self._running: dict[int, _Held] = {}
        """Requests that are being handled, by address, which the handler may see."""
        self._messages: list[Message] = []
        self._events: list[Counter[str]] = []
        self._reported: Counter[str] = Counter()
        self._report_at = 0.0
        """When dropped messages may be reported again."""

    # ── what clients send ────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float, user: str = "", *, allowed: bool = True) -> None:
        """Process a message: with access control, from a client of the role `user`, which may make requests or not."""
        command = flp.decode_client(message)
        size = sum(map(len, message))
        if size > self._max_message or len(message) > self._max_frames:
            self.dropped[TOO_LARGE] += 1
        elif isinstance(command, Invalid):
            self.dropped[MALFORMED] += 1
        elif self.leaving:
            self.dropped[STOPPING] += 1  # a PING as well: clients should prefer other servers
        elif isinstance(command, flp.Ping):
            self._messages.append(flp.pong(command.peer))
        elif not allowed:
            text = f"the role {user} may not call {self._name!r}"
            self._messages.append(flp.exchange(command.peer, command.control, wire.error_body(Code.NOT_ALLOWED, text)))
        else:
            cost = size + FRAME_COST_BYTES * len(message)
            if len(self._waiting) >= self._max_waiting or self._waiting_bytes + cost > self._max_waiting_bytes:
                self.dropped[QUEUE_FULL] += 1
                return
            self._last_address += 1
            options = wire.Options(wire.encode_options({"user": user})) if user else wire.NO_OPTIONS
            request = Request(command.body, service=self._name, client=self._last_address, options=options)
            self._waiting.append(_Held(command.peer, command.control, request, cost))
            self._waiting_bytes += cost

    def leave(self) -> None:
        """Take no more requests, and drop those that have not begun: their clients try other servers."""
        self.leaving = True
        self.dropped[STOPPING] += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    @property
    def running(self) -> list[Request]:
        """The requests that have begun and not ended."""
        return [held.request for held in list(self._running.values())]

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        return len(self._waiting)

    @property
    def ended(self) -> bool:
        """Whether no request is left after `leave`, and everything has been sent."""
        return self.leaving and not self._running and not self._messages

    # ── what the handlers do ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> Request | None:
        """Return the next request for a handler, or None if there is none or enough handlers are running."""
        if not self._waiting or len(self._running) >= self._concurrency:
            return None
        held = self._waiting.popleft()
        self._waiting_bytes -= held.cost
        self._running[self._address(held.request)] = held
        return held.request

    def partial(self, request: Request, body: Sequence[bytes]) -> bool:
        """Keep a PARTIAL for the reply: FLP has only one (C24).  Return False if the client is known to be gone."""
        held = self._running.get(self._address(request))
        if held is None or request.cancelled:
            return False
        held.partials.add(body)
        return True

    def finish(self, request: Request, outcome: Sequence[bytes] | Failed) -> None:
        """Send the reply: the PARTIALs followed by the handler's result, or its failure."""
        held = self._running.pop(self._address(request), None)
        if held is None:
            return
        self.served += 1
        if isinstance(outcome, Failed):
            body: Sequence[bytes] = wire.error_body(outcome.code, outcome.text)
        else:
            body = held.partials.reply(outcome)
        self._messages.append(flp.exchange(held.peer, held.control, body))

    def abandon(self, request: Request) -> None:
        """End a request without a reply: its client tries another server."""
        self._running.pop(self._address(request), None)

    def _address(self, request: Request) -> int:
        address = request.address
        return address if isinstance(address, int) else 0

    # ── messages to send, and reports ────────────────────────────────────────────────────────────────────────────────

    def take_messages(self) -> list[Message]:
        """Return the messages to send."""
        messages, self._messages = self._messages, []
        return messages

    def gone(self, peer: bytes) -> None:
        """Report that a client could not be sent a message because it is gone: nobody waits for its requests."""
        self.dropped[CLIENT_GONE] += 1
        for held in self._running.values():
            if held.peer == peer:
                held.request.cancelled = True

    def not_read(self) -> None:
        """Report that a message was dropped because its client does not read."""
        self.dropped[SLOW_READER] += 1

    def tick(self, now: float) -> None:
        """Report what was dropped since the last report, if that is due."""
        if now >= self._report_at and self.dropped != self._reported:
            self._events.append(self.dropped - self._reported)
            self._reported = Counter(self.dropped)
            self._report_at = now + REPORT_SECONDS

    def deadline(self) -> float | None:
        """Return when `tick` has something to report, or None."""
        return None if self.dropped == self._reported else self._report_at

    def take_events(self) -> list[Counter[str]]:
        """Return the reports: for each, the number of messages that were dropped since the one before, by reason."""
        events, self._events = self._events, []
        return events
