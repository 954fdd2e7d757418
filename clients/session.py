"""A client's side of X1 as a machine: any number of numbered requests over a connection that may be replaced.

No socket, no clock.  The shell opens a new socket when `retry_at` has come and says so with `connected`; it feeds
`receive` and `tick`, sends what is in `messages`, and hands out what is in `events`.  When `lost` tells a reason, the
shell closes the socket: everything outstanding is sent again, under its old number, once there is a new one.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.errors import (
    BrokerUnreachable,
    RequestCancelled,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from ..mdp.limits import LARGEST, SHORTEST_HEARTBEAT, Limits
from ..mdp.timers import Timed, Timers
from ..mdp.wire import Message, Route
from .reply import Reply

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.05, 1.0)
"""Seconds before the first and before the latest attempt to connect to brokers that do not answer."""
GRACE: tuple[float, float] = (0.05, 0.5)
"""Part of its timeout that a request is given beyond it, and the most in seconds: the broker's ERROR says more."""
LARGEST_REPLY = Limits().max_message
"""Bytes that the collected PARTIALs of one reply may have; a stream may have any number."""
FRAME_OVERHEAD: Final = 100
"""Bytes charged for a frame that is kept, beside its own."""
LARGE_REQUEST: Final = 1 << 20
"""Bytes of a request from which it may be what a broker breaks connections for."""
MOST_LOSSES: Final = 3
"""Connections that may be lost while such a request is outstanding."""
RESERVED: Final = frozenset({"ttl", "headers", "attempt"})
"""Options that a service cannot define for itself.  `wait: true` it can: the broker waits anyway."""
HEARTBEAT_ROUTE: Final[Route] = (b"",)


Outcome = Reply | ZmdpError
"""What a request brings: any number of parts, then a final `Reply` or an error."""


class Call(Timed):
    """One request, from when it is made to its FINAL or ERROR."""

    __slots__ = (
        "body", "collected", "collected_bytes", "deadline", "deliver", "ended", "losses", "options", "route",
        "service", "silence", "stream", "streamed", "timeout",
    )  # fmt: skip

    def __init__(
        self, number: int, service: bytes, body: Sequence[bytes], options: dict[str, Any], *, stream: bool
    ) -> None:
        super().__init__()
        self.route: Route = (b"%d" % number, b"")
        """The envelope: the number, and the empty frame."""
        self.service = service
        self.body = body
        self.options = options
        self.stream = stream
        """Each PARTIAL is handed out as it comes; else all are collected."""
        self.streamed = False
        """A PARTIAL has been handed out, so the request cannot be repeated."""
        self.collected: list[bytes] = []
        self.collected_bytes = 0
        self.timeout: float | None = None
        self.silence: float | None = None
        self.deadline: float | None = None
        """When its ttl has passed."""
        self.losses = 0
        """Connections that the other end closed while it was outstanding."""
        self.ended = False
        self.deliver: Callable[[Outcome], object] = _ignore
        """For the shell: what takes the outcomes."""


def _ignore(outcome: Outcome) -> None:
    del outcome


