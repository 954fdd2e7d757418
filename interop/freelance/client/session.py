"""The client's side of FLP (C46) as a state machine: requests to any of several equal servers, without a broker.

It uses no socket and no clock.  `FreelanceConnection` sends the messages of `take_messages`, and reports with `sent`
whether ZeroMQ had a connection to the server.  It calls `receive`, `disconnected` and `tick`; the client delivers the
events of `take_events`.

A server is *usable* from when a PING could be sent to it until its connection ends, or until it has been silent for
`ttl` seconds.  A request goes to the usable server that was heard last.  When that server is lost, the request goes to
the next immediately; when it is silent, after its share of the time that the request has left.  The first reply wins,
so servers may handle a request more than once.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from errno import EAGAIN
from typing import Any, Final, NamedTuple

from ....clients.calls.arguments import MAX_OUTSTANDING
from ....clients.calls.reply import Outcome, Reply
from ....mdp import wire
from ....mdp.errors import (
    BrokerUnreachable,
    RequestTimeout,
    ServiceError,
    SettingError,
    WorkerLost,
    ZmdpError,
)
from ....mdp.limits import LARGEST, SHORTEST_HEARTBEAT
from ....mdp.wire import Invalid, Message, flp

PING_SECONDS: Final = 2.0
"""Silence after which a server is sent a PING."""
TTL_SECONDS: Final = 6.0
"""Silence after which a server is considered dead."""
SHORTEST_RETRY_SECONDS: Final = 0.001
"""Time until the second attempt to reach a server that has just accepted a connection: ZeroMQ learns its name late."""
SEND_RETRY_SECONDS: Final = 0.01
"""Time after which a request that the servers did not accept, because they do not keep up, is sent again."""
MAX_LOSSES: Final = 3
"""Servers that may be lost while they hold a request: perhaps the request ends them."""
MAX_STALE_TIMERS: Final = 64
"""Minimum number of stale entries among the timers before they are removed, so that removing costs little."""

RoundTrips = dict[str, float | None]
"""The seconds that each server took to answer a PING, by endpoint; None for those that did not answer."""
Event = tuple[Any, Outcome | RoundTrips]
"""The receiver of a request or a survey, and what to deliver to it."""


class ServerStatus(NamedTuple):
    """What a client knows of one of its servers.

        for server in client.servers():
            print(server.endpoint, server.alive)

    Args:
        endpoint: Where it listens.
        alive: Whether it is connected and has been heard within the TTL.
        silence: Seconds since it was heard, or None if it never was.
        outstanding: Requests that it has not answered yet.
    """

    endpoint: str
    alive: bool
    """Whether it is connected and has been heard within the TTL."""
    silence: float | None
    """Seconds since it was heard, or None if it never was."""
    outstanding: int
    """Requests that it has not answered yet."""


class FreelanceCall:
    """One request, from when it is made until its reply or error."""

    __slots__ = (
        "attempts", "body", "control", "deadline", "due", "ended", "losses", "receiver", "sent", "timeout",
    )  # fmt: skip

    def __init__(self, control: bytes, body: Sequence[bytes], timeout: float, deadline: float, receiver: Any) -> None:
        self.control = control
        """The number of the request, as text: the control frame."""
        self.body = body
        self.timeout = timeout
        self.deadline = deadline
        self.receiver = receiver
        """Where the outcome is delivered.  The session does not use it."""
        self.attempts: dict[_Server, None] = {}
        """The servers from which a reply may still arrive."""
        self.due = math.inf
        """When the request ends, or before that, goes to another server as well."""
        self.losses = 0
        """Servers that were lost while they held the request."""
        self.sent = False
        """Whether any server was sent the request."""
        self.ended = False


class _Server:
    """What is known of a server."""

    __slots__ = (
        "asked_at", "avoid_until", "calls", "endpoint", "expired", "heard_at", "identity", "ping_at", "retry_delay",
        "usable", "usable_at",
    )  # fmt: skip

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.identity = endpoint.encode()
        self.usable = False
        self.expired = False
        """Whether it is connected, but has been silent for too long."""
        self.usable_at = -math.inf
        """The time from which its silence counts, if it has not been heard since."""
        self.heard_at = -math.inf
        self.ping_at = -math.inf
        """When it is sent the next PING."""
        self.asked_at: float | None = None
        """When the oldest PING was sent that it has not answered."""
        self.retry_delay = SHORTEST_RETRY_SECONDS
        """Time until the next PING, while there is no connection."""
        self.avoid_until = -math.inf
        """The time until which other servers are preferred, because it left a request without a reply."""
        self.calls: dict[FreelanceCall, None] = {}


class _Survey:
    """A `ping` of the user, which waits until each server has answered a PING."""

    def __init__(self, servers: Sequence[_Server], now: float, timeout: float, receiver: Any) -> None:
        self.receiver = receiver
        self.began = now
        self.until = now + timeout
        self.pending = dict.fromkeys(servers)
        self.found: RoundTrips = {server.endpoint: None for server in servers}


class FreelanceSession:
    """One client's exchange with its servers, whose endpoints are also their routing ids.

    Raises `SettingError` if a setting is invalid.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ping: float = PING_SECONDS,
        ttl: float = TTL_SECONDS,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        if not SHORTEST_HEARTBEAT <= ping < LARGEST:
            raise SettingError(f"ping is {ping!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if not ping < ttl < LARGEST:
            raise SettingError(f"ttl is {ttl!r}: it must be more than ping, which is {ping:g} seconds")
        self.dropped: Counter[str] = Counter()
        """Number of messages that were ignored, by reason."""
        self.trouble = ""
        """Why a server refused the latest connection, for error messages; empty if none has."""
        self._ping = ping
        self._ttl = ttl
        self._max_outstanding = max_outstanding
        self._servers = [_Server(endpoint) for endpoint in dict.fromkeys(endpoints)]
        self._by_identity = {server.identity: server for server in self._servers}
        self._last_number = 0
        self._calls: dict[bytes, FreelanceCall] = {}
        self._waiting: dict[FreelanceCall, None] = {}
        """Requests that no usable server holds, or whose turn it is to go to another one as soon as there is one."""
        self._backlog: dict[FreelanceCall, None] = {}
        """Requests that wait because `max_outstanding` others are outstanding."""
        self._timers: list[tuple[float, int, FreelanceCall]] = []
        """A heap of the due times of requests; stale where a request has another due time by now."""
        self._timers_set = 0
        self._surveys: list[_Survey] = []
        self._messages: list[Message] = []
        self._events: list[Event] = []

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._calls)

    def request(self, body: Sequence[bytes], now: float, *, timeout: float, receiver: Any = None) -> FreelanceCall:
        """Begin a request, which ends within `timeout` seconds: its outcome is one of the events."""
        self._last_number += 1
        call = FreelanceCall(b"%d" % self._last_number, body, timeout, now + timeout, receiver)
        self._calls[call.control] = call
        if len(self._calls) - len(self._backlog) > self._max_outstanding:
            self._backlog[call] = None
            self._set_due(call, call.deadline)
        else:
            self._advance(call, now)
        return call

    def forget(self, call: FreelanceCall) -> None:
        """End a request without an outcome, because its caller no longer waits."""
        if not call.ended:
            self._end(call)

    def survey(self, now: float, *, timeout: float, receiver: Any) -> None:
        """Send every server a PING.  The `RoundTrips` are an event once all have answered, or in time."""
        self._surveys.append(_Survey(self._servers, now, timeout, receiver))
        for server in self._servers:
            self._send_ping(server, now)

    def servers(self, now: float) -> list[ServerStatus]:
        """Return what is known of each server, in the order in which they are preferred."""
        ordered = sorted(self._servers, key=lambda server: self._rank(server, now), reverse=True)
        return [
            ServerStatus(
                server.endpoint,
                server.usable and now < server.heard_at + self._ttl,
                None if server.heard_at == -math.inf else now - server.heard_at,
                len(server.calls),
            )
            for server in ordered
        ]

    def unusable(self) -> list[str]:
        """Return the endpoints of the servers that are not connected."""
        return [server.endpoint for server in self._servers if not server.usable and not server.expired]

    def unheard(self, known: Container[bytes]) -> list[bytes]:
        """Return the routing ids of the usable servers that are not `known`."""
        return [server.identity for server in self._servers if server.usable and server.identity not in known]

    def close(self, error: Callable[[], ZmdpError]) -> None:
        """End every request with an `error`."""
        for call in list(self._calls.values()):
            self._fail(call, error())
        for survey in self._surveys:
            self._events.append((survey.receiver, error()))
        self._surveys.clear()
        self._messages.clear()

    def _advance(self, call: FreelanceCall, now: float) -> None:
        """Send `call` to the best server that does not hold it, or have it wait for one."""
        self._waiting.pop(call, None)
        others = [server for server in self._servers if server not in call.attempts]
        usable = [server for server in others if server.usable]
        if usable:
            server = max(usable, key=lambda each: self._rank(each, now))
            call.attempts[server] = None
            call.sent = True
            server.calls[call] = None
            self._messages.append(flp.exchange(server.identity, call.control, call.body))
            # Each server gets the same part of the time that is left; the last one gets all of it.
            self._set_due(call, now + (call.deadline - now) / len(others) if len(others) > 1 else call.deadline)
        else:
            self._waiting[call] = None
            self._set_due(call, call.deadline)

    def _rank(self, server: _Server, now: float) -> tuple[bool, bool, float]:
        return server.usable, now >= server.avoid_until, server.heard_at

    def _end(self, call: FreelanceCall) -> None:
        call.ended = True
        call.due = math.inf
        self._waiting.pop(call, None)
        del self._calls[call.control]
        for server in call.attempts:
            del server.calls[call]
        call.attempts.clear()
        if call in self._backlog:
            del self._backlog[call]
        elif self._backlog:
            following = next(iter(self._backlog))
            del self._backlog[following]
            self._set_due(following, -math.inf)  # the next tick sends it

    def _fail(self, call: FreelanceCall, error: ZmdpError) -> None:
        self._end(call)
        self._events.append((call.receiver, error))

    def _overdue(self, call: FreelanceCall) -> ZmdpError:
        if call in self._backlog:
            text = f"the request was not sent: {self._max_outstanding} others (max_outstanding) were outstanding"
            return RequestTimeout(f"{text} for {call.timeout:g} s")
        names = ", ".join(server.endpoint for server in call.attempts or self._servers)
        if call.sent:
            return RequestTimeout(f"no reply from {names} within {call.timeout:g} s")
        first = self._servers[0].endpoint
        hint = self.trouble or (
            f"is one running, and is this its public name? `mdworker MODULE:NAME --freelance {first}` starts one"
        )
        return BrokerUnreachable(f"no server could be reached at {names} within {call.timeout:g} s: {hint}")

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> None:
        """Process a message."""
        server = self._by_identity.get(message[0])
        if server is None:
            self.dropped["unknown-server"] += 1
            return
        self._heard(server, now)
        command = flp.decode_server(message)
        if isinstance(command, Invalid):
            self.dropped[command.reason.value] += 1
        elif isinstance(command, flp.Pong):
            self._answered(server, now)
            server.asked_at = None
        else:
            server.avoid_until = -math.inf
            self._replied(server, command)

    def _replied(self, server: _Server, command: flp.Exchange) -> None:
        call = self._calls.get(command.control)
        if call is None:  # another server was faster, or the time is over
            self.dropped["unknown-number"] += 1
            return
        self._end(call)
        failure = wire.parse_error(command.body)
        outcome: Outcome
        if failure is None:
            outcome = Reply(command.body, service=server.endpoint, final=True)
        else:
            outcome = ServiceError(*failure, service=server.endpoint)
        self._events.append((call.receiver, outcome))

    def _answered(self, server: _Server, now: float) -> None:
        for survey in list(self._surveys):
            if server in survey.pending:
                del survey.pending[server]
                survey.found[server.endpoint] = now - (survey.began if server.asked_at is None else server.asked_at)
                if not survey.pending:
                    self._finish(survey)

    def _finish(self, survey: _Survey) -> None:
        self._surveys.remove(survey)
        self._events.append((survey.receiver, survey.found))

    def _heard(self, server: _Server, now: float) -> None:
        server.heard_at = now
        server.ping_at = now + self._ping
        self._use(server, now)

    def _use(self, server: _Server, now: float) -> None:
        """Note that a server is connected, and send it the requests that wait for a server."""
        if server.usable:
            return
        server.usable, server.expired = True, False
        server.usable_at = now
        server.retry_delay = SHORTEST_RETRY_SECONDS
        for call in list(self._waiting):
            if server not in call.attempts:
                self._advance(call, now)

    def sent(self, message: Message, errno: int, now: float) -> None:
        """Report that ZeroMQ has accepted a message, or the error number with which it has not."""
        server = self._by_identity[message[0]]
        if not errno:
            if len(message) == 2 and server.asked_at is None:
                server.asked_at = now
            if not server.expired:
                self._use(server, now)
        elif errno != EAGAIN:
            if server.usable or len(message) == 2:  # else its requests have gone to others already
                self._lose(server, now)
        elif len(message) > 2:
            self._not_accepted(server, message[1], now)

    def _not_accepted(self, server: _Server, control: bytes, now: float) -> None:
        """Send a request to another server, or to the same one a little later: this one does not keep up."""
        call = self._calls.get(control)
        if call is None or server not in call.attempts:
            return
        server.avoid_until = now + SEND_RETRY_SECONDS
        self._detach(call, server)
        if any(each.usable and each not in call.attempts and now >= each.avoid_until for each in self._servers):
            self._advance(call, now)
        else:
            self._set_due(call, min(now + SEND_RETRY_SECONDS, call.deadline))

    def disconnected(self, identity: bytes, now: float) -> None:
        """Report that the connection to a server has ended: its replies are lost."""
        server = self._by_identity.get(identity)
        if server is not None:
            self._lose(server, now)

    def probe(self, now: float) -> None:
        """Send every server a PING, because a connection has been made: `sent` then tells which."""
        for server in self._servers:
            server.retry_delay = SHORTEST_RETRY_SECONDS
            self._send_ping(server, now)

    def _lose(self, server: _Server, now: float) -> None:
        """Note that there is no connection to a server, and send its requests to others."""
        server.ping_at = now + server.retry_delay
        server.retry_delay = min(2 * server.retry_delay, self._ping)
        server.expired = False
        server.asked_at = None
        if server.usable:
            server.avoid_until = -math.inf  # a server that comes back there is not the one that was silent
            self._give_up(server, now, lost=True)

    def _give_up(self, server: _Server, now: float, *, lost: bool) -> None:
        """Give up a server: send its requests to others, unless others have them already."""
        server.usable = False
        for call in list(server.calls):
            self._detach(call, server)
            call.losses += lost
            if call.losses >= MAX_LOSSES and not call.attempts:
                text = f"{call.losses} servers were lost while they held the request, the last one at {server.endpoint}"
                self._fail(call, WorkerLost(text))
            elif not call.attempts:
                self._advance(call, now)

    def _detach(self, call: FreelanceCall, server: _Server) -> None:
        del call.attempts[server]
        del server.calls[call]

    # ── messages to send, and timers ──────────────────────────────────────────────────────────────────────────────────

    def take_messages(self) -> list[Message]:
        """Return the messages to send.  The result of each must be reported with `sent`, which may add others."""
        messages, self._messages = self._messages, []
        return messages

    def take_events(self) -> list[Event]:
        """Return the outcomes, each with its receiver."""
        events, self._events = self._events, []
        return events

    def _send_ping(self, server: _Server, now: float) -> None:
        server.ping_at = now + self._ping
        self._messages.append(flp.ping(server.identity))

    def tick(self, now: float) -> None:
        """Do what is due: end overdue requests, try other servers, send PINGs, and give up silent servers."""
        for call in self._pop_due(now):
            if now >= call.deadline:
                self._fail(call, self._overdue(call))
                continue
            for server in call.attempts:
                server.avoid_until = now + self._ttl
            self._advance(call, now)
        for server in self._servers:
            if server.usable and now >= self._silent_at(server):
                self._silent(server, now)
            if now >= server.ping_at:
                self._send_ping(server, now)
        for survey in list(self._surveys):
            if now >= survey.until:
                self._finish(survey)

    def _silent_at(self, server: _Server) -> float:
        return max(server.heard_at, server.usable_at) + self._ttl

    def _silent(self, server: _Server, now: float) -> None:
        """Give up a server that has been silent for too long."""
        if now > server.ping_at + self._ping:
            # This process was held up, and ZeroMQ's thread too: what the server sent may not have reached the socket
            # yet.  It has until the next PING.
            server.usable_at = now + self._ping - self._ttl
        else:
            server.expired = True
            self._give_up(server, now, lost=False)

    def deadline(self) -> float:
        """Return when `tick` is due."""
        due = min(server.ping_at for server in self._servers)
        due = min(due, *(self._silent_at(server) if server.usable else math.inf for server in self._servers), math.inf)
        for survey in self._surveys:
            due = min(due, survey.until)
        timers = self._timers
        while timers and timers[0][0] != timers[0][2].due:
            heapq.heappop(timers)
        return min(due, timers[0][0]) if timers else due

    def _set_due(self, call: FreelanceCall, due: float) -> None:
        call.due = due
        self._timers_set += 1
        heapq.heappush(self._timers, (due, self._timers_set, call))
        if len(self._timers) > 2 * len(self._calls) + MAX_STALE_TIMERS:
            self._timers = [each for each in self._timers if each[0] == each[2].due]
            heapq.heapify(self._timers)

    def _pop_due(self, now: float) -> Iterator[FreelanceCall]:
        while self._timers and self._timers[0][0] <= now:
            due, _, call = heapq.heappop(self._timers)
            if due == call.due:
                call.due = math.inf
                yield call