class ClientSession:
    """The dialog of one client with whatever broker it is connected to.

    `heartbeat` is the interval in seconds after which, with a request outstanding, a silent broker is asked for a sign
    of life; after `liveness` such intervals it is taken for dead.
    """

    def __init__(self, *, heartbeat: float = 1.0, liveness: int = 5, rng: random.Random | None = None) -> None:
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it takes {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 2:
            raise SettingError(f"liveness is {liveness!r}: it takes a number of intervals, 2 or more")
        self.messages: list[Message] = []
        """What to send.  The shell takes them out."""
        self.events: list[tuple[Call, Outcome]] = []
        """What to hand out.  The shell takes them out."""
        self.lost: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.retry_at = 0.0
        """When to connect next, while `lost`."""
        self.where = ""
        """The endpoint, for messages to people."""
        self.heard = False
        """Whether the broker has said anything on this connection."""
        self._trouble: str | None = None
        """Why the last connection was lost, until a broker is heard again."""
        self._heartbeat = heartbeat
        self._patience = heartbeat * (liveness - 1)
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not cryptography
        self._backoff = BACKOFF[0]
        self._numbers = count(1)
        self._calls: dict[Route, Call] = {}
        self._due: Timers[Call] = Timers(0.01)
        self._beat_at = 0.0
        self._asked_at: float | None = None
        """When the first of the heartbeats was sent that have not been answered."""

    @property
    def outstanding(self) -> int:
        """How many requests have not ended."""
        return len(self._calls)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        now: float,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        stream: bool = False,
        wait: bool = True,
        headers: Mapping[Any, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Call:
        """Begin a request.  It is sent now, or when there is a connection.

        `timeout` is the time, in seconds, in which it must be finished; it travels with the request, as its ttl.
        `silence` is how long nothing may come, neither PARTIAL nor FINAL.  Without `wait` it fails at once if nobody
        offers the service.  `options` are more of the request's options.  Raises `SettingError` for what cannot be
        sent.
        """
        given: dict[str, Any] = {}
        if options:
            given.update(options)
            reserved = RESERVED if given.get("wait", True) is True else RESERVED | {"wait"}
            if not reserved.isdisjoint(given):
                names = ", ".join(sorted(reserved.intersection(given)))
                raise SettingError(
                    f"options have {names}: these are X1's own; the arguments timeout, wait and headers set them"
                )
        if headers:
            if not all(isinstance(each, str) for pair in headers.items() for each in pair):
                raise SettingError(f"headers are {headers!r:.200}: names and values are text")
            given["headers"] = dict(headers)
        if not wait:
            given["wait"] = False
        call = Call(next(self._numbers), service, body, given, stream=stream)
        call.timeout, call.silence = timeout, silence
        if timeout is not None:
            call.deadline = now + timeout
        message = self._encode(call, now)
        self._set_due(call, now)
        if not self._calls:
            self._begin_to_listen(now)
            if self.lost is not None:
                self.retry_at = min(self.retry_at, now + self._backoff)
        self._calls[call.route] = call
        if self.lost is None:
            self.messages.append(message)
        return call

    def _set_due(self, call: Call, now: float) -> None:
        due = math.inf
        if call.deadline is not None and call.timeout is not None:
            due = call.deadline + min(call.timeout * GRACE[0], GRACE[1])
        if call.silence is not None:
            due = min(due, now + call.silence)
        if due < math.inf:
            self._due.set(call, due)

    def cancel(self, call: Call) -> None:
        """Forget a request, and have the broker forget it.  Nothing more is handed out for it."""
        if not call.ended:
            self._forget(call)
            self._tell_cancel(call)

    def _tell_cancel(self, call: Call) -> None:
        if self.lost is None:
            self.messages.append(wire.cancel(call.route, call.service))

    def _encode(self, call: Call, now: float) -> Message:
        ttl = None if call.deadline is None else max(1, round((call.deadline - now) * 1000))
        if ttl is None:
            raw = wire.options(call.options)
        elif call.options or ttl >= wire.MAX_TTL:
            raw = wire.options({**call.options, "ttl": ttl})
        else:  # the common case, which is worth a short way
            raw = b'{"ttl":%d}' % ttl
        return wire.request(call.route, wire.CX1, call.service, call.body, raw)

    def _forget(self, call: Call) -> None:
        call.ended = True
        self._due.clear(call)
        del self._calls[call.route]

    def _fail(self, call: Call, error: ZmdpError) -> None:
        self._forget(call)
        self.events.append((call, error))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, where: str, now: float) -> None:
        """There is a new socket, to `where`: everything outstanding is sent there."""
        self.lost = None
        self.where = where
        self.heard = False
        self._begin_to_listen(now)
        for call in self._calls.values():
            call.collected, call.collected_bytes = [], 0
            self.messages.append(self._encode(call, now))

    def lose(self, reason: str, now: float, *, cut: bool = False) -> None:
        """The connection is of no use any more.  What has streamed a PARTIAL fails, the rest waits for the next.

        `cut` says that there was one, and that the other end closed it.
        """
        self.lost = self._trouble = reason
        self.retry_at = now
        if not self.heard:  # else the broker has perhaps been restarted: no reason to wait
            self.retry_at += self._backoff * self._rng.uniform(0.5, 1.0)
            self._backoff = min(2 * self._backoff, BACKOFF[1])
        self.messages.clear()
        for call in list(self._calls.values()):
            call.losses += cut
            service = call.service.decode()
            if call.streamed:
                text = (
                    f"the stream of service {service!r} broke off: the connection to {self.where} was lost ({reason})"
                )
                self._fail(call, StreamInterrupted(text, service=service))
            elif call.losses >= MOST_LOSSES and (size := sum(map(len, call.body))) > LARGE_REQUEST:
                # A broker's libzmq cuts off who sends a frame far over its limit: all others would be done over and
                # over.
                text = (
                    f"the connection to {self.where} was lost {call.losses} times with a request of {size} bytes for "
                    f"service {service!r} outstanding: is that more than the broker's max_message?"
                )
                self._fail(call, RequestRejected(text, service=service))

    def close(self, error: Callable[[], ZmdpError]) -> None:
        """Cancel all that is outstanding; each ends with an `error`."""
        for call in list(self._calls.values()):
            self._tell_cancel(call)
            self._fail(call, error())

    def receive(self, message: Message, now: float) -> None:
        """Take in what the broker sent."""
        command = wire.decode_broker(message)
        if self.lost is not None or isinstance(command, wire.Invalid) or command.header != wire.CX1:
            return
        self.heard = True
        self._backoff = BACKOFF[0]
        self._trouble = None
        self._begin_to_listen(now)
        call = self._calls.get(command.route)
        if call is None:
            return  # a heartbeat, or it has been cancelled
        if isinstance(command, wire.Error):
            self._fail(call, _error(command, streamed=call.streamed))
        elif isinstance(command, wire.Answer):
            self._answered(call, command, now)

    def _answered(self, call: Call, answer: wire.Answer, now: float) -> None:
        service = call.service.decode()
        if not answer.final and call.silence is not None:
            self._due.clear(call)
            self._set_due(call, now)
        if not answer.final and call.stream:
            call.streamed = True
            self.events.append((call, Reply(answer.body, service=service, final=False)))
        elif not answer.final:
            call.collected += answer.body
            call.collected_bytes += sum(map(len, answer.body)) + FRAME_OVERHEAD * len(answer.body)
            if call.collected_bytes > LARGEST_REPLY:
                text = (
                    f"the parts of the reply of service {service!r} have more than {LARGEST_REPLY} bytes: use stream()"
                )
                self._tell_cancel(call)
                self._fail(call, RequestRejected(text, service=service, code=Code.TOO_LARGE))
        else:
            failure = wire.parse_error(answer.body)  # of a worker that has no ERROR
            self._forget(call)
            if failure is not None:
                self.events.append((call, ServiceError(*failure, service=service)))
                return
            reply = Reply(answer.body, service=service, final=True)
            if call.collected:
                reply[:0] = call.collected
                reply.collected = len(call.collected)
            self.events.append((call, reply))

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Do what is due: requests whose time has passed, heartbeats, a broker that has been silent too long."""
        for call in self._due.pop_due(now):
            self._tell_cancel(call)
            self._fail(call, self._overdue(call, now))
        if self.lost is not None or not self._calls or now < self._beat_at:
            return
        if self._asked_at is not None and now >= self._asked_at + self._patience:
            silence = f"silent for {self._patience + self._heartbeat:g} s"
            if self.heard:
                self.lose(f"the broker has been {silence}", now)
            else:
                self.lose(f"what listens there has been {silence}; if it is not zmdp's broker, try protocol 0.2", now)
            return
        if self._asked_at is None:
            self._asked_at = now
        self._beat_at = min(now + self._heartbeat, self._asked_at + self._patience)
        self.messages.append(wire.heartbeat(HEARTBEAT_ROUTE, wire.CX1))

    def deadline(self) -> float | None:
        """When `tick`, or while `lost` a new connection, is due; None if nothing is outstanding."""
        if not self._calls:
            return None
        then = self.retry_at if self.lost is not None else self._beat_at
        due = self._due.next_due()
        return then if due is None else min(due, then)

    def _begin_to_listen(self, now: float) -> None:
        """There was a sign of life, or there is no reason yet to expect one."""
        self._beat_at = now + self._heartbeat
        self._asked_at = None

    def _overdue(self, call: Call, now: float) -> RequestError:
        service = call.service.decode()
        passed = call.deadline is not None and now >= call.deadline
        waited = call.timeout if passed else call.silence
        text = f"no reply from service {service!r} through {self.where} within {waited:g} s"
        if call.streamed:
            text = f"the stream of service {service!r} stopped: nothing came for {waited:g} s after a part"
            if passed:
                text = f"the stream of service {service!r} was not finished within {waited:g} s"
            return StreamInterrupted(text, service=service)
        trouble = self.lost or self._trouble
        if trouble is None and self._asked_at is not None:
            trouble = "the broker has not said anything yet"
        if trouble is not None and not self.heard:
            return BrokerUnreachable(f"{text}: {trouble}", service=service)
        if self._asked_at is not None and now - self._asked_at >= self._heartbeat:
            text += f"; the broker has been silent for {now - self._asked_at + self._heartbeat:.1f} s"
        return RequestTimeout(text, service=service)


def _error(command: wire.Error, *, streamed: bool) -> RequestError:
    """The exception for an ERROR."""
    service, code = command.service.decode(errors="replace"), command.code
    detail = command.detail[0] if command.detail else None
    kind = StreamInterrupted if streamed and code == Code.WORKER_LOST else _ERRORS.get(code)
    if kind is not None:
        message = f"service {service!r}: {command.text} ({code})"
        return kind(message, service=service, code=code, text=command.text, detail=detail)
    return ServiceError(code, command.text, detail, service=service)


_ERRORS: Final[Mapping[int, type[RequestError]]] = {
    Code.MALFORMED: RequestRejected,
    Code.NOT_ALLOWED: RequestRejected,
    Code.NO_WORKER: ServiceNotFound,
    Code.TIME_PASSED: RequestTimeout,
    Code.TOO_LARGE: RequestRejected,
    Code.QUEUE_FULL: RetryLater,
    Code.CANCELLED: RequestCancelled,
    Code.WORKER_LOST: WorkerLost,
    Code.DRAINING: RetryLater,
}
